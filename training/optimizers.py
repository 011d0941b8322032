"""AdamW and Muon, which make the same updates in every attention layout.

N matrices of one shape, R rows, C columns
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

from configs.schema import TrainConfig
from model.gpt import GPT
from model.parameters import tensor_parts


class Optimizer:
    """A learning rate, and the moments of each parameter: running averages of its gradients.

    A training step sets `lr` to a fraction of `peak_lr` and calls `step`, which a subclass defines.

    Not a torch.optim.Optimizer, whose constructor imports PyTorch's compiler: 2.1 to 2.7 of the 4.3
    CPU seconds that train.py took to start.

    All moments exist from the start, so that a checkpoint can be restored into them. A checkpoint
    has nothing else of an optimizer: AdamW's counts of steps are the step of the run.
    """

    def __init__(self, parameters: Collection[nn.Parameter], lr: float, kinds: Sequence[str]):
        self.peak_lr = self.lr = lr
        self.moments = {kind: {p: torch.zeros_like(p) for p in parameters} for kind in kinds}


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    The decay applies to matrices and embeddings, never to norm weights and biases.

    Not torch.optim.AdamW, a torch.optim.Optimizer, but the function that it calls: the fused kernel
    reads and writes each tensor once. docs/gpt.md has the same update in plain lines.
    """

    def __init__(self, parameters: Collection[nn.Parameter], train: TrainConfig):
        super().__init__(parameters, train.learning_rate, ("exp_avg", "exp_avg_sq"))
        # decay pulls weights towards 0; a norm weight of 0 would turn its features off
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() < 2]
        self.groups = ((matrices, train.weight_decay), (vectors, 0.0))
        self.betas = {"beta1": train.beta1, "beta2": train.beta2}
        # one per parameter, for the bias correction: the moments begin at 0
        self.step_counts = torch.zeros(len(parameters), device=next(iter(parameters)).device)
        self.count_of = dict(zip(parameters, self.step_counts, strict=True))  # views

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        for parameters, weight_decay in self.groups:
            exp_avg = [self.moments["exp_avg"][p] for p in parameters]
            exp_avg_sq = [self.moments["exp_avg_sq"][p] for p in parameters]
            gradients = [p.grad for p in parameters]
            counts = [self.count_of[p] for p in parameters]  # adamw adds 1 to each
            adamw(
                parameters, gradients, exp_avg, exp_avg_sq, [], counts,
                lr=self.lr, weight_decay=weight_decay, eps=1e-8, **self.betas,
                fused=True, amsgrad=False, maximize=False,
            )  # fmt: skip


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalized by Newton-Schulz iteration.

    Not torch.optim.Muon, which takes a fused (3C, C) QKV as one matrix: each layout would train
    another model. Nor does it normalize rows (MuonEq-R, arXiv 2603.28254), for -0.009 nats.

    The queries of all heads are one (H*D, C) matrix in every layout, and so are the keys and the
    values. Matrices of one shape are orthogonalized as one batch, in `dtype`.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, dtype: torch.dtype):
        parameters, self.groups = [], defaultdict(list)  # (R, C) -> N, shape, parts of each tensor
        for name, (shape, parts) in tensor_parts(model).items():
            if name.startswith("blocks.") and len(shape) > 1 and not name.endswith(".bias"):
                like = torch.empty(shape, device="meta")
                # qkv (3, H, D, C) is three matrices, any other tensor is one
                matrices = like.flatten(1, 2) if like.dim() == 4 else like.flatten(1)[None]
                self.groups[matrices.shape[1:]].append((len(matrices), shape, parts))
                parameters += [parameter for parameter, _ in parts(like)]
        super().__init__(parameters, train.muon_learning_rate, ("momentum_buffer",))
        self.momentum, self.weight_decay = train.muon_momentum, train.weight_decay
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        # Nesterov momentum: a running mean of the gradients, and a look a step ahead
        updates = {}
        for parameter, average in self.moments["momentum_buffer"].items():
            average.lerp_(parameter.grad, 1 - self.momentum)
            updates[parameter] = parameter.grad.lerp(average, self.momentum)

        for (R, C), group in self.groups.items():
            # gather the updates of this shape, whichever parameters store their parts
            counts = [count for count, _, _ in group]
            batch = next(iter(updates.values())).new_empty(sum(counts), R, C)  # (N, R, C)
            for (_, shape, parts), matrices in zip(group, batch.split(counts), strict=True):
                for parameter, part in parts(matrices.view(shape)):
                    part.copy_(updates[parameter].reshape(part.shape))

            # make all singular values about 1: an equally large step in every direction
            directions = orthogonalize(F.normalize(batch, dim=-1), self.dtype)  # rows of norm 1

            # decay and update; a tall matrix needs a larger step for the same change of its output
            step_size = self.lr * max(1.0, R / C) ** 0.5
            for (_, shape, parts), matrices in zip(group, directions.split(counts), strict=True):
                for parameter, part in parts(matrices.reshape(shape)):
                    parameter.mul_(1 - self.lr * self.weight_decay)
                    parameter.add_(part.reshape(parameter.shape), alpha=-step_size)


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of each matrix close to 1: (N, R, C) -> (N, R, C).

    Newton-Schulz iteration in `dtype`, with the quintic polynomial of Jordan et al. 2024. Small
    singular values grow fast, and nearly all end between 0.7 and 1.2, which is exact enough.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # a is the slope at 0: as steep as possible

    # singular values of at most 1: the iteration diverges for larger ones
    X = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    tall = X.size(1) > X.size(2)
    X = (X.mT if tall else X).to(dtype)  # wide: X X^T is the smaller of the two products

    # a polynomial in X X^T applies to every singular value, without computing any
    for _ in range(5):
        A = X @ X.mT
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A^2, rounded once
        X = torch.baddbmm(X, P, X, beta=a)  # a X + P X

    return (X.mT if tall else X).to(matrices.dtype)


def build_optimizers(model: GPT, train: TrainConfig, dtype: torch.dtype) -> list[Optimizer]:
    """Build AdamW, and Muon for the matrices of the blocks if it is selected."""
    if train.optimizer == "adamw":
        return [AdamW(list(model.parameters()), train)]
    muon = Muon(model, train, dtype)
    others = [p for p in model.parameters() if p not in muon.moments["momentum_buffer"]]
    return [AdamW(others, train), muon]
