"""Two starts at once on one folder: python -m tests.campaigns.starts [--full]"""

import re
import tempfile
from pathlib import Path

from tests.campaigns.common import command, small, start


def campaign(full: bool) -> str:
    pairs = 50 if full else 2
    with tempfile.TemporaryDirectory() as name:
        options = small(Path(name))
        for pair in range(pairs):
            both = [start("train.py", *options, f"--out_dir={name}/{pair}") for _ in range(2)]
            said = {process.pid: process.communicate()[0] for process in both}
            assert sorted(process.returncode for process in both) == [0, 7], said
            first, second = sorted(both, key=lambda process: process.returncode)
            told = (
                r"error: out_dir: \S+ is in use by pid (\d+) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; "
                r".*\n"
            )
            assert int(re.fullmatch(told, said[second.pid])[1]) == first.pid, said
    return (
        f"{pairs} pairs of starts: in {pairs} exactly one trained, "
        "and the other ended with 7 and named it"
    )


if __name__ == "__main__":
    command(campaign)
