"""Resuming: after any sequence of stops and resumes, a run is bit-identical to an uninterrupted
one.
"""

import random
import re
import shutil

import pytest
import torch

from checkpointing import file_format
from checkpointing.checkpoint import BEST, LAST, PREV
from checkpointing.run_dir import CheckpointManager
from common import files
from common.files import write_atomic
from tests.commands import sample_main
from tests.runs import (
    DIVERGING,
    ROOT,
    SMALL,
    STEPS,
    at_step,
    contents,
    count_checkpoints,
    equal,
    outcome,
    resume_if_saved,
    same_runs,
    scalars,
    small_run_args,
    step_of,
    stop_at,
    train,
    train_and_copy,
    write_checkpoint,
)

RECIPES = {
    "adamw-cosine": ["--optimizer=adamw", "--schedule=cosine"],
    "adamw-constant": ["--optimizer=adamw", "--schedule=constant"],
    "adamw-trapezoid-rope": [
        "--optimizer=adamw",
        "--positions=rope",
        "--mlp=swiglu",
        "--norm=rmsnorm",
    ],
    "muon-cosine-no-dropout": [
        "--schedule=cosine",
        "--dropout=0",
        "--gradient_accumulation_steps=1",
    ],
    "muon-trapezoid": ["--schedule=trapezoid"],
    "muon-constant-attention-dropout": [
        "--schedule=constant",
        "--attention_dropout=0.3",
        "--kernel=batched",
    ],
    "early stopping": [*DIVERGING, "--save_interval=4", "--patience=1"],
    "seldom saved": ["--save_interval=1000", "--eval_interval=5", "--log_interval=3"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopping_and_resuming_is_bit_exact(recipe, options, tmp_path):
    options, parts = [*options, *RECIPES[recipe]], tmp_path / "parts"
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    end = step_of(tmp_path / "whole")
    assert (end < STEPS) == (recipe == "early stopping")
    for step in sorted(random.Random(recipe).sample(range(end), 3)):
        stop_at(step, *options, f"--out_dir={parts}", *resume_if_saved(parts))
        assert step_of(parts) == step + 1
    code, output = train(*options, f"--out_dir={parts}", "--resume")
    assert code == 0 and "not be bit-identical" not in output
    assert same_runs(tmp_path / "whole", parts)


def test_the_state_of_the_float16_grad_scaler_is_restored(options, tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp,
        "GradScaler",
        lambda *_, **__: scaler("cpu", init_scale=2.0**127, growth_interval=5),
    )
    parts = tmp_path / "parts"
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    for step in (3, 10):
        stop_at(step, *options, f"--out_dir={parts}", *resume_if_saved(parts))
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0
    assert same_runs(tmp_path / "whole", parts)
    assert 1 < outcome(parts)[LAST]["progress"]["loss_scale"] < 2.0**127


def steps_in(run):
    """Return the step of each checkpoint of a run by file name."""
    return {path.name: contents(path)["progress"]["step"] for path in run.glob("*.safetensors")}


def test_the_best_checkpoint_is_saved_before_the_last_one_that_refers_to_it(
    options, tmp_path, monkeypatch
):
    saved = []

    def record(path, *content, **previous):
        saved.append(path.name)
        write_atomic(path, *content, **previous)

    monkeypatch.setattr(files, "write_atomic", record)
    assert train(*options, "--save_interval=6", f"--out_dir={tmp_path / 'run'}")[0] == 0
    assert [name for name in saved if name in (BEST, LAST)][:2] == [BEST, LAST]


def test_prev_is_the_previous_last_checkpoint(options, tmp_path):
    run = tmp_path / "run"
    stop_at(12, *options, f"--out_dir={run}")
    assert steps_in(run) == {PREV: 12, LAST: 13, BEST: 12}


@pytest.mark.parametrize("recipe", ["muon-constant-attention-dropout", "early stopping"])
def test_a_finished_run_keeps_best_and_last_and_removes_prev(recipe, options, tmp_path):
    run = tmp_path / "run"
    code, output = train(*options, *RECIPES[recipe], f"--out_dir={run}")
    assert code == 0
    steps = steps_in(run)
    early = f", at step {steps[LAST]} of {STEPS}: the validation loss did not improve (patience 1)"
    assert (early in output) == (recipe == "early stopping")
    assert steps.keys() == {BEST, LAST}
    assert (steps[LAST] < STEPS) == (recipe == "early stopping") and steps[BEST] <= steps[LAST]


def test_a_run_killed_before_it_removed_prev_removes_it_on_resume(options, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(CheckpointManager, "remove_prev", lambda _: 1 / 0)
        train(*options, f"--out_dir={run}")
    assert steps_in(run) == {PREV: 20, LAST: STEPS, BEST: STEPS}
    assert train(*options, f"--out_dir={run}", "--resume")[0] == 0
    assert steps_in(run) == {LAST: STEPS, BEST: STEPS}


def test_if_the_final_save_is_damaged_prev_is_kept(options, tmp_path, monkeypatch):
    def flip_a_bit(path, content, previous=None):
        if path.name == LAST and previous.exists():
            content = bytes([*content[:-1], content[-1] ^ 1])
        write_atomic(path, content, previous)

    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(20, *options, f"--out_dir={run}")
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", flip_a_bit)
        code, output = train(*options, f"--out_dir={run}", "--resume", "--save_interval=100")
    assert code == 4 and re.search(
        rf"error: {run / LAST}: .*checksum.*; {run / PREV} is kept; resume from it\n\Z", output
    )
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and f"using {run / PREV} instead" in output
    assert same_runs(whole, run)


def test_a_finished_run_is_trained_further_bit_exactly(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--resume")[0] == 0
    assert same_runs(whole, parts)


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()]
)
def test_a_damaged_or_missing_last_checkpoint_falls_back_to_prev_with_one_line(
    damage, options, tmp_path
):
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(21, *options, f"--out_dir={other}")
    damage(other / LAST)
    code, output = train(*options, f"--out_dir={other}", "--resume")
    first_line = output.splitlines()[0]
    assert (
        code == 0
        and f"{other / 'last.safetensors'}: " in first_line
        and f"; using {other / 'prev.safetensors'} instead" in first_line
    )
    assert same_runs(whole, other)


def test_resume_never_restarts_silently_if_all_checkpoints_are_damaged(options, tmp_path):
    run = tmp_path / "run"
    stop_at(21, *options, f"--out_dir={run}")
    for path in run.glob("*.safetensors"):
        path.write_bytes(b"")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.glob("*event*"))
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert (
        code == 4
        and output.count("empty file (interrupted save?)") == 3
        and output.count("\n") == 1
    )
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.glob("*event*")) == before


