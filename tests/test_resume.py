"""Going on: any sequence of stops and resumes ends, to the last bit, as the run that never
stopped.
"""

import random
import re
import shutil
import signal

import pytest
import torch

from checkpointing.checkpoint import LAST, PREV
from tests.campaigns.common import (
    STEPS,
    at_step,
    contents,
    equal,
    forge,
    loadable,
    outcome,
    same,
    scalars,
    small,
    step_of,
    train,
)
from tests.campaigns.fields import DIVERGING

RECIPES = {
    "adamw-cosine": ["--optimizer=adamw", "--schedule=cosine"],
    "adamw-constant-no-average": ["--optimizer=adamw", "--schedule=constant", "--ema=0"],
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


@pytest.fixture
def options(tmp_path):
    return small(tmp_path)


def stop_at(options, step):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        code, said = train(*options, "--resume")
    assert code == 130, said


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopping_and_going_on_changes_no_bit(recipe, options, tmp_path):
    options = [*options, *RECIPES[recipe]]
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    end = step_of(tmp_path / "whole")
    assert (end < STEPS) == (recipe == "early stopping")
    for step in sorted(random.Random(recipe).sample(range(end), 3)):
        stop_at([*options, f"--out_dir={tmp_path / 'parts'}"], step)
        assert step_of(tmp_path / "parts") == step + 1
    code, said = train(*options, f"--out_dir={tmp_path / 'parts'}", "--resume")
    assert code == 0 and "not the same run" not in said
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_the_state_of_float16_scaling_goes_on_too(options, tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp,
        "GradScaler",
        lambda *_, **__: scaler("cpu", init_scale=2.0**127, growth_interval=5),
    )
    assert train(*options, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    for step in (3, 10):
        stop_at([*options, f"--out_dir={tmp_path / 'parts'}"], step)
    assert train(*options, f"--out_dir={tmp_path / 'parts'}", "--resume")[0] == 0
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert 1 < outcome(tmp_path / "parts")[LAST]["progress"]["loss_scale"] < 2.0**127


def test_prev_is_the_last_before(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=13")[0] == 0
    assert [contents(run / name)["progress"]["step"] for name in (PREV, LAST)] == [
        12,
        13,
    ]


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()]
)
def test_without_a_whole_last_checkpoint_the_one_before_is_taken_with_one_line(
    damage, options, tmp_path
):
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    shutil.copytree(whole, other)
    damage(other / LAST)
    code, said = train(*options, f"--out_dir={other}", "--resume")
    note = said.splitlines()[0]
    assert (
        code == 0
        and f"{other / 'last.safetensors'}: " in note
        and f"; using {other / 'prev.safetensors'} instead" in note
    )
    assert same(whole, other)


def test_never_silently_from_the_beginning(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    for path in run.glob("*.safetensors"):
        path.write_bytes(b"")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.glob("*event*"))
    code, said = train(*options, f"--out_dir={run}", "--resume")
    assert code == 4 and said.count("empty file (interrupted save?)") == 2 and said.count("\n") == 1
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.glob("*event*")) == before


def test_a_finished_run_is_left_as_it_is(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}
    code, said = train(*options, f"--out_dir={run}", "--resume")
    assert code == 0 and "best validation loss" in said
    assert {
        path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"
    } == before


def test_a_run_that_died_before_its_first_save_leaves_no_points_behind(
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


def test_from_another_folder_it_goes_on_in_a_new_one(options, tmp_path):
    whole, new = tmp_path / "whole", tmp_path / "new"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    code, said = train(*options, f"--out_dir={new}", f"--resume={whole / 'prev.safetensors'}")
    assert code == 0 and f"resuming from {whole / 'prev.safetensors'} at step 20" in said
    a, b = outcome(whole), outcome(new)
    assert scalars(new)["train/loss"] == scalars(whole)["train/loss"][20:]
    assert loadable(new)[1] >= 2
    assert equal(a[LAST]["tensors"], b[LAST]["tensors"])


def test_another_environment_is_named_difference_by_difference(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"threads": 7, "torch": "1.0", "cpu_capability": "\x1b[2J"}
    saved["data"]["name"] = "x.txt"
    forge(run / LAST, saved)
    code, said = train(
        *options,
        f"--out_dir={run}",
        "--resume",
        "--max_iters=8",
        "--kernel=loop",
        "--dtype=bfloat16",
    )
    (line,) = (line for line in said.splitlines() if line.startswith("resuming"))
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
    assert line.endswith("; so it is not the same run to the last bit")


def test_what_a_checkpoint_says_of_its_environment_is_shown_in_few_words(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["environment"] |= {"torch": "x" * 100_000, "cpu_capability": "\x1b" * 100_000}
    saved["data"]["name"] = "y" * 100_000
    forge(run / LAST, saved)
    code, said = train(*options, f"--out_dir={run}", "--resume", "--max_iters=8")
    (line,) = (line for line in said.splitlines() if line.startswith("resuming"))
    assert code == 0 and len(line) < 2000


def test_in_the_same_environment_nothing_is_said_of_it(options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}")[0] == 0
    said = train(*options, f"--out_dir={run}", "--resume")[1]
    assert re.search(rf"(?m)^resuming from {run}/last.safetensors at step {STEPS}$", said)


IMPOSSIBLE = {
    "step": -1,
    "last_eval_step": STEPS + 1,
    "best_step": STEPS,
    "evals_since_best": 1.0,
    "best_loss": -1.0,
    "warnings_given": ["x"],
    "train_loss_at_best": -1.0,
    "recent_losses": [1.0, "x"],
    "skipped_in_a_row": 1,
    "skipped": 10**9,
    "more\x1b": 1,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_progress_that_cannot_be_is_refused(name, options, tmp_path):
    run = tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=8")[0] == 0
    saved = contents(run / LAST)
    saved["progress"][name] = IMPOSSIBLE[name]
    forge(run / LAST, saved)
    code, said = train(*options, f"--out_dir={run}", "--resume")
    assert code == 4 and re.search(r"error: \S+/last.safetensors: invalid progress: .+\n\Z", said)
    assert "\x1b" not in said
