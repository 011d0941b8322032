"""The file format of checkpoints: exact round trips, and rejection of damaged and forged files."""

import gzip
import hashlib
import io
import json
import os
import random
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch

from checkpointing import file_format
from common.errors import CheckpointError
from common.files import write_atomic
from tests.conftest import printed
from tests.runs import equal

METADATA = {"config": '{"n": 1}', "vocabulary": '"\\n \\u00e9"'}
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


def to_json(tree):
    return json.dumps(tree, separators=(",", ":")).encode()


def file_with_header(header, data=b""):
    """Build a file with any header, a tree or bytes, and the correct digest."""
    text = header if isinstance(header, bytes) else to_json(header)
    content = bytearray(len(text).to_bytes(8, "little") + text + data)
    digest = content.find(b'"sha256":"') + 10
    zeroed = content[:digest] + b"0" * 64 + content[digest + 64 :]
    content[digest : digest + 64] = hashlib.sha256(zeroed).hexdigest().encode()
    return content


def metadata(**more):
    return {"__metadata__": {"sha256": "0" * 64} | more}


def valid_header(**tensors):
    return metadata(hornbook_format="1", **METADATA) | tensors


def extended(text):
    """Return a valid header, as bytes, with another text before its closing brace."""
    return to_json(valid_header())[:-1] + text + b"}"


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def with_a(**changes):
    """Return a valid header of one tensor, a."""
    return valid_header(a=entry(**changes))


# ---------------------------------------------------------------------- round trips, damaged files


def test_reading_returns_what_was_written(file):
    metadata, tensors = file_format.read(file)
    assert list(metadata)[:2] == ["sha256", "hornbook_format"]
    assert {name: metadata[name] for name in METADATA} == METADATA
    assert equal(tensors, TENSORS)
    file_format.verify(file)


def test_tensors_of_any_stride_are_saved_contiguous_and_without_gradient(tmp_path):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {"view": base[:2], "transposed": base.T, "broadcast": base[0].expand(5, 4)}
    write_atomic(tmp_path / "x", file_format.to_bytes({}, tensors))
    _, read = file_format.read(tmp_path / "x")
    assert equal(read, {name: each.detach() for name, each in tensors.items()})
    assert all(each.is_contiguous() and not each.requires_grad for each in read.values())


def test_every_tensor_is_moved_to_the_cpu_and_no_device_is_saved(monkeypatch):
    to_cpu, moved = torch.Tensor.cpu, []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self) or to_cpu(self))
    content = file_format.to_bytes(METADATA, TENSORS)
    assert len(moved) == len(TENSORS)
    assert b"cpu" not in content and b"device" not in content


def in_order(tensors):
    return dict(sorted(tensors.items()))


