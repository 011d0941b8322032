"""`auto` in the settings: what it stands for, and that a checkpoint keeps the word."""

from dataclasses import fields, replace

import pytest
import torch
from training.resolve import resolve

from configs.schema import Config, ModelConfig, TrainConfig
from storage import load_model
from storage.checkpoint import load
from tests.runs import train
from training.device import Runtime

CPU = Runtime(torch.device("cpu"), torch.float32, "")
AUTO = Config(
    model=ModelConfig(kernel="auto", dropout="auto", logit_scale="auto"),
    train=TrainConfig(eval_interval="auto"),
)


def autos(section):
    return {field.name for field in fields(section) if getattr(section, field.name) == "auto"}


def test_resolving_replaces_every_auto_except_the_rule_for_saves_and_the_folder():
    config = resolve(AUTO, CPU, epochs=3, characters=10**6)
    found = autos(config) | autos(config.model) | autos(config.train)
    assert found == {"save_interval", "out_dir"}


@pytest.mark.parametrize(
    ("epochs", "dropout", "scale"),
    [(0.1, 0, 1), (2.9, 0, 0.91), (5, 0.05, 0.85), (99, 0.3, 0.8)],
)
def test_dropout_rises_and_logit_scale_falls_with_the_number_of_epochs(epochs, dropout, scale):
    model = resolve(AUTO, CPU, epochs, characters=10**5).model
    assert (model.dropout, model.logit_scale) == (dropout, scale)


@pytest.mark.parametrize(("n_layer", "n_embd", "dropout"), [(2, 64, 0), (2, 128, 0), (2, 192, 0.2)])
def test_a_model_too_small_to_memorize_its_text_has_no_dropout(n_layer, n_embd, dropout):
    """300 KB read ten times: see docs/research.md."""
    sized = replace(AUTO, model=replace(AUTO.model, n_layer=n_layer, n_embd=n_embd))
    assert resolve(sized, CPU, epochs=10, characters=300_000).model.dropout == dropout


@pytest.mark.parametrize(
    ("device", "dtype", "block_size", "kernel"),
    [
        ("cpu", torch.bfloat16, 1024, "batched"), ("cpu", torch.bfloat16, 1025, "sdpa"),
        ("cpu", torch.float32, 64, "sdpa"), ("cuda", torch.bfloat16, 64, "sdpa"),
    ],
)  # fmt: skip
def test_kernel_auto_is_the_fastest_one_to_train_with(device, dtype, block_size, kernel):
    config = replace(AUTO, model=replace(AUTO.model, block_size=block_size))
    runtime = Runtime(torch.device(device), dtype, "")
    assert resolve(config, runtime, epochs=1, characters=10**6).model.kernel == kernel


@pytest.mark.parametrize(("max_iters", "interval"), [(60, 6), (1, 1), (71, 8)])
def test_a_run_is_evaluated_ten_times(max_iters, interval):
    train_config = replace(AUTO.train, max_iters=max_iters)
    assert resolve(replace(AUTO, train=train_config), CPU, 1, 10**6).train.eval_interval == interval


def test_a_checkpoint_keeps_auto_and_a_longer_run_gets_values_of_its_own(options, tmp_path):
    folder = tmp_path / "run"
    auto = ["--dropout=auto", "--logit_scale=auto", "--kernel=auto"]
    auto += ["--batch_size=16", "--n_embd=32"]  # so large that it can memorize the text
    for arguments, dropout, scale in (
        ([*options, *auto, "--max_iters=1", "--eval_interval=1", f"--out_dir={folder}"], 0, 1),
        ([folder, "--max_iters=60", "--eval_interval=60"], 0.05, 0.83),
    ):
        code, output = train(*arguments)
        assert code == 0 and f"dropout {dropout}, logit_scale {scale}\n" in output
        saved = load(folder / "last.safetensors").settings
        assert autos(saved.model) == {"dropout", "logit_scale", "kernel"}
        # whoever loads it resolves to the same
        model = load_model(folder / "last.safetensors")[0]
        assert (model.config.dropout, model.config.logit_scale) == (dropout, scale)
    assert "model.dropout 0.0 -> 0.05\n" in output
