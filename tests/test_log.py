"""The log: TensorBoard and metrics.csv show exactly what was logged, after a kill and a resume too;
what cannot be written never ends a run; what a run prints.
"""

import errno
import io
import itertools
import math
import re
import sys
import time
from contextlib import redirect_stdout

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io import gfile

from benchmarks.runs import read_metrics
from configs.command import parse_train
from model.inspect import attention_maps
from storage import log
from storage.checkpoint import LAST
from storage.folder import METRICS
from tests.commands import train_main
from tests.conftest import ROOT
from tests.runs import (
    STEPS,
    at_step,
    contents,
    equal,
    raised,
    same_runs,
    scalars,
    train,
    train_and_copy,
)
from train import build_run
from training.distributed import World

SCALARS = {
    "train/loss", "train/lr", "train/lr/muon", "train/grad_norm",
    "train/chars_per_sec", "train/total_epochs", "val/loss", "val/bpc", "val/gap",
    "val/train_loss", "val/loss_at/16",
}  # fmt: skip
TEXTS = {f"{tag}/text_summary" for tag in ("samples/text", "setup/run")}
IMAGE = "views/attention_layer_1"
EVALUATIONS = [6, 12, 18, 24]


def rows_of(run):
    """The rows of metrics.csv as `read_metrics` gives them, without the times."""
    return [{**row, "minutes": None} for row in read_metrics(run)]


# ------------------------------------------------------------------------------------- TensorBoard


def test_scalars_have_the_values_that_their_tags_promise(uninterrupted):
    logged = {tag: dict(points) for tag, points in scalars(uninterrupted).items()}
    settings = contents(uninterrupted / LAST)["settings"]["train"]
    gap = logged["val/loss"][24] - logged["val/train_loss"][24]
    assert logged["val/gap"][24] == pytest.approx(gap, rel=1e-3)
    assert logged["val/bpc"][24] == pytest.approx(logged["val/loss"][24] / math.log(2))
    assert logged["train/total_epochs"][24] == pytest.approx(24 * 2 * 4 / 339, rel=1e-3)
    assert logged["train/lr"][5] == pytest.approx(settings["learning_rate"])
    assert logged["train/lr/muon"][5] == pytest.approx(settings["muon_learning_rate"])


def test_tensorboard_has_every_tag_at_every_step_that_was_logged(uninterrupted):
    events = EventAccumulator(str(uninterrupted), size_guidance={"scalars": 0, "tensors": 0})
    tags = events.Reload().Tags()
    assert set(tags["scalars"]) == SCALARS and tags["images"] == [IMAGE]
    assert set(tags["tensors"]) == TEXTS
    for tag in SCALARS:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == (EVALUATIONS if tag.startswith("val") else list(range(1, STEPS + 1)))
    for shown in (events.Images(IMAGE), events.Tensors("samples/text/text_summary")):
        assert [event.step for event in shown] == EVALUATIONS


def test_a_kill_loses_nothing_that_was_logged_and_the_resumed_log_is_that_of_an_uninterrupted_run(
    options, uninterrupted, tmp_path, monkeypatch
):
    """metrics.csv is only appended to, even if its last row was cut."""
    append = gfile.LocalFileSystem.append

    def slow_append(*arguments):
        time.sleep(0.005)  # without a flush, what was logged last would still be in a queue
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", slow_append)
        run = train_and_copy(tmp_path / "run", 11, *options)  # a copy is what a kill leaves
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, 12))
    assert [step for step, _ in scalars(run)["val/loss"]] == EVALUATIONS[:1]
    before = (run / METRICS).read_text()
    assert before.splitlines()[-1].startswith("11,")

    (run / METRICS).write_text(f"{before}\n12,1.5,3.14")
    assert train(run)[0] == 0
    assert same_runs(run, uninterrupted)  # all that TensorBoard shows, too
    assert rows_of(run) == rows_of(uninterrupted)
    lines = (run / METRICS).read_text()
    assert lines.startswith(f"{before}\n12,1.5,3.14\n9,")  # goes on after the last save, in step 8
    minutes = [float(line.split(",")[1]) for line in lines.splitlines()[1:] if line]
    minutes.remove(1.5)
    assert minutes == sorted(minutes)


def test_texts_in_tensorboard_are_not_read_as_markdown():
    text = "a\tb\nc\r![x](https://example.org)\n\x1b[2Jd"
    block = "    a\tb\n    c\\r![x](https://example.org)\n    \\x1b[2Jd\n"
    assert log.code_block(text) == block


def test_an_image_of_a_layer_has_a_square_for_each_head_darker_for_more_weight(options):
    run, _ = build_run(parse_train(options), World())
    run.model.eval()
    (image,) = log.attention_images(run).values()
    ids = torch.from_numpy(run.corpus.val.ids[:16].astype(int))
    (weights,) = attention_maps(run.model, ids)
    assert image.shape == (len(weights), 1, 128, 128)
    # a cell has 8 x 8 pixels; the first row is black, then white: it attends to itself alone
    torch.testing.assert_close((1 - image[:, 0, 4::8, 4::8]) ** 2, weights)
    assert image[0, 0, 0].tolist() == [0] * 8 + [1] * 120


