"""Failures during a run: the message, the exit code and the remaining checkpoints."""

import errno
import io
import math
import re
import shlex
import shutil
import sys
import time

import numpy as np
import pytest
import torch

from checkpointing import checkpoint, failures
from checkpointing.checkpoint import LAST, NO_CHECKPOINT_YET
from common import files
from common.console import program
from configs.cli import parse_train
from dashboard import event_file
from dashboard.event_file import DESCRIPTION
from dashboard.logger import Logger
from tests.campaigns.common import (
    STEPS,
    at_step,
    contents,
    count_checkpoints,
    equal,
    same_runs,
    scalars,
    small_run_args,
    start,
    step_of,
    stop_at,
    train,
    train_and_copy,
)
from training import evaluate, step
from training.health import SPIKE_WINDOW, is_spike
from training.optimizers import AdamW
from training.state import Run

PYTHON = shlex.quote(program("python"))  # in printed commands


@pytest.fixture
def options(tmp_path):
    return small_run_args(tmp_path)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def patch_losses(patch, change):
    """Replace each training loss by `change(loss, number)`, numbered from 0; a step has two."""
    real, numbers = step.cross_entropy, iter(range(10**6))
    patch.setattr(
        step, "cross_entropy", lambda logits, targets: change(real(logits, targets), next(numbers))
    )


def scale_losses(*numbers, factor=math.nan):
    """Return a `change` for `patch_losses` that multiplies the losses of these numbers."""
    return lambda loss, number: loss * factor if number in numbers else loss


def patch_gradient_norm(patch, norm):
    real = torch.nn.utils.clip_grad_norm_
    patch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: norm(real(parameters, limit))
    )


def last_line(output):
    assert output.count("error: ") == 1 and output.endswith("\n")
    return output.splitlines()[-1]


# ------------------------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_ends_the_run_before_the_update(factor, options, run, monkeypatch):
    patch_losses(monkeypatch, scale_losses(11, factor=factor))
    code, output = train(*options, f"--out_dir={run}")
    assert code == 6
    assert re.fullmatch(
        r"error: after step 5, at learning rate 0\.001: loss (nan|-?inf), gradient norm nan; "
        rf"both must be finite; the last checkpoint is {run}/last\.safetensors of step 4; "
        rf"try: {re.escape(PYTHON)} train\.py configs/smoke\.yaml .* --out_dir={run} --resume "
        r"--muon_learning_rate=0\.01",
        last_line(output),
    )
    assert step_of(run) == 4 and count_checkpoints(run) == (1, 1)


def test_a_non_finite_gradient_ends_the_run_before_the_update(options, run, monkeypatch):
    patch_gradient_norm(monkeypatch, lambda norm: norm * math.inf)
    code, output = train(*options, f"--out_dir={run}", "--optimizer=adamw")
    assert code == 6 and count_checkpoints(run) == (0, 0)
    assert re.fullmatch(
        r"error: after step 0, at learning rate 0\.0002: loss 4\.\d+, gradient norm inf; "
        r"both must be finite; there is no checkpoint yet; "
        rf"try: {re.escape(PYTHON)} train\.py configs/smoke\.yaml .* --out_dir={run} "
        r"--learning_rate=0\.0005",
        last_line(output),
    )


def test_the_suggested_command_completes_the_run(options, run, monkeypatch):
    with monkeypatch.context() as patch:
        patch_losses(patch, scale_losses(11))
        output = train(*options, f"--out_dir={run}")[1]
    code, output = train(*last_line(output).partition(f"try: {PYTHON} train.py ")[2].split())
    assert code == 0 and "train.muon_learning_rate 0.02 -> 0.01" in output and step_of(run) == STEPS


def test_weights_made_non_finite_by_an_update_are_not_saved(options, run, monkeypatch):
    update = AdamW.step

    def broken_update(self):
        update(self)
        self.param_groups[0]["params"][0].data[0] = math.inf

    monkeypatch.setattr(AdamW, "step", broken_update)
    code, output = train(*options, f"--out_dir={run}", "--optimizer=adamw", "--save_interval=1")
    assert code == 6 and count_checkpoints(run) == (0, 0)
    assert last_line(output).startswith(
        "error: after step 1, at learning rate 0.0002: the weights are no longer finite; there is"
    )


