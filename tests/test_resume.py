"""Resuming: after any stops and resumes, a run is bit-identical to an uninterrupted one."""

import random
import re
import shlex
import shutil

import pytest

from storage.checkpoint import LAST
from tests.runs import (
    STEPS,
    contents,
    equal,
    same_runs,
    scalars,
    snapshot,
    step_of,
    stop_at,
    train,
    train_and_copy,
    write_checkpoint,
)

# the learning rate rises too far, and soon an evaluation is worse than the one before
EARLY = ["--schedule=constant", "--warmup_ratio=1", "--learning_rate=9", "--muon_learning_rate=9",
         "--patience=1"]  # fmt: skip
ADAMW = [
    "--optimizer=adamw", "--schedule=cosine", "--positions=rope", "--mlp=swiglu",
    "--attention_dropout=0.3", "--kernel=batched", "--gradient_accumulation_steps=1",
    "--save_interval=1000", "--eval_interval=5", "--log_interval=3",
]  # fmt: skip


@pytest.fixture
def stopped(options, tmp_path):
    """The folder of a run that Ctrl-C has stopped in step 9."""
    stop_at(9, *options, f"--out_dir={tmp_path / 'run'}")
    return tmp_path / "run"


# ------------------------------------------------------------------------------------ bit-exactness


def stop_and_resume(stops, options, folder):
    """Train a run, and another one that stops and resumes so many times; compare both."""
    whole, parts = folder / "whole", folder / "parts"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    end = step_of(whole)
    for step in sorted(random.Random(1).sample(range(end), min(stops, end))):
        stop_at(step, *options, f"--out_dir={parts}", "--resume")
        assert step_of(parts) == step + 1
    code, output = train(parts)
    assert code == 0 and "will differ from an uninterrupted run" not in output
    assert same_runs(whole, parts)
    return end


@pytest.mark.parametrize("recipe", [[], ADAMW, EARLY], ids=["muon", "adamw", "early stopping"])
def test_stopping_and_resuming_is_bit_exact(recipe, options, tmp_path):
    end = stop_and_resume(3, [*options, *recipe], tmp_path)
    assert (end < STEPS) == (recipe == EARLY)


