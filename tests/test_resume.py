"""Resuming: after any sequence of stops and resumes, a run is bit-identical to an uninterrupted
one.
"""

import random
import re
import shutil

import pytest

from run.checkpoint import BEST, LAST, PREV
from tests.runs import (
    DIVERGING,
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
    code, output = train(parts)
    assert code == 0 and "not be bit-identical" not in output
    assert same_runs(tmp_path / "whole", parts)


def test_a_finished_run_is_trained_further_bit_exactly(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant", "--warmup_ratio=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0  # with 24 steps again
    assert same_runs(whole, parts)


def test_a_copy_of_a_run_folder_goes_on_by_itself(stopped, uninterrupted, tmp_path):
    """To go back, `prev` takes the place of `last`."""
    copy = tmp_path / "elsewhere/copy"
    shutil.copytree(stopped, copy)
    (copy / PREV).replace(copy / LAST)
    shutil.rmtree(stopped)
    code, output = train(copy)
    assert code == 0 and resuming_line(output) == f"resuming {copy} at step 8"
    assert same_runs(uninterrupted, copy)
    assert contents(copy / LAST)["config"]["out_dir"] == str(copy)


# ---------------------------------------------------------------------------- the files that it has


@pytest.mark.parametrize(("interval", "previous"), [("4", 16), ("auto", 12)])
def test_prev_is_the_last_checkpoint_of_the_interval_before(interval, previous, options, tmp_path):
    run = tmp_path / "run"
    stop_at(17, *options, f"--save_interval={interval}", f"--out_dir={run}")
    steps = {path.name: contents(path)["progress"]["step"] for path in run.glob("*.safetensors")}
    assert steps == {PREV: previous, LAST: 18, BEST: 12}


def test_a_resume_by_another_spelling_of_the_folder_does_not_save_the_same_state_again(stopped):
    stop_at(10, stopped / ".." / stopped.name, "--save_interval=1000")
    assert [contents(stopped / name)["progress"]["step"] for name in (PREV, LAST)] == [10, 11]


def test_prev_is_resumed_in_place_of_a_damaged_last_to_the_same_bits(
    options, uninterrupted, tmp_path
):
    run = tmp_path / "run"
    stop_at(20, *options, f"--out_dir={run}")
    content = (run / LAST).read_bytes()
    (run / LAST).write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
    code, output = train(run)
    assert code == 0 and f"{run / LAST}: " in output and f"; using {run / PREV} instead" in output
    assert same_runs(uninterrupted, run)


@pytest.mark.parametrize("best", ["whole", "damaged"])
def test_resume_never_restarts_silently_if_no_checkpoint_can_be_resumed(best, options, tmp_path):
    run = tmp_path / "run"
    stop_at(21, *options, f"--out_dir={run}")
    for path in run.glob("*.safetensors"):
        if path.name != BEST or best == "damaged":
            path.write_bytes(b"")
    before = snapshot(run)
    code, output = train(run)
    assert code == 4 and output.count("\n") == 1 and snapshot(run) == before
    for name in (LAST, PREV):
        assert f"{run / name}: empty file (interrupted save?)" in output
    assert f"; to start a new run from its best weights: --init_from={run}\n" in output


# ----------------------------------------------------------------------------------- what it prints


def test_resume_lists_what_has_changed_without_being_asked_for(train_run, tmp_path):
    run = tmp_path / "run"
    assert train_run("--max_iters=8", "--eval_interval=auto")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"threads": "7", "cpu_capability": "\x1b[2J"}
    write_checkpoint(run / LAST, saved)
    code, output = train(run, "--max_iters=28", "--attention=heads", "--learning_rate=0.0005")
    assert code == 0
    for line in (
        "train.eval_interval 1 -> 3",
        r"cpu_capability \x1b[2J -> ",
        "threads 7 -> 1",
        "the result will not be bit-identical to that of an uninterrupted run\n",
    ):
        assert f"\n{line}" in output
    assert "fused ->" not in output and "0.0005" not in output  # the user has just typed them


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


@pytest.mark.parametrize("change", ["--max_iters=36", "--patience=2"])
def test_a_finished_run_says_how_to_train_it_further_and_both_ways_do(change, options, tmp_path):
    """With another length or patience, the evaluations without a better loss count anew."""
    run = tmp_path / "run"
    code, output = train(*options, *EARLY, f"--out_dir={run}")
    early = f" of {STEPS}: the validation loss did not improve (patience 1)\n"
    assert code == 0 and early in output
    end, before = step_of(run), snapshot(run)
    output = train(run)[1]
    assert f"\nfinished at step {end}; --max_iters (or --patience) trains it further\n" in output
    checkpoints = [name for name in before if name.endswith(".safetensors")]
    assert all(snapshot(run)[name] == before[name] for name in checkpoints)
    assert train(run, change)[0] == 0
    assert step_of(run) > end


# ------------------------------------------------------------------- a run owns its settings


def test_a_config_file_never_changes_a_run_that_is_there(stopped, uninterrupted, tmp_path):
    """Neither its architecture nor its length, and a validation text in it frees none."""
    config, other = tmp_path / "mine.yaml", tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text()[::-1])
    config.write_text(
        f"train: {{max_iters: 7}}\nmodel: {{n_layer: 7}}\ndata: {{val_sources: {other}}}\n"
    )
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    line = f"resuming {stopped} at step 10 with its own settings, not those of {config}"
    assert code == 0 and resuming_line(output) == line and "not be bit-identical" not in output
    assert same_runs(uninterrupted, stopped)


