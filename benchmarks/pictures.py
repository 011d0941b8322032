"""The pictures of docs/gpt.md and docs/usage.md, from real runs: python -m benchmarks.pictures

Trains four models for gpt.md, in half an hour or less on two cores, and six for usage.md, in
about two minutes; with the name of one document, only those of it. Prints their losses, draws
docs/pictures/*.svg and docs/curves.svg, and saves the model of gpt.md without its optimizer state.

The same figures give the same files: these have no date, and their ids come from a fixed salt. The
page is white, so that they are readable in dark mode too.
"""

import argparse
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; pip install -r requirements-dev.txt") from None
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runs import read_curves, train
from common.files import write_atomic
from configs.command import parse_train
from configs.schema import DataConfig
from data.batches import evaluation_windows
from data.corpus import Corpus, load_corpus
from model.generate import Sampler
from model.gpt import GPT
from model.inspect import attention_maps
from storage.checkpoint import BEST, build_model, load_checkpoint, to_bytes
from train import lr_multiplier
from training.device import select_runtime
from training.evaluate import window_losses

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
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hornbook",
}


@contextmanager
def picture(
    path: Path, height: float, rows: int = 1, columns: int = 1, **options
) -> Iterator[Axes]:
    """Yield the axes of a new figure of `height` inches (an array if several), then save it as SVG.

    `options` go to `Figure.subplots`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
        yield figure.subplots(rows, columns, **options)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def train_variant(folder: Path, name: str, *options: str) -> Path:
    """Train a variant of configs/fast.yaml in float32; print its losses and return its folder."""
    fixed = ["--dtype=float32", "--kernel=sdpa"]
    train(folder, "configs/fast.yaml", *fixed, *options)
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
BLANK_NAMES = {"\n": "newline", "\t": "tab", " ": "space"}
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # invisible characters outside categories C, M, Z
SYMBOLS = {"\n": "\\n", " ": "_"}  # beside an attention map
SCHEDULES = {"cosine": BLUE, "wsd": RED, "constant": GREEN}


def character_name(character: str) -> str:
    """Return a character, or a name for one that is invisible on its own: `space`, `U+00A0`.

    characterName() in page/text.js does the same.
    """
    # C: controls, joiners, tags; M: combining marks; Z: spaces
    blank = unicodedata.category(character)[0] in "CMZ" or character in FILLERS
    return BLANK_NAMES.get(character) or (f"U+{ord(character):04X}" if blank else character)


def schedules(path: Path) -> None:
    """Draw the learning rate over three runs with the same number of steps."""
    with picture(path, height=2.6) as axes:
        for schedule, color in SCHEDULES.items():
            options = ["--max_iters=1000", "--warmup_ratio=0.05", "--cooldown_ratio=0.4"]
            options.append(f"--schedule={schedule}")
            settings = parse_train(["configs/nanogpt_cpu.yaml", *options]).config.train
            steps = np.arange(0, settings.max_iters, 4)
            rates = [lr_multiplier(step, settings) for step in steps.tolist()]
            axes.plot(steps, rates, color=color, label=schedule)
        axes.set_title("The learning rate as a fraction of its peak, with a warm-up of 50 steps")
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.05)
        axes.legend(loc="lower left", bbox_to_anchor=(0.08, 0))


def overfitting(path: Path, folder: Path) -> None:
    """Train on one play, with and without remedies; draw validation and training losses."""
    with picture(path, height=3.2) as axes:
        for i, (name, (color, options)) in enumerate(REMEDIES.items()):
            curves = read_curves(train_variant(folder / str(i), name, *FEW_CHARACTERS, *options))
            steps = curves["step"]
            axes.plot(steps, curves["val/loss"], color=color, label=f"{name}, validation")
            axes.plot(steps, curves["val/train_loss"], "--", color=color, label=f"{name}, training")
        axes.set_title("0.4 million parameters on 52,233 characters of one play: 12 epochs")
        axes.set_xlabel("step")
        axes.set_ylabel("nats per character")
        axes.set_ylim(0.5, 2.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def loss_by_position(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw the validation loss at each position in the context."""
    with picture(path, height=3) as axes:
        windows = evaluation_windows(corpus.val, model.config.block_size, batch_size=64)
        losses = window_losses(model, windows, select_runtime("cpu", "float32"))
        by_position = losses.sums / losses.counts
        axes.plot(np.arange(1, len(by_position) + 1), by_position, color=BLUE, label="GPT")
        axes.axhline(TRIGRAM, color=GREY, linestyle="--", label="trigram, by counting")
        axes.set_xscale("log")
        ticks = [1, 2, 4, 8, 16, 32, 64]
        axes.set_xticks(ticks, ticks)
        axes.set_xticks([], minor=True)
        axes.set_title("Validation loss by the number of characters that the model sees")
        axes.set_xlabel("characters in view (logarithmic)")
        axes.set_ylabel("nats per character")
        axes.legend(loc="upper right")


