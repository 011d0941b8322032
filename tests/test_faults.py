"""What goes wrong under a run: what is said, with which code it ends, and what is left of it."""

import errno
import io
import math
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing import checkpoint
from checkpointing.checkpoint import LAST, PREV
from common import files
from dashboard import event_file
from dashboard.event_file import DESCRIPTION
from dashboard.logger import Logger
from tests.campaigns.common import (
    STEPS,
    at_step,
    contents,
    equal,
    loadable,
    same,
    scalars,
    small,
    start,
    step_of,
    train,
)
from training import evaluate
from training.health import SPIKE_WINDOW, is_spike
from training.optimizers import AdamW


@pytest.fixture
def options(tmp_path):
    return small(tmp_path)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def losses_go_by(patch, change):
    """Every loss of training, numbered from 0, becomes `change(loss, number)`; two make a step."""
    real, numbers = evaluate.cross_entropy, iter(range(10**6))

    def changed(logits, targets, reduction="mean"):
        loss = real(logits, targets, reduction)
        return change(loss, next(numbers)) if reduction == "mean" else loss

    patch.setattr(evaluate, "cross_entropy", changed)


def spoil(*numbers, by=math.nan):
    return lambda loss, number: loss * by if number in numbers else loss


def norms_go_by(patch, norm):
    real = torch.nn.utils.clip_grad_norm_
    patch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: norm(real(parameters, limit))
    )


def last_line(said):
    assert said.count("error: ") == 1 and said.endswith("\n")
    return said.splitlines()[-1]


# --------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("by", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(by, options, run, monkeypatch):
    losses_go_by(monkeypatch, spoil(11, by=by))
    code, said = train(*options, f"--out_dir={run}")
    assert code == 6
    assert re.fullmatch(
        r"error: after step 5, at learning rate 0\.001: loss (nan|-?inf), gradient norm nan; "
        r"both must be finite; "
        rf"the last checkpoint is {run}/last\.safetensors of step 4; try: python train\.py "
        rf"{run}/config\.yaml "
        rf"--out_dir={run} --resume --muon_learning_rate=0\.01",
        last_line(said),
    )
    assert step_of(run) == 4 and loadable(run) == (1, 1)


def test_a_gradient_that_is_not_finite_does_so_too(options, run, monkeypatch):
    norms_go_by(monkeypatch, lambda norm: norm * math.inf)
    code, said = train(*options, f"--out_dir={run}", "--optimizer=adamw")
    assert code == 6 and loadable(run) == (0, 0)
    assert re.fullmatch(
        r"error: after step 0, at learning rate 0\.0002: loss 4\.\d+, gradient norm inf; "
        r"both must be finite; there is no "
        rf"checkpoint yet; try: python train\.py {run}/config\.yaml --out_dir={run} --resume "
        rf"--learning_rate=0\.0005",
        last_line(said),
    )


def test_the_command_that_is_proposed_works(options, run, monkeypatch):
    with monkeypatch.context() as patch:
        losses_go_by(patch, spoil(11))
        said = train(*options, f"--out_dir={run}")[1]
    code, said = train(*last_line(said).partition("try: python train.py ")[2].split())
    assert code == 0 and "train.muon_learning_rate 0.02 -> 0.01" in said and step_of(run) == STEPS


def test_steps_that_are_not_finite_may_be_left_out_and_are_counted(
    options, run, tmp_path, monkeypatch
):
    losses_go_by(monkeypatch, spoil(7, 11))
    code, said = train(*options, f"--out_dir={run}", "--on_nonfinite=skip")
    assert code == 0 and re.findall(
        r"step (\d+): loss nan, gradient norm nan: skipped \((\d) skipped so far\)", said
    ) == [
        ("4", "1"),
        ("6", "2"),
    ]
    assert scalars(run)["train/skipped"][-1] == (STEPS, 2.0)
    progress = contents(run / LAST)["progress"]
    assert (progress["skipped"], progress["skipped_in_a_row"], len(progress["recent_losses"])) == (
        2,
        0,
        STEPS - 2,
    )


def test_a_step_that_is_left_out_changes_no_weight(options, run, monkeypatch):
    losses_go_by(monkeypatch, spoil(7))
    arguments = [
        *options,
        f"--out_dir={run}",
        "--on_nonfinite=skip",
        "--save_interval=1",
        "--max_iters=4",
    ]
    assert train(*arguments, "--schedule=constant")[0] == 0
    before, after = contents(run / PREV), contents(run / LAST)
    assert (before["progress"]["step"], after["progress"]["step"]) == (3, 4)
    assert equal(before["tensors"], after["tensors"])


