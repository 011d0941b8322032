"""Resuming: after any sequence of stops and resumes, a run is bit-identical to an uninterrupted
one.
"""

import gc
import random
import re

import pytest
import torch

from run.checkpoint import BEST, LAST, PREV, Checkpoint
from tests.commands import sample_main
from tests.runs import (
    DIVERGING,
    ROOT,
    SMALL,
    STEPS,
    at_step,
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

EARLY = [*DIVERGING, "--save_interval=4", "--patience=1"]
RECIPES = {
    "adamw": ["--optimizer=adamw", "--schedule=cosine", "--positions=rope", "--mlp=swiglu"],
    "no dropout": ["--schedule=constant", "--dropout=0", "--gradient_accumulation_steps=1"],
    "attention dropout": ["--attention_dropout=0.3", "--kernel=batched"],
    "early stopping": EARLY,
    "seldom saved": ["--save_interval=1000", "--eval_interval=5", "--log_interval=3"],
    "stopped at every step": [],
}


@pytest.fixture
def stopped(options, tmp_path):
    """The folder of a run that Ctrl-C has stopped in step 9."""
    stop_at(9, *options, f"--out_dir={tmp_path / 'run'}")
    return tmp_path / "run"


def checkpoints_in_memory():
    gc.collect()  # those of other tests
    return [thing for thing in gc.get_objects() if type(thing) is Checkpoint]


def resuming_line(output):
    (line,) = (line for line in output.splitlines() if line.startswith("resuming"))
    return line


# ------------------------------------------------------------------------------------ bit-exactness


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopping_and_resuming_is_bit_exact(recipe, options, tmp_path):
    options, parts = [*options, *RECIPES[recipe]], tmp_path / "parts"
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    end = step_of(tmp_path / "whole")
    assert (end < STEPS) == (recipe == "early stopping")
    stops = end if recipe == "stopped at every step" else 3
    for step in sorted(random.Random(recipe).sample(range(end), stops)):
        stop_at(step, *options, f"--out_dir={parts}", "--resume")
        assert step_of(parts) == step + 1
    code, output = train(options[0], f"--out_dir={parts}", "--resume")
    assert code == 0 and "not be bit-identical" not in output
    assert same_runs(tmp_path / "whole", parts)


def test_a_finished_run_is_trained_further_bit_exactly(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0  # with 24 steps again
    assert same_runs(whole, parts)


def test_a_checkpoint_of_another_folder_is_resumed_in_a_new_one(
    stopped, options, uninterrupted, tmp_path
):
    new, words = tmp_path / "new", ["--save_interval=7", f"--resume={stopped / PREV}"]
    at_first = train_and_copy(new, 8, *options, *words)
    assert step_of(at_first) == 8  # it is saved at once, with its settings
    assert scalars(new)["train/loss"] == scalars(uninterrupted)["train/loss"][8:]
    assert equal(*(contents(run / LAST)["tensors"] for run in (uninterrupted, new)))


def test_a_resumed_run_does_not_hold_its_checkpoint_in_memory(stopped, options, monkeypatch):
    held = []
    at_step(monkeypatch, 10, lambda: held.extend(checkpoints_in_memory()))
    assert train(options[0], f"--out_dir={stopped}", "--resume")[0] == 0
    # an exception of another test may hold that of its run
    assert [saved for saved in held if saved.path.parent == stopped] == []


# ---------------------------------------------------------------------------- the files that it has


@pytest.mark.parametrize(("interval", "previous"), [("4", 16), ("auto", 12)])
def test_prev_is_the_last_checkpoint_of_the_interval_before(interval, previous, options, tmp_path):
    run = tmp_path / "run"
    stop_at(17, *options, f"--save_interval={interval}", f"--out_dir={run}")
    steps = {path.name: contents(path)["progress"]["step"] for path in run.glob("*.safetensors")}
    assert steps == {PREV: previous, LAST: 18, BEST: 12}


@pytest.mark.parametrize(("damaged", "used"), [([LAST], PREV), ([LAST, PREV], BEST)])
def test_another_checkpoint_is_resumed_in_place_of_a_damaged_one_to_the_same_bits(
    damaged, used, options, uninterrupted, tmp_path
):
    run = tmp_path / "run"
    stop_at(20, *options, f"--out_dir={run}")
    for name in damaged:
        content = (run / name).read_bytes()
        (run / name).write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and f"{run / LAST}: " in output and f"; using {run / used} instead" in output
    assert same_runs(uninterrupted, run)


def test_sample_says_which_checkpoint_it_uses_in_place_of_a_damaged_one(
    train_run, tmp_path, capsys
):
    run = tmp_path / "run"
    assert train_run("--max_iters=8")[0] == 0
    (run / BEST).write_bytes(b"")
    assert sample_main([f"--ckpt={run}", "--max-new-tokens=1"]) == 0
    note = f"{run / BEST}: empty file (interrupted save?); using {run / LAST} instead"
    assert note in capsys.readouterr().err


def test_resume_never_restarts_silently_if_all_checkpoints_are_damaged(
    train_run, options, tmp_path
):
    run = tmp_path / "run"
    stop_at(21, *options, f"--out_dir={run}")
    for path in run.glob("*.safetensors"):
        path.write_bytes(b"")
    before = snapshot(run)
    code, output = train_run("--resume")
    assert code == 4 and output.count("\n") == 1 and snapshot(run) == before
    for name in (LAST, PREV, BEST):
        assert f"{run / name}: empty file (interrupted save?)" in output


def test_resuming_a_finished_run_notes_no_difference_and_changes_nothing(
    train_run, uninterrupted, tmp_path
):
    def contents_of_files():
        files = {name: file and file[1] for name, file in snapshot(run).items()}
        return {name: file for name, file in files.items() if "tfevents" not in name}

    run = tmp_path / "run"
    assert train_run()[0] == 0
    before = contents_of_files()
    code, output = train_run("--resume")
    assert code == 0 and "best validation loss" in output
    assert resuming_line(output) == f"resuming from {run / LAST} at step {STEPS}"
    assert contents_of_files() == before and same_runs(run, uninterrupted)


# ----------------------------------------------------------------------------------- what it prints


def test_resume_lists_every_difference_of_settings_environment_and_data(train_run, tmp_path):
    run = tmp_path / "run"
    assert train_run("--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"threads": "7", "torch": "1.0", "cpu_capability": "\x1b[2J"}
    write_checkpoint(run / LAST, saved)
    changes = ["--attention=heads", "--kernel=loop", "--dtype=bfloat16", "--learning_rate=0.0005"]
    code, output = train_run("--resume", "--max_iters=8", *changes)
    assert code == 0
    for difference in (
        "model.attention fused -> heads",
        "model.kernel sdpa -> loop",
        "train.learning_rate 0.001 -> 0.0005",
        "dtype float32 -> bfloat16",
        r"cpu_capability \x1b[2J -> ",
        "threads 7 -> 1",
        f"torch 1.0 -> {torch.__version__}",
        "the result will not be bit-identical to that of an uninterrupted run\n",
    ):
        assert f"\n{difference}" in output


@pytest.mark.parametrize(
    ("setting", "digest"), [("sources", "sha256"), ("val_sources", "val_sha256")]
)
def test_a_changed_text_is_refused_unless_the_change_is_allowed(
    setting, digest, train_run, tmp_path
):
    texts = {"sources": tmp_path / "text.txt", "val_sources": tmp_path / "val.txt"}
    texts["val_sources"].write_text(texts["sources"].read_text()[:600])
    validation = f"--data.val_sources={texts['val_sources']}"
    assert train_run(validation, "--max_iters=8")[0] == 0
    texts[setting].write_text(texts[setting].read_text()[::-1])
    code, output = train_run(validation, "--resume")
    error = f"error: data.{setting}: the text has changed since the checkpoint"
    assert code == 4 and output.splitlines()[-1].startswith(error)
    code, output = train_run(validation, "--resume", "--allow-data-change", "--max_iters=9")
    assert code == 0 and step_of(tmp_path / "run") == 9
    assert re.search(
        rf"\ndata\.{digest} \w{{64}} -> \w{{64}}\n(.*\n)+.*not be bit-identical", output
    )


@pytest.mark.parametrize(
    ("more", "change"), [([], f"--max_iters={2 * STEPS}"), (EARLY, "--patience=0")]
)
def test_a_finished_run_prints_the_command_that_trains_it_longer(more, change, options, tmp_path):
    run = tmp_path / "run"
    code, output = train(*options, *more, f"--out_dir={run}")
    early = f" of {STEPS}: the validation loss did not improve (patience 1)"
    assert code == 0 and (early in output) == (step_of(run) < STEPS) == bool(more)
    output = train(options[0], f"--out_dir={run}", "--resume")[1]
    words = re.search(r"to train longer:\n  \S+ train.py (.*)\n", output)[1].split()
    assert words == [options[0], f"--out_dir={run}", "--resume", change]
    assert train(*words)[0] == 0 and step_of(run) == (STEPS if more else 2 * STEPS)


# ------------------------------------------------------------------- a run owns its settings


def test_a_bare_command_resumes_what_options_started(stopped, options, uninterrupted):
    """The file says otherwise in nearly every setting; a kill -9 has printed no command."""
    code, output = train(options[0], f"--out_dir={stopped}", "--resume")
    assert code == 0 and "not be bit-identical" not in output
    assert f"max_iters 60 in the file, {STEPS} in the run: --max_iters=60\n" in output
    assert output.count(" in the file, ") == 5
    assert same_runs(uninterrupted, stopped)


def test_the_text_of_a_resumed_run_is_found_without_saying_it_again(stopped, tmp_path):
    """It may even have moved to where the config file says, as long as it is the same."""
    config, moved = tmp_path / "mine.yaml", tmp_path / "moved.txt"
    (tmp_path / "text.txt").rename(moved)
    words, recipe = [config, f"--out_dir={stopped}", "--resume"], (ROOT / SMALL[0]).read_text()
    config.write_text(recipe)
    code, output = train(*words)
    assert code == 4 and "the text has changed since the checkpoint" in output
    config.write_text(f"{recipe}data: {{sources: {moved}}}\n")
    assert train(*words)[0] == 0 and step_of(stopped) == STEPS


def test_a_text_that_an_option_names_is_the_only_one_that_is_looked_at(stopped, tmp_path):
    config = tmp_path / "mine.yaml"
    text = f"data: {{sources: {tmp_path / 'text.txt'}}}\n"  # that of the run
    config.write_text((ROOT / SMALL[0]).read_text() + text)
    words = [f"--out_dir={stopped}", "--resume", "--data.sources=data/plays/orchard.txt"]
    code, output = train(config, *words)
    assert code == 4 and "the text has changed since the checkpoint" in output


def test_the_config_file_in_the_folder_of_a_run_resumes_it(stopped):
    code, output = train(stopped / "config.yaml", "--resume")
    assert code == 0 and step_of(stopped) == STEPS and " in the file, " not in output


def test_a_config_of_another_model_is_the_wrong_folder(options, tmp_path):
    run, config = tmp_path / "run", tmp_path / "other.yaml"
    plain = [options[0], f"--data.sources={tmp_path / 'text.txt'}", "--max_iters=12"]
    assert train(*plain, "--sample_chars=0", f"--out_dir={run}")[0] == 0
    config.write_text("model:\n  n_layer: 7\n")
    code, output = train(config, f"--out_dir={run}", "--resume")
    assert code == 4 and "another model than" in output and "model.n_layer 2 -> 7" in output


def test_a_config_that_has_become_invalid_does_not_keep_a_run_from_resuming(stopped, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  n_head: 3\n  n_embd: 16\n")
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    assert code == 0 and "; the run keeps its own settings\n" in output


def test_a_device_that_this_machine_lacks_becomes_auto(stopped, options):
    saved = contents(stopped / LAST)
    saved["config"]["device"] = "mps"
    write_checkpoint(stopped / LAST, saved)
    code, output = train(options[0], f"--out_dir={stopped}", "--resume")
    assert code == 0 and "note: no MPS device on this machine" in output


def test_the_first_save_is_at_step_0_so_a_run_killed_early_keeps_its_settings(options, tmp_path):
    folder = train_and_copy(tmp_path / "run", 0, *options)
    assert step_of(folder) == 0
    assert train(options[0], f"--out_dir={folder}", "--resume")[0] == 0
    assert same_runs(tmp_path / "run", folder)


# -------------------------------------------------------------------------------- nothing to resume


def test_one_command_starts_a_run_and_resumes_it_and_names_the_runs_beside(options, tmp_path):
    """As torchrun --max-restarts and a cluster that restarts jobs need it."""
    run = tmp_path / "runs" / "run"
    words = [*options, f"--out_dir={run}", "--resume"]
    code, output = train(*words)
    assert code == 0 and output.startswith(f"{run} has no run to resume: starting one\n")
    code, output = train(*words)
    assert code == 0 and resuming_line(output) == f"resuming from {run / LAST} at step {STEPS}"
    misspelled = [*options, f"--out_dir={run}n", "--resume", "--max_iters=12"]
    assert (
        f"{run}n has no run to resume: starting one; runs beside it: {run}\n"
        in train(*misspelled)[1]
    )


def test_fine_tuning_with_resume_starts_once_and_then_resumes(options, uninterrupted, tmp_path):
    run = tmp_path / "run"
    words = [*options, f"--init_from={uninterrupted}", f"--out_dir={run}", "--resume"]
    code, output = train(*words)
    assert code == 0 and "has no run to resume" in output and "were best for fine-tuning" in output
    code, output = train(*words)
    assert code == 0 and resuming_line(output) == f"resuming from {run / LAST} at step {STEPS}"
