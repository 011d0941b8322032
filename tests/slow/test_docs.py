"""The tours, the notebook and the commands of own_text.md run, and all assertions hold."""

import io
import re
import shlex
import subprocess
import sys
from types import ModuleType

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config as ShellConfig

from configs.schema import Config
from data.batches import evaluation_windows
from tests.conftest import ROOT
from tests.runs import sample_main, train_main
from train import train_step
from training.device import select_runtime
from training.distributed import World
from training.evaluate import exact_loss
from training.state import Run

NOTEBOOK = ROOT / "docs" / "hornbook.ipynb"
COMMANDS = {"train.py": train_main, "sample.py": sample_main}


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    """A document is a session of its own, and may change what torch does, and the folder."""
    monkeypatch.chdir(ROOT)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    InteractiveShell.clear_instance()


def run_here(command):
    """Run a command of the project, `python train.py ...`, in this process."""
    _, script, *words = shlex.split(command)
    with torch.enable_grad():
        assert COMMANDS[script](words) == 0


def run_tour(name):
    """Run the code of a tour, from beginning to end; return its names."""
    tour = ROOT / "docs" / name
    text, session = tour.read_text(encoding="utf-8"), {"__name__": "tour"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) == text.count("```python")
    assert sum("assert" in block[1] for block in blocks) > 0.7 * len(blocks)
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # for line numbers in a traceback
        exec(compile(above + block[1], tour, "exec"), session)
    return session


def test_tour_of_attention():
    run_tour("attention.md")


def test_tour_of_gpt():
    """It trains as train_step does, bit for bit, and has the exact loss."""
    tour = run_tour("gpt.md")
    torch.set_grad_enabled(True)
    settings = Config(model=tour["config"], train=tour["train_config"], seed=1)
    run = Run(settings, tour["corpus"], select_runtime("cpu", "float32"), World())
    assert [train_step(run).loss for _ in tour["losses"]] == tour["losses"]
    windows = evaluation_windows(tour["corpus"].val, tour["T"], batch_size=64)
    assert abs(exact_loss(tour["model"], windows, run.runtime) - tour["val_loss"]) < 1e-5


def test_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_notebook_runs(tmp_path, monkeypatch):
    """In this process, with a few steps on the bundled texts, into another folder."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # without the profile of the user
    monkeypatch.chdir(NOTEBOOK.parent)
    few = f"--max_iters=4 --eval_interval=4 --out_dir={tmp_path.as_posix()}"
    changes = {
        "out/": f"{tmp_path.as_posix()}/",
        "shakespeare.yaml --minutes=3": f"smoke.yaml {few}/shakespeare",
        "names.yaml": f"names.yaml --sources=data/lists/names.txt {few}/names",
    }
    options = ShellConfig({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=options, user_module=ModuleType("notebook"))
    # the packages are there
    monkeypatch.setattr(shell, "system", lambda command: None)
    monkeypatch.setattr("sys.excepthook", sys.excepthook)  # a command of %run replaces it
    outputs = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            source = cell.source
            for shown, changed in changes.items():
                source = source.replace(shown, changed)
            with capture_output() as captured:
                done = shell.run_cell(source)
            done.raise_error()
            shown = [each.data for each in captured.outputs]
            shown.append(shell.display_formatter.format(done.result)[0])
            outputs[cell.id] = captured.stdout + str(shown)
    assert "best validation loss" in outputs["train"] and "best validation loss" in outputs["names"]
    assert outputs["sample"].startswith("ROMEO:") and len(outputs["sample"]) > 500
    assert outputs["generate"].startswith("Romeo, Romeo") and len(outputs["generate"]) > 300
    assert "image/png" in outputs["attention"] and outputs["lens"].count("after block") == 2
    assert "srcdoc=" in outputs["page"]


@pytest.mark.parametrize(
    ("section", "text", "size", "shown"),
    [
        ("Lists", "symbols", 1805, r"(smiling .*\n){3}\Z"),
        ("Questions with answers", "words", 10_000, r"4217=.*\n\Z"),
        ("A conversation", "talk", 16_000, r"Ann: "),
    ],
)
def test_own_text(section, text, size, shown, tmp_path, capsys, monkeypatch):
    """The code of a section makes a text, its commands train on it, with few steps, and sample."""
    document = (ROOT / "docs" / "own_text.md").read_text(encoding="utf-8")
    after = document.split(f"\n## {section}\n")[1]
    make, commands = re.search(
        r"^```python\n(.*?)^```\n\n```sh\n(.*?)^```$", after, re.DOTALL | re.MULTILINE
    ).groups()
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True)
    commands = commands.replace(f"{text}.txt", f"{tmp_path.as_posix()}/{text}.txt")
    train, sample = commands.replace("out/", f"{tmp_path.as_posix()}/").splitlines()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # ends a conversation
    lines = (tmp_path / f"{text}.txt").read_text(encoding="utf-8").splitlines()
    assert size <= len(lines) <= 1.1 * size  # later versions of Python have more symbols
    run_here(f"{train} --max_iters=4")
    run_here(f"{sample} --max_new_tokens=90")
    printed = capsys.readouterr().out
    assert re.search(shown, printed), printed
