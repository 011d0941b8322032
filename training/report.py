"""What a run tells people: before the first step, and whenever it looks at what it has learnt."""

import math

import torch

from data.batches import evaluation_windows
from data.report import fitting
from model.generate import Sampler, generate
from training.evaluation import BITS, losses_by_place
from training.monitor import Monitor, say
from training.run import Run
from training.stop import Stop


def introduce(run: Run) -> None:
    """What a person wants to know before the first step."""
    model, corpus, vocabulary = run.model, run.corpus, len(run.corpus.tokenizer)
    parameters = model.parameter_count()
    for line in corpus.report:
        say(line)
    say(
        f"model       {parameters:,} parameters, {parameters / len(corpus.train):.2g} for each character of text; "
        f"{model.flops_per_token() / 1e6:.1f} million operations to train on one"
    )
    if note := fitting(parameters, corpus.characters):
        say(note)
    say(f"device      {run.runtime}")
    say(f"first loss  should be near ln({vocabulary}) = {math.log(vocabulary):.3f}: every character equally likely")


def look(run: Run, stop: Stop, monitor: Monitor) -> bool:
    """Evaluate: exact losses of the validation text and of as much known text, and a sample. Is it the best so far?

    Interrupted, with nothing told or changed, where the run is to stop first.
    """
    progress, train, val = run.progress, run.corpus.train, run.corpus.val
    texts = (evaluation_windows(each, run.config.model.block_size, 64) for each in (val, train.stretch(len(val) // 10)))
    places = [losses_by_place(run.best_model, stop.watched(each), run.runtime) for each in texts]
    val_loss, known_loss = (float(nats / predictions) for nats, predictions in (each.sum(axis=1) for each in places))
    length = run.config.train.sample_chars if math.isfinite(val_loss) else 0
    text = run.runtime.ranks.of_first(sample, run, length, stop)

    step, progress.evaluated = progress.step, progress.step
    better = val_loss < progress.best_loss
    monitor.scalars(step, {"val/loss": val_loss, "val/bpc": val_loss * BITS, "val/train_loss": known_loss})
    say(
        f"step {step:,}: train {known_loss:.4f}, validation {val_loss:.4f} "
        f"({val_loss * BITS:.4f} bits per character){', the best so far' if better else ''}"
    )
    if text:
        monitor.sample(step, text)
    progress.stale = 0 if better else progress.stale + 1
    if better:
        progress.best_loss, progress.best_step = val_loss, step
    elif progress.stale == 3 and known_loss < val_loss and not progress.told_overfitting:
        progress.told_overfitting = True
        say(
            f"validation has not improved since step {progress.best_step:,} while the training text has: the model "
            "learns its text by heart; try more dropout, more text or train.patience"
        )
    return better


def sample(run: Run, length: int, stop: Stop) -> str:
    """What the model writes now, from a fixed seed: one can watch it improve."""
    tokenizer = run.corpus.tokenizer
    start = torch.from_numpy(tokenizer.encode(tokenizer.start).astype("int64"))[None].to(run.runtime.device)
    ids = generate(run.best_model, start, Sampler(run.config.seed, temperature=0.8), length)
    return "".join(tokenizer.decode(each.cpu().numpy()) for each in stop.watched(ids))
