"""Campaign: let each system call of a save fail, or kill the process at it.

    python -m tests.campaigns.saves [--full]

The calls are patched in this process and, in the full form, injected by strace (if installed) into
a subprocess.
"""

import errno
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from checkpointing import checkpoint
from tests.campaigns.common import (
    ENVIRONMENT,
    ROOT,
    merged,
    run_campaign,
    same_runs,
    small_run_args,
    step_of,
    train,
    train_and_copy,
)
from tests.test_files import Killed, System

FAULTS = {
    "EIO": OSError(errno.EIO, "Input/output error"),
    "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
    "kill": Killed(),
}
TRACED = {
    "fsync": "fsync",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
    "unlink": "unlink,unlinkat",
}
OPTIONS = ["--max_iters=12", "--save_interval=8"]


def campaign(full: bool) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*small_run_args(folder), *OPTIONS]
        uninterrupted, other = folder / "uninterrupted", folder / "other"
        at_step_8 = train_and_copy(uninterrupted, 8, *options)  # the next save is at step 12
        assert step_of(at_step_8) == 8

        def check_resume(fault: str) -> None:
            saved, _ = checkpoint.find(other, "last")
            assert saved.progress.step in (8, 12), fault
            assert train(*options, f"--out_dir={other}", "--resume")[0] == 0, fault
            assert same_runs(uninterrupted, other), f"{fault}: differs from the uninterrupted run"

        patched = _patched(options, at_step_8, other, check_resume, every=1 if full else 7)
        traced = (
            _traced(options, at_step_8, other, check_resume)
            if full and shutil.which("strace")
            else 0
        )
    return (
        f"{patched} patched and {traced} traced calls failed with EIO, with ENOSPC, or killed the "
        "process: each time the old or the new checkpoint was intact, and the resumed run ended "
        "bit-identical to an uninterrupted run"
    )


def _patched(options, at_step_8, other, check_resume, every) -> int:
    def run(fault: BaseException | None = None, fatal: int = -1) -> list:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(at_step_8, other)
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, fault, fatal)
            try:
                code, output = train(*options, f"--out_dir={other}", "--resume")
                assert code in (0, 5), output
            except Killed:
                assert fault is FAULTS["kill"]
        return system.calls

    cases = list(itertools.product(FAULTS, range(len(run()))))[::every]
    for name, fatal in cases:
        calls = run(FAULTS[name], fatal)
        check_resume(f"{name} at {calls[fatal]}, call {fatal}")
    return len(cases)


def _traced(options, at_step_8, other, check_resume) -> int:
    def run(*inject: str) -> str:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(at_step_8, other)
        log = other.with_suffix(".strace")
        command_line = [
            "strace",
            "-f",
            "-o",
            log,
            *inject,
            sys.executable,
            "train.py",
            *merged(options),
            f"--out_dir={other}",
        ]
        subprocess.run(
            [*map(str, command_line), "--resume"], cwd=ROOT, env=ENVIRONMENT, capture_output=True
        )
        return log.read_text()

    count = 0
    for calls in TRACED.values():
        count_of_calls = len(
            re.findall(rf"(?m)^\d+ +({calls.replace(',', '|')})\(", run("-e", f"trace={calls}"))
        )
        for when in range(1, count_of_calls + 1):
            for fault in ("error=EIO", "error=ENOSPC", "signal=KILL"):
                run("-e", f"trace={calls}", "-e", f"inject={calls}:{fault}:when={when}")
                check_resume(f"{fault} at {calls} {when}")
                count += 1
    return count


if __name__ == "__main__":
    run_campaign(campaign)
