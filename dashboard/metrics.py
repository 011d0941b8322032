"""metrics.csv: the numbers of a run in a file that every spreadsheet and script reads.

One row for each logged step, and one for each evaluation; what a row does not have is empty.
"""

import os
import time
from collections.abc import Mapping
from errno import EEXIST
from pathlib import Path

from common.files import atomic_file, read_regular

COLUMNS = {  # column -> tag in TensorBoard
    "train_loss": "train/loss",
    "learning_rate": "train/lr",
    "grad_norm": "train/grad_norm",
    "val_loss": "val/loss",
    "loss_on_training_text": "val/train_loss",
    "exact_match": "val/exact_match",
}
MAX_BYTES = 2**30
HEADER = ",".join(["step", "minutes", *COLUMNS]) + "\n"


class MetricsFile:
    """The metrics of a run that continues at `step`; rows of later steps are removed.

    Raises OSError, also from `add`, if the file cannot be read or written, or is not a file of this
    program.
    """

    def __init__(self, path: Path, step: int):
        old = bytes(read_regular(path, MAX_BYTES)) if os.path.lexists(path) else b""
        try:
            header, *rows = old.decode("ascii").splitlines(keepends=True) or [HEADER]
            # a row without its newline was cut by a kill
            rows = [row for row in rows if row[-1] == "\n" and int(row.split(",")[0]) <= step]
            self.minutes_before = float(rows[-1].split(",")[1]) if rows else 0.0
        except (ValueError, IndexError):
            header = ""
        # never cut back a file that somebody else wrote
        if not HEADER.startswith(header.removesuffix("\n")) or not header:
            raise FileExistsError(EEXIST, "not a file of this program")
        self.path, self.started = path, time.monotonic()
        # a resumed run makes the steps after its checkpoint again, so their rows go
        new = "".join([HEADER, *rows]).encode()
        if new != old:
            with atomic_file(path) as file:
                file.write(new)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row with the values of these TensorBoard tags."""
        minutes = self.minutes_before + (time.monotonic() - self.started) / 60
        cells = [f"{values[tag]:.7g}" if tag in values else "" for tag in COLUMNS.values()]
        with open(self.path, "a", encoding="ascii", newline="") as file:
            file.write(f"{step},{minutes:.3f},{','.join(cells)}\n")
