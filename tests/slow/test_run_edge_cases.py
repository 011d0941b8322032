"""Runs and resumes in less common cases: out of patience, on a fallback text, with a text that
moved, without standard output, without a folder.
"""

import os
import shutil
import sys

import pytest

from model.attention import LAYOUTS
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import (
    STEPS,
    at_step,
    evaluations_give,
    raised,
    same_runs,
    small_run_args,
    step_of,
    stop_at,
    train,
)
from tests.slow.ranks import run_ranks
from tests.test_layouts import stop_and_go_on_in
from tests.test_resume import EARLY, stop_and_resume


def test_a_run_that_stops_at_every_step_is_bit_exact(options, tmp_path):
    assert stop_and_resume(STEPS, options, tmp_path) == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_run_goes_on_in_any_layout(layout, options, uninterrupted, tmp_path):
    stop_and_go_on_in(layout, options, uninterrupted, tmp_path / "run")


def test_a_run_out_of_patience_says_so_and_is_trained_further_with_more_steps(options, tmp_path):
    """The evaluations without a better loss count anew."""
    run = tmp_path / "run"
    output = train(*options, *EARLY, f"--out_dir={run}")[1]
    end = step_of(run)
    assert f"at step {end} of {STEPS}: the validation loss did not improve (patience 1)" in output
    assert train(run, "--max_iters=36")[0] == 0 and step_of(run) > end


def test_a_run_that_began_on_the_fallback_keeps_it(tmp_path, monkeypatch):
    """Even if the download works later: another text is another run."""
    *words, text = small_run_args(tmp_path)
    fallback, run, config = text.partition("=")[2], tmp_path / "run", tmp_path / "mine.yaml"
    source = f"https://nowhere.invalid/corpus/input.txt#sha256={'0' * 64}"
    config.write_text(f"sources: {source!r}\nfallback: {fallback}\n")
    monkeypatch.setattr("data.text.urlopen", raised(OSError("no network")))
    code, output = train(config, *words[1:], "--max_iters=4", f"--out_dir={run}")
    assert code == 0 and f"training on {fallback}, losses on it are not comparable" in output
    monkeypatch.setattr("data.text.urlopen", raised(AssertionError("downloaded")))
    code, output = train(run, "--max_iters=5")
    assert code == 0 and "not comparable" not in output, output
    assert load_checkpoint(run / LAST).settings.data.sources == (fallback,)


def test_a_finished_run_keeps_the_options_of_a_resume(options, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved.txt"
    stop_at(9, *options, f"--out_dir={run}")
    assert train(run)[0] == 0
    (tmp_path / "text.txt").rename(moved)
    assert train(run, f"--sources={moved}")[0] == 0
    assert train(run)[0] == 0


def close_stdout(_):
    """Make standard output a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")


def test_a_closed_stdout_does_not_end_a_run(options, uninterrupted, tmp_path):
    words = [*options, f"--out_dir={tmp_path / 'run'}"]
    ((code, _, stderr),) = run_ranks(tmp_path / "console", words, each=close_stdout)
    assert code == 0, stderr
    assert same_runs(uninterrupted, tmp_path / "run")


def test_a_folder_that_is_gone_at_the_end_still_gets_the_finished_weights(
    options, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    at_step(monkeypatch, STEPS - 1, lambda: shutil.rmtree(run))
    evaluations_give(monkeypatch, 1.0, 2.0, 2.0, 2.0)
    code, output = train(*options, f"--out_dir={run}")
    assert code == 0 and output.count("warning: ") == 1 and step_of(run) == STEPS
    assert "best validation loss 1.0000 at step 6" in output
