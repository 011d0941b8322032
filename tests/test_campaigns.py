"""Short forms of the campaigns; `python -m tests.campaigns.NAME --full` runs the full form."""

import importlib
import re
import sys
from pathlib import Path

import pytest

RESULTS = {
    "kills": r"3 kills in 1 runs: 1 of 1 end bit-identical to an uninterrupted run; .*; "
    r"0 of \d+ checkpoints damaged",
    "saves": r"\d\d patched .*: each time the old or the new checkpoint was intact, "
    r"and the resumed run ended .*",
    "fields": r"\d+ fields removed, \d+ changed: the resume test detected 12 of 12; .*",
    "signals": r"5 signals in 5 phases: 5 correct exit codes, .*; "
    r"5 resumed runs bit-identical to an uninterrupted run",
    "interrupts": r"6 interrupts in the first 5 s of train.py and sample.py: all ended within .* s "
    r"with the right exit code and without a traceback .*",
    "starts": r"2 pairs of simultaneous starts: in 2 exactly one trained, "
    r"and the other exited with code 7 and the pid of the first",
    "ranks": r"1 kills of one of 2 ranks in 1 runs: 1 of 1 end bit-identical to an uninterrupted "
    r"run; .*; 0 of \d .*",
    "ends": r"2 of 2 runs of 2 ranks ended without an error",
    "disk": r"8 amounts of free disk space .*; in all 8 cases the old or the new checkpoint loads, "
    r"and the run resumes when there is space",
    "damage": r"150 damaged files: all rejected; 150 forged files with a correct digest: .*; "
    r"no code was executed; memory grew by the file and \d+ MB at most",
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_short_form_of_a_campaign_passes(name):
    if name == "disk":
        pytest.importorskip("resource")
    if name == "damage" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("measures memory by /proc")
    if name == "interrupts" and sys.platform == "win32":
        pytest.skip("Windows sends no SIGINT to a single process")
    if name == "ranks" and not Path("/proc/self/task").exists():
        pytest.skip("finds the ranks in /proc")
    assert re.fullmatch(
        RESULTS[name], importlib.import_module(f"tests.campaigns.{name}").campaign(False)
    )
