"""The log: what TensorBoard, metrics.csv and the console show, after a kill too; a log that cannot
be written never ends a run.
"""

import csv
import errno
import io
import itertools
import math
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io import gfile

from model.inspect import attention_maps
from storage import log
from storage.checkpoint import LAST, load_checkpoint
from storage.log import METRICS
from tests.runs import STEPS, before_call, build, raised, same_runs, scalars, train, train_and_copy
from training.samples import attention_images

EVALUATIONS = [6, 12, 18, 24]
OF_STEPS = ("loss", "lr", "lr/muon", "grad_norm", "chars_per_sec", "total_epochs")
OF_EVALUATIONS = ("loss", "bpc", "gap", "train_loss")
append = gfile.LocalFileSystem.append  # of TensorBoard, to its files


def rows_of(run):
    """The rows of metrics.csv by step, without the times; after a resume, the last of a step."""
    rows = {}
    for row in csv.DictReader(io.StringIO((run / METRICS).read_text())):
        rows[int(row["step"]), bool(row["val/loss"])] = row | {"minutes": None}
    return [rows[key] for key in sorted(rows)]


def test_log_has_all_tags_at_all_steps(uninterrupted):
    events = EventAccumulator(str(uninterrupted), size_guidance={"scalars": 0, "tensors": 0})
    steps = {}
    for kind, tags in events.Reload().Tags().items():
        for tag in tags if kind in ("scalars", "images", "tensors") else ():
            steps[tag] = [event.step for event in getattr(events, kind.title())(tag)]
    expected = {f"train/{tag}": [*range(1, STEPS + 1)] for tag in OF_STEPS}
    expected |= {f"val/{tag}": EVALUATIONS for tag in OF_EVALUATIONS}
    expected |= {"views/attention_layer_1": EVALUATIONS, "samples/text/text_summary": EVALUATIONS}
    assert steps == expected | {"setup/run/text_summary": [0]}


def test_log_values(uninterrupted):
    """Of TensorBoard by their definitions, and the same in metrics.csv."""
    logged = {tag: dict(points) for tag, points in scalars(uninterrupted).items()}
    last = {tag: points[24] for tag, points in logged.items() if 24 in points}
    assert last["val/gap"] == pytest.approx(last["val/loss"] - last["val/train_loss"], rel=1e-3)
    assert last["val/bpc"] == pytest.approx(last["val/loss"] / math.log(2))
    assert last["train/total_epochs"] == pytest.approx(24 * 2 * 4 / 339, rel=1e-3)
    peaks = load_checkpoint(uninterrupted / LAST).settings.train
    assert logged["train/lr"][5] == pytest.approx(peaks.learning_rate)
    assert logged["train/lr/muon"][5] == pytest.approx(peaks.muon_learning_rate)
    rows = rows_of(uninterrupted)
    assert list(rows[0]) == ["step", "minutes", *log.COLUMNS]
    for tag in log.COLUMNS:  # no exact match without answers
        found = {int(row["step"]): float(row[tag]) for row in rows if row[tag]}
        assert found == pytest.approx(logged.get(tag, {}), rel=1e-6), tag


def test_log_after_kill(options, uninterrupted, tmp_path, monkeypatch):
    """Nothing that was logged is lost; the resumed log is that of a run without a kill.

    metrics.csv is only appended to, even if its last row was cut; each row ends with a newline.
    """

    def slow(*arguments):
        time.sleep(0.005)  # without a flush, what was logged last would still be in a queue
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", slow)
        run = train_and_copy(tmp_path / "run", 11, *options)  # a copy is what a kill leaves
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, 12))
    before = (run / METRICS).read_text()
    assert before.endswith("\n")
    before += "12,1.5,3.14"
    (run / METRICS).write_text(before)
    assert train(run)[0] == 0
    assert same_runs(run, uninterrupted) and rows_of(run) == rows_of(uninterrupted)
    # goes on after the last save, in step 6
    assert (run / METRICS).read_text().startswith(f"{before}\n7,")
    last_row = (run / METRICS).read_text().splitlines()[-1]
    assert 1.5 <= float(last_row.split(",")[1]) < 2  # the minutes go on too


