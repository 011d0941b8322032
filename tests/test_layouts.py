"""A run resumed in another attention layout: the same weights and moments, then losses."""

import pytest

from model.attention import LAYOUTS
from storage.checkpoint import LAST, load_checkpoint, make_checkpoint
from tests.runs import bits, build, losses, small_run_args, stop_at, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By optimizer: the options of a run with biases, and the losses that it has without a stop."""
    runs = {}
    for optimizer in ("muon", "adamw"):
        folder = tmp_path_factory.mktemp(optimizer)
        options = [*small_run_args(folder), "--bias", "--max_iters=12", f"--optimizer={optimizer}"]
        assert train(*options, f"--out_dir={folder / 'whole'}")[0] == 0
        runs[optimizer] = options, losses(folder / "whole")
    return runs


CASES = [*((layout, "muon") for layout in LAYOUTS), ("heads", "adamw")]


@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_resume_in_another_layout(layout, optimizer, runs, tmp_path):
    (options, expected), run = runs[optimizer], tmp_path / "run"
    stop_at(5, *options, f"--out_dir={run}")
    resumed = build(run, f"--layout={layout}")
    assert resumed.model.config.layout == layout
    assert bits(make_checkpoint(resumed).tensors) == bits(load_checkpoint(run / LAST).tensors)
    assert train(run, f"--layout={layout}")[0] == 0
    assert losses(run) == pytest.approx(expected, rel=0, abs=1e-6)
