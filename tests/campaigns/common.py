"""What the campaigns share: a run small enough to be made a thousand times, and all that must be
equal at its end.
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import file_format
from checkpointing.checkpoint import BEST, LAST, PARTS
from common.errors import UserError
from common.files import write_atomic
from configs.schema import TrainConfig
from train import main
from training import schedule

ROOT = Path(__file__).parents[2]
STEPS = 24
SMALL = [
    "configs/smoke.yaml",
    "--dtype=float32",
    "--n_layer=1",
    "--n_embd=16",
    "--block_size=16",
    "--batch_size=4",
    f"--max_iters={STEPS}",
    "--warmup_iters=4",
    "--eval_interval=6",
    "--save_interval=4",
    "--log_interval=1",
    "--sample_chars=8",
    "--optimizer=muon",
    "--schedule=trapezoid",
    "--ema=0.9",
    "--dropout=0.1",
    "--gradient_accumulation_steps=2",
    "--patience=100",
]
TIMES = {"train/tokens_per_sec", "train/share_of_peak"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def small(folder: Path) -> list[str]:
    """The arguments of the small run, on a text that is put into `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            (ROOT / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")[:6000],
            encoding="utf-8",
        )
    return [*SMALL, f"--data.sources={text}"]


def train(*arguments: object) -> tuple[int, str]:
    """train.py in this process: its exit code and what it said."""
    torch.set_num_threads(1)
    said = io.StringIO()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with redirect_stdout(said):
            code = main([str(each) for each in arguments])
    except UserError as error:
        return error.exit_code, f"{said.getvalue()}error: {error}\n"
    except SystemExit as leaving:
        return leaving.code, said.getvalue()
    except KeyboardInterrupt:
        return 130, said.getvalue()
    finally:
        os.chdir(before)
    return code, said.getvalue()


def start(*arguments: object) -> subprocess.Popen:
    """A command of its own: `start("train.py", ...)`; both outputs in one pipe."""
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Let something happen as step number `step`, from 0, begins."""
    lr_multiplier = schedule.lr_multiplier

    def watched(now: int, settings: TrainConfig) -> float:
        if now == step:
            action()
        return lr_multiplier(now, settings)

    patch.setattr(schedule, "lr_multiplier", watched)


def contents(path: Path) -> dict:
    """Everything in a checkpoint file: its parts, and under "tensors" the tensors."""
    metadata, tensors = file_format.read(path)
    parts = {name: json.loads(metadata[name]) for name in PARTS if name in metadata}
    return {**parts, "tensors": tensors}


def forge(path: Path, changed: dict) -> None:
    """Write a checkpoint file with a right digest, whatever its contents."""
    metadata = {name: json.dumps(part) for name, part in changed.items() if name != "tensors"}
    write_atomic(path, file_format.to_bytes(metadata, changed.get("tensors", {})))


def step_of(folder: Path) -> int:
    """How far last.safetensors is."""
    return contents(folder / LAST)["progress"]["step"]


def loadable(folder: Path) -> tuple[int, int]:
    """How many checkpoints lie in a folder, and how many of them load."""
    files = list(folder.glob("*.safetensors"))
    return len(files), sum(1 for file in files if contents(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, every (step, value) that TensorBoard's own reader finds, but for times and places."""
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
        if tag not in TIMES and not tag.startswith("run/")
    }


def outcome(folder: Path) -> dict:
    """All that a run leaves, but for times, and for where it and its text lie."""
    left = {name: contents(folder / name) for name in (LAST, BEST)}
    for checkpoint in left.values():
        del checkpoint["config"]["out_dir"], checkpoint["config"]["data"]["sources"]
        del checkpoint["events"]  # file names hold times
    return left | {"scalars": repr(scalars(folder))}  # a NaN equals itself in words alone


def equal(a: object, b: object) -> bool:
    """Whether two trees are equal in types, names, numbers and tensors, to the last bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def same(a: Path, b: Path) -> bool:
    """Whether two runs left the same, to the last bit."""
    return equal(outcome(a), outcome(b))


def command(campaign: Callable[[bool], str]) -> None:
    """`python -m tests.campaigns.NAME [--full]`: run it and print what it counted."""
    assert sys.argv[1:] in ([], ["--full"]), "the only option is --full"
    print(campaign("--full" in sys.argv))
