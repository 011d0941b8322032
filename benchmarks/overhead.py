"""What a run spends on neither learning nor evaluating: python -m benchmarks.overhead RUN

From the event files of a finished run: between two lines of the log that no evaluation parts, the
time on the clock over that of the steps is progress bar, TensorBoard and health. Its checkpoint is
then written again, and timed.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import checkpoint
from common.files import write_atomic
from data.tokenizer import CharTokenizer
from training.runtime import select_runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    folder = parser.parse_args().run
    saved = checkpoint.load(folder / checkpoint.LAST)
    train = saved.config.train
    characters = (
        train.batch_size * train.gradient_accumulation_steps * saved.config.model.block_size
    )
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    speeds, evaluated = (
        events.Scalars("train/tokens_per_sec"),
        [each.step for each in events.Scalars("val/loss")],
    )
    whole, steps = 0.0, 0.0
    for before, after in pairwise(speeds):
        if not any(before.step <= step < after.step for step in evaluated):
            whole += after.wall_time - before.wall_time
            steps += characters * (after.step - before.step) / after.value

    saving, loading = time_checkpoint(saved)
    saves = 2 * len(evaluated)  # at most: each evaluation improves, and saves best and last
    total = speeds[-1].wall_time - speeds[0].wall_time
    size = (folder / checkpoint.LAST).stat().st_size / 1e6
    print(f"log, bar, TensorBoard: {(whole - steps) / whole:.2%} of the time between evaluations")
    print(
        f"a checkpoint of {size:.1f} MB: saved in {saving:.3f} s, loaded in {loading:.3f} s; ",
        end="",
    )
    print(f"{saves} saves: {saves * saving / total:.2%} of {total:.0f} s")


def time_checkpoint(saved: checkpoint.Checkpoint) -> tuple[float, float]:
    """Return the median seconds to save a run, and to load and restore it."""
    corpus = SimpleNamespace(
        tokenizer=CharTokenizer(saved.vocabulary), val_sha256=None, **saved.data
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