def test_log_after_the_clock_went_back(options, tmp_path):
    """TensorBoard keeps every point, although it reads the file of the resume first."""
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=12")[0] == 0
    (events,) = run.glob("events*")
    _, seconds, rest = re.split(r"(\d{10})", events.name, maxsplit=1)
    events.rename(run / f"events.out.tfevents.{int(seconds) + 24 * 60 * 60}{rest}")
    assert train(run, "--max_iters=24")[0] == 0
    assert sorted(step for step, _ in scalars(run)["train/loss"]) == list(range(1, 25))


def test_log_text_is_no_markdown():
    text = "a\tb\nc\r![x](https://example.org)\n\x1b[2Jd"
    block = "    a\tb\n    c\\r![x](https://example.org)\n    \\x1b[2Jd\n"
    assert log.code_block(text) == block


def test_log_images_of_attention(options):
    """A square of 8 x 8 pixels for each query and key, darker for more weight."""
    run = build(*options)
    run.model.eval()
    (image,) = attention_images(run).values()
    ids = torch.from_numpy(run.corpus.val.ids[:16].astype(int))
    (weights,) = attention_maps(run.model, ids)
    assert image.shape == (len(weights), 1, 128, 128)
    torch.testing.assert_close((1 - image[:, 0, 4::8, 4::8]) ** 2, weights)


FAULTS = {
    "TensorBoard: not installed": "import of torch.utils.tensorboard halted; None in sys.modules",
    "TensorBoard: does not start": "Descriptors cannot be created directly.",
    "TensorBoard: full disk": "[Errno 28] No space left on device",
    "metrics.csv: a folder": "[Errno 21] Is a directory",
}


# TensorBoard's thread ends in a traceback
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_log_that_fails(fault, train_run, tmp_path, uninterrupted, monkeypatch):
    """One warning with the reason; the other part is complete."""
    part, reason, counts = fault.partition(":")[0], FAULTS[fault], itertools.count()

    def full(*arguments):
        if next(counts) >= 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*arguments)

    if "installed" in fault:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    elif "start" in fault:
        error = TypeError(f"{reason}\nIf this call came from a _pb2.py file")
        monkeypatch.setattr("torch.utils.tensorboard.writer.FileWriter", raised(error))
    elif "disk" in fault:
        monkeypatch.setattr(gfile.LocalFileSystem, "append", full)
    else:
        make = partial(Path.mkdir, tmp_path / "run" / METRICS)
        before_call(monkeypatch, "train.Log", 1, make)
    code, output = train_run("--resume")
    assert code == 0 and output.count("warning: ") == 1, output
    assert f"warning: {part} is not written ({reason}" in output
    if part == "TensorBoard":
        assert rows_of(tmp_path / "run") == rows_of(uninterrupted)
    else:
        assert repr(scalars(tmp_path / "run")) == repr(scalars(uninterrupted))


# -------------------------------------------------------------------------------------- the console


def test_console_of_a_run(uninterrupted):
    """In a file: the text, the model, losses with the time left, samples, and two commands."""
    text, run = (uninterrupted.parent / "printed.txt").read_text(), uninterrupted
    assert not re.search("[\r\x1b]", text)  # no bar, no colors
    *printed, ended, best, sample, tensorboard = text.splitlines()
    labels = ["text", "split", "model", "device", "training", "first loss", "speed"]
    assert [line[:12].strip() for line in printed if line.startswith(tuple(labels))] == labels
    left = re.findall(r"^(speed|step) .*about \d+\.\d minutes left$", text, re.M)
    assert left == ["speed", *["step"] * len(EVALUATIONS)]
    assert re.search(r"^step 24: validation loss \d.*\n  \| ", text, re.M)
    assert re.fullmatch(r"finished at step 24 of 24 after \d+\.\d minutes", ended)
    assert re.fullmatch(r"best validation loss \d\.\d{4} at step 24; now try:", best)
    assert re.fullmatch(rf"  \S+ \S*sample\.py --ckpt {run}", sample)
    assert re.fullmatch(rf"  \S+ -m tensorboard\.main --logdir {run.parent}", tensorboard)
