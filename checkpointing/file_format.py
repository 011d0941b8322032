"""A file that is whole or refused: written in one stroke, sealed with its own checksum, read with
suspicion.

The payload is a tree of dicts, lists, plain values and tensors. The file is what torch.save makes
of it, and plain torch.load still opens it; its seal is the comment of the zip archive: a format
tag, the format version, and the SHA-256 of every byte before it.
"""

import hashlib
import io
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickletools import genops, markobject

import torch
from torch import Tensor

from common.errors import CheckpointError, ResourceError, printable

VERSION = 1
TAG = f"hornbook checkpoint format {VERSION} sha256 ".encode()
SEAL = re.compile(rb"hornbook checkpoint format ([1-9][0-9]{0,8}) sha256 ([0-9a-f]{64})\Z")
LONGEST_SEAL = 128
PLAIN = (int, float, str, bool, type(None))
GLOBALS = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
# where torch.save puts the structure; each tensor's numbers are a record of their own
PICKLE = "archive/data.pkl"
MAX_FILE = 2**36  # bytes
MAX_PICKLE = 2**22  # bytes, of which each may become an object of 64: enough for 25,000 tensors
MAX_DEPTH = 100  # Python ends in a segmentation fault where it hashes tuples nested a million deep

# ------------------------------------------------------------------------------------------ writing


def seal(payload: object) -> bytes:
    """The bytes of the file; TypeError for a payload that could not be read again, which is our own
    mistake.
    """
    buffer = io.BytesIO()
    torch.save(_portable(payload), buffer)
    with zipfile.ZipFile(buffer) as archive:
        _inspect(archive.read(PICKLE))  # what could not be read again is not written
    buffer.seek(
        -2, io.SEEK_END
    )  # a zip archive ends with the length of its comment and the comment
    buffer.write((len(TAG) + 64).to_bytes(2, "little") + TAG)
    buffer.write(hashlib.sha256(buffer.getvalue()).hexdigest().encode())
    return buffer.getvalue()