def test_a_config_file_that_cannot_be_read_is_an_error_at_a_resume_too(stopped, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  n_heads: 3\n")
    before = snapshot(stopped)
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    assert code == 2 and "unknown key 'n_heads'" in output and snapshot(stopped) == before


def test_a_scheduler_repeats_its_words_whatever_they_are(options, tmp_path, uninterrupted):
    """--minutes, --init_from and fixed options belong to the start: a resume ignores them."""
    run = tmp_path / "run"
    words = [*options, "--n_layer=1", f"--out_dir={run}", "--resume"]
    stop_at(9, *words)
    more = ["--minutes=3", f"--init_from={uninterrupted}", "--new_characters=add"]
    words = [word for word in words if "max_iters" not in word]
    code, output = train(*words, *more)
    assert code == 0 and f"\n--minutes: the run keeps its {STEPS} steps\n" in f"\n{output}"
    assert same_runs(uninterrupted, run)


def test_a_text_that_has_moved_is_found_where_an_option_says(stopped, uninterrupted, tmp_path):
    moved = tmp_path / "moved.txt"
    (tmp_path / "text.txt").rename(moved)
    code, output = train(stopped)
    assert code == 3 and "text.txt: no such file or folder; " in output
    assert re.search(rf"; if it has moved: .*train.py {stopped} --data.sources=PATH; ", output)
    assert output.endswith(f"; to train a new run on another text: --init_from={stopped}\n")
    assert train(stopped, f"--data.sources={moved}")[0] == 0
    assert equal(*(contents(run / LAST)["tensors"] for run in (uninterrupted, stopped)))


def test_a_text_in_another_encoding_is_the_same_text(stopped, options):
    code, output = train(stopped, "--encoding=latin-1")
    assert code == 0 and "not be bit-identical" not in output  # it is ASCII


def test_text_that_was_held_out_is_not_trained_on_later(stopped, tmp_path):
    (tmp_path / "val.txt").write_text("another text")
    code, output = train(stopped, f"--val_sources={tmp_path / 'val.txt'}")
    assert code == 4 and "the run began without val_sources; adding them would" in output


def test_a_device_that_this_machine_lacks_becomes_auto(stopped):
    saved = contents(stopped / LAST)
    saved["config"]["device"] = "mps"
    write_checkpoint(stopped / LAST, saved)
    code, output = train(stopped)
    assert code == 0 and "note: no MPS device on this machine" in output


def test_the_first_save_is_at_step_0_so_a_run_killed_early_keeps_its_settings(options, tmp_path):
    folder = train_and_copy(tmp_path / "run", 0, *options)
    assert step_of(folder) == 0
    assert train(folder)[0] == 0
    assert same_runs(tmp_path / "run", folder)


# -------------------------------------------------------------------------------- nothing to resume


@pytest.mark.parametrize("way", ["new", "init_from"])
def test_one_command_starts_a_run_and_resumes_it(way, options, uninterrupted, tmp_path):
    """As torchrun --max-restarts and a cluster that restarts jobs need it."""
    run = tmp_path / "run"
    words = [*options, f"--out_dir={run}", "--resume"]
    words += [f"--init_from={uninterrupted}"] if way == "init_from" else []
    code, output = train(*words)
    assert code == 0 and f"{run} has no run to resume: starting one\n" in output
    assert ("were best for fine-tuning" in output) == (way == "init_from")
    before = {path.name: path.read_bytes() for path in run.glob("*.safetensors")}
    code, output = train(*words)
    line = f"resuming {run} at step {STEPS} with its own settings, not those of {options[0]}"
    assert code == 0 and resuming_line(output) == line
    assert {path.name: path.read_bytes() for path in run.glob("*.safetensors")} == before


def test_if_there_is_no_run_to_resume_the_runs_beside_are_named(train_run, tmp_path):
    for folder, beside in (("run", ""), ("runs", f"; runs beside it: {tmp_path / 'run'}")):
        output = train_run("--max_iters=8", "--resume", f"--out_dir={tmp_path / folder}")[1]
        assert f"{tmp_path / folder} has no run to resume: starting one{beside}\n" in output
