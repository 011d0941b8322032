"""Answers on several ranks, of which some may get none."""

import sys

import numpy as np
import pytest

from tests.runs import scalars
from tests.slow.ranks import in_float64, run_ranks
from tests.test_lists import SMALL


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_two_ranks_or_micro_batches_of_which_one_may_have_no_target_equal_one_batch(tmp_path):
    text = tmp_path / "list.txt"
    text.write_text("\n".join(f"{'question' * 3}{a}={a % 7}" for a in range(40)))
    options = [*SMALL, f"--sources={text}", "--answer_after=="]
    options += ["--batch_size=2", "--max_iters=6", "--eval_interval=6", "--device=cpu"]
    halves = ["--batch_size=1", "--gradient_accumulation_steps=2"]
    logged = []
    for i, (ranks, more) in enumerate([(1, []), (1, halves), (2, [])]):
        arguments = [*options, *more, f"--out_dir={tmp_path / str(i)}"]
        ended = run_ranks(tmp_path / "output", *[arguments] * ranks, each=in_float64)
        assert [code for code, *_ in ended] == [0] * ranks
        logged.append(scalars(tmp_path / str(i)))
    whole, *divided = logged
    assert len(whole["train/loss"]) < 6  # a step without a target has no loss
    for found in divided:
        assert found["val/exact_match"] == whole["val/exact_match"]
        for tag in ("train/loss", "val/loss"):
            assert np.array(found[tag]) == pytest.approx(np.array(whole[tag]), rel=1e-6)
