"""AdamW and Muon: the parameters of each; test_hornbook.py compares their updates."""

import pytest
import torch
from torch import nn

from configs.schema import LAYOUTS, TrainConfig
from model import gpt
from model.gpt import Block
from model.parameters import named_tensors
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import same_runs, train, train_and_copy
from tests.variants import random_model
from training.optimizers import build_optimizers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_of_each_parameter(layout, optimizer):
    """It has one, and only vectors have no weight decay; Muon has the matrices of the blocks."""
    model = random_model(layout=layout, positions="learned", bias=True).double()
    before = named_tensors(model)
    train = TrainConfig(optimizer=optimizer, learning_rate=0.02, weight_decay=0.5)
    optimizers = build_optimizers(model, train, torch.float64)
    owned = [p for each in optimizers for p in next(iter(each.moments.values()))]
    matrices = {name for name, t in before.items() if t.dim() > 1 and not name.endswith(".bias")}
    if optimizer == "muon":
        momentum = named_tensors(model, optimizers[1].moments["momentum_buffer"])
        assert set(momentum) == {name for name in matrices if name.startswith("blocks.")}
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    for parameter in owned:
        parameter.grad = torch.zeros_like(parameter)
    for each in optimizers:
        each.step()
    for name, tensor in named_tensors(model).items():
        factor = 1 - 0.02 * 0.5 if name in matrices else 1.0
        assert torch.allclose(tensor, before[name] * factor, rtol=0, atol=1e-15), name


class BlockWithMore(Block):
    """A block with parameters of a user's own: a vector and a convolution."""

    def __init__(self, config, rotary):
        super().__init__(config, rotary)
        self.gate = nn.Parameter(torch.ones(config.n_embd))  # also a name in SwiGLU
        self.kernel = nn.Parameter(torch.full((config.n_embd, 1, 3), 0.1))

    def forward(self, x, cache=None):
        x = super().forward(x, cache) * self.gate
        padded = nn.functional.pad(x.mT, (2, 0))  # (B, C, T + 2): no look ahead
        return x + nn.functional.conv1d(padded, self.kernel, groups=x.size(2)).mT


def test_optimizer_of_a_users_parameters(options, tmp_path, monkeypatch):
    """They are trained, saved and resumed."""
    monkeypatch.setattr(gpt, "Block", BlockWithMore)
    copy = train_and_copy(tmp_path / "whole", 13, *options)
    code, output = train(*options, f"--out_dir={copy}", "--resume")
    assert code == 0, output
    assert same_runs(tmp_path / "whole", copy)
    saved = load_checkpoint(copy / LAST)
    for moment in ("exp_avg.blocks.0.gate", "momentum_buffer.blocks.0.kernel"):
        assert saved.tensors[moment].abs().max() > 0, moment
