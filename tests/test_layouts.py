"""A run resumed in another attention layout: the same weights and moments, then losses."""

import pytest

from model.attention import LAYOUTS
from storage.checkpoint import LAST, load_checkpoint, make_checkpoint
from tests.runs import bits, build, losses, small_run_args, stop_at, train


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The options of a run with biases, and the losses that it has without a stop."""
    folder = tmp_path_factory.mktemp(request.param)
    options = [*small_run_args(folder), "--bias=true", f"--optimizer={request.param}"]
    assert train(*options, f"--out_dir={folder / 'whole'}")[0] == 0
    return options, losses(folder / "whole")


CASES = [*((layout, "muon") for layout in LAYOUTS), ("heads", "adamw")]


@pytest.mark.parametrize(("layout", "runs"), CASES, indirect=["runs"])
def test_resume_in_another_layout(layout, runs, tmp_path):
    (options, expected), run = runs, tmp_path / "run"
    stop_at(9, *options, f"--out_dir={run}")
    resumed = build(run, f"--layout={layout}")
    assert resumed.model.config.layout == layout
    assert bits(make_checkpoint(resumed).tensors) == bits(load_checkpoint(run / LAST).tensors)
    assert train(run, f"--layout={layout}")[0] == 0
    assert losses(run) == pytest.approx(expected, rel=0, abs=1e-6)
