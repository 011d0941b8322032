"""Pictures and models of docs/gpt.md, from real runs on data/plays: python -m benchmarks.tour

Trains five small models with train.py, in half an hour or less on two cores, prints their losses,
and writes everything into docs/pictures. The two models of section 12 are saved without their
optimizer state.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.runs import load_events
from checkpointing import checkpoint
from common.files import write_atomic
from configs.cli import parse_train
from configs.schema import DataConfig
from dashboard import plots
from data.batches import Batches, evaluation_windows
from data.corpus import Corpus, load_corpus
from model.generate import Sampler
from model.gpt import GPT
from model.runtime import select_runtime
from training.evaluate import cross_entropy, loss_sums_by_position
from training.optimizers import orthogonalize
from training.schedule import lr_multiplier

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SMALL = [
    "--data.sources=data/plays",
    "--n_embd=32",
    "--n_head=2",
    "--batch_size=32",
    "--max_iters=3000",
    "--warmup_iters=5",
    "--cooldown_iters=2700",
    "--eval_interval=500",
]
FEW_CHARACTERS = [
    "--data.sources=data/plays/admiral.txt",
    "--data.val_fraction=0.3",
    "--max_iters=400",
    "--warmup_iters=5",
    "--cooldown_iters=360",
    "--eval_interval=20",
]
TRIGRAM = 1.835  # nats per character, by counting: docs/gpt.md, section 2
PROMPT = "The harbour is full of s"
SAMPLER_SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "top-k 3": {"top_k": 3},
    "top-p 0.7": {"top_p": 0.7},
    "min-p 0.3": {"min_p": 0.3},
}
GAP = 16  # pixels between attention maps
BLUE, RED, GREEN, GREY = "#285ea3", "#b5402a", "#2e7d4f", "#888888"


# ------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name in the legend, and its points in the units of the axes.

    `dots` marks the points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dashed: bool = False
    dots: bool = False


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    log_x: bool = False,
) -> str:
    """Return a line chart as an SVG file; on white, so that it is readable on any page."""
    width, height, left, right, top, bottom = 760, 360, 60, 190, 44, 48
    scale = np.log if log_x else np.asarray
    x_low, x_high = scale(x_ticks[0]), scale(x_ticks[-1])

    def at_x(x):
        return left + (scale(x) - x_low) / (x_high - x_low) * (width - left - right)

    def at_y(y):
        share = (np.asarray(y) - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return height - bottom - share * (height - top - bottom)

    shapes = [text(left, 24, title, size=15)]
    for tick in y_ticks:
        shapes.append(stroke([left, width - right], [at_y(tick)] * 2, "#dddddd", 1))
        shapes.append(text(left - 8, at_y(tick) + 4, f"{tick:g}", anchor="end"))
    for tick in x_ticks:
        shapes.append(text(at_x(tick), height - bottom + 18, f"{tick:g}", anchor="middle"))
    shapes.append(text((left + width - right) / 2, height - 10, x_name, anchor="middle"))
    shapes.append(text(left, top - 4, y_name, color=GREY))
    for i, line in enumerate(lines):
        shapes.append(stroke(at_x(line.x), at_y(line.y), line.color, 2, line.dashed))
        if line.dots:
            shapes += [
                dot(x, y, line.color) for x, y in zip(at_x(line.x), at_y(line.y), strict=True)
            ]
        y = top + 10 + 20 * i
        shapes.append(stroke([width - right + 14, width - right + 38], [y, y], line.color, 2,
                             line.dashed))  # fmt: skip
        shapes.append(text(width - right + 44, y + 4, line.name))
    return svg(width, height, shapes)


def bar_charts(title: str, names: Sequence[str], charts: dict[str, np.ndarray]) -> str:
    """Return an SVG file: bar charts side by side, with one bar from 0 to 1 for each name."""
    column, row, left, top = 132, 20, 70, 64
    shapes = [text(16, 24, title, size=15)]
    for i, name in enumerate(names):
        shapes.append(text(left - 10, top + row * i + 13, name, anchor="end"))
    for c, (heading, values) in enumerate(charts.items()):
        x = left + column * c
        shapes.append(text(x, top - 10, heading, color=GREY))
        for i, value in enumerate(values):
            y = top + row * i
            shapes.append(f'<rect x="{x}" y="{y + 2}" width="{1 + 80 * value:.1f}" height="14" '
                          f'fill="{BLUE if value else GREY}"/>')  # fmt: skip
            shapes.append(text(x + 6 + 80 * value, y + 13, f"{value:.2f}" if value else "0"))
    return svg(left + column * len(charts) + 10, top + row * len(names) + 16, shapes)


def text(x, y, words, size=12, anchor="start", color="#111111") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{color}">{escape(words)}</text>'
    )


def stroke(x, y, color, width, dashed=False) -> str:
    points = " ".join(f"{each_x:.1f},{each_y:.1f}" for each_x, each_y in zip(x, y, strict=True))
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>'
    )


def dot(x, y, color) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'


def svg(width: int, height: int, shapes: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">'
    )
    paper = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, paper, *shapes, "</svg>\n"])


# --------------------------------------------------------------------------------------------- runs


def train(folder: Path, *options: str) -> Path:
    """Train a variant of configs/fast.yaml in float32; print its losses and return its folder."""
    fixed = ["--ngram_embeddings=0", "--dtype=float32", "--kernel=sdpa", "--log=scalars"]
    command = [sys.executable, "train.py", "configs/fast.yaml", *fixed, *options]
    command.append(f"--out_dir={folder}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps, val, train = loss_curves(folder)
    best = val.argmin()
    print(f"{' '.join(options)}: best {val[best]:.4f} (train {train[best]:.4f}) at step "
          f"{steps[best]}, last {val[-1]:.4f} (train {train[-1]:.4f})", flush=True)  # fmt: skip
    return folder


def loss_curves(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps, validation losses and training losses of all but the first evaluation."""
    events = load_events(folder)
    val, train = (events.Scalars(f"val/{name}")[1:] for name in ("loss", "train_loss"))
    steps = np.array([each.step for each in val])
    return steps, np.array([each.value for each in val]), np.array([each.value for each in train])