def write(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Put `content` in the place of `path`, which at every instant is the old file or the new,
    whole.

    The old file lives on as `previous`, if that is given. It moves there only once the new one is
    in place: a damaged one must not push out the last good one. ResourceError where the disk is
    full or refuses, with nothing lost or left behind.
    """
    try:
        with _temporary(path) as new:
            _write_new(new, content)
            _put_in_place(new, path, previous)
            _sync_folder(path.parent)
    except OSError as error:
        raise ResourceError(
            f"{printable(path)}: not saved ({error.strerror}): need {len(content) / 1e6:,.1f} MB, "
            f"{_free(path.parent)} at {printable(path.parent)}; what was saved before is whole; "
            "make room or choose another --out_dir"
        ) from error


def remove_stale(folder: Path) -> None:
    """Remove the unfinished files of processes that died while they wrote."""
    for path in folder.glob("*.tmp.*"):
        pid = path.suffix[1:]
        if pid.isdecimal() and not _is_running(int(pid)):
            with suppress(OSError):
                path.unlink()


def _portable(value: object) -> object:
    """The tree made anew, with each tensor dense, detached and on the CPU."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        return tensor if is_dense(tensor) else tensor.clone()
    if isinstance(value, dict):
        return {_portable(key): _portable(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_portable, value))
    if type(value) not in PLAIN:
        raise TypeError(
            f"a {type(value).__name__} does not belong in a checkpoint; make it a plain value"
        )
    return value


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory in order, alone, and with every number its own."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` for a file in the making; whatever happens, nothing is left of it."""
    name = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    name.unlink(
        missing_ok=True
    )  # of a dead process that had our number, as every first one in a container has
    try:
        yield name
    finally:
        with suppress(OSError):
            name.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(new: Path, path: Path, previous: Path | None) -> None:
    if previous is None or not path.exists():
        os.replace(new, path)
        return
    with _temporary(previous) as old:
        try:
            os.link(path, old)
        except OSError:  # a file system without hard links
            _write_new(old, path.read_bytes())
        os.replace(new, path)
        os.replace(old, previous)


def _sync_folder(folder: Path) -> None:
    """Make the new names outlast a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free"
    except OSError:
        return "nothing can be written"


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 would be a Ctrl-C, but an open file cannot be removed
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return pid != os.getpid()


# ------------------------------------------------------------------------------------------ reading


def verify(path: Path) -> None:
    """CheckpointError unless the file is there, sealed, undamaged and of this format."""
    with _refusals_of(path):
        _content(path)


def read(path: Path) -> object:
    """The payload of a sealed file, of which nothing is built before all of it has been looked at.

    CheckpointError for a file that is missing, damaged, foreign, of a newer format, or larger
    unpacked than packed.
    """
    with _refusals_of(path):
        return torch.load(_repacked(_content(path)), map_location="cpu", weights_only=True)


@contextmanager
def _refusals_of(path: Path) -> Iterator[None]:
    """Whatever a file makes fail is a CheckpointError that names it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{printable(path)}: {error}") from None
    except OSError as error:
        raise CheckpointError(
            f"{printable(path)}: {(error.strerror or 'cannot be read').lower()}"
        ) from error
    except (
        Exception
    ) as error:  # zipfile, pickletools and torch raise a dozen kinds for what is not theirs
        raise CheckpointError(
            f"{printable(path)}: not a checkpoint of this program ({type(error).__name__})"
        ) from error


def _content(path: Path) -> bytes:
    """The bytes of a file, read once, if its seal is there and right."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError("not a regular file")
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - LONGEST_SEAL))
        seal = SEAL.search(file.read())
        file.seek(0)
        if seal is None or size > MAX_FILE:
            raise CheckpointError(_unsealed(size, file.read(4)))
        content = file.read()
    if hashlib.sha256(memoryview(content)[:-64]).hexdigest().encode() != seal[2]:
        raise CheckpointError("checksum mismatch: the file is damaged")
    if int(seal[1]) != VERSION:
        raise CheckpointError(
            f"written by version {int(seal[1])} of the format, this reads <= {VERSION}; upgrade"
        )
    return content


def _unsealed(size: int, magic: bytes) -> str:
    """What a file is that is too large or has no seal."""
    if size == 0:
        return "empty file (interrupted save?)"
    if size > MAX_FILE:
        return f"{size:,} bytes; allowed: {MAX_FILE:,}"
    if magic != b"PK\3\4":
        return "not a checkpoint of this program"
    return "not a checkpoint of this program, or cut short: no format tag at its end"


def _repacked(content: bytes) -> io.BytesIO:
    """The archive packed again from the records that were looked at, lest torch should read it in
    another way.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(packed, "w") as copy:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError("compressed records, as in a zip bomb; this program writes none")
        if sum(record.file_size for record in records) > len(content):
            raise CheckpointError("overlapping records, as in a zip bomb; this program writes none")
        if len({record.filename.lower() for record in records}) < len(records):
            raise CheckpointError("two records of one name; this program writes none")
        _inspect(archive.read(PICKLE))
        for record in records:
            copy.writestr(record.filename, archive.read(record))
    packed.seek(0)
    return packed


def _inspect(pickle: bytes) -> None:
    """Refuse a pickle that this program would not write, before anything is built from it.

    `weights_only` lets through a `bytearray(3 * 10**9)`, a list that holds another twice, which
    holds another twice, and tuples nested so deep that to hash them ends the process. So: no
    globals but those of tensors; nothing but names is used again, which makes what is built a tree,
    no larger than the pickle; and the tree is not deep.
    """
    if len(pickle) > MAX_PICKLE:
        raise CheckpointError(f"{len(pickle):,} bytes of structure; allowed: {MAX_PICKLE:,}")
    heights, marks = (
        [],
        [],
    )  # how deep what lies on the unpickler's stack is nested, and where its marks are
    kept, latest = {}, ""  # by which opcode each thing was made that is kept to be used again
    for opcode, argument, _ in genops(pickle):
        if opcode.name == "GLOBAL" and not GLOBALS.fullmatch(argument):
            raise CheckpointError(
                f"foreign object {printable(argument[:80])}; allowed: tensors and plain values"
            )
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            kept[argument] = latest
            continue
        latest = opcode.name
        if latest in ("BINGET", "LONG_BINGET") and kept[argument] not in ("GLOBAL", "BINUNICODE"):
            raise CheckpointError("an object used twice; this program writes none")
        if latest == "MARK":
            marks.append(len(heights))
            continue
        inputs = opcode.stack_before
        first = (
            marks.pop() - inputs.index(markobject)
            if markobject in inputs
            else len(heights) - len(inputs)
        )
        height = 1 + max(heights[first:], default=0)
        if height > MAX_DEPTH:
            raise CheckpointError(f"nested more than {MAX_DEPTH} deep")
        heights[first:] = [height for _ in opcode.stack_after]
