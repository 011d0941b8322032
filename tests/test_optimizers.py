"""AdamW and Muon: the parameters of each, and their update rules."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from checkpointing import checkpoint
from configs.schema import LAYOUTS, ModelConfig, TrainConfig
from model import generate, gpt
from model.gpt import GPT, Block
from tests.runs import same_runs, small_run_args, stop_at, train
from tests.variants import copy_optimizers, in_layout
from training.optimizers import AdamW, Muon, build, orthogonalize, set_lr

MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, bias=True, token_shifts=1)
VOCABULARY = 11


def losses(model, optimizers, steps):
    """Train for `steps` on random batches and return the losses."""
    generator = torch.Generator().manual_seed(5)
    values = []
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (4, 9), generator=generator)
        loss = torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_optimizer_and_only_vectors_have_no_weight_decay(
    layout, optimizer, tied
):
    model = GPT(dataclasses.replace(MODEL, attention=layout, tied=tied), VOCABULARY)
    optimizers = build(model, TrainConfig(optimizer=optimizer, weight_decay=0.3), torch.float32)
    groups = [group for each in optimizers for group in each.param_groups]
    owned = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(owned) == sorted(id(parameter) for parameter in model.parameters())
    without_decay = sum(
        parameter.numel()
        for group in groups
        if not group["weight_decay"]
        for parameter in group["params"]
    )
    C, L = MODEL.n_embd, MODEL.n_layer
    biases, norms = L * (3 * C + C + 4 * C + C), (2 * L + 1) * 2 * C  # q k v, output, MLP; norms
    assert without_decay == biases + norms


class BlockWithMore(Block):
    """A block with parameters of a user's own, of 0 to 3 dimensions, in each forward pass."""

    def __init__(self, config, rotary):
        super().__init__(config, rotary)
        C = config.n_embd
        self.gate = nn.Parameter(torch.ones(C))  # also the name of a matrix of SwiGLU
        self.temperature = nn.Parameter(torch.ones(()))
        self.mixer = nn.Linear(C, C)
        nn.init.eye_(self.mixer.weight)
        nn.init.zeros_(self.mixer.bias)
        self.tables = nn.Parameter(torch.eye(C).expand(2, C, C).clone() / C)

    def forward(self, x, cache=None):
        x = super().forward(x, cache) * self.temperature + self.mixer(x) * self.gate
        return x + x @ self.tables.sum(0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_that_a_user_adds_to_a_block_are_trained_saved_and_resumed(
    optimizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpt, "Block", BlockWithMore)
    monkeypatch.setattr(generate, "build_decoder", lambda *_: None)  # it does not know them
    options = [*small_run_args(tmp_path), f"--optimizer={optimizer}"]
    assert train(*options, f"--out_dir={tmp_path}/whole")[0] == 0
    stop_at(13, *options, f"--out_dir={tmp_path}/run")
    assert train(*options, f"--out_dir={tmp_path}/run", "--resume")[0] == 0
    assert same_runs(tmp_path / "whole", tmp_path / "run")
    saved = checkpoint.load(tmp_path / "run" / "last.safetensors")
    for name in ("gate", "temperature", "mixer", "mixer.bias", "tables"):
        moment = "momentum" if optimizer == "muon" and name == "mixer" else "exp_avg"
        assert saved.tensors[f"{moment}.blocks.0.{name}"].abs().max() > 0, name


def test_orthogonalized_matrices_have_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 16, 16), (2, 32, 8), (2, 8, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=generator)))
        assert values.min() > 0.3 and values.max() < 1.3


def test_orthogonalization_preserves_the_singular_vectors():
    matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ orthogonalize(matrix[None], torch.float64)[0] @ v.T
    assert (core - core.diagonal().diag()).abs().max() < 1e-9


def test_a_muon_step_equals_its_formula():
    weight = torch.randn(
        6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_()
    expected, momentum = weight.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    muon = Muon(
        [{"params": [weight]}], lambda of=lambda p: p: [[of(weight)]], 0.1, 0.9, 0.5, torch.float64
    )
    for step in range(3):
        gradient = torch.randn(
            6, 4, generator=torch.Generator().manual_seed(10 + step), dtype=torch.float64
        )
        weight.grad = gradient.clone()
        muon.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        update = 0.9 * momentum + 0.1 * gradient
        expected = (
            expected * (1 - 0.1 * 0.5)
            - 0.1 * (6 / 4) ** 0.5 * orthogonalize(update[None], torch.float64)[0]
        )
        assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


def test_both_optimizers_overfit_a_single_sequence():
    for name in ("adamw", "muon"):
        model = GPT(MODEL, VOCABULARY)
        optimizers = build(model, TrainConfig(optimizer=name), torch.float32)
        ids = torch.arange(9).remainder(VOCABULARY)[None]
        for _ in range(150):
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert loss.item() < 0.5


def test_set_lr_scales_the_learning_rate_of_every_group():
    optimizers = build(GPT(MODEL, VOCABULARY), TrainConfig(optimizer="muon"), torch.float32)
    set_lr(optimizers, 0.25)
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    assert rates == [pytest.approx(0.25 * 1e-3)] * 2 + [pytest.approx(0.25 * 0.02)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changing_the_layout_during_training_does_not_change_the_losses(layout, optimizer):
    train = TrainConfig(optimizer=optimizer)
    model = GPT(dataclasses.replace(MODEL, kernel="batched"), VOCABULARY).double()
    optimizers = build(model, train, torch.float64)
    losses(model, optimizers, 5)
    other = in_layout(model, layout)
    other_optimizers = build(other, train, torch.float64)
    copy_optimizers(model, optimizers, other, other_optimizers)
    assert losses(model, optimizers, 10) == pytest.approx(
        losses(other, other_optimizers, 10), abs=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adamw_step_equals_its_formula(dtype):
    weight = torch.randn(
        6, 4, generator=torch.Generator().manual_seed(2), dtype=dtype
    ).requires_grad_()
    expected, mean, square = weight.detach().clone().double(), 0.0, 0.0
    adamw = AdamW([{"params": [weight], "weight_decay": 0.5}], 0.1, (0.8, 0.9))
    for step in range(1, 5):
        gradient = torch.randn(
            6, 4, generator=torch.Generator().manual_seed(10 + step), dtype=dtype
        )
        weight.grad = gradient.clone()
        adamw.step()
        gradient = gradient.double()
        mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        update = mean / (1 - 0.8**step) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
        assert torch.allclose(
            weight.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14
        )
    adamw.zero_grad()
    assert weight.grad is None


def test_a_training_step_does_not_import_torch_dynamo():
    code = (
        "import sys, torch\n"
        "from configs.schema import ModelConfig, TrainConfig\n"
        "from model.gpt import GPT\n"
        "from training.optimizers import build\n"
        "model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4), 5)\n"
        "optimizers = build(model, TrainConfig(optimizer='muon'), torch.float32)\n"
        "model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()\n"
        "[(each.step(), each.zero_grad()) for each in optimizers]\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )
