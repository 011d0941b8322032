"""What a run tells people: what it is, how it goes, and what it has learnt whenever it looks.

The curves, texts and pictures in TensorBoard all come from here. Tags that begin with `run/` are
said once, those with `train/` come from steps and the others from evaluations: so events.py knows
what a run that goes on must take back.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary

from common.errors import printable
from common.signals import Stop
from dashboard import plots, summaries
from dashboard.logger import Monitor, say
from data.batches import evaluation_windows
from data.summary import fitting
from model.generate import Sampler, generate
from training import health
from training.evaluate import BITS, losses_by_place
from training.state import Run, settings

LENGTH = 32  # characters of the fixed text whose attention is shown
PATIENCE = 300  # steps at least that a head has time to find its work

# ---------------------------------------------------------------------------- before the first step


def introduce(run: Run, monitor: Monitor) -> None:
    """What a person wants to know before the first step."""
    model, corpus, vocabulary = run.model, run.corpus, len(run.corpus.tokenizer)
    parameters = model.parameter_count()
    lines = [
        *corpus.report,
        f"model       {parameters:,} parameters, {parameters / len(corpus.train):.2g} for each "
        f"character of text; "
        f"{model.flops_per_token() / 1e6:.1f} million operations to train on one",
        *filter(None, [fitting(parameters, corpus.characters)]),
        f"device      {run.runtime}",
        f"first loss  should be near ln({vocabulary}) = {math.log(vocabulary):.3f}: every "
        f"character equally likely",
    ]
    for line in lines:
        say(line)
    if run.config.train.log == "pictures":
        say(
            f"peak        {run.runtime.peak / 1e9:,.0f} billion operations a second, measured with "
            f"a matrix product"
        )
    known, origin = resolved(run), f"corpus      {printable(corpus.name)}, SHA-256 {corpus.sha256}"
    monitor.introduce(
        [
            summaries.text("run/config", summaries.table(known, ("setting", "value"))),
            summaries.text("run/corpus", summaries.verbatim([origin, *lines])),
            summaries.charts(),
            summaries.settings(known),
        ]
    )


def resolved(run: Run) -> dict[str, bool | int | float | str]:
    """Every setting with what `auto` stands for, but for where the run and its text lie."""
    config, known = run.config, settings(run.config)
    automatic = {
        "model.attention_dropout": config.model.dropout,
        "train.cooldown_iters": config.train.cooldown,
        "train.save_interval": config.train.eval_interval,
        "device": run.runtime.device.type,
        "dtype": str(run.runtime.dtype).removeprefix("torch."),
    }
    return known | {name: value for name, value in automatic.items() if known[name] == "auto"}


# ------------------------------------------------------------------------------------- step by step


def log(run: Run, monitor: Monitor, loss: float, norm: float, speed: float) -> None:
    """The curves of training; `norm` is the gradient's length before clipping, `speed` in
    characters per second.
    """
    step = run.progress.step
    values = {
        "loss": loss,
        "grad_norm": norm,
        "tokens_per_sec": speed,
        "epoch": readings(run, step),
    }
    values |= {"spikes": run.progress.spikes, "skipped": run.progress.skipped}
    values |= {"lr": run.rate} | {f"lr/{name}": rate for name, rate in run.other_rates.items()}
    if run.config.train.log == "pictures":
        values["share_of_peak"] = (
            speed * run.model.flops_per_token() / (run.runtime.peak * run.runtime.ranks.size)
        )
    monitor.scalars(step, {f"train/{name}": value for name, value in values.items()})


def check_step(run: Run, monitor: Monitor, loss: float, norm: float) -> None:
    """Whether the step that was just done looks healthy."""
    _tell(
        run, monitor, "train", health.of_step(run.progress.step, loss, norm, run.model.vocab_size)
    )


def readings(run: Run, steps: int) -> float:
    """How often so many steps read the training text: epochs."""
    train = run.config.train
    windows = steps * train.batch_size * train.gradient_accumulation_steps
    return windows * run.config.model.block_size / len(run.corpus.train)


# ------------------------------------------------------------------------------- what it has learnt


def look(run: Run, stop: Stop, monitor: Monitor) -> bool:
    """Evaluate: exact losses of the validation text and of as much known text, and a sample. Is it
    the best so far?

    Interrupted, with nothing told or changed, where the run is to stop first.
    """
    progress, train, val = run.progress, run.corpus.train, run.corpus.val
    texts = (
        evaluation_windows(each, run.config.model.block_size, 64)
        for each in (val, train.stretch(len(val) // 10))
    )
    places = [losses_by_place(run.best_model, stop.watched(each), run.runtime) for each in texts]
    val_loss, known_loss = (
        float(nats / predictions) for nats, predictions in (each.sum(axis=1) for each in places)
    )
    length = run.config.train.sample_chars if math.isfinite(val_loss) else 0
    text = run.runtime.ranks.of_first(sample, run, length, stop)

    step, progress.evaluated = progress.step, progress.step
    better = val_loss < progress.best_loss
    values = {
        "loss": val_loss,
        "bpc": val_loss * BITS,
        "train_loss": known_loss,
        "gap": val_loss - known_loss,
    }
    monitor.scalars(step, {f"val/{name}": value for name, value in values.items()})
    say(
        f"step {step:,}: train {known_loss:.4f}, validation {val_loss:.4f} "
        f"({val_loss * BITS:.4f} bits per character){', the best so far' if better else ''}"
    )
    if text:
        monitor.sample(step, text)
    progress.stale = 0 if better else progress.stale + 1
    if better:
        progress.best_loss, progress.best_step, progress.known_at_best = val_loss, step, known_loss
    notices = health.of_losses(
        progress.stale, progress.best_step, progress.known_at_best, known_loss
    )
    _tell(run, monitor, "val", notices)
    if math.isfinite(val_loss):
        look_inside(run, monitor, places[0])
    return better


def sample(run: Run, length: int, stop: Stop) -> str:
    """What the model writes now, from a fixed seed: one can watch it improve."""
    tokenizer = run.corpus.tokenizer
    start = torch.from_numpy(tokenizer.encode(tokenizer.start).astype("int64"))[None].to(
        run.runtime.device
    )
    ids = generate(run.best_model, start, Sampler(run.config.seed, temperature=0.8), length)
    return "".join(tokenizer.decode(each.cpu().numpy()) for each in stop.watched(ids))


def look_inside(run: Run, monitor: Monitor, places: np.ndarray) -> None:
    """What the model attends to and expects in a fixed text, and what context is worth to it."""
    step, config = run.progress.step, run.config
    ids = fixed_text(run)
    maps = [each.float().cpu() for each in run.best_model.attention_maps(ids)]
    if step >= max(PATIENCE, config.train.max_iters // 2):
        _tell(run, monitor, "val", health.of_maps(maps))
    if config.train.log == "pictures":
        monitor.show(step, draw(run, ids, maps, places))


def draw(
    run: Run, ids: torch.Tensor, maps: list[torch.Tensor], places: np.ndarray
) -> Iterator[Summary]:
    """`ids` is the fixed text, `maps` its attention layer by layer; `places` comes from
    `losses_by_place`.
    """
    characters = run.corpus.tokenizer.decode(ids.cpu())
    yield summaries.text("samples/next", summaries.verbatim(expected(run, ids, characters)))
    for layer, heads in enumerate(maps, 1):
        title = f"layer {layer} of {len(maps)}: what each character (left) reads (below)"
        yield summaries.picture(
            f"attention/layer_{layer}", plots.attention(heads.numpy(), characters, title)
        )
    nats, predictions = places[:, places[1] > 0]
    title = "validation loss at each place of the window, in nats; dashed: nothing is known"
    chart = plots.curve(
        1 + np.arange(len(nats)), nats / predictions, math.log(run.model.vocab_size), title
    )
    yield summaries.picture("val/loss_by_place", chart)


@torch.inference_mode()
def expected(run: Run, ids: torch.Tensor, characters: str) -> list[str]:
    """The five characters that the model thinks likeliest after a text."""
    probabilities, best = run.best_model(ids[None])[0, -1].float().softmax(-1).sort(descending=True)
    rows = zip(probabilities[:5].tolist(), run.corpus.tokenizer.decode(best[:5].cpu()), strict=True)
    return [
        f"after {printable(characters)}",
        *(f"{share:6.1%}  {plots.name(each)}" for share, each in rows),
    ]


def fixed_text(run: Run) -> torch.Tensor:
    """The beginning of the longest stretch of validation text, as ids (T,)."""
    start, end = max(run.corpus.val.segments, key=lambda segment: segment[1] - segment[0])
    length = min(LENGTH, run.config.model.block_size, end - start)
    return torch.from_numpy(run.corpus.val.ids[start : start + length].astype("int64")).to(
        run.runtime.device
    )


def _tell(run: Run, monitor: Monitor, section: str, notices: Iterable[health.Notice]) -> None:
    """Each notice once in a run."""
    for name, words in notices:
        if name not in run.progress.told:
            run.progress.told = [*run.progress.told, name]
            monitor.notice(run.progress.step, f"{section}/health/{name.replace(' ', '_')}", words)
