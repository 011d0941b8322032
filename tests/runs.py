"""A run that takes half a second, in this process or in another one; its results."""

import dataclasses
import importlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray

from common.errors import UserError
from common.files import write_atomic
from configs.schema import TrainConfig
from storage.checkpoint import BEST, FORMAT, LAST, SECTIONS, digest, load_checkpoint
from tests.commands import exit_code, sample_main, train_main
from tests.conftest import ROOT
from training import evaluate
from training import step as step_module

STEPS = 24
SMALL = [
    "configs/smoke.yaml", "--device=cpu", "--dtype=float32", "--n_layer=1", "--n_embd=16",
    "--block_size=16", "--batch_size=4", f"--max_iters={STEPS}", f"--warmup_ratio={4 / STEPS}",
    f"--cooldown_ratio={20 / STEPS}", "--eval_interval=6", "--save_interval=4", "--log_interval=1",
    "--sample_chars=8", "--optimizer=muon", "--schedule=trapezoid", "--dropout=0.1",
    "--gradient_accumulation_steps=2", "--patience=100",
]  # fmt: skip
JSON_SECTIONS = [*SECTIONS, "environment"]  # of a checkpoint file
PHASES = {  # a function that only one phase of a run uses
    "load": ("train", "load_corpus"),
    "folder": ("train", "prepare_folder"),
    "step": ("training.step", "lr_multiplier"),
    "evaluate": ("training.evaluate", "window_losses"),
    "draw": ("training.samples", "generate"),
    "save": ("os", "fsync"),
    "agree": ("torch.distributed", "all_reduce"),  # of several ranks, on whether to stop
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
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


def train(*arguments: object) -> tuple[int, str]:
    """Run train.py in this process; return its exit code, and its stdout with any error message."""
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()) as stdout, chdir(ROOT):
        try:
            code = train_main(list(arguments))
        except (UserError, OSError, SystemExit, KeyboardInterrupt) as error:
            with redirect_stderr(stdout):
                code = exit_code(raised(error), [])
    return code, stdout.getvalue()


class Pipe(io.TextIOWrapper):
    """Standard input with some bytes."""

    def __init__(self, content: bytes):
        super().__init__(io.BufferedReader(io.BytesIO(content)))


def run_sample(ckpt, *words, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
    """Run sample.py in this process; return its standard output and standard error."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "stdin", Pipe(stdin))
        assert sample_main([f"--ckpt={ckpt}", *words]) == code
    return stdout.getvalue(), stderr.getvalue()


def start(*arguments: object) -> subprocess.Popen:
    """Start a script in a subprocess: `start("train.py", ...)`, stdout and stderr in one pipe."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, text=True, **pipes)


def raised(error: BaseException) -> Callable:
    """Return a function that raises an error."""

    def fail(*_, **__):
        raise error

    return fail


def evaluations_give(
    patch: pytest.MonkeyPatch,
    *val_losses: float,
    train_losses: Iterable[float] = itertools.repeat(1.0),
) -> None:
    """Let the next evaluations find these losses, on validation text and on training text."""
    pairs = zip(val_losses, train_losses, strict=False)
    losses = iter([np.array([loss]) for pair in pairs for loss in pair])
    one, no_segment = np.array([1.0]), np.array([])
    patch.setattr(
        evaluate,
        "window_losses",
        lambda *_: evaluate.WindowLosses(next(losses), one, no_segment),
    )


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Call `action` at the beginning of step number `step`, counted from 0."""
    lr_multiplier = step_module.lr_multiplier

    def with_action(now: int, settings: TrainConfig) -> float:
        if now == step:
            action()
        return lr_multiplier(now, settings)

    patch.setattr(step_module, "lr_multiplier", with_action)


def stop_at(step: int, *arguments: object) -> str:
    """Run train.py until Ctrl-C in a step, counted from 0, which is the last one; return stdout."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        code, output = train(*arguments)
    assert code == 130, output
    return output


def send_at(phase: str, kind: str, call: int, patch: Callable = setattr) -> None:
    """Patch the function of a phase so that its call number `call` first sends the signal."""
    module, name = PHASES[phase]
    module = importlib.import_module(module)
    original, calls = getattr(module, name), itertools.count(1)

    def with_signal(*arguments, **options):
        if next(calls) == call:
            for _ in range(2 if kind.endswith("twice") else 1):
                os.kill(os.getpid(), getattr(signal, kind.split()[0]))
        return original(*arguments, **options)

    patch(module, name, with_signal)


def train_and_copy(folder: Path, step: int, *arguments: object) -> Path:
    """Train a run in `folder`; return a copy as it was at the beginning of a step, from 0."""
    copy = folder.with_name(f"{folder.name}_at_step_{step}")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: shutil.copytree(folder, copy))
        code, output = train(*arguments, f"--out_dir={folder}")
    assert code == 0, output
    return copy


def contents(path: Path) -> dict:
    """Return the parts of a checkpoint file by name, and its tensors under "tensors"."""
    saved = load_checkpoint(path)
    sections = {name: dataclasses.asdict(getattr(saved, name)) for name in SECTIONS}
    more = {name: getattr(saved, name) for name in ("environment", "vocabulary")}
    return sections | more | {"tensors": dict(sorted(saved.tensors.items()))}


def write_checkpoint(path: Path, changed: dict) -> None:
    """Write a checkpoint file with changed `contents` and the correct digest."""
    metadata = {name: json.dumps(changed[name]) for name in JSON_SECTIONS if name in changed}
    metadata |= {"vocabulary": changed["vocabulary"], "hornbook_format": FORMAT}
    metadata["sha256"] = digest(metadata, changed["tensors"])
    write_atomic(path, safetensors.torch.save(changed["tensors"], metadata))


def step_of(folder: Path) -> int:
    """Return the step of last.safetensors."""
    return contents(folder / LAST)["progress"]["step"]


def count_checkpoints(folder: Path) -> int:
    """Return the number of checkpoints in a folder; raise CheckpointError if one is damaged."""
    return len([contents(file) for file in folder.glob("*.safetensors")])


def snapshot(folder: Path) -> dict[str, object]:
    """Return everything below a folder by path: of a file, also its time and its bytes.

    The content of the lock is left out: it names the last holder.
    """
    return {
        str(path.relative_to(folder)): path.is_file()
        and path.name != ".lock"
        and (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, object]]]:
    """Return the (step, value) pairs of scalars and texts by tag, as TensorBoard serves them.

    What each start has of its own is left out: timings and descriptions.
    """
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
        left_out = tag == "train/chars_per_sec" or tag.startswith("setup/")
        if plugin in ("scalars", "text") and not left_out:
            tensors = [(each.step, make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)]
            found[tag] = [(step, tensor.tolist()) for step, tensor in tensors]
    return found


def same_runs(a: Path, b: Path) -> bool:
    """Compare all results of two runs bit for bit, but timings and the paths of folder and text."""
    outcomes = []
    for folder in (a, b):
        results = {name: contents(folder / name) for name in (LAST, BEST)}
        for checkpoint in results.values():
            del checkpoint["settings"]["out_dir"], checkpoint["settings"]["data"]["sources"]
        outcomes.append(results | {"scalars": repr(scalars(folder))})  # as text, since NaN != NaN
    return equal(*outcomes)


def equal(a: object, b: object) -> bool:
    """Compare two trees of dicts, lists and tensors: equal types, keys and values, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b
