"""A save that fails, or is killed at any of its calls, leaves the old file or the new one whole."""

import errno
import io
import os
from functools import partial

import pytest

from common.console import ResourceError
from common.files import write_atomic

LAST, OLD, NEW = "last.safetensors", b"old" * 5000, b"new" * 5000
CALLS = ["create", "write", "fsync", "replace"]  # of a save


class Killed(BaseException):
    """The end of the process: no later call succeeds, not even for cleanup."""


class System:
    """The calls of a save; number `fatal` fails."""

    def __init__(self, patch, fault=None, fatal=-1):
        self.calls, self.fault, self.fatal = [], fault, fatal
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, partial(self.call, name, getattr(os, name)))
        patch.setattr("common.files.open", partial(self.call, "create", self.create), raising=False)

    def create(self, path, mode):
        file = HalfFile(path, mode)
        file.system = self
        return file

    def call(self, name, function, *arguments, **options):
        if isinstance(self.fault, Killed) and len(self.calls) > self.fatal >= 0:
            raise Killed
        self.calls.append(name)
        if len(self.calls) - 1 == self.fatal:
            raise self.fault
        return function(*arguments, **options)


class HalfFile(io.FileIO):
    """A file of which a write that fails has written half."""

    def write(self, content):
        half = super().write(content[: len(content) // 2])
        return self.system.call("write", super().write, content[half:])


def test_save_calls(tmp_path, monkeypatch):
    """The file is on the disk before it has its name."""
    system = System(monkeypatch)
    write_atomic(tmp_path / LAST, OLD)
    assert system.calls == CALLS and (tmp_path / LAST).read_bytes() == OLD


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_save_without_fsync(code, tmp_path, monkeypatch):
    """On a drive that cannot, the file is there all the same."""
    System(monkeypatch, OSError(code, "no fsync here"), CALLS.index("fsync"))
    write_atomic(tmp_path / LAST, NEW)
    assert (tmp_path / LAST).read_bytes() == NEW


@pytest.mark.parametrize("fatal", range(len(CALLS)))
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), Killed()], ids=repr)
def test_save_fails(fault, fatal, tmp_path, monkeypatch):
    write_atomic(tmp_path / LAST, OLD)
    words = rf"{LAST}: not saved \(No space left\); earlier files are intact"
    with monkeypatch.context() as patch, pytest.raises((ResourceError, Killed)) as caught:
        System(patch, fault, fatal)
        write_atomic(tmp_path / LAST, NEW)
    if caught.type is ResourceError:  # it frees the space
        assert caught.match(words) and os.listdir(tmp_path) == [LAST]
    assert (tmp_path / LAST).read_bytes() == OLD
    write_atomic(tmp_path / LAST, NEW)  # removes what a killed one left
    assert os.listdir(tmp_path) == [LAST]
