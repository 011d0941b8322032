"""TensorBoard's files: each point once, whatever was killed or is full, whatever the clock said."""

import struct
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import masked_crc32c
from torch.utils.tensorboard import SummaryWriter, summary

from dashboard.event_file import EventFile, cut_back


def scalar(tag, value):
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def write(folder, steps, tags=("train/loss",), evaluations=()):
    events = EventFile(folder)
    for step in steps:
        for tag in tags:
            events.add(scalar(tag, step), step)
        if step in evaluations:
            events.add(scalar("val/loss", step), step)
            events.add(summary.text("samples/text", f"of step {step}"), step)
    events.flush()
    return events


def steps(folder, tag="train/loss"):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    found = events.Scalars if tag in events.Tags()["scalars"] else events.Tensors
    return [event.step for event in found(tag)]


def test_tensorboard_reads_what_was_written(tmp_path):
    write(tmp_path, range(1, 5), ("train/loss", "train/lr"), [2, 4])
    assert steps(tmp_path) == steps(tmp_path, "train/lr") == [1, 2, 3, 4]
    assert steps(tmp_path, "val/loss") == steps(tmp_path, "samples/text/text_summary") == [2, 4]


def test_a_record_is_framed_as_tensorboard_frames_it(tmp_path):
    content = write(tmp_path, [1]).path.read_bytes()
    start = 0
    while start < len(content):
        length, check = struct.unpack_from("<QI", content, start)
        data = content[start + 12 : start + 12 + length]
        assert check == masked_crc32c(content[start : start + 8])
        assert struct.unpack_from("<I", content, start + 12 + length)[0] == masked_crc32c(data)
        start += 12 + length + 4
    assert start == len(content)


def test_what_came_after_the_checkpoint_is_gone(tmp_path):
    write(tmp_path, range(1, 11), evaluations=[4, 8])
    cut_back(tmp_path, 6, 4)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path, "val/loss") == steps(tmp_path, "samples/text/text_summary") == [4]


def test_an_evaluation_that_the_checkpoint_does_not_know_of_is_gone_though_its_step_is_not(
    tmp_path,
):
    write(tmp_path, range(1, 9), evaluations=[4, 8])
    cut_back(tmp_path, 8, 4)
    assert steps(tmp_path)[-1] == 8 and steps(tmp_path, "val/loss") == [4]


def test_files_are_cut_whatever_their_names_are(tmp_path):
    for name in (
        "events.out.tfevents.1",
        "events.out.tfevents.9999999999.host.1.0",
        "x.tfevents.v2",
        "tfevents",
    ):
        write(tmp_path, range(1, 6)).path.rename(tmp_path / name)
    with SummaryWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.add_scalar("train/loss", step, step)
    (tmp_path / "notes.txt").write_text("as it was")
    cut_back(tmp_path, 3, 0)
    assert sorted(steps(tmp_path)) == sorted([1, 2, 3] * 5)
    assert (tmp_path / "notes.txt").read_text() == "as it was"


def test_a_record_torn_by_a_kill_is_dropped_wherever_it_is_torn(tmp_path):
    path = write(tmp_path, range(1, 4)).path
    whole = path.read_bytes()
    cut_back(tmp_path, 2, 0)
    two = len(path.read_bytes())
    for size in range(two, len(whole)):
        path.write_bytes(whole[:size])
        cut_back(tmp_path, 3, 0)
        assert path.read_bytes() == whole[:two]
    path.write_bytes(whole[:two] + bytes(64))  # a hole that a power cut left
    cut_back(tmp_path, 3, 0)
    assert path.read_bytes() == whole[:two]


def test_a_file_with_nothing_to_cut_is_not_touched(tmp_path):
    path = write(tmp_path, range(1, 4)).path
    before = path.stat()
    cut_back(tmp_path, 3, 0)
    assert path.stat() == before
    cut_back(tmp_path, 2, 0)
    assert path.stat().st_ino != before.st_ino  # another in its place, in one stroke
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_new_file_comes_after_all_others_even_if_the_clock_was_set_back(tmp_path, monkeypatch):
    names = []
    for now in (2_000_000_000, 1_000_000_000, 1_000_000_000, 2_000_000_001):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        names.append(write(tmp_path, [len(names)]).path.name)
    assert names == sorted(set(names))
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_a_full_disk_delays_the_records_and_loses_none(tmp_path):
    resource = pytest.importorskip("resource")
    events = write(tmp_path, range(1, 4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (4, 5):
        events.add(scalar("train/loss", step), step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (events.size + 10, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                events.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    events.flush()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_without_anything_to_write_there_is_no_file(tmp_path):
    EventFile(tmp_path).flush()
    assert not list(tmp_path.iterdir())
