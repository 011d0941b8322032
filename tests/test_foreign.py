"""PyTorch archives of other programs: valid ones are loaded; malicious ones are rejected without
running code or using much memory.
"""

import gzip
import io
import os
import random
import time
import zipfile

import pytest
import torch

from checkpointing import foreign
from common.errors import CheckpointError

PAYLOAD = {
    "weights": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)},
    "numbers": [1, -(2**40), 0.1, float("inf"), True, None],
    "text": "é\n",
    "pair": (1, "x"),
}
PICKLE = "archive/data.pkl"


def error_message(path):
    """Return the error message for an invalid file: one line that starts with its name."""
    with pytest.raises(CheckpointError) as caught:
        foreign.load(path)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "weights_only" not in message
    return message


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save(PAYLOAD, path)
    return path


def zip_of(records, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_a_valid_archive_is_loaded(file):
    assert equal(foreign.load(file), PAYLOAD)


def test_a_state_dict_of_a_real_model_is_loaded(file):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.save({"model": model.state_dict(), "iter_num": 7, "config": {"n_layer": 1}}, file)
    loaded = foreign.load(file)
    assert loaded["iter_num"] == 7 and list(loaded["model"]) == list(model.state_dict())
    assert all(map(torch.equal, loaded["model"].values(), model.state_dict().values()))


def test_the_state_of_an_optimizer_is_loaded(file):
    """Its groups share one tuple, AdamW's betas."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    torch.save(optimizer.state_dict(), file)
    assert equal(foreign.load(file), optimizer.state_dict())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        random.Random(1).randbytes(5000),
        b"First Citizen:\n" * 100,
        gzip.compress(b"x" * 1000),
        zip_of({"readme.txt": b"hello"}),
        b"PK\3\4",
    ],
    ids=["empty", "random", "text", "gzip", "zip", "magic"],
)
def test_files_that_are_no_torch_archive_are_rejected(file, content):
    file.write_bytes(content)
    error_message(file)


def test_a_truncated_archive_is_rejected(file):
    content = file.read_bytes()
    for length in range(0, len(content), 101):
        file.write_bytes(content[:length])
        error_message(file)


def test_unreadable_paths_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        "": "not a regular file",
        "fifo": "not a regular file",
        "loop": "symbolic link",
        "none": "no such file",
    }
    for name, words in expected.items():
        assert words in error_message(tmp_path / name)


# --------------------------------------------------------------------------------- forged archives


def archive_of(pickle):
    return zip_of({PICKLE: b"\x80\x02" + pickle + b".", "archive/version": b"3\n"})


def tensor_pickle(
    numel=b"K\x06", size=b"K\x02K\x03\x86", stride=b"K\x03K\x01\x86", storage=b"FloatStorage"
):
    """Return the pickle of one tensor stored in the record archive/data/0."""
    persistent = (
        b"(X\x07\0\0\0storagectorch\n" + storage + b"\nX\x01\0\0\x000X\x03\0\0\0cpu" + numel + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + persistent
        + b"K\0"
        + size
        + stride
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def long_int(number):
    return b"\x8a\x08" + number.to_bytes(8, "little")


FORGED_ARCHIVES = {
    "a call": (
        archive_of(b"cos\nsystem\nX\x0c\0\0\0touch harmed\x85R"),
        "foreign object os system",
    ),
    "a large allocation": (
        archive_of(b"cbuiltins\nbytearray\n" + long_int(3 * 10**9) + b"\x85R"),
        "builtins bytearray",
    ),
    "a name with an escape": (archive_of(b"c\x1b[2J\nx\n"), r"foreign object \x1b[2J x"),
    "a list of itself, doubled": (archive_of(b"]" + b"q\0h\0h\0\x86" * 40), "an object used twice"),
    "a tuple of itself, doubled": (
        archive_of(b"K\1\x85q\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40))),
        "an object used twice",
    ),
    "tuples in tuples": (archive_of(b")" + b"\x85" * 10**6), "nested more than 100 deep"),
    "tuples as keys": (archive_of(b"})" + b"\x85" * 10**6 + b"K\1s"), "nested more than 100 deep"),
    "lists in lists": (archive_of(b"(" * 10**5 + b"l" * 10**5), "nested more than 100 deep"),
    "millions of lists": (archive_of(b"(" + b"]" * 2**22 + b"t"), "bytes of structure"),
    "half a pickle": (zip_of({PICKLE: b"\x80\x02(]"}), "not a PyTorch checkpoint"),
    "no such opcode": (archive_of(b"\xff"), "not a PyTorch checkpoint"),
    "an unset memo entry": (archive_of(b"h\7"), "not a PyTorch checkpoint"),
    "no pickle": (zip_of({"archive/version": b"3\n"}), "0 records named data.pkl"),
    "compressed zeros": (
        zip_of({PICKLE: b"\x80\x02}.", "archive/data/0": bytes(10**7)}, zipfile.ZIP_DEFLATED),
        "compressed records",
    ),
    "names that differ in case": (
        zip_of({PICKLE: b"\x80\x02}.", PICKLE.upper(): b"x"}),
        "two records have the same name",
    ),
    "a record too small": (
        zip_of(
            {
                PICKLE: b"\x80\x02" + tensor_pickle(numel=long_int(10**10)) + b".",
                "archive/data/0": bytes(24),
            }
        ),
        "not a PyTorch checkpoint",
    ),
}


@pytest.mark.parametrize("name", FORGED_ARCHIVES)
def test_a_forged_archive_is_rejected_without_running_code_or_using_much_memory(
    name, file, monkeypatch
):
    resource = pytest.importorskip("resource")
    monkeypatch.chdir(file.parent)
    archive, words = FORGED_ARCHIVES[name]
    file.write_bytes(archive)
    peak, start_time = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert words in error_message(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KB
    assert time.monotonic() - start_time < 20
    assert [path.name for path in file.parent.iterdir()] == ["ckpt.pt"]


def test_overlapping_records_are_rejected(file):
    """Let many central directory entries name the same bytes: a zip bomb without compression."""
    content = zip_of({PICKLE: b"\x80\x02}.", "archive/data/0": bytes(10_000)})
    start = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)
    end = content.index(b"PK\5\6")
    copies = b"".join(content[start:end].replace(b"data/0", b"data/%d" % i) for i in range(1, 10))
    count, size = (
        (11).to_bytes(2, "little"),
        (end - content.index(b"PK\1\2") + len(copies)).to_bytes(4, "little"),
    )
    tail = content[end : end + 8] + count + count + size + content[end + 16 :]
    file.write_bytes(content[:end] + copies + tail)
    assert "overlapping records" in error_message(file)


def test_tensors_saved_on_a_gpu_are_loaded_on_the_cpu(file):
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    assert b"X\x03\0\0\0cpu" in records[name]
    records[name] = records[name].replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    file.write_bytes(zip_of(records))
    assert equal(foreign.load(file), PAYLOAD)
