"""Campaign: Ctrl-C at any moment of the first seconds of train.py and sample.py.

    python -m tests.campaigns.interrupts [--full]

Each process must end within two seconds with the exit code of Ctrl-C, or by the signal itself, and
without a traceback. The only exception is Python's own start, which compiles the script, before its
first line runs.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.common import (
    ENVIRONMENT,
    ROOT,
    count_checkpoints,
    merged,
    run_campaign,
    small_run_args,
    train,
)

SECONDS = 5.0  # in which the signals are sent
LIMIT = 2.0  # seconds to end
FULL_COUNT = 200  # interrupts of each script
AT_COMPILE = "line 0, in <module>\nKeyboardInterrupt"  # raised before the first line


def campaign(full: bool) -> str:
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, count = random.Random(0), FULL_COUNT if full else 3
    limit = LIMIT if full else 10.0  # the tests share the cores
    slowest, before_the_first_line = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = small_run_args(folder)
        assert train(*words, f"--out_dir={folder / 'run'}")[0] == 0
        scripts = {
            "train.py": [*words, f"--out_dir={folder / 'new'}", "--max_iters=1000000000"],
            "sample.py": [f"--ckpt={folder / 'run'}", "--max_new_tokens=1000000000"],
        }
        for script, options in scripts.items():
            for _ in range(count):
                delay = rng.uniform(0, SECONDS)
                code, seconds, output = interrupt(delay, [script, *merged(options)])
                case = f"{script} after {delay:.3f} s: exit code {code} after {seconds:.1f} s"
                by_python = str(ROOT) not in output or AT_COMPILE in output
                if "KeyboardInterrupt" in output and by_python:
                    before_the_first_line += 1
                    continue
                assert code in (130, -signal.SIGINT), f"{case}\n{output}"
                assert "Traceback" not in output and seconds < limit, f"{case}\n{output}"
                slowest = max(slowest, seconds)
                if (folder / "new").exists():
                    saved, loadable = count_checkpoints(folder / "new")
                    assert saved == loadable, case
                    shutil.rmtree(folder / "new")
    return (
        f"{2 * count} interrupts in the first {SECONDS:g} s of train.py and sample.py: all ended "
        f"within {slowest:.1f} s with the right exit code and without a traceback "
        f"({before_the_first_line} in Python's own start)"
    )


def interrupt(delay: float, words: list[str]) -> tuple[int, float, str]:
    """Start a script, and interrupt it; return exit code, seconds to the end and stderr."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        try:
            code = process.wait(timeout=60)
        finally:
            process.kill()
        seconds = time.monotonic() - sent
        stderr.seek(0)
        return code, seconds, stderr.read().decode()


if __name__ == "__main__":
    run_campaign(campaign)
