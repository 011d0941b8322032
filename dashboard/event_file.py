"""The TensorBoard event files of a run.

TensorBoard shows all events in all event files of a folder, so a resumed run must first remove the
events that were written after its checkpoint. Every start of the run writes a new event file with a
higher number. A checkpoint contains the position at which it was saved: the number of the current
event file and its size in bytes.
"""

import io
import re
import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from checkpointing.checkpoint import DESCRIPTION, EVENTS, EventPosition
from common.errors import ResourceError
from common.files import write_atomic

MAX_NUMBER = 10**10 - 1  # ten digits, as in EVENTS


class EventFile:
    """A new event file in a folder, with a name that TensorBoard reads after all others there.

    Records are buffered in memory until `flush` succeeds.
    """

    def __init__(self, folder: Path):
        # a number higher than all others, even if the clock was set back
        names = [path.name for path in folder.glob("*tfevents*")]
        numbers = [int(n) for name in names for n in re.findall(r"tfevents\.(\d{1,10})", name)]
        self.number = max([1, int(time.time()), *(n + 1 for n in numbers if n < MAX_NUMBER)])
        self.path = folder / EVENTS.format(self.number)
        self.size = 0  # bytes on disk
        self.buffer = io.BytesIO()

    @property
    def position(self) -> EventPosition:
        """The current end of the file, to which `truncate_events` can cut it back."""
        return EventPosition(self.number, self.size)

    def add(self, summary: Summary, step: int) -> None:
        # a file begins with its version; a run that logs nothing has no file
        if not self.size and not self.buffer.tell():
            self.buffer.write(_records([]))
        self.buffer.write(_record(Event(summary=summary, step=step, wall_time=time.time())))

    def flush(self) -> None:
        """Write the buffered records to disk; if that fails, raise OSError and keep the buffer."""
        if not self.buffer.tell():
            return
        with open(self.path, "r+b" if self.size else "wb") as file:
            file.seek(self.size)  # overwrite the rest of a failed attempt
            file.write(self.buffer.getvalue())
        self.size += self.buffer.tell()
        self.buffer = io.BytesIO()


def write_description(folder: Path, summaries: Iterable[Summary]) -> None:
    """Replace the file that describes the run; raise ResourceError if it cannot be written."""
    write_atomic(folder / DESCRIPTION, _records(summaries))


def truncate_events(folder: Path, position: EventPosition) -> None:
    """Remove all events that a run wrote to its folder after `position` was saved.

    Changes only event files of this program. Raises ResourceError if they cannot be changed.
    """
    try:
        for number, path in event_files(folder):
            # later files go, the file of that time is cut, earlier ones stay
            if number > position.number:
                path.unlink()
            elif number == position.number and path.stat().st_size > position.size:
                with open(path, "r+b") as file:
                    file.truncate(position.size)
    except OSError as error:
        raise ResourceError(
            f"{error.filename or folder}: cannot remove the events after the "
            f"checkpoint ({error.strerror}); make the folder writable"
        ) from error


def event_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the number and path of each event file of this program, except the description."""
    found = []
    for path in folder.glob(EVENTS.partition("{")[0] + "*"):
        match = re.fullmatch(r"events\.out\.tfevents\.(\d{10})", path.name)
        if match and path.is_file():
            found.append((int(match[1]), path))
    return found


def _records(summaries: Iterable[Summary]) -> bytes:
    """Return the content of an event file: the version, then the summaries at step 0."""
    now = time.time()
    events = [Event(file_version="brain.Event:2", wall_time=now)]
    events += [Event(summary=summary, step=0, wall_time=now) for summary in summaries]
    return b"".join(map(_record, events))


def _record(event: Event) -> bytes:
    """Frame an event as a TFRecord: length, CRC of the length, data, CRC of the data."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()