def test_a_finished_run_says_how_to_train_it_further_which_is_bit_exact(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant", "--warmup_ratio=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    before = (parts / LAST).read_bytes()
    output = train(parts)[1]
    assert "\nfinished at step 12; --max_iters (or --patience) trains it further\n" in output
    assert (parts / LAST).read_bytes() == before
    assert train(parts, f"--max_iters={STEPS}")[0] == 0
    assert same_runs(whole, parts)


def test_a_run_killed_in_its_first_step_and_moved_goes_on_by_itself(
    options, uninterrupted, tmp_path
):
    moved = train_and_copy(tmp_path / "run", 0, *options)
    shutil.rmtree(tmp_path / "run")
    assert step_of(moved) == 0 and train(moved)[0] == 0
    assert same_runs(uninterrupted, moved)
    assert contents(moved / LAST)["settings"]["out_dir"] == str(moved)


# ---------------------------------------------------------------------------- the files that it has


def test_resume_never_restarts_silently_if_last_is_damaged(stopped):
    (stopped / LAST).write_bytes(b"")
    before = snapshot(stopped)
    code, output = train(stopped)
    assert code == 4 and snapshot(stopped) == before
    assert output.startswith(f"error: {stopped / LAST}: not a Hornbook checkpoint, or damaged (")
    new_run = f"to start a new run from its best weights: --init_from={stopped}"
    assert output.endswith(f"); {new_run}\n")


def test_a_run_goes_on_on_another_machine_with_a_note_of_each_difference(stopped, monkeypatch):
    saved = contents(stopped / LAST)
    saved["environment"]["threads"] = "\x1b[2J"
    saved["settings"]["device"] = "mps"
    write_checkpoint(stopped / LAST, saved)
    for name in ("torch.backends.mps.is_available", "torch.cuda.is_available"):
        monkeypatch.setattr(name, lambda: False)
    code, output = train(stopped)
    assert code == 0 and "note: no MPS device on this machine" in output
    assert "threads \\x1b[2J -> 1" in output
    assert ": the result will differ from an uninterrupted run\n" in output


def test_a_resume_may_change_batch_size_if_a_step_keeps_its_windows(options, tmp_path):
    """Of 4 * 2 windows, in one batch of 8; another number of windows would skip text."""
    whole, parts, options = tmp_path / "whole", tmp_path / "parts", [*options, "--dropout=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(9, *options, f"--out_dir={parts}")
    code, output = train(parts, "--batch_size=6")
    advice = "use --batch_size=4 --gradient_accumulation_steps=2"
    assert code == 2 and output.endswith(f"must stay 8, or the run would skip text; {advice}\n")
    assert train(parts, "--batch_size=8", "--gradient_accumulation_steps=1")[0] == 0
    for tag in ("train/loss", "train/total_epochs"):
        expected, found = ([value for _, value in scalars(run)[tag]] for run in (whole, parts))
        assert found == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------- a run has its text


@pytest.mark.parametrize(("name", "new"), [("sources", ""), ("val_sources", "\xe9")])
def test_another_text_is_refused_and_the_command_in_the_message_starts_a_new_run(
    name, new, train_run, tmp_path
):
    text, val, run = tmp_path / "text.txt", tmp_path / "val.txt", tmp_path / "run"
    val.write_text(text.read_text()[:600])
    words = [f"--val_sources={val}", "--max_iters=8"]
    assert train_run(*words)[0] == 0
    before, other = snapshot(run), tmp_path / "other.txt"
    changed = val if name == "val_sources" else text
    other.write_text(changed.read_text()[::-1] + new, encoding="utf-8")
    code, output = train(run, f"--{name}={other}")
    assert code == 4 and snapshot(run) == before
    assert output.startswith(f"error: {other} is not the text of this run: SHA-256 ")
    assert "if it has moved" not in output

    # the command, as it is printed
    command = shlex.split(output.partition("from these weights: ")[2])[2:]
    assert ("--new_characters=add" in command) == bool(new) and f"--{name}={other}" in command
    code, output = train(*command, "--max_iters=2")
    assert code == 0 and step_of(tmp_path / "run-2") == 2, output
    # another time, it names another folder
    assert f"--out_dir={tmp_path / 'run-3'}" in train(run, f"--{name}={other}")[1]


def test_a_text_that_has_moved_is_found_where_an_option_says(stopped, uninterrupted, tmp_path):
    moved = tmp_path / "text2.txt"
    (tmp_path / "text.txt").rename(moved)
    code, output = train(stopped)
    assert code == 3 and f"text.txt: no such file or folder; did you mean {moved}? If" in output
    assert re.search(rf" If it has moved: .*train.py {stopped} --sources=PATH\n$", output)
    assert train(stopped, f"--sources={moved}")[0] == 0
    assert equal(*(contents(run / LAST)["tensors"] for run in (uninterrupted, stopped)))


def test_text_that_was_held_out_is_not_trained_on_later(stopped, tmp_path):
    (tmp_path / "val.txt").write_text("another text")
    code, output = train(stopped, f"--val_sources={tmp_path / 'val.txt'}")
    assert code == 4 and "val_sources: this run validates on a part of its own text; " in output


# ------------------------------------------------------------------------ a run has its settings


def test_a_config_file_never_changes_a_run_that_is_there(stopped, uninterrupted, tmp_path):
    """Neither its architecture nor its length, and a validation text in it frees none."""
    config, other = tmp_path / "mine.yaml", tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text()[::-1])
    config.write_text(f"max_iters: 7\nn_layer: 7\nval_sources: {other}\n")
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    line = f"resuming {stopped} at step 10 with its own settings, not those of {config}\n"
    assert code == 0 and line in output and "will differ from an uninterrupted run" not in output
    assert same_runs(uninterrupted, stopped)


def test_one_command_starts_a_run_and_resumes_it_bit_exactly(options, uninterrupted, tmp_path):
    """As torchrun --max-restarts and a cluster that restarts jobs need it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*options, f"--init_from={uninterrupted}"]
    output = stop_at(9, *words, f"--out_dir={parts}", "--resume")
    assert output.startswith(f"{parts} has no run to resume: starting one\n")
    assert "lower learning rates were best for fine-tuning" in output
    code, output = train(*words, f"--out_dir={parts}", "--resume")
    assert code == 0 and f"resuming {parts} at step 10 with its own settings" in output
    code, output = train(*words, f"--out_dir={whole}", "--resume")  # a misspelled folder, perhaps
    assert f"{whole} has no run to resume: starting one; runs beside it: {parts}\n" in output
    assert code == 0 and same_runs(whole, parts)
