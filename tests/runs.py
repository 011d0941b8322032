"""A run that takes half a second, in this process or in another one; its results."""

import importlib
import io
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray

import sample
import train as train_script
from common.console import UserError, report_error
from configs.command import parse_sample_options, parse_train
from configs.schema import to_flat
from storage.checkpoint import BEST, LAST, load_checkpoint
from tests.conftest import ROOT
from training import evaluate
from training.distributed import World
from training.state import Run

STEPS = 24
SMALL = [
    "configs/smoke.yaml", "--device=cpu", "--dtype=float32", "--n_layer=1", "--n_embd=16",
    "--block_size=16", "--batch_size=4", f"--max_iters={STEPS}", f"--warmup_ratio={4 / STEPS}",
    f"--cooldown_ratio={20 / STEPS}", "--eval_interval=6", "--log_interval=1",
    "--sample_chars=8", "--optimizer=muon", "--schedule=wsd", "--dropout=0.1",
    "--gradient_accumulation_steps=2", "--patience=100",
]  # fmt: skip
# Many runs start here within a second. Their event files, in which TensorBoard's writer counts from
# 0, shall have names in the order of the starts, also from 9 to 10.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


def small_run_args(folder: Path) -> list[str]:
    """Return the arguments of the small run, on a text that is written to `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        play = (ROOT / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")
        text.write_text(play[:6000], encoding="utf-8")
    return [*SMALL, f"--sources={text}"]


# ----------------------------------------------------------------------------------------- commands


def train_main(argv) -> int:
    """Run train.py in this process; return its exit code, or raise the error that ends it."""
    return train_script.main(parse_train(list(map(str, argv))))


def sample_main(argv) -> int:
    """Run sample.py in this process; return its exit code, or raise the error that ends it."""
    return sample.main(parse_sample_options(list(map(str, argv))))


def exit_code(command: Callable, argv) -> int:
    """Run a command as a process does; return the exit code, with any error on standard error."""
    try:
        return command(argv)
    except SystemExit as leaving:
        return leaving.code
    except BaseException as error:
        return report_error(error)


def train(*arguments: object) -> tuple[int, str]:
    """Run train.py in this process; return its exit code, and its stdout with any error message."""
    with redirect_stdout(io.StringIO()) as stdout, chdir(ROOT):
        try:
            code = train_main(arguments)
        except (UserError, OSError, KeyboardInterrupt) as error:
            with redirect_stderr(stdout):
                code = report_error(error)
    return code, stdout.getvalue()


def build(*arguments: object) -> Run:
    """Build the run that train.py makes of a command."""
    return train_script.build_run(parse_train(list(map(str, arguments))), World())


def run_sample(ckpt, *words, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
    """Run sample.py in this process; return its standard output and standard error."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert sample_main([f"--ckpt={ckpt}", *words]) == code
    return stdout.getvalue(), stderr.getvalue()


def start(*arguments: object) -> subprocess.Popen:
    """Start a script in a subprocess: `start("train.py", ...)`, stdout and stderr in one pipe."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, **pipes)


# --------------------------------------------------------------------------------- changes of a run


def raised(error: BaseException) -> Callable:
    """Return a function that raises an error."""

    def fail(*_, **__):
        raise error

    return fail


def evaluations_give(patch: pytest.MonkeyPatch, *val_losses: float) -> None:
    """Let the next evaluations find these losses on validation text, and 1 on training text."""
    losses = [np.array([loss]) for val_loss in val_losses for loss in (val_loss, 1.0)]
    # of one prediction, and no document
    found = iter([evaluate.PositionLosses(loss, np.ones(1), np.array([])) for loss in losses])
    patch.setattr(evaluate, "position_losses", lambda *_: next(found))


def before_call(
    patch: pytest.MonkeyPatch, name: str, number: int, action: Callable[[], None]
) -> None:
    """Call `action` before call `number`, from 1, of a function: `training.evaluate.evaluate`."""
    module, _, function = name.rpartition(".")
    original, calls = getattr(importlib.import_module(module), function), itertools.count(1)

    def with_action(*arguments, **options):
        if next(calls) == number:
            action()
        return original(*arguments, **options)

    patch.setattr(name, with_action)


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Call `action` at the beginning of step number `step`, counted from 0."""
    lr_multiplier = train_script.lr_multiplier

    def with_action(now, settings):
        if now == step:
            action()
        return lr_multiplier(now, settings)

    patch.setattr(train_script, "lr_multiplier", with_action)


def stop_at(step: int, *arguments: object) -> str:
    """Run train.py until Ctrl-C in a step, counted from 0, which is the last one; return stdout."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        code, output = train(*arguments)
    assert code == 130, output
    return output


def train_and_copy(folder: Path, step: int, *arguments: object) -> Path:
    """Train a run in `folder`; return a copy as it was at the beginning of a step, from 0."""
    copy = folder.with_name(f"{folder.name}_at_step_{step}")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: shutil.copytree(folder, copy))
        code, output = train(*arguments, f"--out_dir={folder}")
    assert code == 0, output
    return copy


# ------------------------------------------------------------------------------------------ results


def step_of(folder: Path) -> int:
    """Return the step of last.safetensors."""
    return load_checkpoint(folder / LAST).progress.step


def count_checkpoints(folder: Path) -> int:
    """Return the number of checkpoints in a folder; raise CheckpointError if one is damaged."""
    return len([load_checkpoint(file) for file in folder.glob("*.safetensors")])


def snapshot(folder: Path) -> dict[Path, object]:
    """Return everything below a folder by path, but locks: of a file, its time and its bytes."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {path: path.is_file() and (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def scalars(folder: Path) -> dict[str, list[tuple[int, object]]]:
    """Return the (step, value) pairs of scalars and texts by tag, as TensorBoard serves them.

    What each start has of its own is left out: timings and descriptions.
    """
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
        if plugin in ("scalars", "text") and not tag.startswith(("train/chars_per_sec", "setup/")):
            tensors = [(each.step, make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)]
            found[tag] = [(step, tensor.tolist()) for step, tensor in tensors]
    return found


def losses(folder: Path) -> list[float]:
    """Return the losses of all logged steps and evaluations."""
    values = scalars(folder)
    return [loss for tag in ("train/loss", "val/loss") for _, loss in values[tag]]


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple]:
    """Return the types, shapes and bytes of tensors by name."""
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def same_runs(a: Path, b: Path) -> bool:
    """Compare all results of two runs bit for bit, but timings and the paths of folder and text."""
    outcomes = []
    for folder in (a, b):
        outcome = [repr(scalars(folder))]  # as text, since NaN != NaN
        for saved in (load_checkpoint(folder / name) for name in (LAST, BEST)):
            outcome.append(to_flat(saved.settings) | {"out_dir": "", "sources": ""})
            outcome.append(replace(saved, settings=None, tensors=bits(saved.tensors), path=None))
        outcomes.append(outcome)
    return outcomes[0] == outcomes[1]
