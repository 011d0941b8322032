"""The sealed file: what comes back is what was written or nothing, and a save that fails or is
killed loses nothing.
"""

import errno
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from checkpointing import file_format
from common.errors import CheckpointError, ResourceError

PAYLOAD = {
    "weights": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)},
    "numbers": [1, -(2**40), 0.1, float("inf"), True, None],
    "text": "é\n",
    "pair": (1, "x"),
}
PICKLE = "archive/data.pkl"


def refusal(path):
    """What is said of a file that must be refused; on one line, with its name in front."""
    with pytest.raises(CheckpointError) as caught:
        file_format.read(path)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "weights_only" not in message
    return message


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "last.pt"
    file_format.write(path, file_format.seal(PAYLOAD))
    return path


def records_of(path):
    with zipfile.ZipFile(path) as archive:
        return {record.filename: archive.read(record) for record in archive.infolist()}


def packed(records, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def write_sealed(path, archive, version=1):
    """Seal any zip archive as a forger would, who knows the format."""
    tag = b"hornbook checkpoint format %d sha256 " % version
    content = archive[:-2] + (len(tag) + 64).to_bytes(2, "little") + tag
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())


# --------------------------------------------------------------------------------- whole or refused


def test_what_is_read_is_what_was_written(file):
    assert equal(file_format.read(file), PAYLOAD)
    assert file_format.verify(file) is None


def test_plain_torch_load_opens_the_file(file):
    assert equal(torch.load(file, weights_only=True), PAYLOAD)


def test_every_tensor_is_written_dense_and_without_gradient(file):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    file_format.write(
        file,
        file_format.seal({"view": base[:2], "turned": base.T, "broadcast": base[0].expand(5, 4)}),
    )
    back = file_format.read(file)
    for name, tensor in {
        "view": base[:2],
        "turned": base.T,
        "broadcast": base[0].expand(5, 4),
    }.items():
        assert torch.equal(back[name], tensor)
        assert file_format.is_dense(back[name]) and not back[name].requires_grad


@pytest.mark.parametrize(
    "value", [torch.zeros(1).numpy()[0], {1, 2}, b"x", torch.float32, print], ids=type
)
def test_what_is_not_plain_is_not_written(file, value):
    before = file.read_bytes()
    with pytest.raises(TypeError, match=type(value).__name__):
        file_format.write(file, file_format.seal({"value": value}))
    assert file.read_bytes() == before


def test_every_flipped_bit_is_refused(file):
    content = file.read_bytes()
    seal = len(content) - 128
    positions = sorted({*random.Random(0).sample(range(seal), 80), *range(seal, len(content))})
    for position in positions:
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                file_format.verify(file)
            if position < seal and position > 3:
                assert "checksum mismatch" in str(caught.value)


def test_every_truncation_is_refused(file):
    content = file.read_bytes()
    for length in (*range(0, len(content) - 128, 37), *range(len(content) - 128, len(content))):
        file.write_bytes(content[:length])
        assert ("empty file (interrupted save?)" if length == 0 else "not a checkpoint") in refusal(
            file
        )


def test_what_is_appended_is_refused(file):
    with file.open("ab") as appended:
        appended.write(b"\n")
    assert "no format tag" in refusal(file)


@pytest.mark.parametrize(
    "content",
    [
        random.Random(1).randbytes(5000),
        b"First Citizen:\n" * 100,
        json.dumps({"model": [1, 2]}).encode(),
        gzip.compress(b"x" * 1000),
        packed({"readme.txt": b"hello"}),
        b"PK\3\4",
    ],
    ids=["random", "text", "json", "gzip", "zip", "magic"],
)
def test_a_foreign_file_is_refused(file, content):
    file.write_bytes(content)
    assert "not a checkpoint of this program" in refusal(file)
    write_sealed(file, content)
    assert "not a checkpoint of this program" in refusal(file)