def test_more_than_ten_in_a_row_end_the_run_all_the_same(options, run, monkeypatch):
    losses_go_by(monkeypatch, lambda loss, number: loss * math.nan if number >= 8 else loss)
    code, said = train(*options, f"--out_dir={run}", "--on_nonfinite=skip")
    assert (
        code == 6
        and said.count("skipped so far") == 10
        and last_line(said).startswith("error: after step 14, ")
    )


def test_weights_that_an_update_has_spoilt_are_not_saved(options, run, monkeypatch):
    update = AdamW.step

    def spoilt(self):
        update(self)
        self.param_groups[0]["params"][0].data[0] = math.inf

    monkeypatch.setattr(AdamW, "step", spoilt)
    code, said = train(*options, f"--out_dir={run}", "--optimizer=adamw", "--save_interval=1")
    assert code == 6 and loadable(run) == (0, 0)
    assert last_line(said).startswith(
        "error: after step 1, at learning rate 0.0002: the weights are no longer finite; there is"
    )


def scaler_of(patch, scale, overflows=()):
    """Let gradients be scaled as for float16 on a GPU; in the calls that are numbered, one of them
    has overflown.
    """
    numbers = iter(range(10**6))

    class Scaler(torch.amp.GradScaler):
        def __init__(self, *_, **__):
            super().__init__("cpu", init_scale=scale)

        def unscale_(self, optimizer):
            if next(numbers) in overflows:
                optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = math.inf
            super().unscale_(optimizer)

    patch.setattr(torch.amp, "GradScaler", Scaler)


def test_an_overflow_that_the_scaler_answers_is_no_fault(options, run, monkeypatch):
    scaler_of(monkeypatch, 2.0**127)
    code, said = train(*options, f"--out_dir={run}")
    assert code == 0 and "skipped so far" not in said
    norms = [norm for _, norm in scalars(run)["train/grad_norm"]]
    assert not math.isfinite(norms[0]) and math.isfinite(norms[-1])
    assert contents(run / LAST)["progress"]["skipped"] == 0


@pytest.mark.parametrize("optimizer", [0, 1], ids=["adamw", "muon"])
def test_an_overflow_of_one_optimizer_is_a_step_that_none_takes(
    optimizer, options, run, monkeypatch
):
    scaler_of(monkeypatch, 4.0, overflows=[2 * 3 + optimizer])
    assert (
        train(
            *options,
            f"--out_dir={run}",
            "--max_iters=4",
            "--save_interval=1",
            "--schedule=constant",
        )[0]
        == 0
    )
    before, after = contents(run / PREV), contents(run / LAST)
    assert (before["progress"]["loss_scale"], after["progress"]["loss_scale"]) == (4.0, 2.0)
    assert equal(before["tensors"], after["tensors"])


def test_a_scale_below_1_is_no_answer(options, run, monkeypatch):
    scaler_of(monkeypatch, 1.0, overflows=[6])
    code, said = train(*options, f"--out_dir={run}")
    assert (
        code == 6 and "after step 3" in last_line(said) and "gradient norm inf" in last_line(said)
    )


def test_a_validation_loss_that_is_not_finite_is_reported_and_never_the_best(
    options, run, monkeypatch
):
    real, numbers = evaluate.loss_sums_by_position, iter(range(100))
    monkeypatch.setattr(
        evaluate,
        "loss_sums_by_position",
        lambda *arguments: real(*arguments) * (math.nan if next(numbers) in (2, 3) else 1),
    )
    code, said = train(*options, f"--out_dir={run}")
    assert code == 0 and "step 12: train nan, validation nan (nan bits per character)\n" in said
    assert [math.isnan(value) for _, value in scalars(run)["val/loss"]] == [
        False,
        True,
        False,
        False,
    ]
    assert contents(run / "best.safetensors")["progress"]["best_step"] == STEPS


# ------------------------------------------------------------------------------------------- spikes


def test_a_spike_is_counted_and_told(options, run, monkeypatch):
    losses_go_by(monkeypatch, lambda loss, number: loss * 3 if number == 280 else loss)
    code, said = train(
        *options, f"--out_dir={run}", "--max_iters=150", "--eval_interval=150", "--save_interval=50"
    )
    assert code == 0
    assert (
        re.findall(r"step (\d+): loss (\S+) is far above the last 128: spike 1\n", said)[0][0]
        == "141"
    )
    assert scalars(run)["train/spikes"][-1] == (150, 1.0)
    assert len(contents(run / LAST)["progress"]["recent_losses"]) == SPIKE_WINDOW


