"""Health warnings: an unhealthy run gets each once a start, a healthy run gets none."""

import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from model import gpt
from tests.runs import one_loss, stop_at, train
from training import evaluate, health

SHORT = ["--max_iters=4", "--warmup_iters=2", "--cooldown_iters=1", "--eval_interval=1"]


def warnings_given(tmp_path, output):
    """Return the steps of each health warning in TensorBoard; each must be printed once."""
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    steps_by_name = {}
    for tag in events.Tags()["tensors"]:
        if match := re.fullmatch(r"health/(\w+)/text_summary", tag):
            steps_by_name[match[1]] = [each.step for each in events.Tensors(tag)]
            assert output.count(events.Tensors(tag)[0].tensor_proto.string_val[0].decode()) == 1
    return steps_by_name


def test_a_healthy_run_gets_no_warnings(train_run, tmp_path):
    assert warnings_given(tmp_path, train_run()[1]) == {}


def test_a_first_loss_far_above_ln_v_gets_a_warning(train_run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "INIT_STD", 1.0)
    code, output = train_run(*SHORT)
    assert code == 0 and warnings_given(tmp_path, output) == {"first_loss": [1]}
    assert re.search(r"the first loss is \d\.\d\d, far above ln\(57\) = 4\.04: .*check", output)


@pytest.mark.parametrize(("train_losses", "expected"), [
    ([3.0, 2.0, 1.9, 1.8, 1.7, 1.6], {"overfitting": [20]}),
    ([3.0, 1.9, 1.9, 1.9, 1.9, 1.9], {}),  # it has learned what it can
])  # fmt: skip
def test_a_validation_loss_that_only_rises_while_the_training_loss_falls_is_overfitting(
    train_losses, expected, train_run, tmp_path, monkeypatch
):
    val_losses = [3.0, 2.0, 2.1, 2.2, 2.3, 2.4]
    losses = (loss for pair in zip(val_losses, train_losses, strict=True) for loss in pair)
    monkeypatch.setattr(evaluate, "window_losses", lambda *_: one_loss(next(losses)))
    code, output = train_run("--eval_interval=4")
    assert code == 0 and warnings_given(tmp_path, output) == expected
    assert ("not improved since step 8" in output) == bool(expected)


def test_dead_heads_get_a_warning(train_run, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "MIN_STEPS_FOR_DEAD_HEADS", 0)
    code, output = train_run(*SHORT)
    assert code == 0 and warnings_given(tmp_path, output) == {"dead_heads": [2]}
    heads = [f"head {h} of layer 1 attends to everything equally; " for h in (1, 2)]
    assert "".join(heads) + "try" in output


def test_uniform_and_first_position_heads_are_dead_and_previous_token_heads_are_not():
    T = 16
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    first, previous_token = torch.zeros(T, T), torch.eye(T).roll(-1, 1).tril(-1)
    first[:, 0], previous_token[0, 0] = 1.0, 1.0
    assert health.dead_head_reason(uniform) == "attends to everything equally"
    assert health.dead_head_reason(first) == "attends only to position 1"
    for alive in (previous_token, torch.eye(T), torch.full((T, T), torch.nan)):
        assert health.dead_head_reason(alive) == ""
    for fraction in (0.2, 0.8):  # a mixture is not dead
        assert health.dead_head_reason(fraction * uniform + (1 - fraction) * previous_token) == ""
        assert health.dead_head_reason(fraction * first + (1 - fraction) * previous_token) == ""


def test_a_text_too_small_for_the_model_gets_a_note(train_run, tmp_path):
    note = "parameters are too many for 6,000 characters: such a model memorizes the text; use "
    assert note in train_run(*SHORT, "--n_embd=384")[1]
    # a model that is trained further has its size
    tuned = [f"--init_from={tmp_path / 'run'}", f"--out_dir={tmp_path / 'tuned'}"]
    assert "parameters are too" not in train_run(*SHORT, "--n_embd=384", *tuned)[1]


def test_exploding_gradients_get_a_warning_once_a_start(options, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "MAX_GRAD_NORM", 0)
    words = [*options, *SHORT, f"--out_dir={tmp_path / 'run'}"]
    for output in (stop_at(1, *words), train(*words, "--resume")[1]):
        assert output.count("exploding gradients: norm ") == 1
