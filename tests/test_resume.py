"""Resuming: after any sequence of stops and resumes, a run is bit-identical to an uninterrupted
one.
"""

import random
import re

import pytest
import torch

from checkpointing.checkpoint import BEST, LAST, PREV
from common import files
from common.files import write_atomic
from tests.commands import sample_main
from tests.runs import (
    DIVERGING,
    ROOT,
    SMALL,
    STEPS,
    contents,
    equal,
    resume_if_saved,
    same_runs,
    scalars,
    snapshot,
    step_of,
    stop_at,
    train,
    write_checkpoint,
)

EARLY = [*DIVERGING, "--save_interval=4", "--patience=1"]
RECIPES = {
    "adamw-cosine": ["--optimizer=adamw", "--schedule=cosine"],
    "adamw-constant": ["--optimizer=adamw", "--schedule=constant"],
    "adamw-rope": ["--optimizer=adamw", "--positions=rope", "--mlp=swiglu", "--norm=rmsnorm"],
    "no dropout": ["--schedule=cosine", "--dropout=0", "--gradient_accumulation_steps=1"],
    "attention dropout": ["--schedule=constant", "--attention_dropout=0.3", "--kernel=batched"],
    "early stopping": EARLY,
    "seldom saved": ["--save_interval=1000", "--eval_interval=5", "--log_interval=3"],
    "stopped at every step": [],
}


def steps_in(run):
    """Return the step of each checkpoint of a run by file name."""
    return {path.name: contents(path)["progress"]["step"] for path in run.glob("*.safetensors")}


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
        stop_at(step, *options, f"--out_dir={parts}", *resume_if_saved(parts))
        assert step_of(parts) == step + 1
    code, output = train(*options, f"--out_dir={parts}", "--resume")
    assert code == 0 and "not be bit-identical" not in output
    assert same_runs(tmp_path / "whole", parts)


