"""Kill a training process at random moments, and a save at every system call; then resume.

    python -m tests.stress.kills [--full]

Shows that a kill costs at most the steps since the last save, and never a checkpoint: each one
loads, and the run ends bit-identical to an uninterrupted one when the bare command resumes it:
config file, folder and --resume, whatever options or --minutes started it. The calls of a save also
fail with EIO and ENOSPC. The full form kills 204 times, under six mixes of settings.
"""

import errno
import io
import itertools
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from common import files
from storage.checkpoint import LAST, load_preferred
from tests.runs import (
    contents,
    count_checkpoints,
    same_runs,
    scalars,
    small_run_args,
    start,
    step_of,
    train,
    train_and_copy,
)
from tests.stress import main

SAVE_INTERVAL = 4
MINUTES = ["--minutes=0.5"]  # much more than a start takes on a busy machine
# The small run has Muon, dropout, accumulation and images; the full form changes them in turn.
MIXES = [
    [],
    ["--optimizer=adamw", "--schedule=cosine"],
    ["--dropout=0", "--attention_dropout=0.3", "--gradient_accumulation_steps=1"],
    ["--dtype=bfloat16", "--optimizer=adamw", "--positions=rope", "--qk_norm"],
    ["--schedule=constant", "--layout=stacked", "--kernel=batched"],
    [*MINUTES, "--dropout=auto", "--logit_scale=auto", "--gradient_accumulation_steps=5"],
]


def stress(full: bool) -> str:
    kills, steps, mixes = (34, 600, MIXES) if full else (1, 300, MIXES[:1])
    rng, runs, lost = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as name:
        for number, mix in enumerate(mixes):
            done = f"{kills * number} kills so far, {runs} runs, at most {lost} steps lost"
            print(f"mix {number + 1} of {len(mixes)}: {' '.join(mix)} ({done})", flush=True)
            folder = Path(name, str(number))
            folder.mkdir()
            options = [*small_run_args(folder), f"--max_iters={steps}", *mix]
            if mix[:1] == MINUTES:
                options = [word for word in options if "max_iters" not in word]
            more_runs, most_lost = kill_and_compare(folder, options, kills, rng)
            runs, lost = runs + more_runs, max(lost, most_lost)
        print(f"the calls of a save ({runs} runs, at most {lost} steps lost)", flush=True)
        calls = fail_at_every_call(Path(name), every=1 if full else 19)
    return (
        f"{kills * len(mixes)} kills in {runs} runs: all end bit-identical to an uninterrupted "
        f"run; at most {lost} steps lost with a save every {SAVE_INTERVAL}; no checkpoint damaged; "
        f"{calls} calls of a save failed with EIO or ENOSPC or killed the process: the old or the "
        "new checkpoint was intact, and the resumed run ended bit-identical"
    )


# ----------------------------------------------------------------------------------- random moments


def kill_and_compare(
    folder: Path, options: list[str], wanted: int, rng: random.Random
) -> tuple[int, int]:
    """Kill and resume runs `wanted` times; return the number of runs, and the most steps lost."""
    uninterrupted, killed = folder / "uninterrupted", folder / "killed"
    kills = runs = lost = 0
    line = "device " if wanted > 1 else "step "  # a few: when there is a checkpoint
    while kills < wanted:
        while kills < wanted and not _finished(killed):
            kills += _kill(start("train.py", *_words(options, killed)), line, rng)
            saved = step_of(killed) if count_checkpoints(killed) else 0  # none is damaged
            lost = max(lost, _reached(killed) - saved)
            assert lost <= SAVE_INTERVAL, f"kill {kills} lost {lost} steps"
        assert start("train.py", *_words(options, killed)).wait() == 0
        runs += 1

        # the same run without kills; that of --minutes has the length that was chosen
        settings = contents(killed / LAST)["settings"]["train"]
        words = [word for word in options if not word.startswith("--minutes")]
        words += [f"--{name}={settings[name]}" for name in ("max_iters", "eval_interval")]
        assert train(*words, f"--out_dir={uninterrupted}", "--overwrite")[0] == 0
        assert same_runs(uninterrupted, killed), f"{options}: differs from the uninterrupted run"
        shutil.rmtree(killed)
        print(f"  {kills} kills, {runs} runs", flush=True)
    return runs, lost


