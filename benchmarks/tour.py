"""Pictures and the model of docs/gpt.md, from real runs on data/plays: python -m benchmarks.tour

Trains four small models with train.py, in half an hour or less on two cores, prints their losses,
and writes everything into docs/pictures. The model of sections 9 to 12 is saved without its
optimizer state.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import charts
from benchmarks.runs import LossCurve, read_loss_curve, train
from common.files import write_atomic
from common.words import character_name
from configs.command import parse_train
from configs.schema import DataConfig
from data.batches import evaluation_windows
from data.corpus import Corpus, load_corpus
from model.generate import Sampler
from model.gpt import GPT
from model.inspect import attention_maps
from storage.checkpoint import BEST, build_model, load_checkpoint, to_bytes
from training.device import select_runtime
from training.evaluate import window_losses
from training.schedule import lr_multiplier

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SMALL = [
    "--sources=data/plays",
    "--n_embd=32",
    "--n_head=2",
    "--batch_size=32",
    "--max_iters=3000",
    "--warmup_ratio=0.0016667",
    "--cooldown_ratio=0.9",
    "--eval_interval=500",
]
FEW_CHARACTERS = [
    "--sources=data/plays/admiral.txt",
    "--val_fraction=0.3",
    "--max_iters=400",
    "--warmup_ratio=0.0125",
    "--cooldown_ratio=0.9",
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
SYMBOLS = {"\n": "\\n", " ": "_"}  # beside an attention map
SCHEDULES = {"cosine": charts.BLUE, "trapezoid": charts.RED, "constant": charts.GREEN}


# --------------------------------------------------------------------------------------------- runs


def train_variant(folder: Path, *options: str) -> Path:
    """Train a variant of configs/fast.yaml in float32; print its losses and return its folder."""
    fixed = ["--dtype=float32", "--kernel=sdpa"]
    train(folder, "configs/fast.yaml", *fixed, *options)
    curve = read_loss_curve(folder)
    val, train_loss = curve.val_loss, curve.train_loss
    best = val.argmin()
    print(
        f"{' '.join(options)}: best {val[best]:.4f} (train {train_loss[best]:.4f}) at step "
        f"{curve.steps[best]:.0f}, last {val[-1]:.4f} (train {train_loss[-1]:.4f})",
        flush=True,
    )
    return folder


def save_weights(folder: Path, path: Path) -> GPT:
    """Write the best checkpoint of a run to `path`; return its model."""
    saved = load_checkpoint(folder / BEST)  # the weights alone
    settings = replace(saved.settings, out_dir="auto")  # no path of the temporary folder
    write_atomic(path, to_bytes(replace(saved, settings=settings)))
    return build_model(load_checkpoint(path)).eval()


# ----------------------------------------------------------------------------------------- pictures


def schedules(path: Path) -> None:
    """Draw the learning rate over three runs with the same number of steps."""
    with charts.picture(path, height=2.6) as axes:
        for schedule, color in SCHEDULES.items():
            options = ["--max_iters=1000", "--warmup_ratio=0.05", "--cooldown_ratio=0.4"]
            options.append(f"--schedule={schedule}")
            settings = parse_train(["configs/nanogpt_cpu.yaml", *options]).new_settings().train
            steps = np.arange(0, settings.max_iters, 4)
            rates = [lr_multiplier(step, settings) for step in steps.tolist()]
            axes.plot(steps, rates, color=color, label=schedule)
        axes.set_title("The learning rate as a fraction of its peak, with a warm-up of 50 steps")
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.05)
        axes.legend(loc="lower left", bbox_to_anchor=(0.08, 0))


def overfitting(path: Path, curves: dict[str, LossCurve]) -> None:
    """Draw validation and training losses of runs on one play."""
    colors = (charts.RED, charts.BLUE, charts.GREEN)
    with charts.picture(path, height=3.2) as axes:
        for (name, curve), color in zip(curves.items(), colors, strict=True):
            axes.plot(curve.steps, curve.val_loss, color=color, label=f"{name}, validation")
            axes.plot(curve.steps, curve.train_loss, "--", color=color, label=f"{name}, training")
        axes.set_title("0.4 million parameters on 52,233 characters of one play: 12 epochs")
        axes.set_xlabel("step")
        axes.set_ylabel("nats per character")
        axes.set_ylim(0.5, 2.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def loss_by_position(path: Path, model: GPT, corpus: Corpus) -> None:
    """Draw the validation loss at each position in the context."""
    with charts.picture(path, height=3) as axes:
        windows = evaluation_windows(corpus.val, model.config.block_size, batch_size=64)
        losses = window_losses(model, windows, select_runtime("cpu", "float32"))
        by_position = losses.sums / losses.counts
        axes.plot(np.arange(1, len(by_position) + 1), by_position, color=charts.BLUE, label="GPT")
        axes.axhline(TRIGRAM, color=charts.GREY, linestyle="--", label="trigram, by counting")
        charts.log_x(axes, [1, 2, 4, 8, 16, 32, 64])
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
    with charts.picture(path, height=2.8, columns=columns, sharex=True, sharey=True) as panels:
        for axes, (name, settings) in zip(panels, SAMPLER_SETTINGS.items(), strict=True):
            probs = Sampler(**settings).unnormalized_probs(logits)[0]
            probs = (probs / probs.sum())[order]
            bars = axes.barh(names, probs, color=charts.BLUE)
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
    with charts.picture(path, height=3.8, columns=len(maps)) as panels:
        for head, (axes, weights) in enumerate(zip(np.atleast_1d(panels), maps, strict=True), 1):
            # the root keeps small weights visible; the future stays white
            shades = np.ma.masked_where(~np.tri(len(names), dtype=bool), weights.sqrt().numpy())
            axes.imshow(shades, cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer 1, head {head}")
            axes.set_yticks(places, names, fontsize=7)
            axes.set_xticks(places, names, fontsize=7)
            axes.grid(visible=False)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_all_plays = train_variant(folder / "plays", *SMALL)
        on_one_play = {
            "no dropout": train_variant(folder / "a", *FEW_CHARACTERS),
            "dropout 0.3": train_variant(folder / "b", *FEW_CHARACTERS, "--dropout=0.3"),
            "decay 1": train_variant(folder / "c", *FEW_CHARACTERS, "--weight_decay=1"),
        }
        model = save_weights(on_all_plays, PICTURES / "plays.safetensors")
        curves = {name: read_loss_curve(run) for name, run in on_one_play.items()}
        overfitting(PICTURES / "overfitting.svg", curves)
    corpus = load_corpus(DataConfig(sources=["data/plays"]))
    schedules(PICTURES / "schedules.svg")
    loss_by_position(PICTURES / "loss_by_position.svg", model, corpus)
    sampling(PICTURES / "sampling.svg", model, corpus)
    heads(PICTURES / "attention.svg", model, corpus)


if __name__ == "__main__":
    main()
