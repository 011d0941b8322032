"""The file format of checkpoints: a safetensors file that carries its own SHA-256.

8 bytes with the length of the header (little-endian), the header in JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format). The format has no code that could be run, and a
size in the header is used only after it is checked against the size of the file.

The header's `__metadata__` begins with `sha256`, the digest of the whole file, computed with its
own 64 digits set to zeros, followed by the version of this format. Both are at fixed offsets in the
file, so they can be checked before anything is parsed. The digest detects damage, not forgery: a
file forged with a valid digest is refused, with an error of one line, at the first invalid value.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from common.console import shorten
from common.errors import CheckpointError, ResourceError, UserError
from common.files import read_regular

VERSION = 1  # of this format
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_FILE = 2**36  # bytes
# These bound the memory that parsing the header takes. They are enough for 512 blocks, the most
# that the settings allow, or for 300,000 characters.
MAX_HEADER = 2**23  # bytes
MAX_COMMAS = 200_000  # 5 for a tensor; 512 blocks have up to 27,648 tensors
# what parsing a forged file may raise, besides CheckpointError; RecursionError is a RuntimeError
INVALID_CONTENT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
HEAD = 2**20  # bytes at the start of a file, which tell what it is
BEFORE_DIGEST = b'{"__metadata__":{"sha256":"'
DIGEST = slice(8 + len(BEFORE_DIGEST), 8 + len(BEFORE_DIGEST) + 64)
ZEROS = b"0" * 64
AFTER_DIGEST = re.compile(rb'","hornbook_format":"([0-9]{1,9})"')


def to_bytes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytearray:
    """Serialize a checkpoint; put the digest and the format version in front of `metadata`."""
    first = {"sha256": ZEROS.decode(), "hornbook_format": str(VERSION)}
    content = serialize(first | metadata, tensors)
    content[DIGEST] = _digest(content)
    return content


def serialize(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytearray:
    """Return a plain safetensors file, without a digest, of these tensors and this metadata."""
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header_json = json.dumps(header, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % 8)  # align the tensors
    if len(header_json) > MAX_HEADER:  # never write what `parse` refuses
        raise CheckpointError(
            f"the header of a checkpoint would have {len(header_json):,} bytes; allowed: "
            f"{MAX_HEADER:,}; use fewer distinct characters, or fewer n_layer"
        )
    parts = [len(header_json).to_bytes(8, "little"), header_json]
    parts += [_raw_bytes(tensor) for tensor in tensors.values()]
    return bytearray().join(parts)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a checkpoint file.

    Raises CheckpointError if it is missing, damaged, from another program or of another format.
    """
    with checkpoint_errors(path):
        return parse(_read_verified(path))


def verify(path: Path) -> None:
    """Raise CheckpointError unless the file is an undamaged checkpoint of this format."""
    with checkpoint_errors(path):
        _read_verified(path)


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn errors while a checkpoint is read into user errors that begin with its name."""
    try:
        yield
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except MemoryError:
        raise ResourceError(
            f"{path}: its {path.stat().st_size:,} bytes do not fit into memory; free some, "
            "or raise the limit (ulimit -v)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    except INVALID_CONTENT as error:
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{path}: its content is invalid ({reason})") from error


def _read_verified(path: Path) -> bytearray:
    """Read a file; check its first bytes, then its digest, then its format."""
    head = read_regular(path, MAX_FILE, only_first=HEAD)
    if not head:
        raise CheckpointError("empty file (interrupted save?)")
    version = AFTER_DIGEST.match(head, DIGEST.stop)
    if not is_ours(head) or not version:
        raise CheckpointError(_describe_foreign(head))
    content = read_regular(path, MAX_FILE)
    if content[DIGEST] != _digest(content):
        raise CheckpointError("checksum mismatch: the file is damaged or incomplete")
    if int(version[1]) != VERSION:
        raise CheckpointError(
            f"format {int(version[1])}; this program reads format {VERSION}; "
            "upgrade this program, or train again"
        )
    return content


def parse(content: bytearray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of any safetensors file; the tensors are views of it.

    The tensors must fill the file without gaps or overlaps. Raises CheckpointError, or one of
    INVALID_CONTENT.
    """
    length = int.from_bytes(content[:8], "little")
    data_start = 8 + length
    if length > MAX_HEADER:
        raise CheckpointError(f"the header has {length:,} bytes; allowed: {MAX_HEADER:,}")
    if data_start > len(content):
        raise CheckpointError(f"the header has {length:,} bytes, beyond the end of the file")
    header = parse_json(content[8:data_start].decode())
    metadata = header.pop("__metadata__", {})
    if not all(type(text) is str for text in metadata.values()):
        raise CheckpointError("__metadata__ must map names to strings")
    tensors, end = {}, data_start  # of the tensor before
    for name, entry in header.items():
        dtype, shape, offsets = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in shape + offsets):
            raise CheckpointError(f"tensor '{name[:80]}': invalid shape or offset")
        begin, stop = (data_start + offset for offset in offsets)
        count = math.prod(shape)
        if begin != end:
            raise CheckpointError(f"tensor '{name[:80]}': begins at byte {begin:,}, not {end:,}")
        if stop - begin != count * dtype.itemsize:
            raise CheckpointError(f"tensor '{name[:80]}': its size does not fit shape and dtype")
        if stop > len(content):
            raise CheckpointError(f"tensor '{name[:80]}': ends after the end of the file")
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=begin)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[name], end = flat.view(shape), stop
    if end != len(content):
        raise CheckpointError(f"{len(content) - end:,} bytes after the last tensor")
    return metadata, tensors


def parse_json(text: str) -> object:
    """Parse the JSON of the header or of one of its entries, with bounded memory."""
    if text.count(",") > MAX_COMMAS:
        raise CheckpointError("the header has too many entries")
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _digest(content: bytearray) -> bytes:
    """Return the SHA-256 of the file with the digits of the digest set to zeros."""
    view = memoryview(content)
    sha256 = hashlib.sha256(view[: DIGEST.start])
    sha256.update(ZEROS)
    sha256.update(view[DIGEST.stop :])
    return sha256.hexdigest().encode()


def is_ours(head: bytes) -> bool:
    """Return whether these are the first bytes of a checkpoint of this program, in any format."""
    return head.startswith(BEFORE_DIGEST, 8)


def _describe_foreign(head: bytearray) -> str:
    """Describe a file that is not a checkpoint of this program by its first bytes."""
    if head.startswith(b"PK\3\4") and b"model_args" in head:
        return (
            "a nanoGPT checkpoint; import it with python -m convert.nanogpt CKPT "
            "--meta=META --out_dir=DIR"
        )
    if head.startswith(b"PK\3\4"):
        return "not a checkpoint of this program, but a PyTorch or zip file"
    return "not a checkpoint of this program"