def test_a_finished_run_is_trained_further_bit_exactly(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0
    assert same_runs(whole, parts)


def test_resuming_from_another_folder_continues_in_a_new_one(options, uninterrupted, tmp_path):
    stopped, new = tmp_path / "stopped", tmp_path / "new"
    stop_at(21, *options, f"--out_dir={stopped}")
    code, output = train(*options, f"--out_dir={new}", f"--resume={stopped / PREV}")
    assert code == 0 and f"resuming from {stopped / PREV} at step 20" in output
    assert scalars(new)["train/loss"] == scalars(uninterrupted)["train/loss"][20:]
    assert equal(*(contents(run / LAST)["tensors"] for run in (uninterrupted, new)))


# ---------------------------------------------------------------------------- the files that it has


@pytest.mark.parametrize(("interval", "previous"), [("4", 16), ("auto", 12)])
def test_prev_is_the_last_checkpoint_of_the_interval_before(interval, previous, options, tmp_path):
    run = tmp_path / "run"
    stop_at(17, *options, f"--save_interval={interval}", f"--out_dir={run}")
    assert steps_in(run) == {PREV: previous, LAST: 18, BEST: 12}


@pytest.mark.parametrize("more", [[], EARLY], ids=["all steps", "early stopping"])
def test_a_finished_run_has_its_best_last_and_previous_checkpoints(more, train_run, tmp_path):
    code, output = train_run(*more)
    steps = steps_in(tmp_path / "run")
    early = f", at step {steps[LAST]} of {STEPS}: the validation loss did not improve (patience 1)"
    assert code == 0 and steps[BEST] <= steps[LAST] and steps[PREV] < steps[LAST]
    assert (steps[LAST] < STEPS) == (early in output) == bool(more)


def test_if_the_final_save_is_damaged_prev_is_resumed(
    train_run, options, uninterrupted, tmp_path, monkeypatch
):
    def flip_a_bit(path, content, previous=None):
        if path.name == LAST and previous.exists():
            content = bytes([*content[:-1], content[-1] ^ 1])
        write_atomic(path, content, previous)

    run = tmp_path / "run"
    stop_at(20, *options, f"--out_dir={run}")
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", flip_a_bit)
        assert train_run("--resume", "--save_interval=100")[0] == 0
    code, output = train_run("--resume")
    assert code == 0 and f"using {run / PREV} instead" in output
    assert same_runs(uninterrupted, run)


def test_a_run_that_has_only_its_best_checkpoint_is_resumed_from_it(options, tmp_path):
    """A kill after the first evaluation, before the first interval of saves."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = [*options, "--save_interval=100"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(20, *options, f"--out_dir={run}")
    (run / LAST).unlink()
    assert not (run / PREV).exists()
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and f"; using {run / BEST} instead" in output
    assert same_runs(whole, run)


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


def test_resuming_a_finished_run_notes_no_difference_and_changes_no_file(train_run, tmp_path):
    def contents_of_files():
        return {name: file and file[1] for name, file in snapshot(run).items()}

    run = tmp_path / "run"
    assert train_run()[0] == 0
    before = contents_of_files()
    code, output = train_run("--resume")
    assert code == 0 and "best validation loss" in output
    assert resuming_line(output) == f"resuming from {run / LAST} at step {STEPS}"
    assert contents_of_files() == before


# ----------------------------------------------------------------------------------- what it prints


def test_resume_lists_every_difference_of_settings_environment_and_data(train_run, tmp_path):
    run = tmp_path / "run"
    assert train_run("--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    long = "x" * 100_000
    saved["environment"] |= {"threads": 7, "torch": "1.0", "cpu_capability": f"\x1b[2J{long}"}
    saved["data"]["name"] = f"x.txt{long}"
    write_checkpoint(run / LAST, saved)
    changes = ["--attention=heads", "--kernel=loop", "--dtype=bfloat16", "--learning_rate=0.0005"]
    code, output = train_run("--resume", "--max_iters=8", *changes)
    line = resuming_line(output)
    assert code == 0 and len(line) < 2000
    for difference in (
        "model.attention fused -> heads",
        "model.kernel sdpa -> loop",
        "train.learning_rate 0.001 -> 0.0005",
        "dtype float32 -> bfloat16",
        r"cpu_capability \x1b[2Jxxx",
        "threads 7 -> 1",
        f"torch 1.0 -> {torch.__version__}",
        "data.name x.txtxxx",
    ):
        assert f"; {difference}" in line
    assert line.endswith("the result will not be bit-identical to that of an uninterrupted run")


def test_training_a_finished_run_further_prints_where_the_learning_rate_goes(train_run):
    words = ["--schedule=cosine", "--warmup_iters=0"]
    assert train_run(*words)[0] == 0
    code, output = train_run(*words, "--resume", f"--max_iters={2 * STEPS}")
    assert code == 0
    assert "; the learning rate goes from 10% to 55% of its peak; " in resuming_line(output)


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
    assert code == 4 and output.count("\n") == 1
    assert output.startswith(f"error: data.{setting}: the text has changed since the checkpoint")
    code, output = train_run(validation, "--resume", "--allow-data-change", "--max_iters=9")
    assert code == 0 and step_of(tmp_path / "run") == 9
    line = resuming_line(output)
    assert re.search(rf"; data\.{digest} \w{{64}} -> \w{{64}}; .*not be bit-identical", line)


def test_a_run_that_patience_stopped_prints_a_command_that_continues_it(train_run, tmp_path):
    assert train_run(*EARLY)[0] == 0
    assert step_of(tmp_path / "run") < STEPS
    code, output = train_run(*EARLY, "--resume")
    words = re.search(r"to train longer:\n  \S+ train.py (.*)\n", output)[1].split()
    assert code == 0 and words[-1] == "--patience=0"
    assert train(*words)[0] == 0 and step_of(tmp_path / "run") == STEPS


# -------------------------------------------------------------------------------- nothing to resume


def test_resume_refuses_an_out_dir_without_a_run(options, tmp_path):
    def answer(folder):
        code, output = train(*options, f"--out_dir={folder}", "--resume")
        assert code == 4 and output.count("\n") == 1
        return output.removeprefix("error: ").removesuffix("\n")

    out = tmp_path / "out"
    nothing = "holds no run to resume; without --resume a new one starts there"
    assert answer(out / "shakespeare") == f"out_dir: {out}/shakespeare {nothing}"
    (out / "empty").mkdir()
    assert answer(out / "empty") == f"out_dir: {out}/empty {nothing}"


@pytest.mark.parametrize("word", ["--resume", "--resume=auto"])
def test_resume_starts_a_run_in_the_empty_folder_of_a_config_and_resumes_it(
    word, options, tmp_path
):
    """One command starts a run and resumes it, as torchrun --max-restarts needs."""
    config, run = tmp_path / "mine.yaml", tmp_path / "run"
    config.write_text(f"out_dir: {run}\n{(ROOT / SMALL[0]).read_text()}")
    words = [config, *options[1:], word]
    assert train(*words, f"--out_dir={run}")[0] == 4  # may be a typo
    code, output = train(*words)
    assert code == 0 and output.startswith(f"nothing to resume in {run}: starting ")
    code, output = train(*words)
    assert code == 0 and resuming_line(output) == f"resuming from {run / LAST} at step {STEPS}"
