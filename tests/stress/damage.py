"""Read damaged checkpoints.

    python -m tests.stress.damage [--full]

Shows that damage is always noticed: files cut at every kilobyte, each bit of the header and of the
last kilobyte flipped, pieces moved, other formats, noise. Nothing in a file executes.
"""

import io
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError
from storage.checkpoint import LAST, load_checkpoint
from tests.commands import sample_main
from tests.conftest import ROOT, printed
from tests.runs import small_run_args, train
from tests.slow.test_convert import Harmful
from tests.stress import main
from tests.test_checkpoint import OTHER_FILES


def stress(full: bool) -> str:
    rng, count = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        run, trap, path = folder / "run", folder / "trap", folder / "damaged.safetensors"
        options = small_run_args(folder)
        assert train(*options, f"--out_dir={run}", "--max_iters=12")[0] == 0
        original = (run / LAST).read_bytes()
        trap.mkdir()
        patch.chdir(trap)  # code in a file would write here
        for content in damaged(original, rng, full):
            path.write_bytes(content)
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(path)
            assert printed(caught.value).startswith(f"{path}: ")
            count += 1
        code, output = train(*options, f"--out_dir={folder / 'new'}", f"--init_from={path}")
        assert code == 4, output
        with pytest.raises(CheckpointError):
            sample_main([f"--ckpt={path}"])
        harmed = [*trap.iterdir(), *ROOT.glob("harmed")]  # train.py works in ROOT
        assert not harmed, "code was executed"
    return f"{count} damaged files: all rejected; no code was executed"


def damaged(original: bytes, rng: random.Random, full: bool) -> Iterator[bytes]:
    """Yield damaged contents: all of each kind, or 150 in total in the short form."""
    header_end, size = 8 + int.from_bytes(original[:8], "little"), len(original)
    places = [*range(header_end), *range(size - 1024, size)]
    cuts = range(0, size, 1024)
    if not full:
        places, cuts = rng.sample(places, 100), rng.sample(cuts, 20)
    for place in places:
        for bit in range(8) if full else [rng.randrange(8)]:
            yield original[:place] + bytes([original[place] ^ 1 << bit]) + original[place + 1 :]
    for length in cuts:
        yield original[:length]
    for number in range(500 if full else 15):
        # a piece of it somewhere else; a file of another kind
        start, source = rng.sample(range(1, size - 64), 2)
        moved = original[:start] + original[source : source + 64] + original[start + 64 :]
        yield moved if moved != original else original[:-1]
        hostile, refused = io.BytesIO(), io.BytesIO()
        torch.save({"model": Harmful()}, hostile)
        torch.save({"model": random.Random}, refused)
        noise = rng.randbytes(rng.randrange(2, 5000))
        others = [hostile.getvalue(), refused.getvalue(), noise, *OTHER_FILES.values()]
        yield others[0] if number == 0 else rng.choice(others)


if __name__ == "__main__":
    main(stress)
