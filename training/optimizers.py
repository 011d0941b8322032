"""AdamW and Muon, which make the same updates in every attention layout.

N matrices of one shape, R rows, C columns
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.schema import TrainConfig
from model.gpt import GPT
from model.parameters import named_slices


class Optimizer:
    """A learning rate, and the moments of each parameter: running averages of its gradients.

    It replaces torch.optim.Optimizer, whose first step imports PyTorch's compiler and takes more
    than a second. All moments exist from the start, so that a checkpoint can be restored into them.
    """

    moments: tuple[str, ...]

    def __init__(self, parameters: Iterable[Tensor], lr: float):
        self.peak_lr = self.lr = lr  # `set_lr` multiplies the peak
        self.state = {p: {name: torch.zeros_like(p) for name in self.moments} for p in parameters}

    def zero_grad(self) -> None:
        for parameter in self.state:
            # None instead of zeros: the next backward pass has nothing to add to
            parameter.grad = None

    def state_slices(self, model: GPT) -> dict[str, list[Tensor]]:
        """Return all moments by name, as lists of slices: the state of this optimizer.

        {"exp_avg.token_embedding": [(V, C)], "exp_avg.blocks.0.mlp.up": [(4C, C)], ...}

        As with parameters (`model.parameters.named_slices`), they are the same in every layout.
        """
        named = {}
        for moment in self.moments:
            tensors = {parameter: state[moment] for parameter, state in self.state.items()}
            for name, slices in named_slices(model, tensors).items():
                named[f"{moment}.{name}"] = slices
        return named


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Each group is a pair: a list of parameters, and their weight decay.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Sequence[tuple[list[Tensor], float]],
        lr: float,
        betas: tuple[float, float],
    ):
        super().__init__((p for parameters, _ in groups for p in parameters), lr)
        self.groups = groups
        self.beta1, self.beta2 = betas
        # a tensor: the kernel reads it on the device, and a checkpoint stores it like a moment
        self.steps = torch.zeros((), device=next(iter(self.state)).device)

    def state_slices(self, model: GPT) -> dict[str, list[Tensor]]:
        return super().state_slices(model) | {"adamw_steps": [self.steps[None]]}

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1  # sets the bias correction: the averages begin at 0
        for parameters, weight_decay in self.groups:
            states = [self.state[parameter] for parameter in parameters]
            # the kernel of torch.optim.AdamW(fused=True), a class that is slow to start
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # maxima of exp_avg_sq, which only amsgrad uses
                [self.steps for _ in parameters],
                lr=self.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=weight_decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


class Muon(Optimizer):
    """Momentum with normalized rows, orthogonalized by Newton-Schulz iteration.

    Muon (Jordan et al. 2024) with the row normalization of MuonEq-R (arXiv 2603.28254).

    It updates matrices. A parameter may store several, as in layout `fused`, or a part of one, as
    in `heads`. `slices_of` takes a tensor for each parameter (weight, gradient or momentum) and
    returns the slices of each matrix, by name: put together, they are the matrix. So the queries of
    all heads are one (H*D, C) matrix in every layout, and so are the keys and the values. A tensor
    of more than two dimensions counts as a matrix of its rows. Matrices of one shape are
    orthogonalized as one batch, in `dtype`.
    """

    moments = ("momentum",)

    def __init__(
        self,
        parameters: Sequence[Tensor],
        slices_of: Callable[[Mapping[Tensor, Tensor]], dict[str, list[Tensor]]],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ):
        super().__init__(parameters, lr)
        self.slices_of, self.dtype = slices_of, dtype
        self.momentum, self.weight_decay = momentum, weight_decay
        self.weights_by_shape = defaultdict(dict)  # (R, C) -> views of the weights by name
        for name, slices in slices_of({p: p.detach() for p in parameters}).items():
            R = sum(len(view) for view in slices)
            C = slices[0][0].numel()
            self.weights_by_shape[R, C][name] = slices

    @torch.no_grad()
    def step(self) -> None:
        # Nesterov momentum: a running mean of the gradients, and a look a step ahead
        updates: dict[Tensor, Tensor] = {}
        for parameter, state in self.state.items():
            state["momentum"].lerp_(parameter.grad, 1 - self.momentum)
            updates[parameter] = parameter.grad.lerp(state["momentum"], self.momentum)
        update_slices = self.slices_of(updates)

        for (R, C), weights in self.weights_by_shape.items():
            matrices = [torch.cat(update_slices[name]).flatten(1) for name in weights]
            batch = F.normalize(torch.stack(matrices), dim=-1)  # (N, R, C), rows of norm 1

            # make all singular values about 1: an equally large step in every direction
            directions = orthogonalize(batch, self.dtype)

            # decay and update; a tall matrix needs a larger step for the same change of its output
            scale = max(1.0, R / C) ** 0.5
            for slices, direction in zip(weights.values(), directions, strict=True):
                parts = direction.split([len(view) for view in slices])
                for view, part in zip(slices, parts, strict=True):
                    view.mul_(1 - self.lr * self.weight_decay)
                    view.add_(part.reshape(view.shape), alpha=-self.lr * scale)


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of each matrix close to 1: (N, R, C) -> (N, R, C).

    Newton-Schulz iteration in `dtype`, with the quintic polynomial of Jordan et al. 2024. It lets
    small singular values grow fast; nearly all end between 0.7 and 1.2, which is exact enough.
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
    """Build the optimizers of a run: AdamW, and Muon for the blocks' matrices if it is selected.

    Weight decay applies to matrices and embeddings, never to norm weights and biases.
    """
    in_blocks, outside, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif name.startswith("blocks."):
            in_blocks.append(parameter)
        else:
            outside.append(parameter)  # the embeddings, and lm_head unless it is tied

    use_muon = train.optimizer == "muon"
    # decay pulls weights towards 0; a norm weight of 0 would turn its features off
    decayed = outside if use_muon else in_blocks + outside
    groups = [(decayed, train.weight_decay), (vectors, 0.0)]
    adamw = AdamW(groups, train.learning_rate, (train.beta1, train.beta2))
    if not use_muon:
        return [adamw]
    muon = Muon(
        in_blocks,
        partial(named_slices, model),
        train.muon_learning_rate,
        train.muon_momentum,
        train.weight_decay,
        dtype,
    )
    return [adamw, muon]


def set_lr(optimizers: Sequence[Optimizer], multiplier: float) -> None:
    """Set the learning rate of every optimizer to `multiplier` times its peak."""
    for optimizer in optimizers:
        optimizer.lr = multiplier * optimizer.peak_lr
