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

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import checkpoint, file_format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    folder = parser.parse_args().run
    saved = checkpoint.load(folder / "last.pt")
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

    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for _ in range(5):
            began = time.perf_counter()
            file_format.write(Path(place) / "last.pt", checkpoint.seal(saved))
            seconds.append(time.perf_counter() - began)
    a_save, total = statistics.median(seconds), speeds[-1].wall_time - speeds[0].wall_time
    saves = 2 * len(
        evaluated
    )  # at worst: each evaluation is the best so far, and has its best.pt as well
    print(f"log, bar, TensorBoard: {(whole - steps) / whole:.2%} of the time between evaluations")
    print(
        f"a checkpoint of {(folder / 'last.pt').stat().st_size / 1e6:.1f} MB: {a_save:.2f} s; ",
        end="",
    )
    print(f"{saves} of them: {saves * a_save / total:.2%} of {total:.0f} s")


if __name__ == "__main__":
    main()