def test_another_programs_checkpoint_is_refused(file):
    torch.save({"model": {"weight": torch.zeros(3)}, "iter_num": 7}, file)
    assert "no format tag" in refusal(file)


def test_a_newer_format_is_named_before_anything_of_it_is_read(file):
    write_sealed(file, packed({"another layout": b"of another time"}), version=3)
    assert "written by version 3 of the format, this reads <= 1; upgrade" in refusal(file)


def test_what_is_no_readable_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        "": "not a regular file",
        "fifo": "not a regular file",
        "loop": "symbolic link",
        "none": "no such file",
    }
    for name, words in expected.items():
        assert words in refusal(tmp_path / name)


# ---------------------------------------------------------- forged: a right digest over bad content


def forged(pickle):
    return packed({PICKLE: b"\x80\x02" + pickle + b".", "archive/version": b"3\n"})


def tensor_pickle(
    numel=b"K\x06", size=b"K\x02K\x03\x86", stride=b"K\x03K\x01\x86", storage=b"FloatStorage"
):
    """The pickle of one tensor over the record archive/data/0."""
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


def huge(number):
    return b"\x8a\x08" + number.to_bytes(8, "little")


BOMBS = {
    "a call": (forged(b"cos\nsystem\nX\x0c\0\0\0touch harmed\x85R"), "foreign object os system"),
    "a large allocation": (
        forged(b"cbuiltins\nbytearray\n" + huge(3 * 10**9) + b"\x85R"),
        "builtins bytearray",
    ),
    "a name with an escape": (forged(b"c\x1b[2J\nx\n"), r"foreign object \x1b[2J x"),
    "a list of itself, doubled": (forged(b"]" + b"q\0h\0h\0\x86" * 40), "an object used twice"),
    "tuples in tuples": (forged(b")" + b"\x85" * 10**6), "nested more than 100 deep"),
    "tuples as keys": (forged(b"})" + b"\x85" * 10**6 + b"K\1s"), "nested more than 100 deep"),
    "lists in lists": (forged(b"(" * 10**5 + b"l" * 10**5), "nested more than 100 deep"),
    "millions of lists": (forged(b"(" + b"]" * 2**22 + b"t"), "bytes of structure"),
    "half a pickle": (packed({PICKLE: b"\x80\x02(]"}), "not a checkpoint of this program"),
    "no such opcode": (forged(b"\xff"), "not a checkpoint of this program"),
    "what was never kept": (forged(b"h\7"), "not a checkpoint of this program"),
    "no pickle": (packed({"archive/version": b"3\n"}), "not a checkpoint of this program"),
    "compressed zeros": (
        packed({PICKLE: b"\x80\x02}.", "archive/data/0": bytes(10**7)}, zipfile.ZIP_DEFLATED),
        "compressed records",
    ),
    "names that differ in case": (
        packed({PICKLE: b"\x80\x02}.", PICKLE.upper(): b"x"}),
        "two records of one name",
    ),
    "a record too small": (
        packed(
            {
                PICKLE: b"\x80\x02" + tensor_pickle(numel=huge(10**10)) + b".",
                "archive/data/0": bytes(24),
            }
        ),
        "not a checkpoint of this program",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_forged_file_is_refused_and_nothing_in_it_runs_or_grows(name, file, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.chdir(file.parent)
    archive, words = BOMBS[name]
    write_sealed(file, archive)
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert words in refusal(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KB
    assert time.monotonic() - began < 20
    assert [path.name for path in file.parent.iterdir()] == ["last.pt"]


def test_overlapping_records_are_refused(file):
    """Each of many central entries names the same bytes: nothing is compressed, and yet it
    grows.
    """
    content = packed({PICKLE: b"\x80\x02}.", "archive/data/0": bytes(10_000)})
    start = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)
    end = content.index(b"PK\5\6")
    copies = b"".join(content[start:end].replace(b"data/0", b"data/%d" % i) for i in range(1, 10))
    count, size = (
        (11).to_bytes(2, "little"),
        (end - content.index(b"PK\1\2") + len(copies)).to_bytes(4, "little"),
    )
    tail = content[end : end + 8] + count + count + size + content[end + 16 :]
    write_sealed(file, content[:end] + copies + tail)
    assert "overlapping records" in refusal(file)


def test_a_tensor_of_few_numbers_and_a_large_shape_costs_nothing_to_read(file):
    pickle = tensor_pickle(size=huge(10**6) * 2 + b"\x86", stride=b"K\0K\0\x86")
    write_sealed(
        file,
        packed(
            {
                PICKLE: b"\x80\x02" + pickle + b".",
                "archive/data/0": bytes(24),
                "archive/version": b"3",
            }
        ),
    )
    tensor = file_format.read(file)
    assert tensor.shape == (10**6, 10**6) and not file_format.is_dense(tensor)


def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu(file):
    records = records_of(file)
    assert b"X\x03\0\0\0cpu" in records[PICKLE]
    records[PICKLE] = records[PICKLE].replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    write_sealed(file, packed(records))
    assert equal(file_format.read(file), PAYLOAD)


# --------------------------------------------------------------------------------- faults of a save


class Killed(BaseException):
    """The process is gone: nothing runs after it, no cleaning up either."""


class System:
    """The system calls of a save. The one numbered `fatal` raises `fault`; `calls` lists those that
    were made.
    """

    def __init__(self, monkeypatch, fault=None, fatal=-1):
        self.calls, self.fault, self.fatal, self.dead = [], fault, fatal, False
        for name in ("link", "replace", "unlink", "fsync", "open", "close"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))
        monkeypatch.setattr(file_format, "open", self.opened, raising=False)

    def watched(self, name, call):
        def run(*arguments, **options):
            self.happens(name, *arguments)
            return call(*arguments, **options)

        return run

    def opened(self, path, mode):
        if mode != "xb":
            return open(path, mode)
        self.happens("create", path)
        return WatchedFile(path, self)

    def happens(self, name, *arguments):
        if self.dead:
            raise Killed
        self.calls.append(
            (name, *(Path(each).name for each in arguments if isinstance(each, (str, Path))))
        )
        if len(self.calls) - 1 == self.fatal:
            self.dead = isinstance(self.fault, Killed)
            raise self.fault


class WatchedFile(io.FileIO):
    """A new file; a write that fails has written half."""

    def __init__(self, path, system):
        super().__init__(path, "xb")
        self.system = system

    def write(self, content):
        super().write(content[: len(content) // 2])
        self.system.happens("write")
        return super().write(content[len(content) // 2 :])


def payload(step):
    return {"step": step, "weights": torch.full((50,), float(step))}


def step_of(path):
    """The step of a whole file, None of a damaged or missing one."""
    try:
        read = file_format.read(path)
    except CheckpointError:
        return None
    assert equal(read, payload(read["step"]))
    return read["step"]


@pytest.fixture
def folder(tmp_path):
    """A run that saved at steps 1 and 2, and is about to save at step 3."""
    for step in (1, 2):
        save(tmp_path, step)
    assert (step_of(tmp_path / "prev.pt"), step_of(tmp_path / "last.pt")) == (1, 2)
    return tmp_path


def save(folder, step):
    file_format.write(
        folder / "last.pt", file_format.seal(payload(step)), previous=folder / "prev.pt"
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_syncs_the_file_before_it_is_renamed_and_the_folder_after(folder, monkeypatch):
    with monkeypatch.context() as patch:
        system = System(patch)
        save(folder, 3)
    new, old = f"last.pt.tmp.{os.getpid()}", f"prev.pt.tmp.{os.getpid()}"
    assert system.calls == [
        ("unlink", new),
        ("create", new),
        ("write",),
        ("fsync",),
        ("unlink", old),
        ("link", "last.pt", old),
        ("replace", new, "last.pt"),
        ("replace", old, "prev.pt"),
        ("unlink", old),
        ("open", folder.name),
        ("fsync",),
        ("close",),
        ("unlink", new),
    ]


FATAL = range(14)  # one more than a save has calls


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "I/O error")], ids=str
)
def test_whichever_call_of_a_save_fails_the_old_or_the_new_is_whole(
    folder, monkeypatch, fault, links
):
    refused = 0
    for fatal in FATAL:
        save(folder, 1)
        save(folder, 2)
        with monkeypatch.context() as patch:
            system = System(patch, fault, fatal)
            if not links:
                patch.setattr(os, "link", without_links)
            try:
                save(folder, 3)
            except ResourceError as error:
                refused += 1
                message = str(error)
                assert error.exit_code == 5 and "\n" not in message
                assert f".pt: not saved ({fault.strerror}): need 0.0 MB" in message
                assert f"MB free at {folder}; what was saved before is whole" in message
        done = [call for i, call in enumerate(system.calls) if i != fatal]
        in_place = any(call[0] == "replace" and call[2] == "last.pt" for call in done)
        assert step_of(folder / "last.pt") == (3 if in_place else 2)
        assert step_of(folder / "prev.pt") in (1, 2)
        assert names(folder) == ["last.pt", "prev.pt"]
    assert refused >= 8


def without_links(*_):
    raise PermissionError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("damaged", [True, False], ids=["last-damaged", "last-whole"])
def test_killed_at_any_call_of_a_save_a_run_has_a_whole_file(folder, monkeypatch, damaged, links):
    killed = 0
    for fatal in FATAL:
        save(folder, 1)
        save(folder, 2)
        if damaged:
            (folder / "last.pt").write_bytes(b"")
        with monkeypatch.context() as patch:
            System(patch, Killed(), fatal)
            if not links:
                patch.setattr(os, "link", without_links)
            try:
                save(folder, 3)
            except Killed:
                killed += 1
        last, prev = step_of(folder / "last.pt"), step_of(folder / "prev.pt")
        assert last in ((None, 3) if damaged else (2, 3))
        assert prev == 1 or last == 3
        file_format.remove_stale(folder)
        assert names(folder) == ["last.pt", "prev.pt"]
    assert killed >= 12


def test_what_a_dead_process_of_our_number_left_does_not_stop_a_save(folder):
    for name in ("last.pt", "prev.pt"):
        (folder / f"{name}.tmp.{os.getpid()}").write_bytes(b"half")
    save(folder, 3)
    assert names(folder) == ["last.pt", "prev.pt"] and step_of(folder / "last.pt") == 3


def test_only_the_unfinished_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = [f"last.pt.tmp.{dead.pid}", f"best.pt.tmp.{os.getpid()}"]
    others = [f"last.pt.tmp.{os.getppid()}", "last.pt", "notes.tmp.txt"]
    for name in stale + others:
        (tmp_path / name).write_bytes(b"")
    file_format.remove_stale(tmp_path)
    assert names(tmp_path) == sorted(others)


def test_a_disk_that_fills_at_any_byte_leaves_the_old_file(folder):
    resource = pytest.importorskip("resource")
    size = (folder / "last.pt").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(0, size, size // 16):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(ResourceError, match="not saved"):
                save(folder, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (step_of(folder / "prev.pt"), step_of(folder / "last.pt")) == (1, 2)
        assert names(folder) == ["last.pt", "prev.pt"]


def test_a_folder_that_is_gone_is_told(tmp_path):
    with pytest.raises(ResourceError, match="not saved") as caught:
        save(tmp_path / "gone", 1)
    assert caught.value.exit_code == 5


def test_a_reader_beside_a_trainer_sees_only_whole_files(folder):
    done = threading.Event()
    seen = []

    def reads():
        while not done.is_set():
            seen.append(file_format.read(folder / "last.pt")["step"])

    reader = threading.Thread(target=reads)
    reader.start()
    for step in range(3, 60):
        save(folder, step)
    done.set()
    reader.join()
    assert len(seen) > 5 and seen == sorted(seen) and None not in seen
