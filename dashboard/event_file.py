"""TensorBoard's event files: written record by record, and cut back to the checkpoint that a run
goes on from.

TensorBoard shows whatever is in any of them: what came after the checkpoint would stay, beside what
comes in its place. A record is TFRecord's: length, masked CRC-32C of the length, data, masked
CRC-32C of the data. The data is an Event.
"""

import io
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter, masked_crc32c

from checkpointing import file_format

FILES = "*tfevents*"  # TensorBoard's own rule
INTRODUCTION = (
    "run/",
    "_hparams_/",
    "custom_scalars__config__",
)  # tags of step 0 that say what the run is
HEADER, FOOTER = struct.Struct("<QI"), 4  # bytes


class EventFile:
    """A new file in `folder`; its name comes after all that are there, since TensorBoard reads them
    in that order.

    Records wait in memory until `flush` finds room for them.
    """

    def __init__(self, folder: Path):
        numbers = [
            int(n) for path in folder.glob(FILES) for n in re.findall(r"tfevents\.(\d+)", path.name)
        ]
        self.path = (
            folder
            / f"events.out.tfevents.{max(int(time.time()), *(n + 1 for n in [-1, *numbers])):010d}"
        )
        self.size = 0  # bytes that are safe in the file
        self.waiting = io.BytesIO()

    def add(self, summary: Summary, step: int) -> None:
        """Values of `step`; torch.utils.tensorboard.summary makes summaries of most kinds."""
        if not self.size and not self.waiting.tell():
            self._write(Event(file_version="brain.Event:2", wall_time=time.time()))
        self._write(Event(summary=summary, step=step, wall_time=time.time()))

    def flush(self) -> None:
        """Bring what waits to the disk; OSError where it refuses, and then it goes on waiting."""
        if not self.waiting.tell():
            return
        with open(self.path, "r+b" if self.size else "wb") as file:
            file.seek(self.size)  # over what an earlier attempt left
            file.write(self.waiting.getvalue())
        self.size += self.waiting.tell()
        self.waiting = io.BytesIO()

    def _write(self, event: Event) -> None:
        RecordWriter(self.waiting).write(event.SerializeToString())


def cut_back(folder: Path, step: int, evaluated: int) -> None:
    """Drop what came after a checkpoint: tags of train/ after its `step`, the rest after its last
    evaluation.

    A record that a kill has torn ends its file. Files with nothing to drop are left alone;
    ResourceError where one that is cut cannot be written.
    """
    _drop(folder, lambda event: _is_later(event, step, evaluated))


def is_introduced(folder: Path, summaries: Sequence[Summary]) -> bool:
    """Whether the files introduce the run with just these summaries; another introduction is
    dropped from them.
    """
    events = (
        event for path in sorted(folder.glob(FILES)) for event, _ in _records(path.read_bytes())
    )
    same = [event.summary for event in events if _introduces(event)] == list(summaries)
    if not same:
        _drop(folder, _introduces)
    return same


def _drop(folder: Path, dropped: Callable[[Event], bool]) -> None:
    for path in folder.glob(FILES):
        content = path.read_bytes()
        kept = b"".join(record for event, record in _records(content) if not dropped(event))
        if kept != content:
            file_format.write(path, kept)


def _introduces(event: Event) -> bool:
    return any(value.tag.startswith(INTRODUCTION) for value in event.summary.value)


def _is_later(event: Event, step: int, evaluated: int) -> bool:
    in_training = all(value.tag.startswith("train/") for value in event.summary.value)
    return event.step > (step if in_training else evaluated)


def _records(content: bytes) -> Iterator[tuple[Event, bytes]]:
    """Each event with the bytes of its record, as far as they are whole."""
    start = 0
    while start + HEADER.size <= len(content):
        length, check = HEADER.unpack_from(content, start)
        data, end = start + HEADER.size, start + HEADER.size + length + FOOTER
        if check != masked_crc32c(content[start : start + 8]) or end > len(content):
            return
        try:
            event = Event.FromString(content[data : end - FOOTER])
        except DecodeError:
            return
        yield event, content[start:end]
        start = end
