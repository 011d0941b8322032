"""Campaign: start two runs in one folder at the same time.

python -m tests.campaigns.starts [--full]
"""

import re
import tempfile
from pathlib import Path

from tests.campaigns.common import run_campaign, small_run_args, start


def campaign(full: bool) -> str:
    pairs = 50 if full else 2
    with tempfile.TemporaryDirectory() as name:
        options = small_run_args(Path(name))
        for pair in range(pairs):
            processes = [start("train.py", *options, f"--out_dir={name}/{pair}") for _ in range(2)]
            outputs = {process.pid: process.communicate()[0] for process in processes}
            assert sorted(process.returncode for process in processes) == [0, 7], outputs
            first, second = sorted(processes, key=lambda process: process.returncode)
            expected = (
                r"error: out_dir: \S+ is in use by pid (\d+) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; "
                r".*\n"
            )
            assert int(re.fullmatch(expected, outputs[second.pid])[1]) == first.pid, outputs
    return (
        f"{pairs} pairs of simultaneous starts: in {pairs} exactly one trained, and the other "
        "exited with code 7 and the pid of the first"
    )


if __name__ == "__main__":
    run_campaign(campaign)