def patch_grad_scaler(patch, scale, overflows=()):
    """Scale losses as for float16 on a GPU; put an infinity into one gradient in the `unscale_`
    calls numbered in `overflows`.
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


def test_an_overflow_that_lowers_the_loss_scale_is_no_error(options, run, monkeypatch):
    patch_grad_scaler(monkeypatch, 2.0**127)
    code, output = train(*options, f"--out_dir={run}")
    assert code == 0, output
    norms = [norm for _, norm in scalars(run)["train/grad_norm"]]
    assert not math.isfinite(norms[0]) and math.isfinite(norms[-1])


@pytest.mark.parametrize("optimizer", [0, 1], ids=["adamw", "muon"])
def test_an_overflow_in_one_optimizer_skips_the_step_of_both(optimizer, options, run, monkeypatch):
    patch_grad_scaler(monkeypatch, 4.0, overflows=[2 * 3 + optimizer])
    before = train_and_copy(
        run, 3, *options, "--max_iters=4", "--save_interval=1", "--schedule=constant"
    )
    before, after = contents(before / LAST), contents(run / LAST)
    assert (before["progress"]["loss_scale"], after["progress"]["loss_scale"]) == (4.0, 2.0)
    assert equal(before["tensors"], after["tensors"])


def test_an_overflow_at_a_loss_scale_of_1_ends_the_run(options, run, monkeypatch):
    patch_grad_scaler(monkeypatch, 1.0, overflows=[6])
    code, output = train(*options, f"--out_dir={run}")
    assert (
        code == 6
        and "after step 3" in last_line(output)
        and "gradient norm inf" in last_line(output)
    )


def test_a_non_finite_loss_is_no_overflow_at_any_loss_scale(options, run, monkeypatch):
    patch_grad_scaler(monkeypatch, 4.0)
    patch_losses(monkeypatch, scale_losses(11))
    code, output = train(*options, f"--out_dir={run}")
    assert code == 6 and last_line(output).startswith("error: after step 5, ")


def test_a_non_finite_validation_loss_is_reported_and_never_the_best(options, run, monkeypatch):
    real, numbers = evaluate.loss_sums_by_position, iter(range(100))
    monkeypatch.setattr(
        evaluate,
        "loss_sums_by_position",
        lambda *arguments: real(*arguments) * (math.nan if next(numbers) in (2, 3) else 1),
    )
    code, output = train(*options, f"--out_dir={run}")
    assert (
        code == 0
        and "step 12: validation loss nan, loss on training text nan\n"
        in output
    )
    is_nan = [math.isnan(value) for _, value in scalars(run)["val/loss"]]
    assert is_nan == [False, True, False, False]
    assert contents(run / "best.safetensors")["progress"]["best_step"] == STEPS


# ------------------------------------------------------------------------------------------- spikes


def test_a_loss_spike_is_counted_and_printed(options, run, monkeypatch):
    patch_losses(monkeypatch, lambda loss, number: loss * 3 if number == 280 else loss)
    code, output = train(
        *options, f"--out_dir={run}", "--max_iters=150", "--eval_interval=150", "--save_interval=50"
    )
    assert code == 0
    assert (
        re.findall(
            r"step (\d+): loss (\S+) is far above the mean of the last 128 \(spikes so far: 1\)\n",
            output,
        )[0][0]
        == "141"
    )
    assert scalars(run)["train/spikes"][-1] == (150, 1.0)
    assert len(contents(run / LAST)["progress"]["recent_losses"]) == SPIKE_WINDOW


def test_a_spike_is_six_standard_deviations_above_the_mean_of_a_full_window():
    window = [1.0, 3.0] * (SPIKE_WINDOW // 2)  # mean 2, sigma 1
    assert is_spike(8.001, window) and not is_spike(7.999, window) and not is_spike(-100.0, window)
    assert not is_spike(8.001, window[1:])


# ------------------------------------------------------------------------------------------- memory


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_at_the_first_step_suggests_a_smaller_batch(options, run, monkeypatch):
    patch_losses(monkeypatch, out_of_memory)
    code, output = train(*options, f"--out_dir={run}")
    assert code == 5 and not list(run.glob("*.safetensors"))
    assert last_line(output).startswith(
        "error: device auto: out of memory; batch_size 4 windows of block_size 16 do not fit at "
        f"once; there is no checkpoint yet; try: {PYTHON} train.py configs/smoke.yaml "
    )
    assert last_line(output).endswith(
        f" --out_dir={run} --batch_size=2 --gradient_accumulation_steps=4"
    )


@pytest.mark.parametrize(("batch", "size", "expected"), [
    (4, 1, {"batch_size": 2, "gradient_accumulation_steps": 2}),
    (4, 4, {}), (8, 4, {"batch_size": 4, "gradient_accumulation_steps": 2}), (1, 1, {}),
    (9, 3, {"batch_size": 3, "gradient_accumulation_steps": 3}),
])  # fmt: skip
def test_a_smaller_batch_is_one_that_the_processes_divide(batch, size, expected):
    command = parse_train(["configs/smoke.yaml", f"--batch_size={batch}"])
    assert failures._smaller_batch(command, size) == expected


def test_out_of_memory_before_training_suggests_no_resume_of_an_older_run(
    options, run, monkeypatch
):
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    monkeypatch.setattr(Run, "__init__", out_of_memory)
    code, output = train(*options, f"--out_dir={run}", "--overwrite")
    assert code == 5 and last_line(output).endswith(
        f" --out_dir={run} --overwrite --batch_size=2 --gradient_accumulation_steps=4"
    )
    assert step_of(run) == 8


def test_the_command_suggested_before_the_first_checkpoint_keeps_the_origin_of_the_run(
    options, run, tmp_path, monkeypatch
):
    stop_at(20, *options, f"--out_dir={run}")
    for number, origin in enumerate([f"--init_from={run}", f"--resume={run}"]):
        with monkeypatch.context() as patch:
            patch_losses(patch, out_of_memory)
            new = [f"--out_dir={tmp_path / f'new{number}'}", "--max_iters=30"]
            code, output = train(*options, origin, *new)
        command = last_line(output).partition(f"there is no checkpoint yet; try: {PYTHON} ")[2]
        assert code == 5 and f" {origin} " in command and f" {new[0]} " in command
        code, output = train(*command.split()[1:])
        assert code == 0 and step_of(tmp_path / f"new{number}") == 30
        assert ("resuming from" in output) == ("--resume" in origin)


def test_after_out_of_memory_the_suggested_smaller_batches_train_on_the_same_windows(
    options, run, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch_losses(patch, lambda loss, number: out_of_memory() if number == 13 else loss)
        code, output = train(*options, f"--out_dir={run}", "--dropout=0")
    assert (
        code == 5
        and f"; the last checkpoint is {run}/last.safetensors; try: {PYTHON} train.py "
        in last_line(output)
    )
    code, output = train(*last_line(output).partition(f"try: {PYTHON} train.py ")[2].split())
    assert (
        code == 0 and "train.batch_size 4 -> 2; train.gradient_accumulation_steps 2 -> 4" in output
    )
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
def test_every_kind_of_out_of_memory_has_exit_code_5_and_other_errors_are_re_raised(
    error, code, options, run, monkeypatch
):
    def fail(*_):
        raise error

    patch_losses(monkeypatch, fail)
    if code is None:
        with pytest.raises(RuntimeError, match="our own mistake"):
            train(*options, f"--out_dir={run}")
    else:
        assert train(*options, f"--out_dir={run}", "--batch_size=1")[0] == code


# --------------------------------------------------------------------------------------------- disk


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_unwritable_folder_is_reported_before_training(options, tmp_path, run, monkeypatch):
    (tmp_path / "file").write_text("")
    code, output = train(*options, f"--out_dir={tmp_path / 'file' / 'run'}")
    assert code == 5
    assert last_line(output) == (
        f"error: out_dir: cannot write to {tmp_path}/file/run (Not a directory); choose another "
        f"--out_dir"
    )
    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_synced", disk_full)
        code, output = train(*options, f"--out_dir={run}")
    assert code == 5 and "device  " not in output and not run.exists()
    assert last_line(output).startswith(
        f"error: {run / NO_CHECKPOINT_YET}: not saved (No space left on device): need 0.0 MB, "
    )


def test_a_disk_too_small_for_the_checkpoints_is_reported_before_training(
    options, run, monkeypatch
):
    usage = shutil.disk_usage(run.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    code, output = train(*options, f"--out_dir={run}")
    assert code == 5 and "step" not in output
    expected = (
        rf"error: out_dir: the checkpoints of this run need (\S+) MB, 0\.1 MB are free at {run}; "
        "free some space or choose another --out_dir"
    )
    needed = float(re.fullmatch(expected, last_line(output))[1]) * 1e6
    monkeypatch.undo()
    stop_at(20, *options, f"--out_dir={run}")
    assert 0.3 < needed / (4 * (run / LAST).stat().st_size) < 1.5
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    # new checkpoints replace existing ones, so they need no more space
    assert train(*options, f"--out_dir={run}", "--resume")[0] == 0


def patch_disk_full(patch, is_full):
    """Raise ENOSPC for the checkpoint files, numbered from 0, with `is_full(name, number)`."""
    write, numbers = files._write_synced, iter(range(10**6))

    def written(path, content):
        if path.name.startswith((LAST, "best.safetensors")) and is_full(
            path.name[:4], next(numbers)
        ):
            disk_full()
        write(path, content)

    patch.setattr(files, "_write_synced", written)


def test_a_failed_save_is_a_warning_and_the_next_save_retries(options, run, monkeypatch):
    patch_disk_full(monkeypatch, lambda name, number: number < 4)
    code, output = train(*options, f"--out_dir={run}")
    expected = re.findall(
        rf"warning: {run}/(\w+)\.safetensors: not saved \(No space left on device\): need \S+ MB, "
        rf"\S+ MB free at {run}; earlier files are intact; free some space or choose another "
        r"--out_dir; training continues and retries at the next save",
        output,
    )
    assert code == 0 and expected == ["last", "best", "best", "best"]
    assert (
        contents(run / "best.safetensors")["progress"]["step"]
        == contents(run / LAST)["progress"]["step"]
        == STEPS
    )


def test_a_failed_save_of_the_best_checkpoint_is_retried_at_the_next_save(
    options, run, monkeypatch
):
    values = iter([1.0, 1.0] + [2.0] * 6)
    monkeypatch.setattr(
        evaluate, "loss_sums_by_position", lambda *_: np.array([[next(values)], [1.0]])
    )
    attempts = []
    patch_disk_full(
        monkeypatch,
        lambda name, number: (
            attempts.append(name) or attempts.count("best") == 1 == (name == "best")
        ),
    )
    code, output = train(*options, f"--out_dir={run}")
    assert (
        code == 0
        and output.count("warning: ") == 1
        and attempts[:4] == ["last", "best", "best", "last"]
    )
    assert attempts.count("best") == 2
    best = contents(run / "best.safetensors")["progress"]
    assert best["step"] == best["best_step"] == 6


def test_if_the_final_save_fails_the_exit_code_is_5_and_the_old_checkpoint_is_intact(
    options, run, monkeypatch
):
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    before = (run / LAST).read_bytes()
    with monkeypatch.context() as patch:
        patch_disk_full(patch, lambda name, number: True)
        code, output = train(*options, f"--out_dir={run}", "--resume", "--max_iters=12")
    assert code == 5 and (run / LAST).read_bytes() == before and not list(run.glob("*.tmp*"))
    assert re.fullmatch(
        rf"error: {run}/\w+\.safetensors: not saved \(No space left on device\): need 0\.\d MB, "
        rf"\S+ MB free at {run}; earlier files are intact; free some space or choose another "
        "--out_dir",
        last_line(output),
    )
    assert (
        train(*options, f"--out_dir={run}", "--resume", "--max_iters=12")[0] == 0
        and step_of(run) == 12
    )


def test_an_unwritable_event_file_is_one_warning_and_does_not_affect_training(
    options, run, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(event_file.EventFile, "flush", disk_full)
        code, output = train(*options, f"--out_dir={run}")
    assert code == 0 and [path.name for path in run.glob("*tfevents*")] == [DESCRIPTION]
    (warning,) = re.findall("warning: .*", output)
    assert re.fullmatch(
        rf"warning: {run}/events\.out\.tfevents\.\d+: not written \(No space left on device\); "
        "training continues without it",
        warning,
    )
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    assert equal(*(contents(each / LAST)["tensors"] for each in (run, tmp_path / "whole")))


def test_a_run_folder_removed_during_training_is_reported(options, run, monkeypatch):
    at_step(monkeypatch, 5, lambda: shutil.rmtree(run))
    code, output = train(*options, f"--out_dir={run}")
    assert code == 5 and output.count("training continues without it") == 1
    assert re.match(
        rf"error: {run}/best\.safetensors: not saved \(No such file or directory\): ",
        last_line(output),
    )


# ---------------------------------------------------------------------------- existing checkpoints


def test_a_folder_with_a_run_is_not_overwritten_without_a_flag(options, run):
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
    code, output = train(*options, f"--out_dir={run}")
    assert (
        code == 2
        and {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
        == before
    )
    assert last_line(output) == (
        f"error: out_dir: {run} already holds a run; --resume continues it, --overwrite replaces "
        "it, another --out_dir leaves it alone"
    )


def test_best_and_last_checkpoints_of_the_same_step_are_serialized_once(options, run, monkeypatch):
    steps, to_bytes = [], checkpoint.to_bytes

    def recorded(saved):
        steps.append(saved.progress.step)
        return to_bytes(saved)

    monkeypatch.setattr(checkpoint, "to_bytes", recorded)
    assert train(*options, f"--out_dir={run}")[0] == 0
    assert (
        sorted(set(steps)) == steps
        and (run / "best.safetensors").read_bytes() == (run / LAST).read_bytes()
    )


# --------------------------------------------------------------------------------- closed terminals


def test_a_closed_stdout_does_not_end_a_run(options, run, tmp_path):
    process = start("train.py", *options, f"--out_dir={run}")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0 and same_runs(
        tmp_path / "whole", run
    )


def test_a_closed_terminal_does_not_raise_in_the_progress_bar(tmp_path, monkeypatch):
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
    for number in range(100):
        logger.progress(number * 1000, 1.0, 1.0)
        Terminal.gone = number > 50
        time.sleep(0.002)
    assert "loss 1.000, 1 char/s" in sys.stderr.getvalue()
    with pytest.raises(OSError, match="Broken pipe"):
        sys.stderr.write("x")
    logger.close()
