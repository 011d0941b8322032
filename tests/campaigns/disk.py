"""A disk that fills up under a run, at every size: python -m tests.campaigns.disk [--full]

On a small tmpfs where mounting one is allowed; else no file may grow beyond the room that is left.
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
from tests.campaigns.common import at_step, command, contents, same, small, train

OPTIONS = ["--max_iters=12", "--save_interval=8"]
DISK = 2**24  # bytes


def campaign(full: bool) -> str:
    sizes = 64 if full else 8
    with tempfile.TemporaryDirectory() as name, _disk(Path(name) / "disk") as (how, filled):
        folder, out = Path(name), Path(name) / "disk" / "run"
        options = [*small(folder), *OPTIONS]
        undisturbed, begun = folder / "undisturbed", folder / "begun"
        assert train(*options, f"--out_dir={undisturbed}")[0] == 0
        shutil.copytree(undisturbed, begun)
        (begun / "prev.safetensors").replace(
            begun / "last.safetensors"
        )  # at step 8, about to save at 12
        need, saved = (begun / "last.safetensors").stat().st_size * 3, 0
        for size in range(sizes):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(begun, out)
            room = need * size // (sizes - 1)
            with (
                pytest.MonkeyPatch.context() as patch
            ):  # full once it trains: as it starts it looks for room itself
                at_step(patch, 8, lambda room=room: filled(room))
                code, said = train(*options, f"--out_dir={out}", "--resume")
            filled(None)
            assert (code, said.count("error: ")) in ((0, 0), (5, 1)), said
            assert code == 0 or "MB free at " in said.splitlines()[-1], said
            saved += code == 0
            path, _ = checkpoint.resolve(out, "last")
            assert contents(path)["progress"]["step"] == (12 if code == 0 else 8)
            assert not list(out.glob("*.tmp.*"))
            assert train(*options, f"--out_dir={out}", "--resume")[0] == 0
            assert (
                same(undisturbed, out) or code == 0
            )  # the log may have found no room where the checkpoint did
    assert 0 < saved < sizes
    return (
        f"{sizes} sizes of a disk ({how}) that fills up under a run: {saved} runs saved, "
        f"{sizes - saved} ended with 5; "
        f"{sizes} old or new checkpoints load, and go on when there is room"
    )


@contextmanager
def _disk(folder: Path) -> Iterator[tuple[str, Callable[[int | None], None]]]:
    """A place to fill: what it is, and the function that leaves so many bytes of room, or all with
    None.
    """
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True
    ).returncode:
        yield "limited files", _limit_files
        return
    try:
        yield "tmpfs", lambda room: _fill(folder, room)
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(folder: Path, room: int | None) -> None:
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    if room is not None:
        filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - room)))


def _limit_files(room: int | None) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if room is None else room, most))


if __name__ == "__main__":
    command(campaign)
