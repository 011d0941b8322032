"""Read damaged and forged checkpoints.

    python -m tests.stress.damage [--full]

Shows that damage is always noticed: files cut at every kilobyte, each bit of the header and of the
last kilobyte flipped, pieces moved, other formats, noise. A file forged with the correct digest is
rejected too, or gives a run with finite tensors of the right shape. Nothing in a file executes.
"""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from data.batches import Split
from data.tokenizer import CharTokenizer
from run import checkpoint
from tests.conftest import printed
from tests.runs import small_run_args, start, train
from tests.stress import main
from tests.test_convert import HOSTILE, archive_of
from tests.test_file_format import OTHER_FILES, file_with_header
from training.device import select_runtime
from training.state import Run


def stress(full: bool) -> str:
    rng, counts = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        run, trap, path = folder / "run", folder / "trap", folder / "damaged.safetensors"
        options = small_run_args(folder)
        assert train(*options, f"--out_dir={run}", "--max_iters=12")[0] == 0
        original = (run / checkpoint.LAST).read_bytes()
        assert not is_rejected(run / checkpoint.LAST)
        trap.mkdir()
        patch.chdir(trap)  # code in a file would write here

        for content in damaged(original, rng, full):
            path.write_bytes(content)
            counts["damaged", is_rejected(path)] += 1
        for _ in range(5000 if full else 150):
            path.write_bytes(forged(original, rng))
            counts["forged", is_rejected(path)] += 1
        for case in range(100 if full else 2):
            is_forged = case % 2 == 1
            content = forged(original, rng) if is_forged else next(damaged(original, rng, False))
            path.write_bytes(content)
            commands = [
                ["sample.py", f"--ckpt={path}", "--max_new_tokens=3"],
                ["train.py", *options, f"--out_dir={folder / str(case)}", f"--init_from={path}"],
            ]
            process = start(*commands[(case + case // 2) % 2])
            output = process.communicate()[0]
            allowed = (0, 2, 4, 6) if is_forged else (4,)
            assert process.returncode in allowed, f"case {case}: {output}"
            assert "Traceback" not in output, output
            counts["command", process.returncode == 4] += 1
        assert not list(trap.iterdir()), "code was executed"
    assert not counts["damaged", False], f"{counts['damaged', False]} damaged files were loaded"
    return (
        f"{counts['damaged', True]} damaged files: all rejected; "
        f"{counts['forged', True] + counts['forged', False]} forged files with a correct digest: "
        f"{counts['forged', True]} rejected, {counts['forged', False]} loaded with finite tensors "
        f"of the right shape; with train.py and sample.py: {counts['command', True]} rejected, "
        f"{counts['command', False]} accepted; no code was executed"
    )


def is_rejected(path: Path) -> bool:
    """Load a file as the commands do; return whether it is rejected. If not, it must be valid."""
    try:
        saved = checkpoint.load(path)
        tokenizer, split = CharTokenizer(saved.vocabulary), Split(np.zeros(40, int), ((0, 40),))
        corpus = type("Corpus", (), {"tokenizer": tokenizer, "train": split, "question": ""})
        run = Run(saved.config, corpus, select_runtime("cpu", "float32"))
        checkpoint.restore(saved, run)
        model = checkpoint.build_model(saved)
    except CheckpointError as error:
        assert printed(error).startswith(f"{path}: "), error
        return True
    moments = [
        each for o in run.optimizers for state in o.state.values() for each in state.values()
    ]
    for tensor in (*run.model.parameters(), *model.parameters(), *moments):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()
    return False


# ------------------------------------------------------------------------------------------- damage


def damaged(original: bytes, rng: random.Random, full: bool) -> Iterator[bytes]:
    """Yield damaged contents: all of each kind, or 150 in total in the short form."""
    header_end = 8 + int.from_bytes(original[:8], "little")
    last = range(len(original) - 1024, len(original))
    flips = [(i, bit) for i in (*range(header_end), *last) for bit in range(8)]
    cuts = list(range(0, len(original), 1024))
    if not full:
        flips, cuts = rng.sample(flips, 100), rng.sample(cuts, min(len(cuts), 20))
    for position, bit in flips:
        content = bytearray(original)
        content[position] ^= 1 << bit
        yield bytes(content)
    for length in cuts:
        yield original[:length]
    for _ in range(1000 if full else 150 - len(flips) - len(cuts)):
        yield rng.choice([_spliced, _foreign])(original, rng)


def _spliced(original: bytes, rng: random.Random) -> bytes:
    start, source = rng.sample(range(len(original)), 2)
    size = rng.randrange(1, len(original) - max(start, source) + 1)
    content = original[:start] + original[source : source + size] + original[start + size :]
    return content if content != original else original[:-1]


def _foreign(_: bytes, rng: random.Random) -> bytes:
    noise = rng.randbytes(rng.randrange(2, 5000))
    archive = archive_of(HOSTILE[rng.choice(sorted(HOSTILE))])
    return rng.choice([noise, archive, *OTHER_FILES.values()])


# ------------------------------------------------------------------------------------------ forgery


def forged(original: bytes, rng: random.Random) -> bytes:
    """Return a changed file with a correct digest."""
    length = int.from_bytes(original[:8], "little")
    header, data = json.loads(original[8 : 8 + length]), bytearray(original[8 + length :])
    rng.choice([_entries, _parts, _tensor_values])(header, data, rng)
    return bytes(file_with_header(header, data))


def _entries(header: dict, data: bytearray, rng: random.Random) -> None:
    """Change, remove, rename or duplicate the entry of a tensor."""
    name = rng.choice([each for each in header if each != "__metadata__"])
    number = rng.choice([0, 1, 4, 2**31, 2**53, 0.5, "x", None, [], {}])
    kind = rng.choice(["shape", "data_offsets", "name", "out", "again", "whole"])
    if kind in ("shape", "data_offsets"):
        header[name][kind][0] = number
    elif kind == "name":
        header[name + rng.choice(["x", "\0", "\x1b[2J", "/../x", "\ud800"])] = header.pop(name)
    elif kind == "out":
        del header[name]
    elif kind == "again":
        header[name + "x"] = header[name]
    else:
        header[name] = number


def _parts(header: dict, data: bytearray, rng: random.Random) -> None:
    """Change a value somewhere in the metadata."""
    metadata = header["__metadata__"]
    name = rng.choice([name for name in metadata if name not in ("sha256", "hornbook_format")])
    value = rng.choice([-1, 0, 10**30, 1.5, "x", "\x1b[2J", None, True, [], {}, [1, "x"]])
    part = metadata[name] if name == "vocabulary" else json.loads(metadata[name])
    section = part
    while isinstance(section, dict) and section:
        key = rng.choice(list(section))
        if not isinstance(section[key], dict) or rng.random() < 0.2:
            section[key] = value
            break
        section = section[key]
    else:
        part = value
    metadata[name] = rng.choice([json.dumps(part), json.dumps(part), json.dumps(part)[:-1]])
    if rng.random() < 0.1:
        del metadata[name]


def _tensor_values(header: dict, data: bytearray, rng: random.Random) -> None:
    """Overwrite a tensor element, possibly with NaN or infinity."""
    start = rng.randrange(len(data)) // 4 * 4
    numbers = [b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\0\0\x80\x7f", rng.randbytes(4)]
    data[start : start + 4] = rng.choice(numbers)


if __name__ == "__main__":
    main(stress)
