"""The file format of checkpoints: a safetensors file that carries its own SHA-256.

8 bytes with the length of the header (little-endian), the header in JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format). The format has no code that could be run, and a
size in the header is used only after it is checked against the size of the file.

The header's `__metadata__` begins with `sha256`, the digest of the whole file, computed with its
own 64 digits set to zeros, followed by the version of this format. Both are at fixed offsets in the
file, so they can be checked before anything is parsed.
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

from common.errors import CheckpointError, ResourceError
from common.files import read_regular

VERSION = 3  # current format version; all earlier ones were before the first release
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
# that the settings allow, with 300,000 characters: so what is written can be read.
MAX_HEADER = 2**23  # bytes
MAX_COMMAS = 200_000  # 5 for a tensor; 512 blocks have up to 27,648 tensors
MAX_NUMBERS = 2**48  # in a tensor
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
    parts = [len(header_json).to_bytes(8, "little"), header_json]
    parts += [_raw_bytes(tensor) for tensor in tensors.values()]
    return bytearray().join(parts)


def verify(path: Path) -> None:
    """Raise CheckpointError unless the file is an undamaged checkpoint of this format."""
    with _checkpoint_errors(path):
        _read_verified(path)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a checkpoint file.

    Raises CheckpointError if it is missing, damaged, from another program or in another version.
    """
    with _checkpoint_errors(path):
        return parse(_read_verified(path))


def parse(content: bytearray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of any safetensors file; the tensors are views of it.

    Raises CheckpointError unless every name, dtype, shape and offset is valid and the tensors fill
    the file without gaps or overlaps.
    """
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER:
        raise CheckpointError(f"the header has {length:,} bytes; allowed: {MAX_HEADER:,}")
    if 8 + length > len(content):
        raise CheckpointError(
            f"the header has {length:,} bytes, which is beyond the end of the file"
        )
    header = _parse_json_bytes(bytes(content[8 : 8 + length]))
    if type(header) is not dict:
        raise CheckpointError("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise CheckpointError("__metadata__ must map names to strings")
    tensors, end = {}, 0
    for name, entry in header.items():
        dtype, shape, start, stop = _parse_entry(name, entry)
        if start != end:
            raise CheckpointError(f"{_quote(name)} begins at byte {start:,}, not {end:,}")
        count = math.prod(shape)
        if stop - start != count * dtype.itemsize:
            raise CheckpointError(
                f"{_quote(name)} has {stop - start:,} bytes, but its shape and dtype need "
                f"{count * dtype.itemsize:,}"
            )
        if 8 + length + stop > len(content):
            raise CheckpointError(f"{_quote(name)} ends after the end of the file")
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=8 + length + start)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[name], end = flat.view(shape), stop
    if 8 + length + end != len(content):
        raise CheckpointError(f"{len(content) - 8 - length - end:,} bytes after the last tensor")
    return metadata, tensors


def _parse_entry(name: str, entry: object) -> tuple[torch.dtype, list[int], int, int]:
    """Check the header's entry for a tensor; return its dtype, shape, start and end."""
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{_quote(name)} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise CheckpointError(f"{_quote(name)} has an unknown dtype")
    for numbers in (shape, offsets):
        if type(numbers) is not list or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise CheckpointError(f"{_quote(name)} has an invalid shape or offset")
    if len(shape) > 8 or math.prod(max(n, 1) for n in shape) > MAX_NUMBERS or len(offsets) != 2:
        raise CheckpointError(f"{_quote(name)} has an invalid shape or offset")
    return DTYPES[dtype], shape, *offsets


def _parse_json_bytes(text: bytes) -> object:
    """Parse JSON; refuse too many entries, deep nesting, duplicate names, NaN and Infinity."""
    if text.count(b",") > MAX_COMMAS:
        raise CheckpointError("the header has too many entries")
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_float=_parse_finite,
            parse_constant=_parse_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"invalid JSON in the header ({type(error).__name__})") from error


def parse_json(text: str) -> object:
    """Parse the JSON of a metadata value, with the same limits as the header."""
    return _parse_json_bytes(text.encode("utf-8", "surrogatepass"))


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number is not finite")
    return number


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


def _read_verified(path: Path) -> bytearray:
    """Read a file; check its first bytes, then its digest, then its format version."""
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
        older = int(version[1]) < VERSION
        raise CheckpointError(
            f"written in format version {int(version[1])}; this program reads version {VERSION}; "
            f"{'train again' if older else 'upgrade this program'}"
        )
    return content


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


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn errors in the block into user errors that begin with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except MemoryError:
        raise ResourceError(
            f"{path}: its {path.stat().st_size:,} bytes do not fit into memory; free some, "
            "or raise the limit (ulimit -v)"
        ) from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{path}: {reason}") from error


def _quote(name: str) -> str:
    """Return a tensor's name for a message: short, and without control characters."""
    return f"tensor '{name[:80]}'"