# ------------------------------------------------------------------------------------- metrics.csv


def test_metrics_csv_has_the_numbers_that_tensorboard_shows(uninterrupted):
    rows, shown = rows_of(uninterrupted), scalars(uninterrupted)
    columns = "batch_loss learning_rate grad_norm val_loss train_loss exact_match"
    assert list(rows[0]) == ["step", "minutes", *columns.split()]
    for column, tag in log.COLUMNS.items():
        found = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        # no exact match without answers
        assert found == pytest.approx(dict(shown.get(tag, [])), rel=1e-6), column


# --------------------------------------------------------------------- a log that cannot be written


# its thread ends in a traceback
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("import", "import of torch.utils.tensorboard halted; None in sys.modules"),
        ("start", "Descriptors cannot be created directly."),
        ("write", "No space left on device"),
    ],
)
def test_a_tensorboard_that_fails_is_one_warning_with_the_reason_and_metrics_csv_is_complete(
    fault, reason, train_run, tmp_path, uninterrupted, monkeypatch
):
    append, counts = gfile.LocalFileSystem.append, itertools.count()

    def append_to_a_full_disk(*arguments):
        if next(counts) >= 40:
            raise OSError(errno.ENOSPC, reason)
        append(*arguments)

    if fault == "import":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    elif fault == "start":
        error = TypeError(f"{reason}\nIf this call came from a _pb2.py file")
        monkeypatch.setattr("torch.utils.tensorboard.writer.FileWriter", raised(error))
    else:
        monkeypatch.setattr(gfile.LocalFileSystem, "append", append_to_a_full_disk)
    code, output = train_run()
    assert code == 0 and output.count("warning: ") == 1
    assert f"TensorBoard is not written ({reason}); training continues\n" in output
    assert rows_of(tmp_path / "run") == rows_of(uninterrupted)


def test_a_metrics_csv_that_fails_is_one_warning_and_tensorboard_is_complete(
    train_run, tmp_path, uninterrupted
):
    (tmp_path / "run" / METRICS).mkdir(parents=True)
    code, output = train_run("--resume")
    assert code == 0 and output.count("warning: ") == 1
    assert "metrics.csv is not written (Is a directory); training continues\n" in output
    assert equal(scalars(tmp_path / "run"), scalars(uninterrupted))


# ------------------------------------------------------------------------------------ the console


def test_a_run_prints_its_data_model_and_results_and_at_the_end_two_commands(uninterrupted):
    text = (uninterrupted.parent / "printed.txt").read_bytes().decode()
    assert not re.search("[\r\x1b]", text)  # no terminal: no bar, no colours
    *printed, ended, best, sample, tensorboard = text.splitlines()
    labels = ("text", "split", "rarest", "model", "device", "training", "first loss", "speed")
    starts = [line for line in printed if line.startswith(labels)]
    assert [line[:12].strip() for line in starts] == list(labels)
    assert "\nstep 24: validation loss " in text and "  | " in text  # a sample
    assert re.fullmatch(r"finished after \d+\.\d minutes", ended)
    assert re.fullmatch(r"best validation loss \d\.\d{4} at step 24; now try:", best)
    assert re.fullmatch(rf"  \S+ \S*sample\.py --ckpt {uninterrupted}", sample)
    assert re.fullmatch(rf"  \S+ -m tensorboard\.main --logdir {uninterrupted.parent}", tensorboard)


def test_a_file_gets_the_loss_and_the_time_left_now_and_then(train_run, monkeypatch):
    monkeypatch.setattr(log, "SECONDS_BETWEEN_LINES", 0)
    lines = [line for line in train_run()[1].splitlines() if line.endswith(" left")]
    assert len(lines) == STEPS - 2 and lines[0].startswith("speed ")  # not after both ends
    assert re.fullmatch(r"step 23: loss .*, about \d+\.\d minutes left", lines[-1])


class Terminal(io.StringIO):
    """A terminal that can go away."""

    gone = False

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_terminal_has_a_bar_and_may_be_closed(options, tmp_path, uninterrupted, monkeypatch):
    monkeypatch.setattr(log, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.chdir(ROOT)
    terminal, run = Terminal(), tmp_path / "run"
    monkeypatch.setattr("sys.stderr", terminal)
    at_step(monkeypatch, 12, lambda: setattr(terminal, "gone", True))
    with redirect_stdout(Terminal()) as stdout:
        assert train_main([*options, f"--out_dir={run}"]) == 0
    assert stdout.getvalue().count(": about ") == 1  # the bar has the rest
    assert "loss " in terminal.getvalue() and " char/s" in terminal.getvalue()
    assert same_runs(run, uninterrupted)
