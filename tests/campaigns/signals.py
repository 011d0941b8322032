"""Signals in each phase of a run: python -m tests.campaigns.signals [--full]

A run sends itself the signal at a random call of a function that only that phase uses, and is then
resumed.
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

from tests.campaigns.common import command, loadable, same, small, start, train

PHASES = {
    "load": ("data.corpus", "load_corpus"),
    "step": ("training.schedule", "lr_multiplier"),
    "evaluate": ("training.evaluate", "loss_sums_by_position"),
    "sample": ("training.evaluate", "generate"),
    "save": ("os", "fsync"),
}
FIRST = {"save": 3}  # the first two are of config.yaml
CALLS = {"load": 1, "sample": 4}  # that a run makes at least; 6 of the others
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143, "SIGINT twice": 130}
SECONDS = 10


def campaign(full: bool) -> str:
    chance, slowest = random.Random(0), 0.0
    cases = list(itertools.product(PHASES, CODES))
    cases = cases * 5 if full else [cases[0], cases[5], cases[10], cases[15], cases[19]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = small(folder)
        undisturbed, stopped = folder / "undisturbed", folder / "stopped"
        assert train(*options, f"--out_dir={undisturbed}")[0] == 0
        for phase, kind in cases:
            call = FIRST.get(phase, 1) + chance.randrange(CALLS.get(phase, 6))
            run = start(
                "-m", "tests.campaigns.signals", phase, kind, call, *options, f"--out_dir={stopped}"
            )
            said = run.communicate()[0]
            ended = time.monotonic()
            assert run.returncode == CODES[kind], (
                f"{phase}, {kind}: exit code {run.returncode}\n{said}"
            )
            assert "Traceback" not in said, said
            sent = next(
                float(line.split()[1]) for line in said.splitlines() if line.startswith("sent ")
            )
            slowest = max(slowest, ended - sent)
            there, good = loadable(stopped)
            assert there == good and not list(stopped.glob("*.tmp.*")), (
                f"{phase}, {kind}: torn files"
            )
            assert train(*options, f"--out_dir={stopped}", "--resume")[0] == 0
            assert same(undisturbed, stopped), (
                f"{phase}, {kind}: does not end as the undisturbed run"
            )
            shutil.rmtree(stopped)
    assert slowest < SECONDS
    return (
        f"{len(cases)} signals in {len(PHASES)} phases: {len(cases)} right exit codes, after "
        f"{slowest:.1f} s at most; "
        f"{len(cases)} resumed to the last bit of the undisturbed run"
    )


def send_at(phase: str, kind: str, call: int, patch: Callable = setattr) -> None:
    """Patch the function of a phase so that its `call`-th call begins with the signal."""
    module, name = PHASES[phase]
    module = importlib.import_module(module)
    original, calls = getattr(module, name), itertools.count(1)

    def watched(*arguments, **options):
        if next(calls) == call:
            print("sent", time.monotonic(), flush=True)
            for _ in range(2 if kind.endswith("twice") else 1):
                os.kill(os.getpid(), getattr(signal, kind.split()[0]))
        return original(*arguments, **options)

    patch(module, name, watched)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        from common.errors import run_command
        from train import main

        phase, kind, call, *sys.argv[1:] = sys.argv[1:]
        send_at(phase, kind, int(call))
        sys.exit(run_command(main))
    command(campaign)
