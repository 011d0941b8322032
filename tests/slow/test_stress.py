"""The short forms of the stress tests; that of cached_text is in test_generate.py."""

from pathlib import Path

import pytest

from tests.stress import damage, kills, ranks


def test_a_killed_run_resumes_bit_exactly_from_the_last_save():
    assert kills.stress(full=False).startswith("1 kills in 1 runs: all end bit-identical")


def test_damaged_checkpoints_are_rejected_and_nothing_in_them_executes():
    assert damage.stress(full=False).startswith("150 damaged files: all rejected")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_run_whose_rank_was_killed_ends_and_is_resumed_bit_exactly():
    assert ranks.stress(full=False).startswith("1 kills of one of 2 ranks in 1 runs: all")