def save_weights(folder: Path, path: Path) -> GPT:
    """Write the best checkpoint of a run to `path` without optimizer state; return its model."""
    saved = checkpoint.load(folder / checkpoint.BEST)
    weights = {f"model.{name}": tensor for name, tensor in saved.role("model").items()}
    config = replace(saved.config, out_dir="auto")  # no path of the temporary folder
    write_atomic(path, checkpoint.to_bytes(replace(saved, config=config, tensors=weights)))
    return checkpoint.build_model(checkpoint.load(path)).eval()


# ----------------------------------------------------------------------------------------- pictures


def schedules() -> str:
    """Draw the learning rate over three runs with the same number of steps."""
    lines = []
    for schedule, color in (("cosine", BLUE), ("trapezoid", RED), ("constant", GREEN)):
        options = ["--max_iters=1000", "--warmup_iters=50", "--cooldown_iters=auto"]
        options.append(f"--schedule={schedule}")
        settings = parse_train(["configs/nanogpt_cpu.yaml", *options]).config.train
        steps = np.arange(settings.max_iters)
        rates = [lr_multiplier(step, settings) for step in steps]
        lines.append(Line(schedule, steps[::4], rates[::4], color))
    return line_chart(
        "Learning-rate schedules: warm-up of 100 steps, down to 0.1 at step 1000",
        "step",
        "fraction of the peak",
        lines,
        y_ticks=[0, 0.25, 0.5, 0.75, 1],
        x_ticks=[0, 250, 500, 750, 1000],
    )


def singular_values(model: GPT, corpus: Corpus) -> str:
    """Draw the singular values of one gradient, before and after orthogonalization by Muon."""
    x, y = map(torch.from_numpy, Batches(corpus.train, model.config.block_size, 32, seed=0)(0))
    cross_entropy(model(x), y).backward()
    gradient = model.blocks[0].mlp.up.weight.grad
    direction = orthogonalize(gradient[None])[0]
    before, after = (torch.linalg.svdvals(each).numpy() for each in (gradient, direction))
    numbers = np.arange(1, len(before) + 1)
    return line_chart(
        "Singular values of the gradient of blocks.0.mlp.up, largest first",
        "number of the singular value",
        "singular value",
        [
            Line("orthogonalized", numbers, after, RED),
            Line("gradient, scaled to 1", numbers, before / before[0], BLUE),
        ],
        y_ticks=[0, 0.25, 0.5, 0.75, 1, 1.25],
        x_ticks=[1, 8, 16, 24, 32],
    )


