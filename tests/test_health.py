"""Is the run healthy? Each notice is provoked by a run that deserves it, and said once; a healthy
run gets none.
"""

import re
import signal

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from model import gpt
from tests.campaigns.common import at_step, small, train
from training import evaluate, health

SHORT = ["--max_iters=4", "--warmup_iters=2", "--cooldown_iters=1", "--eval_interval=1"]


@pytest.fixture
def options(tmp_path):
    return [*small(tmp_path), f"--out_dir={tmp_path / 'run'}"]


def told(tmp_path, said):
    """By name, the steps of every notice in TensorBoard's texts; each is among what was `said` on
    the console.
    """
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    notices = {}
    for tag in events.Tags()["tensors"]:
        if match := re.fullmatch(r"(?:train|val)/health/(\w+)/text_summary", tag):
            notices[match[1]] = [each.step for each in events.Tensors(tag)]
            assert said.count(events.Tensors(tag)[0].tensor_proto.string_val[0].decode()) == 1
    return notices


def test_a_healthy_run_is_told_nothing(options, tmp_path):
    assert told(tmp_path, train(*options)[1]) == {}


def test_a_first_loss_far_above_ln_v(options, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "INIT_STD", 1.0)
    code, said = train(*options, *SHORT)
    assert code == 0 and told(tmp_path, said) == {"first_loss": [1]}
    assert (
        re.search(r"the first loss is \d\.\d\d, far above ln\(57\) = 4\.04", said)
        and "warmup_iters" in said
    )


def test_exploding_and_vanishing_gradients(options, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "INIT_STD", 20.0)
    said = train(*options, *SHORT)[1]
    assert "exploding gradients: norm " in said and len(told(tmp_path, said)["exploding"]) == 1
    said = train(*options, *SHORT, "--logit_softcap=0.001", "--overwrite")[1]
    assert "vanishing gradients: norm " in said and told(tmp_path, said)["vanishing"] == [1]


def test_a_short_gradient_is_no_fault_where_all_is_learnt():
    assert [name for name, _ in health.check_step(2, 0.2, 1e-6, 65)] == ["vanishing"]
    assert not list(health.check_step(2, 0.05, 1e-6, 65))


DECLINES = {  # losses of validation and of known text, evaluation by evaluation
    "overfitting": ([3.0, 2.0, 2.1, 2.2, 2.3, 2.4], [3.0, 2.0, 1.9, 1.8, 1.7, 1.6]),
    "plateau": ([3.0, 2.0, 2.0, 2.0, 2.0, 2.0], [3.0, 1.9, 1.9, 1.9, 1.9, 1.9]),
}


@pytest.mark.parametrize("name", DECLINES)
def test_a_loss_that_falls_no_more(options, tmp_path, monkeypatch, name):
    losses = (loss for pair in zip(*DECLINES[name], strict=True) for loss in pair)
    monkeypatch.setattr(
        evaluate, "loss_sums_by_position", lambda *_: np.array([[next(losses)], [1.0]])
    )
    code, said = train(*options, "--eval_interval=4")
    assert code == 0 and told(tmp_path, said) == {name: [20]}
    assert "improved since step 8" in said


def test_dead_heads(options, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "MIN_STEPS_FOR_DEAD_HEADS", 0)
    code, said = train(*options, *SHORT)
    assert code == 0 and told(tmp_path, said) == {"dead_heads": [2]}
    assert (
        "head 1 of layer 1 attends to everything equally; head 2 of layer 1 attends to "
        "everything equally; try" in said
    )


def test_a_head_is_idle_whatever_it_reads_and_not_when_it_looks_back_by_one():
    T = 16
    even = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    first, back = torch.zeros(T, T), torch.eye(T).roll(-1, 1).tril(-1)
    first[:, 0], back[0, 0] = 1.0, 1.0
    assert health.dead_head_reason(even) == "attends to everything equally"
    assert health.dead_head_reason(first) == "attends only to position 1"
    assert (
        health.dead_head_reason(back)
        == ""
        == health.dead_head_reason(torch.eye(T))
        == health.dead_head_reason(torch.full((T, T), torch.nan))
    )
    for share in (0.2, 0.8):  # partly at work: it is idle only where all of it is
        assert health.dead_head_reason(share * even + (1 - share) * back) == ""
        assert health.dead_head_reason(share * first + (1 - share) * back) == ""


def test_a_text_smaller_than_the_model_wants(options, tmp_path):
    code, said = train(*options, *SHORT, "--n_embd=384")
    (note,) = re.findall(
        r"note: \S+ parameters are many for 6,000 characters: .* memorizes it; use \S+_small.yaml",
        said,
    )
    (corpus,) = EventAccumulator(str(tmp_path / "run")).Reload().Tensors("run/corpus/text_summary")
    assert code == 0 and note in corpus.tensor_proto.string_val[0].decode()


def test_each_is_told_once_however_often_the_run_is_resumed(options, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "INIT_STD", 20.0)
    said = ""
    for _ in range(3):
        with monkeypatch.context() as patch:
            at_step(
                patch,
                2 + said.count("stopped and saved"),
                lambda: signal.raise_signal(signal.SIGINT),
            )
            said += train(*options, *SHORT, "--logit_softcap=0.001", "--resume")[1]
    notices = told(tmp_path, said)
    assert notices["vanishing"] == [1] and said.count("vanishing gradients") == 1
