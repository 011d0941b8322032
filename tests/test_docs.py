"""The tours and the notebook: their Python runs and all assertions hold."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from benchmarks import minutes
from tests.conftest import ROOT

TOURS = [ROOT / "docs" / name for name in ("attention.md", "gpt.md")]
NOTEBOOK = ROOT / "docs" / "hornbook.ipynb"


@pytest.fixture
def restore_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tour", TOURS, ids=lambda path: path.stem)
def test_the_code_of_a_tour_runs_from_beginning_to_end(tour, restore_default_dtype, monkeypatch):
    monkeypatch.chdir(ROOT)
    text, session = tour.read_text(encoding="utf-8"), {"__name__": "tour"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) == text.count("```python")
    assert sum("assert" in block[1] for block in blocks) > 0.7 * len(blocks)
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # for line numbers in a traceback
        exec(compile(above + block[1], tour, "exec"), session)


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_the_notebook_runs_from_beginning_to_end(tmp_path, monkeypatch):
    """Train for a few steps on the bundled texts, into another folder."""
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR"):  # without the kernels and profiles of the user
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    runs, names = tmp_path.as_posix(), "--sources=data/lists/names.txt"
    options = "--max_iters=4 --eval_interval=4"
    for shown, changed in (
        ("out/", f"{runs}/"),
        ("shakespeare.yaml --minutes=3", f"smoke.yaml {options} --out_dir={runs}/shakespeare"),
        ("names.yaml", f"names.yaml {names} {options} --out_dir={runs}/names"),
    ):
        assert any(shown in cell.source for cell in code)
        for cell in code:
            cell.source = cell.source.replace(shown, changed)

    folder = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=120, resources=folder).execute()
    outputs = {
        cell.id: "".join(each.get("text") or str(each.get("data")) for each in cell.outputs)
        for cell in code
    }
    assert "best validation loss" in outputs["train"] and "best validation loss" in outputs["names"]
    assert outputs["sample"].startswith("ROMEO:") and len(outputs["sample"]) > 500
    assert outputs["generate"].startswith("Romeo, Romeo") and len(outputs["generate"]) > 300
    assert "image/png" in outputs["attention"] and outputs["lens"].count("after block") == 2
    assert "srcdoc=" in outputs["page"]


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("section", "text", "size", "shown"),
    [
        ("Lists", "symbols", 1805, r"(smiling .*\n){3}\Z"),
        ("Questions with answers", "words", 10_000, r"4217=.*\n\Z"),
    ],
)
def test_the_commands_for_lists_and_answers_make_a_text_train_on_it_and_sample(
    section, text, size, shown, tmp_path
):
    """Run those that make the text, train, and sample: with few steps and short samples."""
    document = (ROOT / "docs" / "own_text.md").read_text(encoding="utf-8")
    after = document.split(f"\n## {section}\n")[1]
    script = re.search(r"^```sh\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)[1]
    for word, short in (
        ("python ", f"{sys.executable} "),
        (f"{text}.txt", f"{tmp_path}/{text}.txt"),
        (f"out/{text}", f"{tmp_path}/{text}"),
        ("--batch_size=", "--max_iters=4 --batch_size="),
        ("sample.py", "sample.py --max_new_tokens=90"),
    ):
        assert word in script
        script = script.replace(word, short)
    done = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / f"{text}.txt").read_text(encoding="utf-8").splitlines()
    assert size <= len(lines) <= 1.1 * size  # later versions of Python have more symbols
    assert re.search(shown, done.stdout), done.stdout


def test_the_picture_of_losses_is_drawn_from_the_results_beside_it(tmp_path):
    results, drawn = (ROOT / "docs" / f"minutes_amx.{suffix}" for suffix in ("jsonl", "svg"))
    minutes.draw(minutes.load_runs(results), tmp_path / "again.svg")
    again, shown = (
        [(shape.tag, shape.text) for shape in ElementTree.parse(picture).iter()]
        for picture in (tmp_path / "again.svg", drawn)
    )
    assert again == shown
