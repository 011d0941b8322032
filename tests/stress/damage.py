"""Read damaged and forged checkpoints.

    python -m tests.stress.damage [--full]

Shows that damage is always noticed: files cut at every kilobyte, each bit of the header and of the
last kilobyte flipped, pieces moved, other formats, noise. A file forged with the correct digest is
rejected too, or gives a run with finite tensors of the right shape and dtype. Nothing in a file
executes, and memory grows by no more than the size of the file plus 64 MB.
"""

import json
import random
import resource
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing import checkpoint
from common.errors import CheckpointError
from data.batches import Split
from data.tokenizer import CharTokenizer
from model.runtime import select_runtime
from tests.conftest import printed
from tests.runs import small_run_args, start, train
from tests.stress import main
from tests.test_file_format import FORGED, OTHER_FILES, file_with_header
from tests.test_nanogpt import PICKLES, archive_of
from training.state import Run

MEMORY = 64_000_000  # bytes


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

        growth = 0
        for content in damaged(original, rng, full):
            path.write_bytes(content)
            before = _reset_peak_memory()
            counts["damaged", is_rejected(path)] += 1
            growth = max(growth, _memory_beyond(path, before))
        for _ in range(5000 if full else 150):
            path.write_bytes(forged(original, rng))
            before = _reset_peak_memory()
            counts["forged", is_rejected(path)] += 1
            growth = max(growth, _memory_beyond(path, before))
        for case in range(100 if full else 2):
            is_forged = case % 2 == 1
            content = forged(original, rng) if is_forged else next(damaged(original, rng, False))
            path.write_bytes(content)
            commands = [
                ["sample.py", f"--ckpt={path}", "--max_new_tokens=3"],
                ["train.py", *options, f"--out_dir={folder / str(case)}", f"--resume={path}"],
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
        f"of the right shape and dtype; with train.py and sample.py: {counts['command', True]} "
        f"rejected, {counts['command', False]} accepted; no code was executed; "
        f"memory grew by the file and {growth / 1e6:.0f} MB at most"
    )


def is_rejected(path: Path) -> bool:
    """Load a file as the commands do; return whether it is rejected. If not, it must be valid."""
    try:
        saved = checkpoint.load(path)
        tokenizer, split = CharTokenizer(saved.vocabulary), Split(np.zeros(40, int), ((0, 40),))
        corpus = type("Corpus", (), {"tokenizer": tokenizer, "train": split})
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
    archive = archive_of(PICKLES[rng.choice(sorted(PICKLES))])
    return rng.choice([noise, archive, *OTHER_FILES.values()])


# ------------------------------------------------------------------------------------------ forgery


def forged(original: bytes, rng: random.Random) -> bytes:
    """Return a changed file with a correct digest."""
    length = int.from_bytes(original[:8], "little")
    header, data = bytearray(original[8 : 8 + length]), bytearray(original[8 + length :])
    change = rng.choice(
        [_bytes, _entries, _entries, _parts, _parts, _tensor_values, _named_forgery]
    )
    return bytes(file_with_header(*change(header, data, rng)))


def _bytes(header: bytearray, data: bytearray, rng: random.Random) -> tuple[bytes, bytes]:
    """Change some bytes of the header."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        header[rng.randrange(len(header))] = rng.randrange(256)
    return bytes(header), data


def _entries(header: bytearray, data: bytearray, rng: random.Random) -> tuple[dict, bytes]:
    """Change, remove, rename or duplicate the entry of a tensor."""
    tree = json.loads(header)
    name = rng.choice([each for each in tree if each != "__metadata__"])
    number = rng.choice([-1, 0, 1, 4, 2**31, 2**53, 2**63, 0.5, "x", None, True, [], {}])
    kind = rng.choice(["dtype", "shape", "data_offsets", "name", "out", "again", "whole"])
    if kind == "dtype":
        tree[name]["dtype"] = rng.choice(["F16", "F64", "I32", "BOOL", "F8_E4M3", "", 7, None])
    elif kind in ("shape", "data_offsets"):
        numbers = tree[name][kind]
        if numbers:
            numbers[rng.randrange(len(numbers))] = number
        else:
            numbers.append(number)
    elif kind == "name":
        tree[name + rng.choice(["x", "\0", "\x1b[2J", "/../x", "\ud800"])] = tree.pop(name)
    elif kind == "out":
        del tree[name]
    elif kind == "again":
        tree[name + "x"] = tree[name]
    else:
        tree[name] = number
    return tree, data


def _parts(header: bytearray, data: bytearray, rng: random.Random) -> tuple[dict, bytes]:
    """Change a value somewhere in config, vocabulary, data, progress, environment or events."""
    tree = json.loads(header)
    metadata = tree["__metadata__"]
    name = rng.choice([*checkpoint.SECTIONS, "vocabulary"])
    value = rng.choice([-1, 0, 10**30, 1.5, "x", "\x1b[2J", None, True, [], {}, [1, "x"], 2**20])
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
    return tree, data


def _tensor_values(header: bytearray, data: bytearray, rng: random.Random) -> tuple[bytes, bytes]:
    """Overwrite a tensor element, possibly with NaN or infinity."""
    start = rng.randrange(len(data)) // 4 * 4
    numbers = [b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\0\0\x80\x7f", rng.randbytes(4)]
    data[start : start + 4] = rng.choice(numbers)
    return bytes(header), data


def _named_forgery(header: bytearray, data: bytearray, rng: random.Random) -> tuple[object, bytes]:
    """Return one of the forged headers of tests/test_file_format.py."""
    return FORGED[rng.choice(sorted(FORGED))][0], bytes(16)


def _reset_peak_memory() -> int:
    """Reset the peak of resident memory to its present size (Linux); return it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _memory_beyond(path: Path, before: int) -> int:
    """Return by how much more than a file's size memory has grown; refuse more than MEMORY."""
    growth = _peak_memory() - before - path.stat().st_size
    assert growth <= MEMORY, f"memory grew by the file and {growth} bytes"
    return growth


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(stress)
