"""What comes from outside is looked at and never obeyed: by rules about the source, and tried with
a forged checkpoint.

That a terminal obeys nothing that is printed is shown in tests/campaigns/terminal.py, that nothing
in a damaged or forged file runs or grows in test_file_format.py and test_foreign.py, and that
downloads are pinned and https in test_data.py.
"""

import ast
import re
import shutil
import sys

import pytest

import sample
import train
from common.errors import escape
from tests.campaigns.common import contents, forge
from tests.conftest import ROOT

OURS = [
    path
    for path in ROOT.rglob("*.py")
    if not {"tests", ".venv", "out"} & set(path.relative_to(ROOT).parts)
]
TEXTS = [
    *OURS,
    *ROOT.rglob("*.yaml"),
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    ROOT / "Makefile",
    ROOT / ".ci/run",
]
FORBIDDEN = re.compile(
    r"builtins\.(eval|exec|compile|__import__)|importlib(\..*)?|runpy(\..*)?|code(\..*)?|ctypes(\..*)?"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*|startfile)|subprocess\.(getoutput|getstatusoutput)"
    r"|(pickle|_pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)(\..*)?|numpy\.load|torch\.(hub|jit)\..*"
    r"|yaml\.(?!SafeLoader\b)\w*(load|Loader|construct)\w*|tensorboard\.(main|program)(\..*)?"
)


