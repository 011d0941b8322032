"""The tours, the notebook and the commands of own_text.md run, and all assertions hold."""

import io
import re
import shlex
import subprocess
import sys

import pytest
import torch

from configs.schema import Config
from tests.conftest import ROOT, run_command
from tests.runs import sample_main, train_main
from train import train_step
from training.device import select_runtime
from training.distributed import World
from training.state import Run


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    """A document is a session of its own, and may change what torch does."""
    monkeypatch.chdir(ROOT)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


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
    """It trains as train_step does, bit for bit."""
    tour = run_tour("gpt.md")
    torch.set_grad_enabled(True)
    settings = Config(model=tour["config"], train=tour["train_config"], seed=1)
    run = Run(settings, tour["corpus"], select_runtime("cpu", "float32"), World())
    assert [train_step(run).loss for _ in tour["losses"]] == tour["losses"]


def test_notebook_runs(tmp_path):
    """With a few steps on the bundled texts, into another folder; the packages are there."""
    few = f"--max_iters=4 --eval_interval=4 --out_dir={tmp_path.as_posix()}"
    notebook = (ROOT / "docs" / "hornbook.ipynb").read_text(encoding="utf-8")
    for shown, changed in {
        "%pip": "# %pip",
        "out/": f"{tmp_path.as_posix()}/",
        "shakespeare.yaml --minutes=3": f"smoke.yaml {few}/shakespeare",
        "names.yaml": f"names.yaml --sources=data/lists/names.txt {few}/names",
    }.items():
        notebook = notebook.replace(shown, changed)
    (tmp_path / "copy.ipynb").write_text(notebook, encoding="utf-8")
    done = run_command("-m", "IPython", tmp_path / "copy.ipynb", IPYTHONDIR=str(tmp_path))
    assert done.stdout.count("best validation loss") == 2, done
    assert re.search(r"^ROMEO:.{200}", done.stdout, re.DOTALL | re.MULTILINE)
    assert done.stdout.count("after block") == 2 and (tmp_path / "shakespeare.html").exists()


OWN_TEXT = {  # section of own_text.md, in what its commands print
    "Lists": r"(smiling .*\n){3}\Z",
    "Questions with answers": r"4217=.*\n\Z",
    "A conversation": r"Ann: ",
}


@pytest.mark.parametrize("section", OWN_TEXT)
def test_own_text(section, tmp_path, capsys, monkeypatch):
    """The code of a section makes a text, its commands train on it, with few steps, and sample."""
    document = (ROOT / "docs" / "own_text.md").read_text(encoding="utf-8")
    after = document.split(f"\n## {section}\n")[1]
    blocks = r"^```python\n(.*?)^```\n\n```sh\n(.*?)^```$"
    make, commands = re.search(blocks, after, re.DOTALL | re.MULTILINE).groups()
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True)
    commands = re.sub(r"\w+\.txt|out/", rf"{tmp_path.as_posix()}/\g<0>", commands)
    train, sample = map(shlex.split, commands.splitlines())
    assert train_main([*train[2:], "--max_iters=4"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # ends a conversation
    assert sample_main([*sample[2:], "--max_new_tokens=90"]) == 0
    assert re.search(OWN_TEXT[section], capsys.readouterr().out)
