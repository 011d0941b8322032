"""Runs and resumes in less common cases: a stop at every step, any layout, patience, a fallback
text, overfitting, automatic saves, another length, no standard output, no folder.
"""

import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from model.attention import LAYOUTS
from storage import folder as folder_module
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


@pytest.mark.parametrize(("train_losses", "warned"), [
    ([3.0, 2.0, 1.9, 1.8, 1.7, 1.6], True),
    ([3.0, 1.9, 1.9, 1.9, 1.9, 1.9], False),  # it has learned what it can
])  # fmt: skip
def test_a_validation_loss_that_only_rises_while_the_training_loss_falls_is_overfitting(
    train_losses, warned, options, tmp_path, monkeypatch
):
    """A resumed run knows it too: it compares with the best step, not with its first evaluation."""
    val_losses = [3.0, 2.0, 2.1, 2.2, 2.3, 2.4]
    evaluations_give(monkeypatch, *val_losses, train_losses=train_losses)
    words = [*options, "--eval_interval=4", f"--out_dir={tmp_path / 'run'}"]
    assert "overfitting" not in stop_at(17, *words)
    code, output = train(*words, "--resume")
    assert code == 0 and output.count("overfitting: ") == warned
    fell = "not improved since step 8, while the loss on training text fell from 2.0000 to 1.7000"
    assert (fell in output) == warned


@pytest.mark.parametrize(
    ("step_seconds", "save_seconds", "expected"),
    [
        (10, 0, [*range(0, 21, 2), 23, 24]),  # 15 s at first; after 150 s, a tenth
        (1000, 0, [*range(25)]),  # never more than five minutes
        (10, 1, [0, 5, 10, 15, 20, 24]),  # 50 times what a save takes
    ],
)
def test_an_automatic_save_comes_after_a_tenth_of_the_time_so_far(
    step_seconds, save_seconds, expected, options, tmp_path, monkeypatch
):
    saved, clock = set(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    to_bytes = folder_module.to_bytes

    def slow_to_bytes(checkpoint):
        saved.add(checkpoint.progress.step)
        clock.now += save_seconds
        return to_bytes(checkpoint)

    monkeypatch.setattr(folder_module, "to_bytes", slow_to_bytes)
    for step in range(STEPS):
        at_step(monkeypatch, step, lambda: setattr(clock, "now", clock.now + step_seconds))
    assert (
        train(
            *options, f"--out_dir={tmp_path / 'run'}", "--save_interval=auto", "--eval_interval=99"
        )[0]
        == 0
    )
    assert sorted(saved) == expected


def test_a_longer_run_keeps_dropout_and_interval_and_says_how_to_choose_them_anew(
    options, tmp_path
):
    run = tmp_path / "run"
    words = ["--batch_size=16", "--n_embd=32", "--dropout=auto", "--eval_interval=auto"]
    assert train(*options, *words, "--max_iters=10", f"--out_dir={run}")[0] == 0
    code, output = train(run, "--max_iters=12")
    line = "note: the run keeps dropout 0 and eval_interval 1; for the new length: --dropout=auto"
    assert code == 0 and f"\n{line} --eval_interval=auto\n" in output
    code, output = train(run, "--max_iters=60", "--dropout=auto", "--eval_interval=auto")
    assert code == 0 and "the run keeps" not in output
    settings = load_checkpoint(run / LAST).settings
    assert (settings.model.dropout, settings.train.eval_interval) == (0.05, 6)
    assert "the run keeps" not in train(run)[1]  # the same length


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
