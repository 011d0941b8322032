"""The file format of checkpoints: exact round trips, and rejection of damaged and forged files."""

import gzip
import hashlib
import io
import json
import pickle
import random

import pytest
import safetensors.torch
import torch

from common.errors import CheckpointError
from common.files import write_atomic
from run import file_format
from tests.conftest import printed
from tests.runs import equal

METADATA = {"config": '{"n": 1}', "vocabulary": "\n é😀\u2028\0\x1b</script>"}
TENSORS = {
    "model.a": torch.arange(6.0).reshape(2, 3),
    "model.b": torch.tensor([7.0]),
    "exp_avg.a": torch.full((2, 3), -0.5),
}


def error_message(path):
    """Return the error message for an invalid file: one line that starts with its name."""
    with pytest.raises(CheckpointError) as caught:
        file_format.read(path)
    assert caught.value.exit_code == 4
    message = printed(caught.value)
    assert message.startswith(f"{path}: ")
    return message


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "last.safetensors"
    write_atomic(path, file_format.to_bytes(METADATA, TENSORS))
    return path


def file_with_header(header, data=b""):
    """Build a file with any header, a tree or bytes, and the correct digest."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    content = bytearray(len(text).to_bytes(8, "little") + text + data)
    digest = content.find(b'"sha256":"') + 10
    zeroed = content[:digest] + b"0" * 64 + content[digest + 64 :]
    content[digest : digest + 64] = hashlib.sha256(zeroed).hexdigest().encode()
    return content


def header_with(version="1", **tensors):
    metadata = {"sha256": "0" * 64, "hornbook_format": version} | METADATA
    return {"__metadata__": metadata} | tensors


def entry(shape=(2,), offsets=(0, 8)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(offsets)}


# ---------------------------------------------------------------------- round trips, damaged files


def test_reading_returns_what_was_written(file):
    metadata, tensors = file_format.read(file)
    assert list(metadata)[:2] == ["sha256", "hornbook_format"]
    assert {name: metadata[name] for name in METADATA} == METADATA
    assert equal(tensors, TENSORS)


def test_a_header_of_any_length_is_read(file):
    for length in range(0, 256, 8):  # its first byte may be that of a pickle
        file.write_bytes(file_format.to_bytes({"x": length * "x"}, TENSORS))
        assert file_format.read(file)[0]["x"] == length * "x"


def test_tensors_of_any_stride_are_saved_contiguous_and_without_gradient(tmp_path):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {"view": base[:2], "transposed": base.T, "broadcast": base[0].expand(5, 4)}
    write_atomic(tmp_path / "x", file_format.to_bytes({}, tensors))
    _, read = file_format.read(tmp_path / "x")
    assert equal(read, {name: each.detach() for name, each in tensors.items()})
    assert all(each.is_contiguous() and not each.requires_grad for each in read.values())


def in_order(tensors):
    return dict(sorted(tensors.items()))


def test_the_safetensors_library_reads_our_file(file):
    assert equal(in_order(safetensors.torch.load_file(file)), in_order(TENSORS))
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["hornbook_format"] == "1" and metadata["vocabulary"] == METADATA["vocabulary"]


@pytest.mark.parametrize("size", [1, 2**20])
def test_the_digest_is_the_sha256_of_the_whole_file_with_zeros_in_its_place(size):
    content = bytes(file_format.to_bytes(METADATA, TENSORS | {"large": torch.ones(size)}))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    digest = header["__metadata__"]["sha256"]
    assert content.count(digest.encode()) == 1
    assert hashlib.sha256(content.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def test_a_flipped_bit_in_any_byte_is_detected(file):
    content = file.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            file_format.read(file)
        assert caught.value.exit_code == 4


def test_every_truncation_and_an_appended_byte_are_rejected(file):
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        message = error_message(file)
        assert ("empty file (interrupted save?)" in message) == (length == 0)
    file.write_bytes(content + b"\n")
    assert "checksum mismatch" in error_message(file)


def pytorch_file():
    content = io.BytesIO()
    torch.save({"model": {"weight": torch.zeros(3)}, "iter_num": 7}, content)
    return content.getvalue()


OTHER_FILES = {
    "random": random.Random(1).randbytes(5000),
    "text": b"First Citizen:\n" * 100,
    "json": json.dumps({"model": [1, 2]}).encode(),
    "gzip": gzip.compress(b"x" * 1000),
    "zip": b"PK\3\4" + bytes(200),
    "pickle": pickle.dumps({"model": [1, 2]}),
    "long header": (10**9).to_bytes(8, "little") + b'{"__metadata__":{}}',
    "PyTorch": pytorch_file(),
    "safetensors": safetensors.torch.save({"weight": torch.zeros(3)}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_rejected(kind, file):
    file.write_bytes(OTHER_FILES[kind])
    message = error_message(file)
    assert "not a Hornbook checkpoint" in message
    assert ("python convert.py imports" in message) == (kind in ("zip", "pickle", "PyTorch"))


@pytest.mark.parametrize("version", ["0", "2"])
def test_another_format_is_rejected(version, file):
    file.write_bytes(file_with_header(header_with(version=version)))
    assert error_message(file) == (
        f"{file}: format {version}; this version of Hornbook reads format 1; upgrade Hornbook, or "
        "train again"
    )


@pytest.mark.parametrize("name, words", [("none", "no such file"), ("", "is a directory")])
def test_a_path_that_is_no_file_is_rejected(name, words, tmp_path):
    assert words in error_message(tmp_path / name)


INVALID = {  # headers of files with the right digest and 16 bytes of tensors
    "no version": ({"__metadata__": {"sha256": "0" * 64}}, "KeyError: 'hornbook_format'"),
    "no JSON": (json.dumps(header_with(), separators=(",", ":")).encode()[:-1], "JSONDecodeError"),
    "no shape": (header_with(a={"data_offsets": [0, 8]}), "KeyError: 'shape'"),
    "a tensor beyond the file": (header_with(a=entry([5], (0, 20))), "RuntimeError"),
    "a tensor that is a number": (header_with(a=1), "TypeError"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_content_with_the_right_digest_is_one_line(name, file):
    header, expected = INVALID[name]
    file.write_bytes(file_with_header(header, bytes(16)))
    assert f"its content is invalid ({expected}" in error_message(file)
