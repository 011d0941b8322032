"""Security: rules about the source code, and a forged checkpoint whose paths must not be opened.

Related tests: tests/campaigns/terminal.py (control characters on terminals), test_file_format.py
(damaged and forged files), test_nanogpt.py (pickles), test_data.py (downloads).
"""

import ast
import re
import shutil
import sys

import pytest

from common.console import escape
from tests.campaigns.common import contents, write_checkpoint
from tests.commands import sample_main, train_main
from tests.conftest import ROOT

SOURCES = [
    path
    for path in ROOT.rglob("*.py")
    if not {"tests", ".venv", "out"} & set(path.relative_to(ROOT).parts)
]
DOCUMENTS = [
    *SOURCES,
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


def violations(source: str) -> list[str]:
    """List every use of a function that could run, unpickle or fetch untrusted content."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found, allowed = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
            required = {
                "torch.load": ("weights_only", "True"),
                "yaml.parse": ("Loader", "yaml.SafeLoader"),
            }
            option, value = required.get(_name(node.func, aliases), (None, None))
            if option and keywords.get(option) == value:
                allowed.add(node.func)
            if keywords.get("shell", "False") != "False":
                found.append(f"line {node.lineno}: a shell")
    for node in ast.walk(tree):
        name = _name(node, aliases)
        if FORBIDDEN.fullmatch(name) or (
            name in ("torch.load", "yaml.parse") and node not in allowed
        ):
            found.append(f"line {node.lineno}: {name}")
    return found


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Map each imported name to its full name."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for each in node.names:
                aliases[each.asname or each.name] = module + each.name
    return aliases


def _name(node: ast.AST, aliases: dict[str, str]) -> str:
    """Return the full name that a node reads or imports, such as os.system, or an empty string."""
    if isinstance(node, ast.alias):
        return aliases[node.asname or node.name]
    if isinstance(node, ast.Attribute):
        before = _name(node.value, aliases)
        return before and f"{before}.{node.attr}"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return aliases.get(node.id, f"builtins.{node.id}")
    return ""


EXCEPTIONS = {
    # looks for packages without importing them
    "common/packages.py": ["importlib.util.find_spec", "importlib.util.find_spec"],
    "benchmarks/decode.py": ["importlib.util"],  # imports the nanoGPT checkout given by the user
    # an unpickler whose find_class always raises
    "convert/nanogpt.py": [
        "pickle",
        "pickle.Unpickler",
        "pickle",
        "pickle.UnpicklingError",
        "pickle",
    ],
    "training/environment.py": [
        "ctypes",
        "ctypes.CDLL",
        "ctypes",
    ],  # sets options of glibc's malloc
}

FORBIDDEN_EXAMPLES = [
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
ALLOWED_EXAMPLES = [
    "import torch; torch.load(path, map_location='cpu', weights_only=True)",
    "import yaml; yaml.parse(text, Loader=yaml.SafeLoader); yaml.safe_dump(tree)",
    "import re; re.compile('x'); model.eval(); torch.compile(model)",
    "import subprocess; subprocess.run(['ls'], shell=False)",
    "def inspect(pickle: bytes, code: int): return pickle, code, pickle.decode()",
    "class Config:\n    compile: bool = False",
]


def test_the_rules_find_forbidden_examples_and_accept_allowed_ones():
    for source in FORBIDDEN_EXAMPLES:
        assert violations(source), source
    for source in ALLOWED_EXAMPLES:
        assert not violations(source), source


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_file_can_run_or_unpickle_untrusted_content(path):
    found = [each.partition(": ")[2] for each in violations(path.read_text(encoding="utf-8"))]
    assert found == EXCEPTIONS.get(str(path.relative_to(ROOT)), [])


def test_torch_load_is_called_only_in_the_importer_and_a_benchmark():
    users = {
        path.name
        for path in SOURCES
        if re.search(r"torch\.load\(", path.read_text(encoding="utf-8"))
    }
    # the benchmark reads a file that nanoGPT has just written, with weights_only=True
    assert users == {"nanogpt.py", "time_to_loss.py"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_url_is_https_and_tensorboard_listens_on_localhost(path):
    text = path.read_text(encoding="utf-8")
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"\b(?!https://)[a-z][a-z0-9+.-]*://", text)
    assert not re.search(r"bind_all|0\.0\.0\.0|--host\b", text)


RECORDED_EVENTS = re.compile(
    r"open|os\.\w+|shutil\.\w+|socket\.\w+|subprocess\.\w+|glob\.\w+|import|tempfile\.\w+|urllib\.\w+"
)
recorded: list[str] | None = None  # set by a fixture, since audit hooks cannot be removed


def _record(event: str, arguments: tuple) -> None:
    if recorded is not None and RECORDED_EVENTS.fullmatch(event):
        recorded.append(f"{event} {arguments}")


@pytest.fixture
def events(monkeypatch):
    """Record all files opened, listed, created and removed, connections and subprocesses."""
    sys.addaudithook(_record)
    monkeypatch.setattr(sys.modules[__name__], "recorded", [])
    return recorded


@pytest.fixture
def forged(smoke, tmp_path):
    """Create a run whose checkpoints contain the path of an existing file and a URL wherever text
    is allowed.
    """
    folder = shutil.copytree(smoke, tmp_path / "run")
    canary = tmp_path / "canary.txt"
    canary.write_text("never read " * 100)
    text = f"{canary}\x1b[2J\u202e"
    shutil.copy(folder / "last.safetensors", folder / "prev.safetensors")
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
            "cpu_capability": str(canary),
            "python": f"../../{canary.name}",
        }
        write_checkpoint(folder / name, payload)
    return folder


def test_no_path_or_url_in_a_checkpoint_is_opened_and_its_text_is_printed_escaped(
    forged, events, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert sample_main([f"--ckpt={forged}", "--max-new-tokens=5"]) == 0
    resumed = ["configs/smoke.yaml", f"--out_dir={forged}", "--max_iters=61", "--dtype=float32"]
    assert train_main([*resumed, "--resume"]) == 0
    new_run = [
        *resumed[:1],
        f"--out_dir={forged.parent / 'new'}",
        "--max_iters=1",
        "--warmup_iters=0",
    ]
    assert train_main([*new_run, f"--init_from={forged}"]) == 0
    assert any("last.safetensors" in event for event in events)
    assert [event for event in events if "canary" in event] == []
    output = "".join(capsys.readouterr())
    assert "canary.txt" in output and escape(output, keep="\n\t") == output
