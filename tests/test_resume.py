"""Resuming: after any stops and resumes, a run is bit-identical to an uninterrupted one."""

import random
import shlex
import shutil
from dataclasses import replace

import pytest

from storage.checkpoint import LAST, load_checkpoint, to_bytes
from tests.runs import STEPS, losses, same_runs, snapshot, step_of, stop_at, train, train_and_copy

ADAMW = ["--optimizer=adamw", "--schedule=cosine", "--attention_dropout=0.3", "--log_interval=3"]
# the learning rate rises too far, and soon an evaluation is worse than the one before
EARLY = ["--warmup_ratio=1", "--learning_rate=9", "--muon_learning_rate=9", "--patience=1"]


@pytest.mark.parametrize("recipe", [[], ADAMW, EARLY], ids=["muon", "adamw", "early stopping"])
def test_resume_equals_uninterrupted(recipe, options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(*options, *recipe, f"--out_dir={whole}")[0] == 0
    end = step_of(whole)
    assert (end < STEPS) == (recipe == EARLY)
    for step in sorted(random.Random(1).sample(range(end), 3)):
        stop_at(step, *options, *recipe, f"--out_dir={parts}", "--resume")
        assert step_of(parts) == step + 1
    code, output = train(parts)
    assert code == 0 and "will differ from an uninterrupted run" not in output
    assert same_runs(whole, parts)


def test_resume_of_a_finished_run(options, tmp_path):
    """It ends at once; with more steps it trains further."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant", "--warmup_ratio=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    assert "\nfinished at step 12 of 12 (a larger --max_iters trains it further)" in train(parts)[1]
    assert train(parts, f"--max_iters={STEPS}")[0] == 0
    assert same_runs(whole, parts)


def test_resume_of_a_copy(options, uninterrupted, tmp_path):
    """A run that was killed in its first step, without the folder in which it began."""
    copy = train_and_copy(tmp_path / "run", 0, *options)
    shutil.rmtree(tmp_path / "run")
    assert step_of(copy) == 0 and train(copy)[0] == 0
    assert same_runs(uninterrupted, copy)
    assert load_checkpoint(copy / LAST).settings.out_dir == str(copy)


def test_resume_by_the_first_command(options, uninterrupted, tmp_path):
    """As a scheduler repeats it. What has changed in the config since does not count."""
    whole, parts, config = tmp_path / "whole", tmp_path / "parts", tmp_path / "mine.yaml"
    words = [f"--init_from={uninterrupted}", "--resume"]
    assert train(*options, *words, f"--out_dir={whole}")[0] == 0
    output = stop_at(9, *options, *words, f"--out_dir={parts}")
    assert output.startswith(f"{parts} has no run to resume: starting one")
    assert "lower learning rates were best for fine-tuning" in output
    config.write_text("max_iters: 7\nn_layer: 7\nval_sources: other.txt\n")
    output = train(config, *words, f"--out_dir={parts}")[1]
    kept = f"with its own settings and length, not those of {config}"
    assert f"resuming {parts} at step 10 of 24 {kept}\n" in output
    assert same_runs(whole, parts)


@pytest.fixture
def stopped(options, tmp_path):
    """The folder of a run that Ctrl-C has stopped in step 9."""
    stop_at(9, *options, "--dropout=0", f"--out_dir={tmp_path / 'run'}")
    return tmp_path / "run"


def test_resume_with_another_batch_size(stopped, options, tmp_path):
    """If a step keeps its windows, 4 * 2; another number would skip text."""
    code, output = train(stopped, "--batch_size=6")
    advice = "--batch_size=2 --gradient_accumulation_steps=4"
    assert code == 2 and output.endswith(f"must stay 8, or the run would skip text: {advice}\n")
    assert train(stopped, "--batch_size=8", "--gradient_accumulation_steps=1")[0] == 0
    assert train(*options, "--dropout=0", f"--out_dir={tmp_path / 'whole'}")[0] == 0
    assert losses(stopped) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_resume_on_another_machine(stopped, monkeypatch):
    """With a note of the difference."""
    saved = load_checkpoint(stopped / LAST)
    saved.environment = "a Mac"
    saved.settings = replace(saved.settings, device="mps")
    (stopped / LAST).write_bytes(to_bytes(saved))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    code, output = train(stopped)
    assert code == 2 and "no MPS device" in output and "--device=auto" in output
    code, output = train(stopped, "--device=auto")
    assert code == 0 and "\nnote: a Mac -> torch " in output
    assert ": the result will differ from an uninterrupted run\n" in output


def test_resume_with_another_text(train_run, tmp_path):
    """It is refused, and the command in the message starts a new run."""
    text, run, other = tmp_path / "text.txt", tmp_path / "run", tmp_path / "other.txt"
    assert train_run(f"--val_sources={text}", "--max_iters=2")[0] == 0
    before = snapshot(run)
    other.write_text(f"{text.read_text()}\xe9", encoding="utf-8")
    for name in ("val_sources", "sources"):
        code, output = train(run, f"--{name}={other}")
        assert code == 2 and output.startswith(f"error: {name}: not the text of this run, ")
    assert snapshot(run) == before
    command = shlex.split(output.partition("from these weights: ")[2])[2:]
    assert train(*command, "--max_iters=2")[0] == 0 and step_of(tmp_path / "run-2") == 2
    assert load_checkpoint(tmp_path / "run-2" / LAST).settings.data.sources == (str(other),)


def test_resume_with_a_text_that_has_moved(stopped, tmp_path):
    """An option says where it is, and a later resume remembers that."""
    text, moved = tmp_path / "text.txt", tmp_path / "text2.txt"
    text.rename(moved)
    code, output = train(stopped)
    assert code == 2
    assert output.endswith(f" (--sources={text}): no such file or folder; did you mean {moved}?\n")
    assert train(stopped, f"--sources={moved}")[0] == train(stopped)[0] == 0