def test_the_safetensors_library_reads_our_file(file):
    assert equal(in_order(safetensors.torch.load_file(file)), in_order(TENSORS))
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["hornbook_format"] == "1" and metadata["vocabulary"] == METADATA["vocabulary"]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_parse_reads_a_file_of_the_safetensors_library(metadata, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {"empty": torch.empty(0, 4)}
    for name, dtype in file_format.DTYPES.items():
        numbers = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        tensors |= {f"{name}.matrix": numbers, f"{name}.scalar": numbers[0, 0].clone()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
    read, parsed = file_format.parse(bytearray((tmp_path / "theirs").read_bytes()))
    assert read == (metadata or {})
    assert equal(in_order(parsed), in_order(tensors))


@pytest.mark.parametrize("size", [1, 2**20])
def test_the_digest_is_the_sha256_of_the_whole_file_with_zeros_in_its_place(size):
    content = bytes(file_format.to_bytes(METADATA, TENSORS | {"large": torch.ones(size)}))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    digest = header["__metadata__"]["sha256"]
    assert content.count(digest.encode()) == 1
    assert hashlib.sha256(content.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def test_any_flipped_bit_is_detected(file):
    content = file.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                file_format.verify(file)
            if position > file_format.DIGEST.stop + 30 or position < 8:
                assert "checksum mismatch" in str(caught.value)


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
    "long header": (10**9).to_bytes(8, "little") + b'{"__metadata__":{}}',
    "PyTorch": pytorch_file(),
    "safetensors": safetensors.torch.save({"weight": torch.zeros(3)}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_rejected(kind, file):
    file.write_bytes(OTHER_FILES[kind])
    message = error_message(file)
    assert "not a checkpoint of this program" in message
    assert (", but a PyTorch or zip file" in message) == (kind in ("zip", "PyTorch"))


@pytest.mark.parametrize("version", ["0", "2"])
def test_another_format_is_rejected_before_its_header_is_parsed(version, file):
    header = to_json(metadata(hornbook_format=version))
    file.write_bytes(file_with_header(header[:-1] + b",[", b"of another time"))
    assert error_message(file) == (
        f"{file}: format {version}; this program reads format 1; upgrade this program, or train "
        "again"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "not a regular file"), ("fifo", "not a regular file"), ("loop", "link")],
)
def test_a_path_that_is_no_file_is_rejected(name, words, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    assert words in error_message(tmp_path / name)


# ---------------------------------------------- forged files: correct digest, invalid content


NOT_OURS = "not a checkpoint of this program"
INVALID = "its content is invalid "
WRONG_SIZE = "tensor 'a': its size does not fit shape and dtype"
FORGED = {  # header, and words of the message; 16 bytes of data follow
    "no version": (metadata(), NOT_OURS),
    "version is a word": (metadata(hornbook_format="two"), NOT_OURS),
    "header is no JSON": (extended(b","), f"{INVALID}(JSONDecodeError: "),
    "header is not UTF-8": (extended(b',"\xff":1'), f"{INVALID}(UnicodeDecodeError: "),
    "a duplicate tensor": (
        extended(b',"a":%s,"a":%s' % ((to_json(entry()),) * 2)),
        f"{INVALID}(ValueError: a name occurs twice)",
    ),
    "a number of 5,000 digits": (
        extended(b',"a":' + b"9" * 5000),
        f"{INVALID}(ValueError: Exceeds the limit",
    ),
    "metadata is a number": (
        metadata(hornbook_format="1", config=1),
        "__metadata__ must map names to strings",
    ),
    "nested deeply": (
        extended(b',"a":' + b"[" * 100_000 + b"]" * 100_000),
        f"{INVALID}(RecursionError: ",
    ),
    "millions of parts": (
        extended(b',"a":[' + b",".join([b"{}"] * 1_300_000) + b"]"),
        "the header has too many entries",
    ),
    "a header of 100 MB": (extended(b" " * 100_000_000), "the header has 100,000,"),
    "a gap": (with_a(offsets=(4, 12)), "tensor 'a': begins at byte"),
    "bytes after the last tensor": (with_a(shape=(1,), offsets=(0, 4)), "12 bytes after"),
    "beyond the file": (with_a(shape=(5,), offsets=(0, 20)), "tensor 'a': ends after the end of"),
    "a shape beyond memory": (
        with_a(shape=[2**47, 2**47, 0], offsets=(0, 0)),
        f"{INVALID}(RuntimeError: ",
    ),
    "a negative offset": (with_a(offsets=(-8, 0)), "invalid shape or offset"),
    "unknown dtype": (with_a(dtype="F7"), f"{INVALID}(KeyError: 'F7')"),
    "dtype of another size": (with_a(dtype="F16"), WRONG_SIZE),
    "a tensor that is a number": (valid_header(a=1), f"{INVALID}(TypeError: "),
    "a name with an escape": (
        valid_header(**{"\x1b[2J": entry(offsets=(4, 12))}),
        r"tensor '\x1b[2J': begins at byte",
    ),
}


def message_and_peak_memory(path):
    """Return the error message for a file and the peak of Python's memory while reading it."""
    tracemalloc.start()
    try:
        message = error_message(path)
        return message, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_rejected_quickly_with_bounded_memory(name, file):
    header, expected = FORGED[name]
    file.write_bytes(file_with_header(header, bytes(16)))
    start_time = time.monotonic()
    message, peak = message_and_peak_memory(file)
    assert expected in message and peak <= file.stat().st_size + 64e6
    assert time.monotonic() - start_time < 10


def test_a_header_that_is_longer_than_the_file_is_an_error():
    with pytest.raises(CheckpointError, match="the header has 100 bytes, beyond the end"):
        file_format.parse(bytearray((100).to_bytes(8, "little") + b"{}"))


def test_metadata_of_any_text_is_read_back_exactly(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(0, 0xD800, 50))) for _ in range(20)]
    metadata = {f"{i}": text for i, text in enumerate([*texts, "😀\u2028\0\x1b</script>"])}
    write_atomic(tmp_path / "x", file_format.to_bytes(metadata, TENSORS))
    read, _ = file_format.read(tmp_path / "x")
    assert {name: read[name] for name in metadata} == metadata


def test_what_could_not_be_read_is_not_written():
    vocabulary = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    with pytest.raises(CheckpointError, match="use fewer distinct characters"):
        file_format.to_bytes({"vocabulary": vocabulary}, {})