@torch.inference_mode()
def sampling(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw the distribution of the character after PROMPT under five settings of the sampler."""
    ids = torch.from_numpy(corpus.tokenizer.encode(PROMPT).astype(int))
    logits = model(ids[None])[:, -1].double().numpy()
    order = (-logits[0]).argsort()[:10]
    names = [character_name(corpus.tokenizer.vocabulary[i]) for i in order]
    columns = len(SAMPLER_SETTINGS)
    with picture(path, height=2.8, columns=columns, sharex=True, sharey=True) as panels:
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
    names = [SYMBOLS.get(c, character_name(c)) for c in corpus.tokenizer.decode(ids)]
    places = range(len(names))
    with picture(path, height=3.8, columns=len(maps)) as panels:
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
    model = build_model(saved).eval()
    corpus = load_corpus(DataConfig(sources=["data/plays"]))
    schedules(pictures / "schedules.svg")
    loss_by_position(pictures / "loss_by_position.svg", model, corpus)
    sampling(pictures / "sampling.svg", model, corpus)
    heads(pictures / "attention.svg", model, corpus)
    overfitting(pictures / "overfitting.svg", folder)


# ----------------------------------------------------------------------------------------- usage.md

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


def train_example(folder: Path, title: str, options: list[str], characters: int | None) -> Path:
    """Train the run of an example; return its folder.

    All examples have the same validation text, from a play that none reads.
    """
    folder.mkdir()
    unknown, *plays = [path.read_text(encoding="utf-8") for path in sorted(PLAYS.glob("*.txt"))]
    train_text, val_text = folder / "train.txt", folder / "val.txt"
    train_text.write_text("".join(plays)[:characters], encoding="utf-8")
    val_text.write_text(unknown[:15_000], encoding="utf-8")
    fixed = [f"--sources={train_text}", f"--val_sources={val_text}", "--eval_interval=10"]
    fixed += ["--log_interval=2", "--warmup_ratio=0.05", "--cooldown_ratio=0.4"]
    fixed.append(f"--max_iters={STEPS}")
    return train_variant(folder, title, *fixed, *options)


def draw_usage(folder: Path) -> None:
    """Train the examples of usage.md; draw a panel for each, with losses above LIMITS there."""
    runs = [
        train_example(folder / str(i), title, options, characters)
        for i, (title, (_, options, characters)) in enumerate(EXAMPLES.items())
    ]
    path = DOCS / "curves.svg"
    with picture(path, height=4.6, rows=2, columns=3, sharex=True, sharey=True) as panels:
        for axes, run, (title, (subtitle, *_)) in zip(
            panels.flat, runs, EXAMPLES.items(), strict=True
        ):
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
            axes.set_xticks(range(0, STEPS + 1, 50))
            axes.set_ylim(*LIMITS)
        legend = axes.get_legend_handles_labels()  # the same in each panel
        axes.figure.legend(*legend, loc="outside lower center", ncols=3)


DOCUMENTS = {"gpt.md": draw_gpt, "usage.md": draw_usage}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("documents", nargs="*", metavar="DOCUMENT", help=" or ".join(DOCUMENTS))
    names = parser.parse_args(argv).documents or DOCUMENTS
    if unknown := set(names) - set(DOCUMENTS):
        parser.error(f"{', '.join(sorted(unknown))}: there is only {' and '.join(DOCUMENTS)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            DOCUMENTS[name](Path(folder))


if __name__ == "__main__":
    main()
