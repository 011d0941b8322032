"""How soon is nanoGPT's loss reached? python -m benchmarks.time_to_loss [--nanogpt FOLDER]
[--repeats N]

Whole commands in turn: nanoGPT's recipe for a CPU, by its own train.py in FOLDER (a checkout whose
data/shakespeare_char has been prepared), against configs/fast.yaml, and against what
shakespeare.yaml learns when it is cut to less time than nanoGPT takes. Without FOLDER our
nanogpt_cpu.yaml in float32 stands in for it. All learn the same text. Losses are exact, over the
whole validation text; "training" is the time of the steps alone.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode import nanogpt_module
from benchmarks.runs import course
from data.batches import Split, evaluation_windows
from training import runtime
from training.evaluate import exact_loss

# nanoGPT's README, "I only have a macbook"
MACBOOK = {
    "eval_iters": 20,
    "log_interval": 1,
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
}
MACBOOK |= {
    "n_embd": 128,
    "max_iters": 2000,
    "lr_decay_iters": 2000,
    "dropout": 0.0,
    "device": "cpu",
    "compile": False,
}
AS_LONG = (
    "--n_layer=2",
    "--n_embd=192",
    "--max_iters=1000",
    "--cooldown_iters=900",
    "--eval_interval=1000",
)


def ours(config: str, *options: str) -> tuple[float, float, float]:
    """Seconds of the whole command, seconds of its steps, exact loss at the end."""
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "train.py", config, *options, f"--out_dir={name}/run"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        whole = time.perf_counter() - began
        way = course(Path(name) / "run")
    return whole, way.seconds[-1], way.losses[-1]


def nanogpt(folder: Path, compiled: bool) -> tuple[float, float, float]:
    """The same of nanoGPT, whose ordinary step, the median, stands for those that it timed with an
    evaluation.
    """
    with tempfile.TemporaryDirectory() as out:
        settings = MACBOOK | {"compile": compiled, "out_dir": out, "always_save_checkpoint": True}
        command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in settings.items())],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        whole = time.perf_counter() - began
        saved = torch.load(f"{out}/ckpt.pt", weights_only=True)
    milliseconds = [float(each) for each in re.findall(r"time ([\d.]+)ms", done.stdout)]
    module = nanogpt_module(folder)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(
        {name.removeprefix("_orig_mod."): value for name, value in saved["model"].items()}
    )
    ids = np.fromfile(folder / "data/shakespeare_char/val.bin", np.uint16)
    windows = evaluation_windows(Split(ids, ((0, len(ids)),)), model.config.block_size, 64)
    loss = exact_loss(_Logits(model), windows, runtime.select_runtime("cpu", "float32"))
    return whole, statistics.median(milliseconds) / 1000 * MACBOOK["max_iters"], loss


class _Logits(torch.nn.Module):
    """nanoGPT gives the logits of all places only where it is given targets."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, ids)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--compile", action="store_true", help="nanoGPT with its compile: true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    text = []
    if options.nanogpt:
        text = [f"--data.sources={options.nanogpt.resolve()}/data/shakespeare_char/input.txt"]
        theirs = ("nanoGPT", lambda seed: nanogpt(options.nanogpt, options.compile))
    else:
        classic = ("configs/nanogpt_cpu.yaml", "--dtype=float32", "--kernel=sdpa")
        theirs = ("nanogpt_cpu.yaml, float32", lambda seed: ours(*classic, f"--seed={seed}"))
    programs = {
        theirs[0]: theirs[1],
        "fast.yaml": lambda seed: ours("configs/fast.yaml", f"--seed={seed}", *text),
        "shakespeare.yaml, cut": lambda seed: ours(
            "configs/shakespeare.yaml", *AS_LONG, f"--seed={seed}", *text
        ),
    }
    found = {name: [] for name in programs}
    for seed in range(options.repeats):
        for name, program in programs.items():
            found[name].append(program(seed))
            print(
                f"{name:<26} whole {found[name][-1][0]:6.1f} s  training {found[name][-1][1]:6.1f} "
                f"s  "
                f"loss {found[name][-1][2]:.4f}",
                flush=True,
            )
    slow, *others = found.values()
    for name, rows in zip(list(found)[1:], others, strict=True):
        for place, what in enumerate(("whole", "training")):
            ratios = sorted(a[place] / b[place] for a, b in zip(slow, rows, strict=True))
            print(
                f"{name}, {what}: {statistics.median(ratios):.1f} times as fast ({ratios[0]:.1f} "
                f"to {ratios[-1]:.1f})"
            )
    losses = (
        f"{name} {statistics.mean(each[2] for each in rows):.4f}" for name, rows in found.items()
    )
    print(f"mean losses: {', '.join(losses)}")


if __name__ == "__main__":
    main()
