"""Campaign: a disk that fills up during a run, with different amounts of free space.

    python -m tests.campaigns.disk [--full]

Uses a small tmpfs if mounting one is allowed, and otherwise a limit on the size of files.
"""

import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpointing import checkpoint
from tests.campaigns.common import (
    at_step,
    run_campaign,
    same_runs,
    small_run_args,
    step_of,
    train,
    train_and_copy,
)

OPTIONS = ["--max_iters=12", "--save_interval=8"]
DISK = 2**24  # bytes


def campaign(full: bool) -> str:
    sizes = 64 if full else 8
    with tempfile.TemporaryDirectory() as name, _disk(Path(name) / "disk") as (kind, fill):
        folder, out = Path(name), Path(name) / "disk" / "run"
        options = [*small_run_args(folder), *OPTIONS]
        uninterrupted = folder / "uninterrupted"
        at_step_8 = train_and_copy(uninterrupted, 8, *options)  # the next save is at step 12
        assert step_of(at_step_8) == 8
        need, completed = (at_step_8 / "last.safetensors").stat().st_size * 3, 0
        for size in range(sizes):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(at_step_8, out)
            free = need * size // (sizes - 1)
            # fill it during training, because train.py checks the free space when it starts
            with pytest.MonkeyPatch.context() as patch:
                at_step(patch, 8, lambda free=free: fill(free))
                code, output = train(*options, f"--out_dir={out}", "--resume")
            fill(None)
            assert (code, output.count("error: ")) in ((0, 0), (5, 1)), output
            assert code == 0 or "MB free at " in output.splitlines()[-1], output
            completed += code == 0
            saved, _ = checkpoint.find(out, "last")
            assert saved.progress.step == (12 if code == 0 else 8)
            assert not list(out.glob("*.tmp*"))
            assert train(*options, f"--out_dir={out}", "--resume")[0] == 0
            # with code 0, events may be missing: the checkpoint fitted on the disk, the log did not
            assert same_runs(uninterrupted, out) or code == 0
    assert 0 < completed < sizes
    return (
        f"{sizes} amounts of free disk space ({kind}) during a run: {completed} runs completed, "
        f"{sizes - completed} exited with code 5; in all {sizes} cases the old or the new "
        "checkpoint loads, and the run resumes when there is space"
    )


@contextmanager
def _disk(folder: Path) -> Iterator[tuple[str, Callable[[int | None], None]]]:
    """Create a disk; yield its kind and a function that leaves N bytes free, or all with None."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True
    ).returncode:
        yield "limited files", _limit_files
        return
    try:
        yield "tmpfs", lambda free: _fill(folder, free)
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(folder: Path, free: int | None) -> None:
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    if free is not None:
        filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - free)))


def _limit_files(free: int | None) -> None:
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit if free is None else free, hard_limit))


if __name__ == "__main__":
    run_campaign(campaign)
