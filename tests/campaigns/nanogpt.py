"""Models that nanoGPT trains: python -m tests.campaigns.nanogpt CHECKOUT [--full]

CHECKOUT is a clone of https://github.com/karpathy/nanoGPT. It is copied, and its own prepare.py and
train.py make a meta.pkl and small models of several shapes, with biases and without, in the full
form also compiled. Each is imported: the logits of nanoGPT's model.py and ours must agree, --meta
and --vocabulary must give the same run, and the run is sampled and trained further, but not
resumed. A model without a meta.pkl, which nanoGPT takes for one of byte pairs, must be refused.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.decode import load_nanogpt_module
from checkpointing import checkpoint as checkpoints
from tests.campaigns.common import ENVIRONMENT, ROOT, start

SHAPES = [  # n_layer, n_head, n_embd, block_size, bias, compile
    (2, 2, 16, 16, False, False),
    (1, 4, 32, 8, True, False),
    (4, 4, 128, 64, False, False),
    (3, 6, 96, 33, True, False),
    (2, 2, 16, 16, False, True),
    (2, 4, 32, 16, True, True),
]
STEPS = 20
COMMON = {
    "device": "cpu",
    "eval_iters": 2,
    "eval_interval": STEPS,
    "log_interval": STEPS,
    "batch_size": 4,
    "max_iters": STEPS,
    "lr_decay_iters": STEPS,
    "warmup_iters": 2,
    "learning_rate": 0.01,
}
WINDOWS = 50  # random ones, of block_size characters
ODD_CHARACTERS = "caf\xe9 \u2028 \U0001f600 \r\n \t\x1b"  # nanoGPT reads \r\n as \n


def campaign(checkout: Path, full: bool) -> str:
    shapes = SHAPES if full else SHAPES[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nanogpt = shutil.copytree(checkout, folder / "nanoGPT")
        data = nanogpt / "data" / "shakespeare_char"
        plays = sorted((ROOT / "data" / "plays").glob("*.txt"))
        text = "".join(play.read_text(encoding="utf-8") for play in plays) + ODD_CHARACTERS
        (data / "input.txt").write_text(text, encoding="utf-8", newline="")
        (data / "requests.py").touch()  # prepare.py imports it, for a download that is not needed
        run(nanogpt, "data/shakespeare_char/prepare.py")
        largest = max(check_model(nanogpt, folder / str(i), each) for i, each in enumerate(shapes))
        check_byte_pairs(nanogpt, folder / "bpe")
    compiled = sum(compile for *_, compile in shapes)
    return (
        f"{len(shapes)} models of nanoGPT's own scripts, {compiled} of them compiled: logits over "
        f"{WINDOWS} windows differ by up to {largest:.1e} of the largest; sampled, trained further "
        "and not resumed; the model of byte pairs is refused"
    )


def run(nanogpt: Path, script: str, **options: object) -> None:
    """Run a script of nanoGPT."""
    words = [f"--{name}={value}" for name, value in options.items()]
    config = ["config/train_shakespeare_char.py"] if script == "train.py" else []
    command = [sys.executable, script, *config, *words]
    done = subprocess.run(command, cwd=nanogpt, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def command(*arguments: object, exit_code: int = 0) -> str:
    """Run a command of ours; return what it printed."""
    process = start(*arguments)
    printed = process.communicate()[0]
    assert process.returncode == exit_code, (
        f"{arguments}: exit code {process.returncode}: {printed}"
    )
    assert "Traceback" not in printed, printed
    return printed


def check_model(nanogpt: Path, folder: Path, shape: tuple) -> float:
    """Train a model, import it and use it; return the largest difference of the logits."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "compile")
    settings = COMMON | dict(zip(names, shape, strict=True)) | {"out_dir": folder / "theirs"}
    run(nanogpt, "train.py", **settings)
    ckpt, data = folder / "theirs" / "ckpt.pt", nanogpt / "data" / "shakespeare_char"
    imported, again = folder / "imported", folder / "again"
    bridge = ["-m", "convert.nanogpt", ckpt]
    command(*bridge, f"--meta={data / 'meta.pkl'}", f"--out_dir={imported}")
    command(*bridge, f"--vocabulary={data / 'input.txt'}", f"--out_dir={again}")

    # the logits
    module, theirs = load_nanogpt_module(nanogpt), torch.load(ckpt, weights_only=True)
    model = module.GPT(module.GPTConfig(**theirs["model_args"])).eval()
    weights = {name.removeprefix("_orig_mod."): each for name, each in theirs["model"].items()}
    model.load_state_dict(weights)
    saved, other = (checkpoints.load(each / "best.safetensors") for each in (imported, again))
    assert saved.vocabulary == other.vocabulary
    assert all(torch.equal(each, other.tensors[name]) for name, each in saved.tensors.items())
    shape = (WINDOWS, model.config.block_size)
    ids = torch.randint(len(saved.vocabulary), shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = model(ids, ids)[0], checkpoints.build_model(saved).eval()(ids)
    difference = ((found - expected).abs().max() / max(1, expected.abs().max())).item()
    assert difference < 1e-5, difference

    # the run
    command("sample.py", f"--ckpt={imported}", "--max_new_tokens=20")
    assert "python -m convert.nanogpt" in command("sample.py", f"--ckpt={ckpt}", exit_code=4)
    train = ["train.py", imported / "config.yaml", "--max_iters=2", "--warmup_iters=0"]
    command(*train, f"--init_from={imported}", f"--out_dir={folder / 'further'}")
    refused = command(*train, f"--out_dir={imported}", "--resume", exit_code=4)
    (error,) = [line for line in refused.splitlines() if line.startswith("error: ")]
    assert "an imported model" in error and refused.endswith(f"{error}\n"), refused
    return difference


def check_byte_pairs(nanogpt: Path, out_dir: Path) -> None:
    """Train as if for byte pairs, without a meta.pkl, and check that the import is refused."""
    data = nanogpt / "data" / "shakespeare_char"
    (data / "meta.pkl").rename(data / "elsewhere.pkl")
    settings = COMMON | {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 8, "max_iters": 1}
    run(nanogpt, "train.py", **settings | {"eval_interval": 1, "compile": False}, out_dir=out_dir)
    options = [f"--meta={data / 'elsewhere.pkl'}", f"--out_dir={out_dir / 'imported'}"]
    bridge = ["-m", "convert.nanogpt", out_dir / "ckpt.pt", *options]
    assert "GPT-2's BPE tokens" in command(*bridge, exit_code=4)
    assert not (out_dir / "imported").exists()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("checkout", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--full", action="store_true", help="more shapes, and compiled models")
    options = parser.parse_args()
    print(campaign(options.checkout, options.full))


if __name__ == "__main__":
    main()
