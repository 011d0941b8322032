"""Helpers of the campaigns: a run that takes about a second, and comparison of runs."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import file_format
from checkpointing.checkpoint import BEST, LAST, SECTIONS
from checkpointing.run_dir import holds_run
from common.errors import UserError
from common.files import write_atomic
from configs.cli import CommandLineOptions
from configs.fields import value_type
from configs.options import options_of
from configs.schema import Config, TrainConfig
from tests.commands import train_main
from tests.conftest import printed
from training import schedule

ROOT = Path(__file__).parents[2]
STEPS = 24
SMALL = [
    "configs/smoke.yaml", "--dtype=float32", "--n_layer=1", "--n_embd=16", "--block_size=16",
    "--batch_size=4", f"--max_iters={STEPS}", "--warmup_iters=4", "--eval_interval=6",
    "--save_interval=4", "--log_interval=1", "--sample_chars=8", "--optimizer=muon",
    "--schedule=trapezoid", "--dropout=0.1", "--gradient_accumulation_steps=2",
    "--patience=100",
]  # fmt: skip
TIMES = {"train/tokens_per_sec", "train/share_of_peak"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def small_run_args(folder: Path) -> list[str]:
    """Return the arguments of the small run, on a text that is written to `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            (ROOT / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")[:6000],
            encoding="utf-8",
        )
    return [*SMALL, f"--data.sources={text}"]


def merged(arguments: Iterable[object]) -> list[str]:
    """Replace an option where a later one, `--key=value`, changes the same setting.

    train.py refuses an option given twice. Lists, such as --data.sources, add up and are kept.
    """
    options, words = options_of(CommandLineOptions, Config), {}
    for number, word in enumerate(map(str, arguments)):
        key = word.partition("=")[0].removeprefix("--").replace("-", "_")
        name, field, _ = options.get(key, ("", None, ""))
        replaces = word.startswith("--") and name and value_type(field) is not tuple
        words[name if replaces else number] = word
    return list(words.values())


def train(*arguments: object) -> tuple[int, str]:
    """Run train.py in this process; return its exit code, and its stdout with any error message.

    Options may override earlier ones: they are `merged`.
    """
    torch.set_num_threads(1)
    stdout = io.StringIO()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with redirect_stdout(stdout):
            code = train_main(merged(arguments))
    except UserError as error:
        return error.exit_code, f"{stdout.getvalue()}error: {printed(error)}\n"
    except SystemExit as system_exit:
        return system_exit.code, stdout.getvalue()
    except KeyboardInterrupt:
        return 130, stdout.getvalue()
    finally:
        os.chdir(before)
    return code, stdout.getvalue()


def resume_if_saved(folder: Path) -> list[str]:
    """Return --resume if a folder holds a run: train.py refuses an --out_dir without one."""
    return ["--resume"] if holds_run(folder) else []


def start(*arguments: object) -> subprocess.Popen:
    """Start a script in a subprocess: `start("train.py", ...)`, stdout and stderr in one pipe.

    Options may override earlier ones: they are `merged`.
    """
    words = [sys.executable, *merged(arguments)]
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Call `action` at the beginning of step number `step`, counted from 0."""
    lr_multiplier = schedule.lr_multiplier

    def with_action(now: int, settings: TrainConfig) -> float:
        if now == step:
            action()
        return lr_multiplier(now, settings)

    patch.setattr(schedule, "lr_multiplier", with_action)


def stop_at(step: int, *arguments: object) -> None:
    """Run train.py until Ctrl-C in a step, counted from 0, which is the last one."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        code, output = train(*arguments)
    assert code == 130, output


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
    metadata, tensors = file_format.read(path)
    sections = {name: json.loads(metadata[name]) for name in SECTIONS}
    return {**sections, "vocabulary": metadata["vocabulary"], "tensors": tensors}


def write_checkpoint(path: Path, changed: dict) -> None:
    """Write a checkpoint file with any contents and the correct digest."""
    metadata = {name: json.dumps(changed[name]) for name in SECTIONS if name in changed}
    if "vocabulary" in changed:
        metadata["vocabulary"] = changed["vocabulary"]
    write_atomic(path, file_format.to_bytes(metadata, changed.get("tensors", {})))


def step_of(folder: Path) -> int:
    """Return the step of last.safetensors."""
    return contents(folder / LAST)["progress"]["step"]


def count_checkpoints(folder: Path) -> tuple[int, int]:
    """Return the number of checkpoints in a folder, and the number of those that load."""
    files = list(folder.glob("*.safetensors"))
    return len(files), sum(1 for file in files if contents(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs by tag, read by TensorBoard, without timings and descriptions."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    texts = {
        tag: [(each.step, list(each.tensor_proto.string_val)) for each in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    return {
        tag: values
        for tag, values in (tags | texts).items()
        if tag not in TIMES and not tag.startswith("setup/")
    }


def outcome(folder: Path) -> dict:
    """Return all results of a run, except timings and the paths of its folder and text."""
    results = {name: contents(folder / name) for name in (LAST, BEST)}
    for checkpoint in results.values():
        del checkpoint["config"]["out_dir"], checkpoint["config"]["data"]["sources"]
        del checkpoint["events"]  # its file names contain times
    return results | {"scalars": repr(scalars(folder))}  # as text, since NaN != NaN


def equal(a: object, b: object) -> bool:
    """Compare two trees of dicts, lists and tensors: equal types, keys and values, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def same_runs(a: Path, b: Path) -> bool:
    """Compare the results of two runs, bit for bit."""
    return equal(outcome(a), outcome(b))


def run_campaign(campaign: Callable[[bool], str]) -> None:
    """Run `python -m tests.campaigns.NAME [--full]` and print its line of results."""
    assert sys.argv[1:] in ([], ["--full"]), "the only option is --full"
    print(campaign("--full" in sys.argv))
