"""AdamW and Muon, which make the same updates in every attention layout.

N matrices of one shape, R rows, C columns
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from configs.schema import TrainConfig
from model.gpt import GPT
from model.parameters import ParameterSplit, named_splits

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum")  # of AdamW, and of Muon


class Optimizer:
    """A learning rate, and the moments of each parameter: running averages of its gradients.

    Not torch.optim.Optimizer, whose constructor imports PyTorch's compiler: 2.1 to 2.7 of the 4.3
    CPU seconds that train.py took to start.

    All moments exist from the start, so that a checkpoint can be restored into them. A checkpoint
    has nothing else of an optimizer: AdamW's counts of steps are the step of the run.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, moments: Sequence[str]):
        self.peak_lr = self.lr = lr
        self.state = {p: {name: torch.zeros_like(p) for name in moments} for p in parameters}


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    The decay applies to matrices and embeddings, never to norm weights and biases.
    """

    def __init__(self, splits: Sequence[ParameterSplit], train: TrainConfig):
        # decay pulls weights towards 0; a norm weight of 0 would turn its features off
        matrices = [p for split in splits if split.matrices for p in split.parameters]
        vectors = [p for split in splits if not split.matrices for p in split.parameters]
        super().__init__([*matrices, *vectors], train.learning_rate, ("exp_avg", "exp_avg_sq"))
        self.betas = {"beta1": train.beta1, "beta2": train.beta2}
        self.groups = ((matrices, train.weight_decay), (vectors, 0.0))
        # one per parameter, for the bias correction: the moments begin at 0
        self.step_counts = torch.zeros(len(self.state), device=next(iter(self.state)).device)
        self.count_of = dict(zip(self.state, self.step_counts, strict=True))  # views

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        for parameters, weight_decay in self.groups:
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [self.state[parameter]["exp_avg"] for parameter in parameters],
                [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
                [],  # maxima of exp_avg_sq, which only amsgrad uses
                [self.count_of[parameter] for parameter in parameters],  # adds 1 to each
                lr=self.lr,
                **self.betas,
                weight_decay=weight_decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                fused=True,
            )


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalized by Newton-Schulz iteration.

    The rows are normalized first, as in MuonEq-R (arXiv 2603.28254).

    The queries of all heads are one (H*D, C) matrix in every layout, and so are the keys and the
    values. Matrices of one shape are orthogonalized as one batch, in `dtype`.
    """

    def __init__(self, splits: Sequence[ParameterSplit], train: TrainConfig, dtype: torch.dtype):
        parameters = [parameter for split in splits for parameter in split.parameters]
        super().__init__(parameters, train.muon_learning_rate, ("momentum",))
        self.momentum, self.weight_decay = train.muon_momentum, train.weight_decay
        self.dtype = dtype
        self.splits_by_shape = defaultdict(list)  # (R, C) -> the splits of such matrices
        for split in splits:
            self.splits_by_shape[split.matrices[1:]].append(split)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        # Nesterov momentum: a running mean of the gradients, and a look a step ahead
        updates = {}
        for parameter, state in self.state.items():
            state["momentum"].lerp_(parameter.grad, 1 - self.momentum)
            updates[parameter] = parameter.grad.lerp(state["momentum"], self.momentum)

        for (R, C), splits in self.splits_by_shape.items():
            # gather the updates of this shape, whichever parameters store their parts
            counts = [split.matrices[0] for split in splits]
            batch = next(iter(updates.values())).new_empty(sum(counts), R, C)  # (N, R, C)
            for split, matrices in zip(splits, batch.split(counts), strict=True):
                for parameter, part in split.parts(matrices.view(split.shape)):
                    part.copy_(updates[parameter].reshape(part.shape))

            # make all singular values about 1: an equally large step in every direction
            directions = orthogonalize(F.normalize(batch, dim=-1), self.dtype)  # rows of norm 1

            # decay and update; a tall matrix needs a larger step for the same change of its output
            step_size = self.lr * max(1.0, R / C) ** 0.5
            for split, matrices in zip(splits, directions.split(counts), strict=True):
                for parameter, part in split.parts(matrices.reshape(split.shape)):
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
    for_muon, for_adamw = [], []
    for name, split in named_splits(model).items():
        is_hidden_matrix = name.startswith("blocks.") and split.matrices
        use_muon = train.optimizer == "muon" and is_hidden_matrix
        (for_muon if use_muon else for_adamw).append(split)
    optimizers = [AdamW(for_adamw, train)]
    return [*optimizers, Muon(for_muon, train, dtype)] if for_muon else optimizers


def state_of(optimizers: Iterable[Optimizer]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the moments of each parameter, whichever optimizer has them."""
    return {p: moments for optimizer in optimizers for p, moments in optimizer.state.items()}
