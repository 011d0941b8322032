"""AdamW and Muon over the same matrices in every attention layout, and the moving average of the
weights.

R rows, C columns of a matrix, N matrices of one shape
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.schema import TrainConfig
from model.gpt import GPT, copy_views


class Optimizer:
    """Groups of parameters, each with its settings, and what is remembered of each parameter: at
    first zeros.

    In place of torch.optim.Optimizer, at whose first step PyTorch's compiler is imported: more than
    a second.
    """

    moments: tuple[str, ...]

    def __init__(self, groups: Sequence[dict], **settings: float):
        self.param_groups = [settings | group for group in groups]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state = {p: {name: torch.zeros_like(p) for name in self.moments} for p in parameters}

    def zero_grad(self) -> None:
        for parameter in self.state:
            parameter.grad = None

    def state_dict(self) -> dict:
        """What steps have made, by the number of the parameter; rates and decays are settings, and
        no state.
        """
        numbers = {parameter: i for i, parameter in enumerate(self.state)}
        groups = [
            {"params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(enumerate(self.state.values())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Take over what `state_dict` gave; that it fits is checked by
        `checkpoint.load_optimizers`.
        """
        for i, state in enumerate(self.state.values()):
            for name, value in state.items():
                value.copy_(saved["state"][i][name])


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), by PyTorch's
    fused kernel.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Sequence[dict],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ):
        super().__init__(groups, lr=lr, weight_decay=weight_decay)
        self.beta1, self.beta2 = betas
        for parameter, moments in self.state.items():
            self.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | moments

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"]]
            means, squares, steps = (
                [state[name] for state in states] for name in (*self.moments, "step")
            )
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                group["params"],
                [parameter.grad for parameter in group["params"]],
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=group["weight_decay"],
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


class Muon(Optimizer):
    """Momentum, orthogonalised: each update has nearly equal singular values (Jordan et al. 2024,
    Muon).

    `matrices(of)` gives the matrices that lie in `groups`' parameters, each as its blocks of rows,
    which are views of `of(parameter)` (see `GPT.matrices`): so queries, keys and values are the
    same (H*D, C) matrices in every layout. Matrices of one shape are orthogonalised as one batch,
    in `dtype`.
    """

    moments = ("momentum",)

    def __init__(
        self,
        groups: Sequence[dict],
        matrices: Callable[..., list[list[Tensor]]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.matrices, self.dtype = matrices, dtype

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        lr, momentum = group["lr"], group["momentum"]
        updates: dict[Tensor, Tensor] = {}
        for parameter, state in self.state.items():
            state["momentum"].lerp_(parameter.grad, 1 - momentum)
            updates[parameter] = parameter.grad.lerp(state["momentum"], momentum)  # Nesterov
        by_shape = defaultdict(list)
        in_rows = self.matrices(
            of=lambda parameter: updates.get(parameter, parameter)
        )  # biases are not ours
        for rows, update in zip(self.matrices(), map(torch.cat, in_rows), strict=True):
            by_shape[update.shape].append((rows, update))
        for (R, C), same in by_shape.items():
            directions = orthogonalise(torch.stack([update for _, update in same]), self.dtype)
            for (rows, _), direction in zip(same, directions, strict=True):
                for block, part in zip(
                    rows, direction.split([len(block) for block in rows]), strict=True
                ):
                    block.mul_(1 - lr * group["weight_decay"])
                    block.add_(part, alpha=-lr * max(1.0, R / C) ** 0.5)


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32, steps: int = 5) -> Tensor:
    """(N, R, C) -> (N, R, C), each with its singular values moved close to 1.

    Newton-Schulz iteration with the quintic of Jordan et al. 2024, whose coefficients trade
    exactness (values end between about 0.7 and 1.2) for speed from small values. Computed in
    `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    tall = X.size(1) > X.size(2)
    X = (X.mT if tall else X).to(dtype)
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A^2, rounded once
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if tall else X).to(matrices.dtype)


def build(model: GPT, train: TrainConfig, dtype: torch.dtype) -> list[Optimizer]:
    """The optimizers of a run: AdamW alone, or Muon for the hidden matrices and AdamW for the rest.

    Weight decay pulls at matrices and embeddings, never at gains and biases: decided by what a
    parameter is for, not by its name or shape. Each group keeps its peak rate as `peak_lr`, of
    which the schedule takes a share.
    """
    hidden, embeddings = model.hidden_parameters(), model.embeddings()
    matrices = {id(parameter) for parameter in (*hidden, *embeddings)}
    vectors = [parameter for parameter in model.parameters() if id(parameter) not in matrices]
    by_muon = train.optimizer == "muon"
    name, pulled = ("embeddings", embeddings) if by_muon else ("matrices", [*hidden, *embeddings])
    groups = [
        {"name": name, "params": pulled, "weight_decay": train.weight_decay},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[Optimizer] = [AdamW(groups, train.learning_rate, (train.beta1, train.beta2))]
    if by_muon:
        moved = [{"name": "hidden", "params": hidden}]
        optimizers.append(
            Muon(
                moved,
                model.matrices,
                train.muon_learning_rate,
                train.muon_momentum,
                train.weight_decay,
                dtype,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: Sequence[Optimizer], share: float) -> None:
    """Set every group's rate to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak_lr"]


@torch.no_grad()
def copy_state(
    source: GPT,
    source_optimizers: Sequence[Optimizer],
    target: GPT,
    target_optimizers: Sequence[Optimizer],
) -> None:
    """Give each target optimizer the state of its source: what moments and steps they keep,
    whatever the layouts.

    Rates and decays stay those of the target: they are settings, not state.
    """
    for theirs, ours in zip(source_optimizers, target_optimizers, strict=True):
        for name in ours.moments:
            copy_views(source, target, _moment(theirs, name), _moment(ours, name))
        example = next(iter(theirs.state.values()))
        for state in ours.state.values():
            if "step" in state:  # as many for every parameter
                state["step"].copy_(example["step"])


def _moment(optimizer: Optimizer, name: str) -> Callable[[Tensor], Tensor]:
    """For `GPT.views`: a parameter's moment, or zeros where another optimizer has the parameter."""
    return lambda parameter: (
        optimizer.state[parameter][name]
        if parameter in optimizer.state
        else torch.zeros_like(parameter)
    )