def test_six_sigmas_of_a_full_window_are_a_spike():
    window = [1.0, 3.0] * (SPIKE_WINDOW // 2)  # mean 2, sigma 1
    assert is_spike(8.001, window) and not is_spike(7.999, window) and not is_spike(-100.0, window)
    assert not is_spike(8.001, window[1:])


# ------------------------------------------------------------------------------------------- memory


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_at_the_first_step_proposes_smaller_batches(options, run, monkeypatch):
    losses_go_by(monkeypatch, out_of_memory)
    code, said = train(*options, f"--out_dir={run}")
    assert code == 5 and not list(run.glob("*.safetensors"))
    assert last_line(said) == (
        "error: device auto: out of memory; batch_size 4 windows of block_size 16 do not fit at "
        "once; there is no "
        f"checkpoint yet; try: python train.py {run}/config.yaml --out_dir={run} --resume "
        f"--batch_size=2 "
        "--gradient_accumulation_steps=4"
    )


def test_out_of_memory_later_names_the_last_checkpoint_and_goes_on_with_the_same_windows(
    options, run, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        losses_go_by(patch, lambda loss, number: out_of_memory() if number == 13 else loss)
        code, said = train(*options, f"--out_dir={run}", "--dropout=0")
    assert (
        code == 5
        and f"; the last checkpoint is {run}/last.safetensors; try: python train.py "
        in last_line(said)
    )
    code, said = train(*last_line(said).partition("try: python train.py ")[2].split())
    assert code == 0 and "train.batch_size 4 -> 2; train.gradient_accumulation_steps 2 -> 4" in said
    assert train(*options, f"--out_dir={tmp_path / 'whole'}", "--dropout=0")[0] == 0
    for name in ("train/loss", "val/loss"):
        pairs = zip(scalars(run)[name], scalars(tmp_path / "whole")[name], strict=True)
        assert all(a == pytest.approx(b, rel=1e-3) for a, b in pairs)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 5),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                "memory"
            ),
            5,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"), 5),
        (RuntimeError("our own mistake"), None),
    ],
    ids=str,
)
def test_memory_that_runs_out_is_known_by_its_names_and_other_errors_are_ours(
    error, code, options, run, monkeypatch
):
    def fail(*_):
        raise error

    losses_go_by(monkeypatch, fail)
    if code is None:
        with pytest.raises(RuntimeError, match="our own mistake"):
            train(*options, f"--out_dir={run}")
    else:
        assert train(*options, f"--out_dir={run}", "--batch_size=1")[0] == code


