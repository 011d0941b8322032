"""One character of one text, lean: what `GPT.forward` computes with caches and T = 1, in few calls.

`GPT.forward` says what a step is. For a single character its products are a vector times a matrix:
there is little to compute, and the time goes into calling functions and into reading weights. So
whatever can be done once is done once:

- Weights lie as (in, out), q, k and v side by side, with gains and constant factors multiplied in.
  What is multiplied with them ends in a 1, for which they have one row more: the bias.
- LayerNorm subtracts the mean. Here everything that is added to the residual stream is centred
  beforehand, so that the stream's mean is 0 throughout, and what is left of LayerNorm is RMSNorm.
- All results have their memory, which NumPy and PyTorch share: each does what it does sooner.

C n_embd, H n_head, D head size, S characters read so far, V vocabulary
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.gpt import GPT, Block
from model.kv_cache import KVCache

LARGE = 2**22  # weights: more than these 16 MB come from memory, not from the processor's caches
PANEL = 16  # columns
TINY = torch.finfo(torch.float32).eps  # what RMS norms add to the mean square


class LeanStep:
    """A model's weights, copied and prepared, for float32 on a CPU, with the memory of one step."""

    @torch.no_grad()
    def __init__(self, model: GPT):
        config, rotary, hidden = (
            model.config,
            model.blocks[0].attention.rotary,
            model.blocks[0].mlp.up.out_features,
        )
        C, H, D = config.n_embd, config.n_head, config.n_embd // config.n_head
        self.config, self.caches, self.memory = config, None, []
        self.tokens = self._centred(model.token_embedding.weight).numpy()
        self.shifts = [
            self._centred(embedding.weight).numpy() for embedding in model.shift_embeddings
        ]
        self.positions = None if rotary else self._centred(model.position_embedding.weight).numpy()
        self.turns = (
            rotary.turns.repeat(1, 1, 2 * H).numpy() if rotary else None
        )  # cos, sin: (2, positions, 2 C)
        self.eps, self.tiny = model.norm.eps or TINY, np.array(TINY, np.float32)
        self.factor, self.zero, self.one = (
            np.array(n, np.float32) for n in (1, 0, 1)
        )  # sooner than mere numbers
        self.lengths = np.repeat(np.float32([D**-0.5, 1]), C).reshape(
            -1, D
        )  # after QK-norm, over sqrt D
        self.mean = np.full((D, D), 1 / D, np.float32)

        normal, heads, bent = (torch.ones(n + 1) for n in (C, C, hidden))  # what is multiplied
        z_size = 2 * hidden if config.mlp == "swiglu" else hidden
        qkv, added, z, logits = (
            torch.empty(n + -n % PANEL) for n in (3 * C, C, z_size, model.vocab_size)
        )  # products
        self.stream, self.normal, self.heads = (
            np.empty(C, np.float32),
            normal.numpy()[:-1],
            heads.numpy()[:-1],
        )
        self.heads, self.qkv, self.added = (
            self.heads.reshape(H, 1, D),
            qkv.numpy()[: 3 * C],
            added.numpy()[:C],
        )
        self.q, self.k, self.v = self.qkv.reshape(3, H, 1, D)
        self.z, self.bent, self.logits = (
            z.numpy()[:z_size],
            bent.numpy()[:-1],
            logits.numpy()[: model.vocab_size],
        )
        self.erf = partial(torch.erf, z[:hidden], out=bent[:-1])  # which NumPy lacks

        tasks = []
        for block in model.blocks:
            tasks += zip(
                (normal, heads, normal, bent),
                self._affines(block),
                (qkv, added, z, added),
                strict=True,
            )
        output = after(model.norm, affine(model.output.weight)) / (config.logit_softcap or 1.0)
        large = sum(matrix.numel() for _, matrix, _ in tasks) > LARGE
        *calls, self.output = products([*tasks, (normal, output, logits)], large)
        self.threads = (
            quickest(calls) if large else 1
        )  # those that help; idle ones only take turns away
        self.blocks = [calls[i : i + 4] for i in range(0, len(calls), 4)]

    def _affines(self, block: Block) -> list[Tensor]:
        """Those of a block: to q, k and v; from the heads to the stream; into the MLP; out
        of it.
        """
        mlp, projection = block.mlp, block.attention.projection
        heads = [projection.head_weights(h) for h in range(projection.n_head)]
        q, k, v, *biases = (
            torch.cat(part) for part in zip(*heads, strict=True)
        )  # three (C, C), three (C,) or none
        qkv = affine(torch.cat([q, k, v]), torch.cat(biases) if biases else None)
        output = affine(block.attention.output.weight, block.attention.output.bias)
        up, down = affine(mlp.up.weight, mlp.up.bias), affine(mlp.down.weight, mlp.down.bias)
        if not self.config.qk_norm:
            qkv[:, : len(q)] /= math.sqrt(self.q.shape[-1])
        if mlp.kind == "gelu":  # gelu(x) = z (1 + erf z) / sqrt 2, where z = x / sqrt 2
            up /= math.sqrt(2)
            down[:-1] /= math.sqrt(2)
        if mlp.kind == "swiglu":  # silu(x) = z (1 + tanh z), where z = x / 2
            up = torch.cat([affine(mlp.gate.weight, mlp.gate.bias) / 2, up], dim=1)
        return [
            after(block.norm_1, qkv),
            self._centred(output),
            after(block.norm_2, up),
            self._centred(down),
        ]

    def _centred(self, rows: Tensor) -> Tensor:
        """Rows (n, C) as they are added to the stream."""
        return rows - rows.mean(dim=1, keepdim=True) if self.config.norm == "layernorm" else rows

    def __call__(self, ids: np.ndarray, caches: Sequence[KVCache]) -> np.ndarray:
        """Reads the last of ids (S,), of which `caches` hold the others -> logits (1, V) of what
        follows.

        The first ones are for `GPT.forward` to read.
        """
        if caches is not self.caches:
            self.caches = caches
            self.memory = [(cache.keys[0].mT.numpy(), cache.values[0].numpy()) for cache in caches]
        stream, position = self.stream, caches[0].length
        stream[:] = self.tokens[ids[position]]
        for n, embedding in enumerate(self.shifts[:position], 1):
            stream += embedding[ids[position - n]]
        if self.positions is not None:
            stream += self.positions[position]
        scores = torch.empty(len(self.heads), 1, position + 1)
        weights = scores.numpy()
        for (project, merge, up, down), (keys, values), cache in zip(
            self.blocks, self.memory, caches, strict=True
        ):
            self._normalise()
            project()
            if self.config.qk_norm:
                self._normalise_heads()
            if self.turns is not None:
                self._turn(*self.turns[:, position])
            keys[:, :, position], values[:, position] = self.k[:, 0], self.v[:, 0]
            np.matmul(self.q, keys[:, :, : position + 1], weights)  # (H, 1, D) @ (H, D, S)
            torch.softmax(scores, -1, out=scores)
            np.matmul(weights, values[:, : position + 1], self.heads)  # (H, 1, S) @ (H, S, D)
            merge()
            stream += self.added
            self._normalise()
            up()
            self._bend()
            down()
            stream += self.added
            cache.length += 1
        self._normalise()
        self.output()
        softcap = self.config.logit_softcap
        return softcap * np.tanh(self.logits)[None] if softcap else self.logits[None].copy()

    def _normalise(self) -> None:
        """The stream over the root of its mean square: both norms, without their gains, of what has
        mean 0.
        """
        self.factor[()] = (
            float(self.stream.dot(self.stream)) / len(self.stream) + self.eps
        ) ** -0.5
        np.multiply(self.stream, self.factor, self.normal)

    def _normalise_heads(self) -> None:
        """QK-norm: every head of q and k gets a mean square of 1, and then q its 1 / sqrt(D)."""
        heads = self.qkv.reshape(-1, len(self.mean))[: len(self.lengths)]
        heads *= self.lengths / np.sqrt((heads * heads).dot(self.mean) + self.tiny)

    def _turn(self, cos: np.ndarray, sin: np.ndarray) -> None:
        """Rotary positions: as in `Rotary`, for q and k at once."""
        heads = self.qkv[: len(cos)]
        swapped = heads.reshape(-1, 2, len(self.mean) // 2)[:, ::-1].reshape(-1)
        heads *= cos
        heads += swapped * sin

    def _bend(self) -> None:
        """The activation of z, from `up` to `down`."""
        z, bent = self.z, self.bent
        if self.config.mlp == "relu2":
            np.maximum(z, self.zero, out=bent)
            bent *= bent
            return
        if self.config.mlp == "gelu":
            self.erf()
        else:
            z, up = z.reshape(2, -1)
            np.tanh(z, bent)
            z *= up
        bent += self.one
        bent *= z


def affine(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x -> weight x + bias as one matrix (in + 1, out), for an x that ends in 1."""
    return torch.cat([weight.T, weight.new_zeros(1, len(weight)) if bias is None else bias[None]])


def after(norm: nn.Module, matrix: Tensor) -> Tensor:
    """The affine `matrix` of what comes out of `norm`, with the gains and the bias of `norm` worked
    in.
    """
    shift = getattr(norm, "bias", None)
    bias = matrix[-1:] if shift is None else matrix[-1:] + shift @ matrix[:-1]
    return torch.cat([norm.weight[:, None] * matrix[:-1], bias])


def products(tasks: Sequence[tuple[Tensor, Tensor, Tensor]], large: bool) -> list[Callable]:
    """For each (x, matrix, y) a call that writes the product of x (in + 1,) and the matrix (in + 1,
    out) to y.

    Of `large` matrices, panels of some columns are laid out in one piece each, to be read straight
    through, and shared among PyTorch's threads. All lie in one piece of memory, which has larger
    pages.
    """
    matrices = [panels(matrix) if large else matrix for _, matrix, _ in tasks]
    sizes, calls = [matrix.numel() for matrix in matrices], []
    memory = torch.from_numpy(np.empty(sum(sizes), np.float32)).split(sizes)
    for (x, _, y), matrix, place in zip(tasks, matrices, memory, strict=True):
        weight = place.view(matrix.shape).copy_(matrix)
        if large:
            calls.append(
                partial(torch.bmm, x.expand(len(weight), 1, -1), weight, out=y.view(-1, 1, PANEL))
            )
        else:
            calls.append(partial(x.numpy().dot, weight.numpy(), y.numpy()[: matrix.size(1)]))
    return calls


def quickest(calls: Sequence[Callable]) -> int:
    """With how many of PyTorch's threads the calls take less time here and now: all, or one beside
    other work.
    """
    threads = torch.get_num_threads()
    seconds = dict.fromkeys((1, threads), 0.0)  # as many as before come last, and stay
    for count in [*seconds] * 5:
        torch.set_num_threads(count)
        began = time.perf_counter()
        for call in calls:
            call()
        seconds[count] += time.perf_counter() - began
    return min(seconds, key=seconds.get)


def panels(matrix: Tensor) -> Tensor:
    """(in, out) -> (panels, in, PANEL), with columns of zeros at the end where they do not
    divide.
    """
    return F.pad(matrix, (0, -matrix.size(1) % PANEL)).unflatten(1, (-1, PANEL)).transpose(0, 1)
