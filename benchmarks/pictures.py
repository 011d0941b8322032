"""The pictures of the documents, from real runs: python -m benchmarks.pictures

Trains four models for docs/gpt.md and six for docs/curves.svg: half an hour or less on two cores.
Prints their losses, draws the pictures, and saves the first model, docs/pictures/plays.safetensors.

The same figures give the same files: these have no date, and their ids come from a fixed salt. The
page is white, so that they are readable in dark mode too.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runs import read_curves, train
from common.files import write_atomic
from configs.schema import DataConfig, TrainConfig
from data.batches import evaluation_windows
from data.corpus import Corpus, load_corpus
from model.generate import Sampler
from model.gpt import GPT
from model.inspect import attention_maps
from storage.checkpoint import BEST, load_checkpoint, model_of, to_bytes
from train import lr_multiplier
from training.device import select_runtime
from training.evaluate import position_losses

DOCS = Path(__file__).parent.parent / "docs"
PLAYS = DOCS.parent / "data" / "plays"
BLUE, RED, GREEN, GREY, LIGHT_GREY = "#285ea3", "#b5402a", "#2e7d4f", "#888888", "#bbbbbb"
WIDTH = 6.25  # inches: 600 px at 96 px per inch
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hornbook",
}


@contextmanager
def picture(path: Path, height: float, **options) -> Iterator[Axes]:
    """Yield the axes of a new figure of `height` inches (an array if several), then save it as SVG.

    `options` go to `Figure.subplots`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
        yield figure.subplots(**options)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def train_variant(folder: Path, name: str, *options: str) -> Path:
    """Train a variant of configs/fast.yaml in float32; print its losses and return its folder."""
    train(folder, "configs/fast.yaml", "--dtype=float32", "--kernel=sdpa", *options)
    curves = read_curves(folder)
    val, train_loss = curves["val/loss"], curves["val/train_loss"]
    best = val.argmin()
    print(
        f"{name}: best {val[best]:.4f} (train {train_loss[best]:.4f}) at step "
        f"{curves['step'][best]:.0f}, last {val[-1]:.4f} (train {train_loss[-1]:.4f})",
        flush=True,
    )
    return folder


# ------------------------------------------------------------------------------------------- gpt.md

SMALL = [
    "--sources=data/plays", "--n_embd=32", "--n_head=2", "--batch_size=32", "--max_iters=3000",
    "--warmup_ratio=0.0016667", "--cooldown_ratio=0.9", "--eval_interval=500",
]  # fmt: skip
FEW_CHARACTERS = [
    "--sources=data/plays/admiral.txt", "--val_fraction=0.3", "--max_iters=400",
    "--warmup_ratio=0.0125", "--cooldown_ratio=0.9", "--eval_interval=20",
]  # fmt: skip
REMEDIES = {
    "no dropout": (RED, []),
    "dropout 0.3": (BLUE, ["--dropout=0.3"]),
    "decay 1": (GREEN, ["--weight_decay=1"]),
}
TRIGRAM = 1.835  # nats per character, by counting: docs/gpt.md, section 2
PROMPT = "The harbour is full of s"
SAMPLER_SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "top-k 3": {"top_k": 3},
    "top-p 0.7": {"top_p": 0.7},
    "min-p 0.3": {"min_p": 0.3},
}
SCHEDULES = {"cosine": BLUE, "wsd": RED, "constant": GREEN}


def labels(ids: np.ndarray, corpus: Corpus) -> list[str]:
    """Return the characters of ids, with symbols for the invisible ones."""
    symbols = {"\n": "\\n", " ": "_"}
    return [symbols.get(c, c) for c in corpus.tokenizer.decode(ids)]