def test_resuming_a_finished_run_changes_no_file(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and "best validation loss" in output
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
    assert after == before


def test_a_new_run_removes_the_events_of_one_that_died_before_its_first_save(
    options, tmp_path, monkeypatch
):
    def die():
        raise ZeroDivisionError

    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 3, die)
        train(*options, f"--out_dir={run}")
    assert list(run.glob("*tfevents*")) and not list(run.glob("*.safetensors"))
    assert train(*options, f"--out_dir={run}")[0] == 0
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(1, STEPS + 1))


def test_resuming_from_another_folder_continues_in_a_new_one(options, tmp_path):
    whole, stopped, new = (tmp_path / name for name in ("whole", "stopped", "new"))
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(21, *options, f"--out_dir={stopped}")
    code, output = train(*options, f"--out_dir={new}", f"--resume={stopped / PREV}")
    assert code == 0 and f"resuming from {stopped / PREV} at step 20" in output
    a, b = outcome(whole), outcome(new)
    assert scalars(new)["train/loss"] == scalars(whole)["train/loss"][20:]
    assert count_checkpoints(new)[1] >= 2
    assert equal(a[LAST]["tensors"], b[LAST]["tensors"])


def test_resume_lists_every_difference_of_settings_environment_and_data(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"threads": 7, "torch": "1.0", "cpu_capability": "\x1b[2J"}
    saved["data"]["name"] = "x.txt"
    write_checkpoint(run / LAST, saved)
    changes = ("--max_iters=8", "--kernel=loop", "--dtype=bfloat16")
    code, output = train(*options, f"--out_dir={run}", "--resume", *changes)
    (line,) = (line for line in output.splitlines() if line.startswith("resuming"))
    assert code == 0
    for difference in (
        "model.kernel sdpa -> loop",
        "dtype float32 -> bfloat16",
        r"cpu_capability \x1b[2J -> ",
        "threads 7 -> 1",
        f"torch 1.0 -> {torch.__version__}",
        "data.name x.txt -> text.txt",
    ):
        assert f"; {difference}" in line
    assert line.endswith("; the result will not be bit-identical to that of an uninterrupted run")


