"""Safe loading of PyTorch archives from other programs, to import their models.

`torch.load(weights_only=True)` runs no code, but an archive of a few hundred bytes can still make
it allocate gigabytes or crash the process. So the archive and the pickle in it are inspected first.
"""

import io
import re
import zipfile
from pathlib import Path
from pickletools import genops, markobject

import torch

from common.errors import CheckpointError, escape
from common.files import read_regular

PICKLE = "data.pkl"  # record with the structure; the numbers of each tensor have their own record
GLOBALS = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
MAX_FILE = 2**36  # bytes
MAX_PICKLE = 2**22  # bytes; one byte of a pickle may become an object of 64 bytes
MAX_DEPTH = 100  # Python crashes when it hashes tuples nested a million deep


def load(path: Path) -> object:
    """Load the tensors and plain values of an archive that torch.save wrote.

    Raises CheckpointError for a file that is missing, is not an archive, unpacks to more than its
    own size, or contains anything but tensors and plain values.
    """
    try:
        repacked = _repack(bytes(read_regular(path, MAX_FILE)))
        return torch.load(repacked, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{escape(path)}: {error}") from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{escape(path)}: {reason}") from error
    except Exception as error:  # zipfile, pickletools and torch raise a dozen types
        raise CheckpointError(
            f"{escape(path)}: not a PyTorch checkpoint ({type(error).__name__})"
        ) from error


def _repack(content: bytes) -> io.BytesIO:
    """Copy the inspected records to a new archive, so that torch reads only what was inspected."""
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(copy, "w") as target:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError("compressed records, as in a zip bomb; torch.save writes none")
        if sum(record.file_size for record in records) > len(content):
            raise CheckpointError("overlapping records, as in a zip bomb; torch.save writes none")
        if len({record.filename.lower() for record in records}) < len(records):
            raise CheckpointError("two records have the same name; torch.save writes none")
        pickles = [each for each in records if each.filename.rpartition("/")[2] == PICKLE]
        if len(pickles) != 1:
            raise CheckpointError(f"{len(pickles)} records named {PICKLE}; torch.save writes one")
        inspect_pickle(archive.read(pickles[0]))
        for record in records:
            target.writestr(record.filename, archive.read(record))
    copy.seek(0)
    return copy


def inspect_pickle(pickle: bytes) -> None:
    """Raise CheckpointError for a pickle that contains code or takes too much memory to load.

    `weights_only` does not refuse a `bytearray(3 * 10**9)`, a list that contains a second list
    twice (which contains a third one twice, and so on), or tuples nested so deep that hashing them
    crashes the process. This function allows only the globals that tensors need. It allows a second
    reference only to names and to short tuples of plain values (AdamW's betas), so the objects form
    a tree that is not much larger than the pickle. And it limits the depth of the tree.
    """
    if len(pickle) > MAX_PICKLE:
        raise CheckpointError(f"{len(pickle):,} bytes of structure; allowed: {MAX_PICKLE:,}")
    # the unpickler's stack: the nesting depth of each value, and the positions of its MARKs, which
    # begin a group of values
    depths, marks = [], []
    memo, opcode_before = {}, ""  # the unpickler's memo: opcode and nesting depth of each value
    for opcode, argument, _ in genops(pickle):
        if opcode.name == "GLOBAL" and not GLOBALS.fullmatch(argument):
            raise CheckpointError(
                f"foreign object {escape(argument[:80])}; allowed: tensors and plain values"
            )
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = (opcode_before, depths[-1])
            continue
        opcode_before = opcode.name
        if opcode.name in ("BINGET", "LONG_BINGET"):
            made_by, depth = memo[argument]
            short_tuple = made_by in ("TUPLE1", "TUPLE2", "TUPLE3") and depth == 2
            if made_by not in ("GLOBAL", "BINUNICODE") and not short_tuple:
                raise CheckpointError("an object used twice; allowed: a tree")
            depths.append(depth)
            continue
        if opcode.name == "MARK":
            marks.append(len(depths))
            continue
        inputs = opcode.stack_before
        if markobject in inputs:
            first = marks.pop() - inputs.index(markobject)
        else:
            first = len(depths) - len(inputs)
        depth = 1 + max(depths[first:], default=0)
        if depth > MAX_DEPTH:
            raise CheckpointError(f"nested more than {MAX_DEPTH} deep")
        depths[first:] = [depth for _ in opcode.stack_after]