def _words(options: list[str], folder: Path) -> list[str]:
    """Return the arguments that start a run in a folder; once it holds one, the bare command."""
    if (folder / LAST).exists():
        return [options[0], f"--out_dir={folder}", "--resume"]
    return [*options, f"--out_dir={folder}"]


def _finished(folder: Path) -> bool:
    """Return whether the run in a folder has made all of its steps."""
    if not (folder / LAST).exists():
        return False
    saved = contents(folder / LAST)
    return saved["progress"]["step"] >= saved["settings"]["train"]["max_iters"]


def _kill(process: subprocess.Popen, line: str, rng: random.Random) -> bool:
    """Kill a run at a random moment: while it starts, one time in ten, or else after a line.

    Return whether it was killed: it may have ended before.
    """
    if line == "device " and rng.random() < 0.1:
        time.sleep(rng.uniform(0, 3))
    else:
        next(each for each in process.stdout if each.startswith(line))
        time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.communicate()
    assert process.returncode in (-9, 0), f"exit code {process.returncode}"
    return process.returncode == -9


def _reached(folder: Path) -> int:
    """Return the last logged step; every step is logged. A run may die before its folder exists."""
    if not folder.exists():
        return 0
    return max((step for step, _ in scalars(folder).get("train/loss", [])), default=0)


# ----------------------------------------------------------------------- the system calls of a save


class Killed(BaseException):
    """The simulated end of the process: no further system call succeeds, not even for cleanup."""


FAULTS = [OSError(errno.EIO, "I/O error"), OSError(errno.ENOSPC, "No space left"), Killed()]


class System:
    """The system calls of a save, listed in `calls`. Call number `fatal` raises `fault`."""

    def __init__(self, monkeypatch, fault=None, fatal=-1):
        self.calls, self.fault, self.fatal, self.dead = [], fault, fatal, False
        for name in ("link", "replace", "unlink", "fsync", "open", "close"):
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        monkeypatch.setattr(files, "open", self.opened, raising=False)

    def wrapped(self, name, call):
        def run(*arguments, **options):
            self.record(name, *arguments)
            return call(*arguments, **options)

        return run

    def opened(self, path, mode):
        if mode != "wb":
            return open(path, mode)
        self.record("create", path)
        return RecordedFile(path, self)

    def record(self, name, *arguments):
        if self.dead:
            raise Killed
        self.calls.append(
            (name, *(Path(each).name for each in arguments if isinstance(each, (str, Path))))
        )
        if len(self.calls) - 1 == self.fatal:
            self.dead = isinstance(self.fault, Killed)
            raise self.fault


class RecordedFile(io.FileIO):
    """A new file. A failing write has written half of the content."""

    def __init__(self, path, system):
        super().__init__(path, "wb")
        self.system = system

    def write(self, content):
        super().write(content[: len(content) // 2])
        self.system.record("write")
        return super().write(content[len(content) // 2 :])


def fail_at_every_call(folder: Path, every: int) -> int:
    """Let the calls of a resumed run fail one by one, and resume again; return their number."""
    options = [*small_run_args(folder), "--max_iters=12", "--save_interval=8"]
    uninterrupted, other = folder / "run", folder / "other"
    at_step_8 = train_and_copy(uninterrupted, 8, *options)  # the next save is at step 12
    assert step_of(at_step_8) == 8

    def resumed_calls(fault: BaseException | None = None, fatal: int = -1) -> list:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(at_step_8, other)
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, fault, fatal)
            try:
                code, output = train(*options, f"--out_dir={other}", "--resume")
                assert code in (0, 5), output
            except Killed:
                assert isinstance(fault, Killed)
        return system.calls

    cases = list(itertools.product(FAULTS, range(len(resumed_calls()))))[::every]
    for fault, fatal in cases:
        case = f"{fault!r} at {resumed_calls(fault, fatal)[fatal]}, call {fatal}"
        assert load_preferred(other, "last", notify=print).progress.step in (8, 12), case
        assert train(*options, f"--out_dir={other}", "--resume")[0] == 0, case
        assert same_runs(uninterrupted, other), f"{case}: differs from the uninterrupted run"
    return len(cases)


if __name__ == "__main__":
    main(stress)
