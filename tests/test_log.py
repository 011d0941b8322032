"""The log: what TensorBoard, metrics.csv and the console show, after a kill too; a log that cannot
be written never ends a run.
"""

import csv
import io
import math
import re
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io import gfile

from model.inspect import attention_maps
from storage import log
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import STEPS, before_call, build, raised, same_runs, scalars, train, train_and_copy
from training.samples import attention_images

EVALUATIONS = [6, 12, 18, 24]
OF_STEPS = ("loss", "lr", "lr/muon", "grad_norm", "chars_per_sec", "total_epochs")
append = gfile.LocalFileSystem.append  # of TensorBoard, to its files


def rows_of(run):
    """The rows of metrics.csv by step, without the times; after a resume, the last of a step."""
    rows = {}
    for row in csv.DictReader(io.StringIO((run / log.METRICS).read_text())):
        rows[int(row["step"]), bool(row["val/loss"])] = row | {"minutes": None}
    return [rows[key] for key in sorted(rows)]


def test_log_has_all_tags_at_all_steps(uninterrupted):
    events = EventAccumulator(str(uninterrupted), size_guidance={"scalars": 0, "tensors": 0})
    steps = {}
    for kind, tags in events.Reload().Tags().items():
        for tag in tags if kind in ("scalars", "images", "tensors") else ():
            steps[tag] = [event.step for event in getattr(events, kind.title())(tag)]
    expected = {f"train/{tag}": [*range(1, STEPS + 1)] for tag in OF_STEPS}
    expected |= {f"val/{tag}": EVALUATIONS for tag in ("loss", "bpc", "gap", "train_loss")}
    expected |= {"views/attention_layer_1": EVALUATIONS, "samples/text/text_summary": EVALUATIONS}
    assert steps == expected | {"setup/run/text_summary": [0]}


def test_log_values(uninterrupted):
    """Of TensorBoard by their definitions, and the same in metrics.csv."""
    logged = {tag: dict(points) for tag, points in scalars(uninterrupted).items()}
    last = {tag: points[STEPS] for tag, points in logged.items() if STEPS in points}
    assert last["val/gap"] == pytest.approx(last["val/loss"] - last["val/train_loss"], rel=1e-3)
    assert last["val/bpc"] == pytest.approx(last["val/loss"] / math.log(2))
    peaks = load_checkpoint(uninterrupted / LAST).settings.train
    assert logged["train/lr"][5] == pytest.approx(peaks.learning_rate)
    assert logged["train/lr/muon"][5] == pytest.approx(peaks.muon_learning_rate)
    rows = rows_of(uninterrupted)
    assert list(rows[0]) == ["step", "minutes", *log.COLUMNS]
    for tag in log.COLUMNS:  # no exact match without answers
        found = {int(row["step"]): float(row[tag]) for row in rows if row[tag]}
        assert found == pytest.approx(logged.get(tag, {}), rel=1e-6), tag


def test_log_after_kill(options, run, uninterrupted, monkeypatch):
    """Nothing that was logged is lost; the resumed log is that of a run without a kill.

    metrics.csv is only appended to, even if its last row was cut; each row ends with a newline.
    """

    def slow(*arguments):
        time.sleep(0.005)  # without a flush, what was logged last would still be in a queue
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", slow)
        run = train_and_copy(run, 11, *options)  # a copy is what a kill leaves
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, 12))
    before = (run / log.METRICS).read_text()
    assert before.endswith("\n")
    (run / log.METRICS).write_text(f"{before}12,1.5,3.14")
    assert train(run)[0] == 0
    assert same_runs(run, uninterrupted) and rows_of(run) == rows_of(uninterrupted)
    after = (run / log.METRICS).read_text()
    assert after.startswith(f"{before}12,1.5,3.14\n7,")  # goes on after the last save, in step 6
    assert 1.5 <= float(after.splitlines()[-1].split(",")[1]) < 2  # the minutes go on too


def test_log_after_the_clock_went_back(options, run):
    """TensorBoard keeps every point, although it reads the file of the resume first."""
    assert train(*options, f"--out_dir={run}", "--max_iters=12")[0] == 0
    (events,) = run.glob("events*")
    _, seconds, rest = re.split(r"(\d{10})", events.name, maxsplit=1)
    events.rename(run / f"events.out.tfevents.{int(seconds) + 24 * 60 * 60}{rest}")
    assert train(run, "--max_iters=24")[0] == 0
    assert sorted(step for step, _ in scalars(run)["train/loss"]) == list(range(1, 25))


def test_log_text_is_no_markdown():
    block = log.code_block("a\tb\nc\r![x](https://a.org)\n\x1b[2Jd")
    assert block == "    a\tb\n    c\\r![x](https://a.org)\n    \\x1b[2Jd\n"


def test_log_images_of_attention(options):
    """A square of 8 x 8 pixels for each query and key, darker for more weight."""
    run = build(*options)
    run.model.eval()
    (image,) = attention_images(run).values()
    ids = torch.from_numpy(run.corpus.val.ids[:16].astype(int))
    (weights,) = attention_maps(run.model, ids)
    assert image.shape == (len(weights), 1, 128, 128)
    torch.testing.assert_close((1 - image[:, 0, 4::8, 4::8]) ** 2, weights)


def no_tensorboard(patch, run):
    patch.setitem(sys.modules, "torch.utils.tensorboard", None)


def full_disk(patch, run):
    patch.setattr(gfile.LocalFileSystem, "append", raised(OSError("No space left on device")))


def folder_in_the_way(patch, run):
    before_call(patch, "train.Log", 1, lambda: (run / log.METRICS).mkdir())


FAULTS = [  # what goes wrong, the warning, the results that are complete
    (no_tensorboard, "TensorBoard is not written (import of torch.utils.tensorboard", rows_of),
    (full_disk, "TensorBoard is not written (No space left on device", rows_of),
    (folder_in_the_way, "metrics.csv is not written ([Errno 21] Is a directory", scalars),
]


# TensorBoard's thread ends in a traceback
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("fault", "warning", "results"), FAULTS)
def test_log_that_fails(fault, warning, results, train_run, run, uninterrupted, monkeypatch):
    """One warning with the reason; the other part is complete."""
    fault(monkeypatch, run)
    code, output = train_run()
    assert code == 0 and output.count("warning: ") == 1, output
    assert f"warning: {warning}" in output
    assert repr(results(run)) == repr(results(uninterrupted))


def test_console_of_a_run(uninterrupted):
    """In a file: the text, the model, losses with the time left, samples, and two commands."""
    text = (uninterrupted.parent / "printed.txt").read_text()
    assert not re.search("[\r\x1b]", text)  # no bar, no colors
    *printed, ended, best, sample, tensorboard = text.splitlines()
    labels = [line[:12].strip() for line in printed]
    start = ["text", "split", "model", "device", "training", "first loss", "speed"]
    assert labels[: len(start)] == start
    left = re.findall(r"^(speed|step) .*about \d+\.\d minutes left$", text, re.M)
    assert left == ["speed", *["step"] * len(EVALUATIONS)]
    assert re.search(r"^step 24: validation loss \d.*\n  \| ", text, re.M)
    assert re.fullmatch(r"finished at step 24 of 24 after \d+\.\d minutes", ended)
    assert re.fullmatch(r"best validation loss \d\.\d{4} at step 24; now try:", best)
    assert re.fullmatch(rf"  \S+ \S*sample\.py --ckpt {uninterrupted}", sample)
    assert re.fullmatch(rf"  \S+ -m tensorboard\.main --logdir {uninterrupted.parent}", tensorboard)
