"""Each campaign in its short form; the full one is `python -m tests.campaigns.NAME --full`."""

import importlib
import re
from pathlib import Path

import pytest

PROMISES = {
    "kills": r"3 kills in 1 runs: 1 of 1 end to the last bit as the undisturbed run; .*; "
    r"0 of \d+ files unloadable",
    "saves": r"\d\d calls patched .*: each time the old or the new checkpoint was whole, "
    r"and the run went on .*",
    "fields": r"\d+ fields left out, \d+ changed: the resume test failed 12 times of as many; .*",
    "signals": r"5 signals in 5 phases: 5 right exit codes, .*; "
    r"5 resumed to the last bit of the undisturbed run",
    "starts": r"2 pairs of starts: in 2 exactly one trained, "
    r"and the other ended with 7 and named it",
    "ranks": r"1 ranks of 2 killed in 1 runs: 1 of 1 end to the last bit as the undisturbed run; "
    r".*; 0 of \d .*",
    "disk": r"8 sizes of a disk .*; 8 old or new checkpoints load, and go on when there is room",
    "damage": r"150 damaged files: all refused; 150 with a right digest: .*; nothing was executed; "
    r"memory grew by the file and \d+ MB at most",
}


@pytest.mark.parametrize("name", PROMISES)
def test_a_campaign_keeps_its_promise_in_the_short_form(name):
    if name == "disk":
        pytest.importorskip("resource")
    if name == "damage" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("measures memory by /proc")
    if name == "ranks" and not Path("/proc/self/task").exists():
        pytest.skip("finds the ranks in /proc")
    assert re.fullmatch(
        PROMISES[name], importlib.import_module(f"tests.campaigns.{name}").campaign(False)
    )
