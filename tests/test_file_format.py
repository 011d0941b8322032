"""The file format of checkpoints: exact round trips, and rejection of damaged and other files."""

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
from storage import file_format
from tests.conftest import printed
from tests.runs import equal

METADATA = {"config": '{"n": 1}', "vocabulary": "\n é😀\u2028\0\x1b</script>"}
TENSORS = {
    "exp_avg.a": torch.full((2, 3), -0.5),
    "model.a": torch.arange(6.0).reshape(2, 3),
    "model.b": torch.tensor([7.0]),
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


# ---------------------------------------------------------------------- round trips, damaged files


def test_reading_returns_what_was_written(file):
    metadata, tensors = file_format.read(file)
    assert list(metadata)[:2] == ["sha256", "hornbook_format"]
    assert {name: metadata[name] for name in METADATA} == METADATA
    assert equal(tensors, TENSORS)


def test_the_safetensors_library_reads_our_file(file):
    assert equal(dict(sorted(safetensors.torch.load_file(file).items())), TENSORS)
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["hornbook_format"] == "2" and metadata["vocabulary"] == METADATA["vocabulary"]


def test_the_digest_is_the_sha256_of_the_whole_file_with_zeros_in_its_place():
    large = {"large": torch.ones(2**20)}
    content = bytes(file_format.to_bytes(METADATA, TENSORS | large))
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
        error_message(file)


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


@pytest.mark.parametrize(
    ("version", "words"),
    [("1", "an earlier version of Hornbook; train again"),
     ("3", "a later version of Hornbook; upgrade this one")],
)  # fmt: skip
def test_another_version_of_the_format_is_rejected(version, words, file):
    file.write_bytes(file_format.to_bytes({"hornbook_format": version}, TENSORS))
    assert error_message(file) == f"{file}: made by {words}"