def test_long_texts_in_a_checkpoints_environment_are_shortened(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"torch": "x" * 100_000, "cpu_capability": "\x1b" * 100_000}
    saved["data"]["name"] = "y" * 100_000
    write_checkpoint(run / LAST, saved)
    code, output = train(*options, f"--out_dir={run}", "--resume", "--max_iters=8")
    (line,) = (line for line in output.splitlines() if line.startswith("resuming"))
    assert code == 0 and len(line) < 2000


def test_resume_in_the_same_environment_lists_no_differences(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    output = train(*options, f"--out_dir={run}", "--resume")[1]
    assert re.search(rf"(?m)^resuming from {run}/last.safetensors at step {STEPS}$", output)


def test_resume_refuses_an_out_dir_without_a_run_and_names_the_nearest(options, tmp_path):
    def answer(folder):
        code, output = train(*options, f"--out_dir={folder}", "--resume")
        assert code == 4 and output.count("\n") == 1
        return output.removeprefix("error: ").removesuffix("\n")

    out = tmp_path / "out"
    nothing = "holds no run to resume; without --resume a new one starts there"
    assert answer(out / "shakespeare") == f"out_dir: {out}/shakespeare {nothing}"
    assert not out.exists()
    (out / "shakespeare").mkdir(parents=True)
    (out / "shakespeare" / LAST).write_bytes(b"")
    (out / "empty").mkdir()
    assert answer(out / "empty") == f"out_dir: {out}/empty {nothing}"
    assert answer(out / "shakespere") == (
        f"{out}/shakespere: no such file or folder; did you mean {out}/shakespeare?"
    )
    assert sorted(path.name for path in out.iterdir()) == ["empty", "shakespeare"]


def test_where_another_checkpoint_is_used_every_command_says_so_and_reads_it_once(
    options, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    (run / BEST).write_bytes((run / BEST).read_bytes()[:-1])
    shutil.copy(run / LAST, run / PREV)
    read, paths = file_format.read, []
    monkeypatch.setattr(file_format, "read", lambda path: paths.append(path) or read(path))
    note = f"{run / BEST}: checksum mismatch: the file is damaged or incomplete; using {run / LAST}"
    code, output = train(*options, f"--out_dir={tmp_path / 'new'}", f"--init_from={run}")
    assert code == 0 and note in output and paths == [run / BEST, run / LAST]
    paths.clear()
    assert sample_main([f"--ckpt={run}", "--max-new-tokens=1"]) == 0
    assert note in capsys.readouterr().err and paths == [run / BEST, run / LAST]
    paths.clear()
    (run / LAST).write_bytes((run / LAST).read_bytes()[:-1])
    code, output = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and f"; using {run / PREV} instead" in output
    assert paths == [run / LAST, run / PREV]


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


def test_a_run_that_stopped_early_prints_a_command_that_continues_it(options, tmp_path):
    run = tmp_path / "run"
    early = [*options, *DIVERGING, f"--out_dir={run}", "--patience=1"]
    assert train(*early)[0] == 0
    stopped = steps_in(run)[LAST]
    assert stopped < STEPS
    code, output = train(*early, "--resume")
    words = re.search(r"to train longer:\n  \S+ train.py (.*)\n", output)[1].split()
    assert code == 0 and words[-1] == "--patience=0"
    assert train(*words)[0] == 0 and steps_in(run)[LAST] == STEPS


@pytest.mark.parametrize("word", ["--resume", "--resume=auto"])
def test_resume_refuses_an_empty_out_dir_only_if_an_option_names_it(word, options, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text(f"out_dir: {tmp_path / 'run'}\n{(ROOT / SMALL[0]).read_text()}")
    named = [config, *options[1:], f"--out_dir={tmp_path / 'run'}", word]
    assert train(*named)[0] == 4 and not (tmp_path / "run").exists()
    code, output = train(config, *options[1:], word)
    assert code == 0 and output.startswith(f"nothing to resume in {tmp_path / 'run'}: starting ")
    assert train(*named)[0] == 0


INVALID_PROGRESS = {
    "step": -1,
    "last_eval_step": STEPS + 1,
    "best_step": STEPS,
    "evals_since_best": 1.5,
    "best_loss": -1.0,
    "warnings_given": ["x"],
    "train_loss_at_best": -1.0,
    "recent_losses": [1.0, "x"],
    "more\x1b": 1,
}


@pytest.fixture(scope="module")
def diverging(tmp_path_factory):
    """A folder with a finished run, a copy of it at step 18, and the arguments of both."""
    folder = tmp_path_factory.mktemp("diverging")
    options = [*small_run_args(folder), *DIVERGING]
    train_and_copy(folder / "run", 18, *options).rename(folder / "saved")
    return folder, options


SAVED_FIELDS = {  # a change of each kind of state that a resumed run needs
    "last_eval_step": ("progress", "last_eval_step", 17),
    "best_loss": ("progress", "best_loss", 0.5),
    "best_step": ("progress", "best_step", 11),
    "evals_since_best": ("progress", "evals_since_best", 2),
    "train_loss_at_best": ("progress", "train_loss_at_best", 0.5),
    "recent_losses": ("progress", "recent_losses", [1.0]),
    "spikes": ("progress", "spikes", 3),
    "step": ("progress", "step", 19),
    "text": ("data", "sha256", "0" * 64),
    "environment": ("environment", "threads", 63),
    "vocabulary": ("vocabulary",),
    **{role: ("tensors", f"{role}.") for role in ("model", "exp_avg", "exp_avg_sq", "momentum")},
}


def resumes_alike(diverging, change):
    """Resume from a changed checkpoint; return whether nothing is said and the run ends alike."""
    folder, options = diverging
    run = folder / "resumed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "saved", run)
    saved = contents(run / LAST)
    change(saved)
    write_checkpoint(run / LAST, saved)
    code, output = train(*options, f"--out_dir={run}", f"--resume={run / LAST}")
    return code == 0 and "bit-identical" not in output and same_runs(folder / "run", run)


def test_an_unchanged_checkpoint_resumes_alike(diverging):
    assert resumes_alike(diverging, lambda saved: None)


@pytest.mark.parametrize("name", SAVED_FIELDS)
def test_a_change_of_any_saved_state_is_noticed_at_resume(name, diverging):
    section, *key = SAVED_FIELDS[name]

    def change(saved):
        if section == "tensors":
            next(t for name, t in saved["tensors"].items() if name.startswith(key[0])).add_(1)
        elif section == "vocabulary":
            saved["vocabulary"] = saved["vocabulary"][::-1]
        else:
            assert saved[section][key[0]] != key[1]
            saved[section][key[0]] = key[1]

    assert not resumes_alike(diverging, change)


@pytest.mark.parametrize("name", INVALID_PROGRESS)
def test_invalid_progress_is_rejected(name, options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["progress"][name] = INVALID_PROGRESS[name]
    write_checkpoint(run / LAST, saved)
    code, output = train(*options, f"--out_dir={run}", f"--resume={run / LAST}")
    assert code == 4 and re.search(r"error: \S+/last.safetensors: progress: .+\n\Z", output)
    assert "\x1b" not in output
