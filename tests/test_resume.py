"""Resuming: after any sequence of stops and resumes, a run is bit-identical to an uninterrupted
one.
"""

import random
import re
import shutil

import pytest

from storage.checkpoint import BEST, LAST
from tests.runs import (
    STEPS,
    contents,
    equal,
    same_runs,
    snapshot,
    step_of,
    stop_at,
    train,
    train_and_copy,
    write_checkpoint,
)

# the learning rate rises too far, and soon an evaluation is worse than the one before
EARLY = ["--schedule=constant", "--warmup_ratio=1", "--learning_rate=1", "--muon_learning_rate=1",
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


@pytest.mark.parametrize(
    ("recipe", "stops"),
    [([], STEPS), (ADAMW, 3), (EARLY, 3)],
    ids=["muon, stopped at every step", "adamw", "early stopping"],
)
def test_stopping_and_resuming_is_bit_exact(recipe, stops, options, tmp_path):
    options, whole, parts = [*options, *recipe], tmp_path / "whole", tmp_path / "parts"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    end = step_of(whole)
    assert (end < STEPS) == (recipe == EARLY)
    for step in sorted(random.Random(1).sample(range(end), stops)):
        stop_at(step, *options, f"--out_dir={parts}", "--resume")
        assert step_of(parts) == step + 1
    code, output = train(parts)
    assert code == 0 and "not be bit-identical" not in output
    assert same_runs(whole, parts)


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


def test_a_run_out_of_patience_says_so_and_is_trained_further_with_more_steps(options, tmp_path):
    """The evaluations without a better loss count anew."""
    run = tmp_path / "run"
    output = train(*options, *EARLY, f"--out_dir={run}")[1]
    end = step_of(run)
    assert f"at step {end} of {STEPS}: the validation loss did not improve (patience 1)" in output
    assert train(run, "--max_iters=36")[0] == 0 and step_of(run) > end


def test_a_run_killed_in_its_first_step_is_resumed_with_its_settings(options, tmp_path):
    folder = train_and_copy(tmp_path / "run", 0, *options)
    assert step_of(folder) == 0 and train(folder)[0] == 0
    assert same_runs(tmp_path / "run", folder)


def test_a_copy_of_a_run_folder_goes_on_by_itself_from_prev_if_last_is_damaged(
    stopped, uninterrupted, tmp_path
):
    copy = tmp_path / "elsewhere/copy"
    shutil.copytree(stopped, copy)
    shutil.rmtree(stopped)
    content = (copy / LAST).read_bytes()
    (copy / LAST).write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
    code, output = train(copy)
    assert code == 0 and output.startswith(f"{copy / LAST}: checksum mismatch")
    assert f"; using {copy / PREV} instead\nresuming {copy} at step 8\n" in output
    assert same_runs(uninterrupted, copy)
    assert contents(copy / LAST)["settings"]["out_dir"] == str(copy)


# ---------------------------------------------------------------------------- the files that it has


@pytest.mark.parametrize(("interval", "previous"), [("4", 16), ("auto", 12)])
def test_prev_is_the_last_checkpoint_of_the_interval_before(interval, previous, options, tmp_path):
    run = tmp_path / "run"
    stop_at(17, *options, f"--save_interval={interval}", f"--out_dir={run}")
    steps = {path.name: contents(path)["progress"]["step"] for path in run.glob("*.safetensors")}
    assert steps == {PREV: previous, LAST: 18, BEST: 12}


def test_resume_never_restarts_silently_if_no_checkpoint_can_be_resumed(stopped):
    for name in (LAST, PREV):
        (stopped / name).write_bytes(b"")
    before = snapshot(stopped)
    code, output = train(stopped)
    assert code == 4 and snapshot(stopped) == before
    faults = [f"{stopped / name}: empty file (interrupted save?)" for name in (LAST, PREV)]
    new_run = f"to start a new run from its best weights: --init_from={stopped}"
    assert output == f"error: {'; '.join([*faults, new_run])}\n"


def test_resume_lists_what_has_changed_without_being_asked_for(train_run, tmp_path):
    run = tmp_path / "run"
    assert train_run("--max_iters=8", "--eval_interval=auto")[0] == 0
    saved = contents(run / LAST)
    saved["environment"]["threads"] = "\x1b[2J"
    write_checkpoint(run / LAST, saved)
    code, output = train(run, "--max_iters=28", "--layout=heads", "--learning_rate=0.0005")
    assert code == 0 and "\ntrain.eval_interval 1 -> 3\n" in output
    assert "\nthreads \\x1b[2J -> 1\nthe result will not be bit-identical to that of an " in output
    assert "fused ->" not in output and "0.0005" not in output  # the user has just typed them


# ------------------------------------------------------------------------------- a run has its text


@pytest.mark.parametrize("name", ["sources", "val_sources"])
def test_a_changed_text_is_refused_unless_the_change_is_allowed(name, train_run, tmp_path):
    text, val = tmp_path / "text.txt", tmp_path / "val.txt"
    val.write_text(text.read_text()[:600])
    words = [f"--data.val_sources={val}", "--max_iters=8"]
    assert train_run(*words)[0] == 0
    changed = val if name == "val_sources" else text
    changed.write_text(changed.read_text()[::-1])
    code, output = train_run(*words, "--resume")
    error = f"error: data.{name}: the text has changed since the checkpoint"
    assert code == 4 and output.splitlines()[-1].startswith(error)
    code, output = train_run(*words, "--resume", "--allow-data-change", "--max_iters=9")
    assert code == 0 and step_of(tmp_path / "run") == 9
    digest = name.replace("sources", "sha256")
    assert re.search(rf"\ndata\.{digest} \w{{64}} -> \w{{64}}\n", output)
    assert "not be bit-identical" in output


def test_a_text_that_has_moved_is_found_where_an_option_says(stopped, uninterrupted, tmp_path):
    moved = tmp_path / "moved.txt"
    (tmp_path / "text.txt").rename(moved)
    code, output = train(stopped)
    assert code == 3 and "text.txt: no such file or folder; " in output
    assert re.search(rf"; if it has moved: .*train.py {stopped} --data.sources=PATH; ", output)
    assert output.endswith(f"; to train a new run on another text: --init_from={stopped}\n")
    assert train(stopped, f"--data.sources={moved}")[0] == 0
    assert equal(*(contents(run / LAST)["tensors"] for run in (uninterrupted, stopped)))


def test_a_finished_run_keeps_the_options_of_a_resume(stopped, tmp_path):
    moved = tmp_path / "moved.txt"
    assert train(stopped)[0] == 0
    (tmp_path / "text.txt").rename(moved)
    assert train(stopped, f"--data.sources={moved}")[0] == 0
    assert train(stopped)[0] == 0


def test_text_that_was_held_out_is_not_trained_on_later(stopped, tmp_path):
    (tmp_path / "val.txt").write_text("another text")
    code, output = train(stopped, f"--val_sources={tmp_path / 'val.txt'}")
    assert code == 4 and "the run began without val_sources; adding them would" in output


# ------------------------------------------------------------------------ a run has its settings


def test_a_config_file_never_changes_a_run_that_is_there(stopped, uninterrupted, tmp_path):
    """Neither its architecture nor its length, and a validation text in it frees none."""
    config, other = tmp_path / "mine.yaml", tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text()[::-1])
    config.write_text(
        f"train: {{max_iters: 7}}\nmodel: {{n_layer: 7}}\ndata: {{val_sources: {other}}}\n"
    )
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    line = f"resuming {stopped} at step 10 with its own settings, not those of {config}\n"
    assert code == 0 and line in output and "not be bit-identical" not in output
    assert same_runs(uninterrupted, stopped)


def test_a_device_that_this_machine_lacks_becomes_auto(stopped):
    saved = contents(stopped / LAST)
    saved["settings"]["device"] = "mps"
    write_checkpoint(stopped / LAST, saved)
    code, output = train(stopped)
    assert code == 0 and "note: no MPS device on this machine" in output


def test_one_command_starts_a_run_and_resumes_it_bit_exactly(options, uninterrupted, tmp_path):
    """As torchrun --max-restarts and a cluster that restarts jobs need it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*options, "--n_layer=1", f"--init_from={uninterrupted}", "--new_characters=add"]
    output = stop_at(9, *words, f"--out_dir={parts}", "--resume")
    assert output.startswith(f"{parts} has no run to resume: starting one\n")
    assert "were best for fine-tuning" in output
    code, output = train(*words, f"--out_dir={parts}", "--resume")
    line = f"resuming {parts} at step 10 with its own settings, not those of {options[0]}\n"
    assert code == 0 and line in output
    code, output = train(*words, f"--out_dir={whole}", "--resume")  # a misspelled folder, perhaps
    assert f"{whole} has no run to resume: starting one; runs beside it: {parts}\n" in output
    assert code == 0 and same_runs(whole, parts)
