"""Campaign: signals in each phase of a run.

    python -m tests.campaigns.signals [--full]

A run sends itself a signal at a random call of a function that only that phase uses, and is then
resumed. It must end bit-identical to an uninterrupted run.
"""

import importlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.process import end_command
from tests.campaigns.common import (
    count_checkpoints,
    resume_if_saved,
    run_campaign,
    same_runs,
    small_run_args,
    start,
    train,
)
from tests.commands import exit_code, train_main

PHASES = {
    "load": ("train", "load_corpus"),
    "step": ("training.schedule", "lr_multiplier"),
    "evaluate": ("training.evaluate", "loss_sums_by_position"),
    "sample": ("training.evaluate", "generate"),
    "save": ("os", "fsync"),
}
FIRST = {"save": 5}  # the first four calls write the marker and config.yaml
CALLS = {"load": 1, "sample": 4}  # the least number of calls in a run; 6 for the others
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "SIGINT twice": 130}
SECONDS = 10


def campaign(full: bool) -> str:
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, slowest = random.Random(0), 0.0
    cases = list(itertools.product(PHASES, CODES))
    cases = cases * 5 if full else [cases[0], cases[5], cases[10], cases[15], cases[19]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = small_run_args(folder)
        uninterrupted, stopped = folder / "uninterrupted", folder / "stopped"
        assert train(*options, f"--out_dir={uninterrupted}")[0] == 0
        for phase, kind in cases:
            call = FIRST.get(phase, 1) + rng.randrange(CALLS.get(phase, 6))
            run = start(
                "-m", "tests.campaigns.signals", phase, kind, call, *options, f"--out_dir={stopped}"
            )
            output = run.communicate()[0]
            end_time = time.monotonic()
            assert run.returncode == CODES[kind], (
                f"{phase}, {kind}: exit code {run.returncode}\n{output}"
            )
            assert "Traceback" not in output, output
            sent = next(
                float(line.split()[1]) for line in output.splitlines() if line.startswith("sent ")
            )
            slowest = max(slowest, end_time - sent)
            saved, loadable_count = count_checkpoints(stopped)
            assert saved == loadable_count and not list(stopped.glob("*.tmp*")), (
                f"{phase}, {kind}: damaged files"
            )
            resume = resume_if_saved(stopped)
            assert train(*options, f"--out_dir={stopped}", *resume)[0] == 0
            assert same_runs(uninterrupted, stopped), (
                f"{phase}, {kind}: differs from the uninterrupted run"
            )
            shutil.rmtree(stopped)
    assert slowest < SECONDS
    return (
        f"{len(cases)} signals in {len(PHASES)} phases: {len(cases)} correct exit codes, within "
        f"{slowest:.1f} s; {len(cases)} resumed runs bit-identical to an uninterrupted run"
    )


def send_at(phase: str, kind: str, call: int, patch: Callable = setattr) -> None:
    """Patch the function of a phase so that its call number `call` first sends the signal."""
    module, name = PHASES[phase]
    module = importlib.import_module(module)
    original, calls = getattr(module, name), itertools.count(1)

    def with_signal(*arguments, **options):
        if next(calls) == call:
            print("sent", time.monotonic(), flush=True)
            for _ in range(2 if kind.endswith("twice") else 1):
                os.kill(os.getpid(), getattr(signal, kind.split()[0]))
        return original(*arguments, **options)

    patch(module, name, with_signal)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        phase, kind, call, *sys.argv[1:] = sys.argv[1:]
        send_at(phase, kind, int(call))
        end_command(exit_code(train_main, sys.argv[1:]))
    run_campaign(campaign)
