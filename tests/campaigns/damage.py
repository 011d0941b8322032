"""Damaged and hostile checkpoints: python -m tests.campaigns.damage [--full]

Every other one is sealed again, as a forger would who knows the format. What is not must be
refused; what is must be refused too, or be a model and optimizers with finite numbers of the right
shape and dtype. Nothing runs, nothing grows.
"""

import gzip
import random
import resource
import tempfile
import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
import torch

from checkpointing import checkpoint, file_format
from common.errors import CheckpointError
from tests.campaigns.common import command, small, start, train
from tests.test_sealed import BOMBS, PICKLE, packed, tensor_pickle, write_sealed
from training import optimizers
from training.state import Progress

SEAL = len(file_format.TAG) + 64
# bytes that loading may take beside 3 times the file: 4 MB of structure become so many of objects
MEMORY = 300_000_000


def campaign(full: bool) -> str:
    chance, counts = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        run, trap, path = folder / "run", folder / "trap", folder / "damaged.pt"
        options = small(folder)
        assert train(*options, f"--out_dir={run}", "--max_iters=12")[0] == 0
        whole = (run / "last.pt").read_bytes()
        assert not refused(run / "last.pt")
        trap.mkdir()
        patch.chdir(trap)  # where the forged calls would leave their traces

        peak = _peak_memory()
        for case in range(10_000 if full else 300):
            again = case % 2 == 1
            write(path, damaged(whole[:-SEAL], chance), whole, again)
            counts[again, refused(path)] += 1
            assert _peak_memory() - peak <= 3 * path.stat().st_size + MEMORY, f"case {case}: memory"
        for case in range(100 if full else 2):
            again = case % 2 == 1
            write(path, damaged(whole[:-SEAL], chance), whole, again)
            commands = [
                ["sample.py", f"--ckpt={path}", "--max_new_tokens=3"],
                ["train.py", *options, f"--out_dir={folder / str(case)}", f"--resume={path}"],
            ]
            process = start(*commands[(case + case // 2) % 2])
            said = process.communicate()[0]
            assert process.returncode in ((0, 4, 6) if again else (4,)), f"case {case}: {said}"
            counts["command", process.returncode] += 1
        assert not list(trap.iterdir()), "something was executed"
    assert not counts[False, False], f"{counts[False, False]} damaged files were loaded"
    return (
        f"{counts[False, True]} damaged files: all refused; "
        f"{counts[True, True] + counts[True, False]} sealed again: "
        f"{counts[True, True]} refused, {counts[True, False]} loaded with finite numbers of the "
        f"right kind; "
        f"through the commands: {counts['command', 4]} refused, {counts['command', 0]} used, "
        f"{counts['command', 6]} ended with 6 for what they made of it; nothing was executed; "
        f"memory grew by {(_peak_memory() - peak) / 1e6:.0f} MB"
    )


def refused(path: Path) -> bool:
    """Whether the functions of the commands refuse a file. If not, what they make of it must be
    sound.
    """
    try:
        saved = checkpoint.load(path)
        model = checkpoint.build_model(saved, ema=saved.ema is not None)
        made = optimizers.build(model, saved.config.train, torch.float32)
        checkpoint.load_optimizers(saved, made)
        Progress.restore(saved)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ") and str(error).isprintable(), str(error)
        return True
    states = [tensor for each in made for state in each.state.values() for tensor in state.values()]
    for tensor in (*model.state_dict().values(), *states):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()
    return False


def write(path: Path, archive: bytes, whole: bytes, again: bool) -> None:
    """The damaged archive with a right digest, or with the old seal."""
    if again:
        write_sealed(path, archive)
    else:
        path.write_bytes(archive[:-2] + whole[-SEAL - 2 :])
        assert path.read_bytes() != whole


def damaged(archive: bytes, chance: random.Random) -> bytes:
    """A zip archive that ends with the length of its comment, in one of many ways not what
    it was.
    """
    return chance.choice(DAMAGES)(archive, chance)


def flips(archive: bytes, chance: random.Random) -> bytes:
    content = bytearray(archive)
    for _ in range(chance.choice([1, 1, 2, 8])):
        content[chance.randrange(len(content) - 2)] ^= 1 << chance.randrange(8)
    return bytes(content)


def cuts(archive: bytes, chance: random.Random) -> bytes:
    return archive[: chance.randrange(2, len(archive) - 2)]


def splices(archive: bytes, chance: random.Random) -> bytes:
    start, source, size = (chance.randrange(len(archive) - 2) for _ in range(3))
    size = min(size, len(archive) - 2 - max(start, source))
    spliced = archive[:start] + archive[source : source + size] + archive[start + size :]
    return spliced if spliced != archive else flips(archive, chance)


def foreign(_: bytes, chance: random.Random) -> bytes:
    stored = BytesIO()
    torch.save({"model": {"weight": torch.zeros(3)}, "iter_num": 7}, stored)
    noise = chance.randbytes(chance.randrange(2, 5000))
    return chance.choice(
        [
            noise,
            gzip.compress(noise),
            b"First Citizen:\n" * 100,
            packed({"read.me": noise}),
            stored.getvalue(),
        ]
    )


def bombs(_: bytes, chance: random.Random) -> bytes:
    return BOMBS[chance.choice(sorted(BOMBS))][0]


def structures(archive: bytes, chance: random.Random) -> bytes:
    """Another pickle in a sound archive: some of its bytes are others."""
    records = _records(archive)
    content = bytearray(records[PICKLE])
    for _ in range(chance.choice([1, 2, 4])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return packed(records | {PICKLE: bytes(content)})


def numbers(archive: bytes, chance: random.Random) -> bytes:
    """Other numbers in a sound archive, infinite ones among them."""
    records = _records(archive)
    name = chance.choice([each for each in records if "/data/" in each])
    content = bytearray(records[name])
    start = chance.randrange(len(content)) // 4 * 4
    content[start : start + 4] = chance.choice(
        [b"\0\0\xc0\x7f", b"\0\0\x80\xff", chance.randbytes(4)]
    )
    return packed(records | {name: bytes(content)})


def shapes(_: bytes, chance: random.Random) -> bytes:
    """One tensor of any size and stride over a few bytes."""
    size, stride = (
        b"\x8a\x08" + chance.choice([0, 1, 3, 10**6, 2**62]).to_bytes(8, "little") for _ in range(2)
    )
    pickle = tensor_pickle(numel=b"K\x06", size=size * 2 + b"\x86", stride=stride * 2 + b"\x86")
    return packed(
        {
            PICKLE: b"\x80\x02" + pickle + b".",
            "archive/data/0": bytes(24),
            "archive/version": b"3\n",
        }
    )


def records(archive: bytes, chance: random.Random) -> bytes:
    """A record is missing, or has another's content."""
    kept = _records(archive)
    name, other = chance.sample(sorted(kept), 2)
    content = kept.pop(name)
    return packed(kept if chance.random() < 0.5 else kept | {name: content[:-1] + kept[other][:7]})


def _records(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(archive[:-2] + b"\0\0")) as opened:
        return {record.filename: opened.read(record) for record in opened.infolist()}


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


DAMAGES = [flips, cuts, splices, foreign, bombs, structures, numbers, shapes, records]

if __name__ == "__main__":
    command(campaign)