def overfitting(runs: dict[str, Path]) -> str:
    """Draw validation and training losses of runs on one play."""
    lines = []
    for (name, folder), color in zip(runs.items(), (RED, BLUE, GREEN), strict=True):
        steps, val, train_losses = loss_curves(folder)
        lines.append(Line(f"{name}, validation", steps, val, color))
        lines.append(Line(f"{name}, training", steps, train_losses, color, dashed=True))
    return line_chart(
        "0.4 million parameters on 52,233 characters of one play: 12 epochs",
        "step",
        "nats per character",
        lines,
        y_ticks=[0.5, 1, 1.5, 2, 2.5],
        x_ticks=[0, 100, 200, 300, 400],
    )


def loss_by_position(models: dict[str, GPT], corpus: Corpus) -> str:
    """Draw the validation loss at each position in the context."""
    lines = []
    for (name, model), color in zip(models.items(), (BLUE, RED), strict=True):
        windows = evaluation_windows(corpus.val, model.config.block_size, batch_size=64)
        nats, counts = loss_sums_by_position(model, windows, select_runtime("cpu", "float32"))
        lines.append(Line(name, np.arange(1, len(nats) + 1), nats / counts, color))
    x_ticks = [1, 2, 4, 8, 16, 32, 64]
    lines.append(Line("trigram, by counting", x_ticks, [TRIGRAM] * 7, GREY, dashed=True))
    return line_chart(
        "Validation loss by the number of characters that the model sees",
        "characters in view (logarithmic)",
        "nats per character",
        lines,
        y_ticks=[1, 1.5, 2, 2.5, 3, 3.5],
        x_ticks=x_ticks,
        log_x=True,
    )


@torch.inference_mode()
def sampling(model: GPT, corpus: Corpus) -> str:
    """Draw the distribution of the character after PROMPT under five settings of the sampler."""
    ids = torch.from_numpy(corpus.tokenizer.encode(PROMPT).astype(int))
    logits = model(ids[None])[:, -1].double().numpy()
    order = (-logits[0]).argsort()[:10]
    charts = {}
    for name, settings in SAMPLER_SETTINGS.items():
        probs = Sampler(**settings).unnormalized_probs(logits)[0]
        charts[name] = (probs / probs.sum())[order]
    names = [plots.name(corpus.tokenizer.vocabulary[i]) for i in order]
    return bar_charts(f"The ten likeliest characters after “{PROMPT}”", names, charts)


def attention_maps(model: GPT, corpus: Corpus) -> Image.Image:
    """Draw the heads of the first layer, two in a row, on the start of the validation text."""
    start = corpus.val.segments[0][0]
    ids = corpus.val.ids[start : start + 32].astype(int)
    maps = model.attention_maps(torch.from_numpy(ids))[0]
    text = corpus.tokenizer.decode(ids)
    heads = [
        plots.attention(weights, text, f"layer 1, head {head}")
        for head, weights in enumerate(maps.numpy(), 1)
    ]
    width, height = heads[0].size
    page = Image.new("P", (2 * width + GAP, -(-len(heads) // 2) * (height + GAP)), plots.BACKGROUND)
    page.putpalette(heads[0].getpalette())
    for i, image in enumerate(heads):
        page.paste(image, (i % 2 * (width + GAP), i // 2 * (height + GAP)))
    return page


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_with_shifts = train(folder / "shifts", *SMALL)
        run_no_shifts = train(folder / "no_shifts", *SMALL, "--token_shifts=0")
        on_one_play = {
            "no dropout": train(folder / "a", *FEW_CHARACTERS),
            "dropout 0.3": train(folder / "b", *FEW_CHARACTERS, "--dropout=0.3"),
            "decay 1": train(folder / "c", *FEW_CHARACTERS, "--weight_decay=1"),
        }
        models = {
            "with token shifts": save_weights(
                run_with_shifts, PICTURES / "with_shifts.safetensors"
            ),
            "without": save_weights(run_no_shifts, PICTURES / "without_shifts.safetensors"),
        }
        pictures = {"overfitting": overfitting(on_one_play)}
    corpus = load_corpus(DataConfig(sources=["data/plays"]))
    with_shifts, no_shifts = models.values()
    pictures |= {
        "schedules": schedules(),
        "loss_by_position": loss_by_position(models, corpus),
        "sampling": sampling(with_shifts, corpus),
        "singular_values": singular_values(no_shifts, corpus),
    }
    for name, content in pictures.items():
        (PICTURES / f"{name}.svg").write_text(content, encoding="utf-8")
    for name, model in (("with_shifts", with_shifts), ("without_shifts", no_shifts)):
        image = attention_maps(model, corpus)
        image.save(PICTURES / f"attention_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
