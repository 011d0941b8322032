"""TensorBoard event files: every record exactly once after kills, full disks and clock changes."""

import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import Summary

from checkpointing.checkpoint import EventPosition
from common.errors import ResourceError
from dashboard.event_file import DESCRIPTION, EventFile, truncate_events, write_description
from tests.conftest import file_size_limit


def scalar(tag, value):
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def write(folder, steps, tags=("train/loss",), events=None):
    events = events or EventFile(folder)
    for step in steps:
        for tag in tags:
            events.add(scalar(tag, step), step)
    events.flush()
    return events


def steps(folder, tag="train/loss"):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return [event.step for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_tensorboard_reads_every_record(tmp_path):
    EventFile(tmp_path).flush()
    assert not list(tmp_path.iterdir())  # without records no file is created
    write(tmp_path, range(1, 5), ("train/loss", "train/lr"))
    assert steps(tmp_path) == steps(tmp_path, "train/lr") == [1, 2, 3, 4]


def test_events_after_the_checkpoint_are_removed(tmp_path):
    events = write(tmp_path, [1, 2, 3])
    saved = events.position
    write(tmp_path, [4, 5], events=events)
    truncate_events(tmp_path, saved)
    assert steps(tmp_path) == [1, 2, 3]
    before = events.path.stat()
    assert before.st_size == saved.size
    truncate_events(tmp_path, saved)  # again, after a resume that was killed at once
    assert events.path.stat() == before  # nothing to remove: the file is not modified


def test_files_of_later_processes_are_removed_and_earlier_ones_unchanged(tmp_path):
    write(tmp_path, [1, 2])
    saved = write(tmp_path, [3, 4]).position
    for _ in range(3):  # resumed, and killed before the first save
        write(tmp_path, [5, 6])
    assert len(names(tmp_path)) == 5
    truncate_events(tmp_path, saved)
    assert steps(tmp_path) == [1, 2, 3, 4] and len(names(tmp_path)) == 2


def test_a_partial_record_is_removed_wherever_it_ends(tmp_path):
    events = write(tmp_path, [1, 2])
    saved, whole = events.position, events.path.read_bytes()
    write(tmp_path, [3], events=events)
    longer = events.path.read_bytes()
    for size in range(len(whole), len(longer)):
        events.path.write_bytes(longer[:size])
        truncate_events(tmp_path, saved)
        assert events.path.read_bytes() == whole
    events.path.write_bytes(whole + bytes(64))  # zeros left by a power cut
    truncate_events(tmp_path, saved)
    assert events.path.read_bytes() == whole


def test_a_folder_that_cannot_be_changed_is_a_resource_error(tmp_path, monkeypatch):
    path = write(tmp_path, [1, 2, 3]).path

    def deny(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", deny)
    with pytest.raises(ResourceError, match=f"{path}.*Permission denied"):
        truncate_events(tmp_path, EventPosition())


def test_a_new_file_sorts_after_all_others_even_if_the_clock_was_set_back(tmp_path, monkeypatch):
    names = []
    for now in (2_000_000_000, 1_000_000_000, 1_000_000_000, 2_000_000_001):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        names.append(write(tmp_path, [len(names)]).path.name)
    assert names == sorted(set(names))
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_the_description_is_one_file_that_is_read_first_and_replaced_as_a_unit(tmp_path):
    write(tmp_path, [1])
    for value in (1.0, 2.0):
        write_description(tmp_path, [scalar("run/x", value)])
        events = EventAccumulator(str(tmp_path)).Reload()
        assert [event.value for event in events.Scalars("run/x")] == [value]
    assert names(tmp_path)[0] == DESCRIPTION and len(names(tmp_path)) == 2
    truncate_events(tmp_path, EventPosition())
    assert names(tmp_path) == [DESCRIPTION]


def test_a_full_disk_delays_records_and_loses_none(tmp_path):
    events = write(tmp_path, range(1, 4))
    for step in (4, 5):
        events.add(scalar("train/loss", step), step)
        before = events.position
        with file_size_limit(events.size + 10), pytest.raises(OSError, match="too large"):
            events.flush()
        assert events.position == before
    events.flush()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
