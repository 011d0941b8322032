"""The file format of checkpoints: a safetensors file that carries its own SHA-256.

8 bytes with the length of the header (little-endian), the header in JSON, then the raw float32
tensors (https://github.com/huggingface/safetensors#format). Nothing in such a file can be run.

The header's `__metadata__` begins with `sha256`, the digest of the whole file, computed with these
64 digits set to zero. They are at a fixed place, so damage is noticed before anything is parsed.
The digest detects damage, not forgery.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.console import shorten
from common.errors import CheckpointError, UserError

VERSION = 2  # of this format
# what stands between the 8 bytes of the length and the digest
BEFORE_DIGEST = b'{"__metadata__":{"sha256":"'
DIGEST = slice(8 + len(BEFORE_DIGEST), 8 + len(BEFORE_DIGEST) + 64)
ZEROS = b"0" * 64


def to_bytes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytearray:
    """Serialize tensors as float32; put the digest and the version in front of `metadata`."""
    first = {"sha256": ZEROS.decode(), "hornbook_format": str(VERSION)}
    header, end = {"__metadata__": first | metadata}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header_json = json.dumps(header, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % 8)  # align the tensors

    parts = [len(header_json).to_bytes(8, "little"), header_json]
    parts += [tensor.detach().float().cpu().contiguous().numpy() for tensor in tensors.values()]
    content = bytearray().join(parts)
    content[DIGEST] = _digest(content)
    return content


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a checkpoint file.

    Raises CheckpointError if it is missing, damaged, from another program or of another format.
    """
    with checkpoint_errors(path):
        content = np.fromfile(path, np.uint8)
        _check_digest(content)

        data_start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:data_start].tobytes())
        metadata = header.pop("__metadata__")
        version = int(metadata["hornbook_format"])
        if version < VERSION:
            raise CheckpointError("made by an earlier version of Hornbook; train again")
        if version > VERSION:
            raise CheckpointError("made by a later version of Hornbook; upgrade this one")

        # tensors are views of the file's bytes, not copies
        data, tensors = torch.from_numpy(content[data_start:]).view(torch.float32), {}
        for name, entry in header.items():
            start = entry["data_offsets"][0] // 4  # bytes to numbers
            count = math.prod(entry["shape"])
            tensors[name] = data[start : start + count].view(entry["shape"])
        return metadata, tensors


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn an error in reading a checkpoint into a CheckpointError that begins with its path."""
    try:
        yield
    except MemoryError:  # not the fault of the file
        raise
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except Exception as error:  # the digest matched, so the writer produced invalid content
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{path}: its content is invalid ({reason})") from error


def _check_digest(content: np.ndarray) -> None:
    """Raise CheckpointError unless this is the content of an undamaged checkpoint."""
    head = content[: DIGEST.stop].tobytes()
    if not head:
        raise CheckpointError("empty file (interrupted save?)")
    if not head.startswith(BEFORE_DIGEST, 8):
        is_pickle = head.startswith((b"PK\3\4", b"\x80"))  # from torch.save: zipped, or old
        remedy = "; python convert.py imports the ckpt.pt of nanoGPT" if is_pickle else ""
        raise CheckpointError(f"not a Hornbook checkpoint{remedy}")

    if head[DIGEST] != _digest(content):
        raise CheckpointError("checksum mismatch: the file is damaged or incomplete")


def _digest(content: bytearray | np.ndarray) -> bytes:
    """Return the SHA-256 of the file with the digits of the digest set to zeros."""
    # in three parts, to avoid copying the file
    sha256 = hashlib.sha256(content[: DIGEST.start])
    sha256.update(ZEROS)
    sha256.update(memoryview(content)[DIGEST.stop :])
    return sha256.hexdigest().encode()