def offences(source: str) -> list[str]:
    """Everything in a Python text that could run, load or fetch what somebody else wrote."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found, right = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            wanted = {
                "torch.load": ("weights_only", "True"),
                "yaml.parse": ("Loader", "yaml.SafeLoader"),
            }
            option, value = wanted.get(_name(node.func, aliases), (None, None))
            if option and given.get(option) == value:
                right.add(node.func)
            if given.get("shell", "False") != "False":
                found.append(f"line {node.lineno}: a shell")
    for node in ast.walk(tree):
        name = _name(node, aliases)
        if FORBIDDEN.fullmatch(name) or (
            name in ("torch.load", "yaml.parse") and node not in right
        ):
            found.append(f"line {node.lineno}: {name}")
    return found


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for each in node.names:
                aliases[each.asname or each.name] = module + each.name
    return aliases


def _name(node: ast.AST, aliases: dict[str, str]) -> str:
    """The full name that a piece of source reads, such as os.system, or imports; else nothing."""
    if isinstance(node, ast.alias):
        return aliases[node.asname or node.name]
    if isinstance(node, ast.Attribute):
        before = _name(node.value, aliases)
        return before and f"{before}.{node.attr}"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return aliases.get(node.id, f"builtins.{node.id}")
    return ""


ON_PURPOSE = {
    "benchmarks/decode.py": ["importlib.util"],  # runs the checkout of nanoGPT that its user names
    "training/runtime.py": [
        "ctypes",
        "ctypes.CDLL",
        "ctypes",
    ],  # tells the C library that is loaded to keep memory
}

WRONG = [
    "import pickle",
    "from pickle import loads as parse",
    "import numpy as np; np.load('x')",
    "eval('1')",
    "list(map(exec, lines))",
    "compile(text, 'x', 'exec')",
    "__import__(name)",
    "import importlib; importlib.import_module(name)",
    "import builtins; builtins.eval('1')",
    "import os as system; system.system('ls')",
    "from os import popen",
    "import subprocess; subprocess.run('ls', shell=True)",
    "import subprocess; subprocess.run('ls', shell=yes)",
    "import yaml; yaml.load(text, yaml.SafeLoader)",
    "import yaml; yaml.unsafe_load(text)",
    "from yaml import full_load_all",
    "import yaml; yaml.parse(text)",
    "import yaml; yaml.parse(text, Loader=yaml.Loader)",
    "import torch; torch.load(path)",
    "import torch; torch.load(path, weights_only=False)",
    "import torch; torch.load(path, weights_only=safe)",
    "from torch import load; load(path)",
    "import torch; read = torch.load",
    "import torch as t; t.hub.load('x', 'y')",
    "from tensorboard import program",
]
RIGHT = [
    "import torch; torch.load(path, map_location='cpu', weights_only=True)",
    "import yaml; yaml.parse(text, Loader=yaml.SafeLoader); yaml.safe_dump(tree)",
    "import re; re.compile('x'); model.eval(); torch.compile(model)",
    "import subprocess; subprocess.run(['ls'], shell=False)",
    "def inspect(pickle: bytes, code: int): return pickle, code, pickle.decode()",
    "class Config:\n    compile: bool = False",
]


def test_the_rules_find_what_is_wrong_and_nothing_else():
    for source in WRONG:
        assert offences(source), source
    for source in RIGHT:
        assert not offences(source), source


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_can_run_or_unpickle_what_somebody_else_wrote(path):
    found = [each.partition(": ")[2] for each in offences(path.read_text(encoding="utf-8"))]
    assert found == ON_PURPOSE.get(str(path.relative_to(ROOT)), [])


def test_the_one_place_that_unpickles_is_where_files_are_looked_at():
    users = {
        path.name for path in OURS if re.search(r"torch\.load\(", path.read_text(encoding="utf-8"))
    }
    assert users == {
        "foreign.py",
        "time_to_loss.py",
    }  # the latter a file that nanoGPT has just written, weights only


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_address_is_https_and_tensorboard_stays_on_this_machine(path):
    text = path.read_text(encoding="utf-8")
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"\b(?!https://)[a-z][a-z0-9+.-]*://", text)
    assert not re.search(r"bind_all|0\.0\.0\.0|--host\b", text)


ACTS = re.compile(
    r"open|os\.\w+|shutil\.\w+|socket\.\w+|subprocess\.\w+|glob\.\w+|import|tempfile\.\w+|urllib\.\w+"
)
watched: list[str] | None = (
    None  # what is done while somebody looks; Python's audit hooks stay for ever
)


def _watch(event: str, arguments: tuple) -> None:
    if watched is not None and ACTS.fullmatch(event):
        watched.append(f"{event} {arguments}")


@pytest.fixture
def acts(monkeypatch):
    """All that is opened, listed, made, removed, connected to or started from here on."""
    sys.addaudithook(_watch)
    monkeypatch.setattr(sys.modules[__name__], "watched", [])
    return watched


@pytest.fixture
def forged(smoke, tmp_path):
    """A run whose checkpoints name, wherever they may hold a text, a file that is there and an
    address.
    """
    folder = shutil.copytree(smoke, tmp_path / "run")
    canary = tmp_path / "canary.txt"
    canary.write_text("never read " * 100)
    text = f"{canary}\x1b[2J\u202e"
    for name in ("last.safetensors", "prev.safetensors", "best.safetensors"):
        payload = contents(folder / name)
        payload["config"]["out_dir"] = str(canary.with_name("canary"))
        payload["config"]["data"]["sources"] = [
            str(canary),
            f"https://canary.invalid/a/b#sha256={'0' * 64}",
        ]
        payload["data"]["name"] = text
        payload["environment"] |= {
            "device_name": text,
            str(canary): str(canary),
            "python": f"../../{canary.name}",
        }
        forge(folder / name, payload)
    return folder


def test_no_path_or_address_in_a_checkpoint_is_followed_and_nothing_in_it_is_obeyed(
    forged, acts, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert sample.main([f"--ckpt={forged}", "--max-new-tokens=5"]) == 0
    resumed = ["configs/smoke.yaml", f"--out_dir={forged}", "--max_iters=61", "--dtype=float32"]
    assert train.main([*resumed, "--resume"]) == 0
    first = [
        *resumed[:1],
        f"--out_dir={forged.parent / 'new'}",
        "--max_iters=1",
        "--warmup_iters=0",
    ]
    assert train.main([*first, f"--init_from={forged}"]) == 0
    assert any("last.safetensors" in act for act in acts)
    assert [act for act in acts if "canary" in act] == []
    said = "".join(capsys.readouterr())
    assert "canary.txt" in said and escape(said, keep="\n\t") == said
