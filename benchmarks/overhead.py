"""Overhead of logging and checkpoints in a finished run: python -m benchmarks.overhead RUN

Logging: in each log interval without an evaluation, the wall-clock time minus the time of the steps
went to the log, the progress bar, TensorBoard and health checks. Checkpoints: the last one is saved
and loaded again, in a temporary folder, and timed.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.runs import characters_per_step, load_events
from checkpointing import checkpoint
from common.files import write_atomic
from data.corpus import load_corpus
from model.runtime import select_runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    folder = parser.parse_args().run
    saved = checkpoint.load(folder / checkpoint.LAST)
    events = load_events(folder)
    overhead = logging_overhead(events, characters_per_step(saved.config))
    print(f"log, progress bar, TensorBoard: {overhead:.2%} of the time between evaluations")

    saving, loading = time_checkpoint(saved)
    saves = 2 * len(events.Scalars("val/loss"))  # if each improves, it saves best and last
    speeds = events.Scalars("train/tokens_per_sec")
    total = speeds[-1].wall_time - speeds[0].wall_time
    size = (folder / checkpoint.LAST).stat().st_size / 1e6
    print(
        f"checkpoint of {size:.1f} MB: saved in {saving:.3f} s, loaded in {loading:.3f} s; "
        f"at most {saves} saves: {saves * saving / total:.2%} of {total:.0f} s"
    )


def logging_overhead(events: EventAccumulator, per_step: int) -> float:
    """Return the fraction of the time between evaluations that is not spent in steps.

    `per_step` is the number of characters that a step trains on.
    """
    evaluated_steps = [each.step for each in events.Scalars("val/loss")]
    total, in_steps = 0.0, 0.0  # seconds
    for before, after in pairwise(events.Scalars("train/tokens_per_sec")):
        if any(before.step <= step < after.step for step in evaluated_steps):
            continue
        total += after.wall_time - before.wall_time
        in_steps += per_step * (after.step - before.step) / after.value
    return (total - in_steps) / total


def time_checkpoint(saved: checkpoint.Checkpoint) -> tuple[float, float]:
    """Return the median seconds to save a run, and to load and restore it."""
    corpus = load_corpus(
        saved.config.data,
        sha256s=(saved.data.sha256, saved.data.val_sha256),
        vocabulary=saved.vocabulary,
    )
    run = checkpoint.restore(saved, saved.config, corpus, select_runtime("cpu", "float32"))
    saving, loading = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / checkpoint.LAST
        for _ in range(9):
            began = time.perf_counter()
            write_atomic(path, checkpoint.to_bytes(checkpoint.capture(run, saved.events)))
            saving.append(time.perf_counter() - began)
            began = time.perf_counter()
            loaded = checkpoint.load(path)
            checkpoint.restore(loaded, loaded.config, corpus, run.runtime)
            loading.append(time.perf_counter() - began)
    return statistics.median(saving), statistics.median(loading)


if __name__ == "__main__":
    main()