def schedules(path: Path) -> None:
    """Draw the learning rate over three runs with the same number of steps."""
    with picture(path, height=2.6) as axes:
        for schedule, color in SCHEDULES.items():
            settings = TrainConfig(schedule=schedule, max_iters=1000, min_lr_ratio=0.1)
            settings = replace(settings, warmup_ratio=0.05, cooldown_ratio=0.4)
            steps = range(0, settings.max_iters, 4)
            rates = [lr_multiplier(step, settings) for step in steps]
            axes.plot(steps, rates, color=color, label=schedule)
        title = "The learning rate as a fraction of its peak, with a warm-up of 50 steps"
        axes.set(title=title, xlabel="step", ylim=(0, 1.05))
        axes.legend(loc="lower left", bbox_to_anchor=(0.08, 0))


def overfitting(path: Path, folder: Path) -> None:
    """Train on one play, with and without remedies; draw validation and training losses."""
    with picture(path, height=3.2) as axes:
        for i, (name, (color, options)) in enumerate(REMEDIES.items()):
            curves = read_curves(train_variant(folder / str(i), name, *FEW_CHARACTERS, *options))
            steps = curves["step"]
            axes.plot(steps, curves["val/loss"], color=color, label=f"{name}, validation")
            axes.plot(steps, curves["val/train_loss"], "--", color=color, label=f"{name}, training")
        title = "0.4 million parameters on 52,233 characters of one play: 12 epochs"
        axes.set(title=title, xlabel="step", ylabel="nats per character", ylim=(0.5, 2.5))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def loss_by_position(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw the validation loss at each position in the context."""
    with picture(path, height=3) as axes:
        windows = evaluation_windows(corpus.val, model.config.block_size, batch_size=64)
        losses = position_losses(model, windows, select_runtime("cpu", "float32"))
        by_position = losses.sums / losses.counts
        axes.plot(np.arange(1, len(by_position) + 1), by_position, color=BLUE, label="GPT")
        axes.axhline(TRIGRAM, color=GREY, linestyle="--", label="trigram, by counting")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")  # 64, not a power of 2
        title = "Validation loss by the number of characters that the model sees"
        axes.set(title=title, xlabel="characters in view (logarithmic)")
        axes.set_ylabel("nats per character")
        axes.legend(loc="upper right")


@torch.inference_mode()
def sampling(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw the distribution of the character after PROMPT under five settings of the sampler."""
    ids = torch.from_numpy(corpus.tokenizer.encode(PROMPT).astype(int))
    logits = model(ids[None])[:, -1].double().numpy()
    order = (-logits[0]).argsort()[:10]
    names = labels(order, corpus)
    columns = len(SAMPLER_SETTINGS)
    with picture(path, height=2.8, ncols=columns, sharex=True, sharey=True) as panels:
        for axes, (name, settings) in zip(panels, SAMPLER_SETTINGS.items(), strict=True):
            probs = Sampler(**settings).unnormalized_probs(logits)[0]
            probs = (probs / probs.sum())[order]
            bars = axes.barh(names, probs, color=BLUE)
            axes.bar_label(bars, [f"{p:.2f}" if p else "0" for p in probs], padding=2)
            axes.set_title(name)
            axes.grid(visible=False)
            axes.tick_params(bottom=False, labelbottom=False, left=False)
            axes.spines.bottom.set_visible(False)
        panels[0].invert_yaxis()  # shared by all
        panels[0].set_xlim(0, 0.6)
        panels[0].figure.suptitle(f"The ten likeliest characters after “{PROMPT}”")


def heads(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw what the heads of the first layer attend to at the start of the validation text."""
    ids = corpus.val.ids[:32].astype(int)
    maps = attention_maps(model, torch.from_numpy(ids))[0]  # (H, T, T)
    names = labels(ids, corpus)
    places = range(len(names))
    with picture(path, height=3.8, ncols=len(maps)) as panels:
        for head, (axes, weights) in enumerate(zip(np.atleast_1d(panels), maps, strict=True), 1):
            # the root keeps small weights visible; the future stays white
            shades = np.ma.masked_where(~np.tri(len(names), dtype=bool), weights.sqrt().numpy())
            axes.imshow(shades, cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer 1, head {head}")
            axes.set_yticks(places, names, fontsize=7)
            axes.set_xticks(places, names, fontsize=7)
            axes.grid(visible=False)


def draw_gpt(folder: Path) -> None:
    """Train the models of gpt.md in a folder, draw its pictures, and save its model."""
    pictures = DOCS / "pictures"
    saved = load_checkpoint(train_variant(folder / "plays", "plays", *SMALL) / BEST)
    settings = replace(saved.settings, out_dir="auto")  # no path of the temporary folder
    write_atomic(pictures / "plays.safetensors", to_bytes(replace(saved, settings=settings)))
    model = model_of(saved).eval()
    corpus = load_corpus(DataConfig(sources=["data/plays"]))
    schedules(pictures / "schedules.svg")
    loss_by_position(pictures / "loss_by_position.svg", model, corpus)
    sampling(pictures / "sampling.svg", model, corpus)
    heads(pictures / "attention.svg", model, corpus)
    overfitting(pictures / "overfitting.svg", folder)


# --------------------------------------------------------------------------------------- the curves

STEPS, LIMITS = 200, (1, 5)  # of both axes


def rates(factor: float) -> list[str]:
    """Return options with the learning rates of configs/fast.yaml times a factor."""
    return [f"--learning_rate={0.03 * factor:g}", f"--muon_learning_rate={0.04 * factor:g}"]


EXAMPLES = {  # title -> subtitle, options, characters of the training text at most
    "Good": ("the cooldown starts at step 120", [], None),
    "Learning rate 100 times too high": ("diverges, and never recovers", rates(100), None),
    "Learning rate 10 times too high": ("learns, but loses most of its time", rates(10), None),
    "Learning rate 100 times too low": ("flat at the end, at a high loss", rates(0.01), None),
    "Too few steps": ("still falling at the end", ["--max_iters=30"], None),
    "Too little text": ("overfitting on 20,000 characters", [], 20_000),
}


def draw_curves(folder: Path) -> None:
    """Train the examples, and draw a panel for each; a loss beyond LIMITS is drawn at the limit."""
    unread, *plays = [path.read_text(encoding="utf-8") for path in sorted(PLAYS.glob("*.txt"))]
    train_text, val_text = folder / "train.txt", folder / "val.txt"
    val_text.write_text(unread[:15_000], encoding="utf-8")
    fixed = [f"--sources={train_text}", f"--val_sources={val_text}", f"--max_iters={STEPS}"]
    fixed += ["--eval_interval=10", "--log_interval=2"]
    fixed += ["--warmup_ratio=0.05", "--cooldown_ratio=0.4"]
    path = DOCS / "curves.svg"
    with picture(path, height=4.6, nrows=2, ncols=3, sharex=True, sharey=True) as panels:
        for axes, title in zip(panels.flat, EXAMPLES, strict=True):
            subtitle, options, characters = EXAMPLES[title]
            train_text.write_text("".join(plays)[:characters], encoding="utf-8")
            run = train_variant(folder / title, title, *fixed, *options)
            curves, batches = read_curves(run), read_curves(run, "train/loss")
            lines = [
                (curves, "val/loss", "validation loss", BLUE, "-"),
                (curves, "val/train_loss", "on training text, evaluated alike", RED, "--"),
                (batches, "train/loss", "of the batches", LIGHT_GREY, "-"),
            ]
            for order, (rows, tag, label, color, style) in enumerate(lines):
                losses = np.clip(rows[tag], *LIMITS)
                axes.plot(rows["step"], losses, style, color=color, label=label, zorder=9 - order)
            axes.set_title(f"{title}\n{subtitle}", fontsize=8)
            axes.set(xticks=range(0, STEPS + 1, 50), ylim=LIMITS)
        legend = axes.get_legend_handles_labels()  # the same in each panel
        axes.figure.legend(*legend, loc="outside lower center", ncols=3)


def main() -> None:
    for draw in (draw_gpt, draw_curves):
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder))


if __name__ == "__main__":
    main()