# --------------------------------------------------------------------------------------------- disk


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_is_found_before_training(
    options, tmp_path, run, monkeypatch
):
    (tmp_path / "file").write_text("")
    code, said = train(*options, f"--out_dir={tmp_path / 'file' / 'run'}")
    assert code == 5
    assert last_line(said) == (
        f"error: out_dir: cannot write to {tmp_path}/file/run (Not a directory); choose another "
        f"--out_dir"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        code, said = train(*options, f"--out_dir={run}")
    assert code == 5 and "first loss" not in said
    assert last_line(said) == (
        f"error: out_dir: cannot write to {run} (No space left on device); choose another --out_dir"
    )


def test_a_disk_too_small_for_the_checkpoints_is_found_before_training(options, run, monkeypatch):
    usage = shutil.disk_usage(run.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    code, said = train(*options, f"--out_dir={run}")
    assert code == 5 and "step" not in said
    told = (
        rf"error: out_dir: the checkpoints of this run need (\S+) MB, 0\.1 MB are free at {run}; "
        rf"free some space or choose "
        "another --out_dir"
    )
    needed = float(re.fullmatch(told, last_line(said))[1]) * 1e6
    monkeypatch.undo()
    assert train(*options, f"--out_dir={run}")[0] == 0
    assert 0.3 < needed / (4 * (run / LAST).stat().st_size) < 1.5
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    assert (
        train(*options, f"--out_dir={run}", "--resume", "--max_iters=25")[0] == 0
    )  # in the place of what is there


def full_for(patch, is_full):
    """No room for the files, of those of a save numbered from 0, that `is_full(name, number)`."""
    write, numbers = files._write_synced, iter(range(10**6))

    def written(path, content):
        if path.name.startswith((LAST, "best.safetensors")) and is_full(
            path.name[:4], next(numbers)
        ):
            full()
        write(path, content)

    patch.setattr(files, "_write_synced", written)


def test_a_save_that_fails_is_told_and_made_up_for_by_the_next(options, run, monkeypatch):
    full_for(monkeypatch, lambda name, number: number < 4)
    code, said = train(*options, f"--out_dir={run}")
    told = re.findall(
        rf"warning: {run}/(\w+)\.safetensors: not saved \(No space left on device\): need \S+ MB, "
        rf"\S+ MB free at {run}; earlier "
        r"files are intact; free some space or choose another --out_dir; training continues and "
        r"retries at the next save",
        said,
    )
    assert code == 0 and told == ["last", "best", "best", "best"]
    assert (
        contents(run / "best.safetensors")["progress"]["step"]
        == contents(run / LAST)["progress"]["step"]
        == STEPS
    )


def test_a_best_checkpoint_that_found_no_room_is_saved_as_soon_as_there_is(
    options, run, monkeypatch
):
    values = iter([1.0, 1.0] + [2.0] * 6)
    monkeypatch.setattr(
        evaluate, "loss_sums_by_position", lambda *_: np.array([[next(values)], [1.0]])
    )
    tried = []
    full_for(
        monkeypatch,
        lambda name, number: tried.append(name) or tried.count("best") == 1 == (name == "best"),
    )
    code, said = train(*options, f"--out_dir={run}")
    assert (
        code == 0 and said.count("warning: ") == 1 and tried[:4] == ["last", "best", "best", "last"]
    )
    assert tried.count("best") == 2
    best = contents(run / "best.safetensors")["progress"]
    assert best["step"] == best["best_step"] == 6


def test_where_the_last_save_fails_the_run_ends_with_5_and_the_old_one_is_whole(
    options, run, monkeypatch
):
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    before = (run / LAST).read_bytes()
    with monkeypatch.context() as patch:
        full_for(patch, lambda name, number: True)
        code, said = train(*options, f"--out_dir={run}", "--resume", "--max_iters=12")
    assert code == 5 and (run / LAST).read_bytes() == before and not list(run.glob("*.tmp.*"))
    assert re.fullmatch(
        rf"error: {run}/\w+\.safetensors: not saved \(No space left on device\): need 0\.\d MB, "
        rf"\S+ MB free at {run}; "
        "earlier files are intact; free some space or choose another --out_dir",
        last_line(said),
    )
    assert (
        train(*options, f"--out_dir={run}", "--resume", "--max_iters=12")[0] == 0
        and step_of(run) == 12
    )


def test_a_log_that_cannot_be_written_is_one_warning_and_nothing_else(
    options, run, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(event_file.EventFile, "flush", full)
        code, said = train(*options, f"--out_dir={run}")
    assert code == 0 and [path.name for path in run.glob("*tfevents*")] == [DESCRIPTION]
    (warning,) = re.findall("warning: .*", said)
    assert re.fullmatch(
        r"warning: TensorBoard's file cannot be written: "
        rf"{run}/events\.out\.tfevents\.\d+: not written \(No space left on device\); "
        "training continues",
        warning,
    )
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    assert equal(*(contents(each / LAST)["tensors"] for each in (run, tmp_path / "whole")))


def test_a_folder_that_is_removed_under_a_run_is_never_silent(options, run, monkeypatch):
    at_step(monkeypatch, 5, lambda: shutil.rmtree(run))
    code, said = train(*options, f"--out_dir={run}")
    assert code == 5 and said.count("TensorBoard's file cannot be written") == 1
    assert re.match(
        rf"error: {run}/best\.safetensors: not saved \(No such file or directory\): ",
        last_line(said),
    )


# ------------------------------------------------------------------------------------ what is there


def test_a_folder_with_a_run_is_not_begun_anew_unasked(options, run):
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
    code, said = train(*options, f"--out_dir={run}")
    assert (
        code == 2
        and {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
        == before
    )
    assert last_line(said) == (
        f"error: out_dir: {run} already holds a run; --resume continues it, --overwrite replaces "
        "it, another --out_dir leaves it alone"
    )


def test_the_best_and_the_last_of_one_step_are_one_content(options, run, monkeypatch):
    steps, to_bytes = [], checkpoint.to_bytes

    def watched(saved):
        steps.append(saved.progress["step"])
        return to_bytes(saved)

    monkeypatch.setattr(checkpoint, "to_bytes", watched)
    assert train(*options, f"--out_dir={run}")[0] == 0
    assert (
        sorted(set(steps)) == steps
        and (run / "best.safetensors").read_bytes() == (run / LAST).read_bytes()
    )


# ----------------------------------------------------------------------------------------- speaking


def test_a_reader_of_the_output_who_leaves_ends_nothing(options, run, tmp_path):
    process = start("train.py", *options, f"--out_dir={run}")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0 and same(
        tmp_path / "whole", run
    )


def test_a_terminal_that_has_gone_ends_nothing(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        gone = False

        def isatty(self):
            return True

        def write(self, text):
            if self.gone:
                raise OSError(errno.EPIPE, "Broken pipe")
            return super().write(text)

    monkeypatch.setattr("sys.stderr", Terminal())
    logger = Logger(tmp_path, 0, 10**6)
    for step in range(100):
        logger.progress(step * 1000, 1.0, 1.0)
        Terminal.gone = step > 50
        time.sleep(0.002)
    assert "loss 1.000, 1 characters/s" in sys.stderr.getvalue()
    with pytest.raises(OSError, match="Broken pipe"):
        sys.stderr.write("x")
    logger.close()
