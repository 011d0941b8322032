"""Every system call of a run's saves made to fail, or to be its last: python -m
tests.campaigns.saves [--full]

By patched calls in this process; and, in the full form where strace is installed, by strace in a
process of its own.
"""

import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from checkpointing import checkpoint
from tests.campaigns.common import ENVIRONMENT, ROOT, command, contents, same, small, train
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
        options = [*small(folder), *OPTIONS]
        undisturbed, begun, other = (folder / each for each in ("undisturbed", "begun", "other"))
        assert train(*options, f"--out_dir={undisturbed}")[0] == 0
        shutil.copytree(undisturbed, begun)
        os.replace(
            begun / "prev.safetensors", begun / "last.safetensors"
        )  # at step 8, about to save at 12

        def survives(fault: str) -> None:
            path, _ = checkpoint.resolve(other, "last")
            assert contents(path)["progress"]["step"] in (8, 12), fault
            assert train(*options, f"--out_dir={other}", "--resume")[0] == 0, fault
            assert same(undisturbed, other), f"{fault}: does not end as the undisturbed run"

        patched = _patched(options, begun, other, survives, every=1 if full else 7)
        traced = _traced(options, begun, other, survives) if full and shutil.which("strace") else 0
    return (
        f"{patched} calls patched and {traced} calls traced, to fail with EIO, with ENOSPC, or to "
        f"be the last: "
        "each time the old or the new checkpoint was whole, and the run went on to the same end"
    )


def _patched(options, begun, other, survives, every) -> int:
    def run(fault: BaseException | None = None, fatal: int = -1) -> list:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(begun, other)
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, fault, fatal)
            try:
                code, said = train(*options, f"--out_dir={other}", "--resume")
                assert code in (0, 5), said
            except Killed:
                assert fault is FAULTS["kill"]
        return system.calls

    cases = list(itertools.product(FAULTS, range(len(run()))))[::every]
    for name, fatal in cases:
        calls = run(FAULTS[name], fatal)
        survives(f"{name} at {calls[fatal]}, call {fatal}")
    return len(cases)


def _traced(options, begun, other, survives) -> int:
    def run(*inject: str) -> str:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(begun, other)
        log = other.with_suffix(".strace")
        words = [
            "strace",
            "-f",
            "-o",
            log,
            *inject,
            sys.executable,
            "train.py",
            *options,
            f"--out_dir={other}",
        ]
        subprocess.run(
            [*map(str, words), "--resume"], cwd=ROOT, env=ENVIRONMENT, capture_output=True
        )
        return log.read_text()

    count = 0
    for calls in TRACED.values():
        made = len(
            re.findall(rf"(?m)^\d+ +({calls.replace(',', '|')})\(", run("-e", f"trace={calls}"))
        )
        for when in range(1, made + 1):
            for fault in ("error=EIO", "error=ENOSPC", "signal=KILL"):
                run("-e", f"trace={calls}", "-e", f"inject={calls}:{fault}:when={when}")
                survives(f"{fault} at {calls} {when}")
                count += 1
    return count


if __name__ == "__main__":
    command(campaign)
