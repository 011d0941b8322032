"""One character of one text, lean: what `GPT.forward` computes with caches and T = 1, in few NumPy calls.

`GPT.forward` says what a step is. For a single character its products are a vector times a matrix: there is little to
compute, and the time goes into calling functions and into reading weights. So whatever can be done once is done once:

- Weights lie as (in, out), q, k and v side by side, with gains and constant factors multiplied in.
- LayerNorm subtracts the mean. Here everything that is added to the residual stream is centred beforehand, so that the
  stream's mean is 0 throughout, and what is left of LayerNorm is RMSNorm.
- Softmax, which PyTorch does sooner, and erf, which NumPy lacks, work on memory that both share.

C n_embd, H n_head, D head size, S characters read so far, V vocabulary
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.cache import KVCache
from model.gpt import GPT, Block

LARGE = 2**22  # weights: more than these 16 MB come from memory, not from the processor's caches
PANEL = 24  # columns
TINY = torch.finfo(torch.float32).eps  # what RMS norms add to the mean square


class Product:
    """x (in,) -> x W + b (out,) for W (in, out)."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray):
        self.weight, self.bias = weight, bias if bias.any() else None

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        y = x.dot(self.weight, out)
        if self.bias is not None:
            y += self.bias
        return y


class PanelProduct:
    """The same for a W that comes from memory. It lies in panels (panels, in, PANEL), each some of its columns in one
    piece, so that it is read straight through, and the panels are shared among PyTorch's threads.
    """

    def __init__(self, panels: np.ndarray, bias: np.ndarray):
        self.weight, self.bias, x = torch.from_numpy(panels), bias, torch.empty(panels.shape[1])
        self.x, self.rows = x.numpy(), x.expand(len(panels), 1, -1)

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        self.x[:] = x
        y = torch.bmm(self.rows, self.weight).numpy().reshape(-1)
        return np.add(y[: len(self.bias)], self.bias, out)


class LeanStep:
    """A model's weights, copied and prepared, for float32 on a CPU, with the memory of one step."""

    @torch.no_grad()
    def __init__(self, model: GPT):
        config, rotary = model.config, model.blocks[0].attention.rotary
        C, hidden = config.n_embd, model.blocks[0].mlp.up.out_features
        self.config, self.H, self.D = config, config.n_head, C // config.n_head
        self.tokens = array(self._centred(model.token_embedding.weight))
        self.positions = None if rotary else array(self._centred(model.position_embedding.weight))
        self.turns = array(rotary.turns.repeat(1, 1, 2 * self.H)) if rotary else None  # cos, sin: (2, positions, 2 C)
        output = after(model.norm, affine(model.output.weight)) / (config.logit_softcap or 1.0)
        *blocks, self.output = products([*(each for block in model.blocks for each in self._affines(block)), output])
        self.blocks = [blocks[i : i + 4] for i in range(0, len(blocks), 4)]
        self.caches, self.memory = None, []

        self.qkv = np.empty(3 * C, np.float32)
        self.q, self.k, self.v = self.qkv.reshape(3, self.H, self.D)
        self.lengths = np.repeat(np.float32([self.D**-0.5, 1]), C).reshape(-1, self.D)  # after QK-norm, over sqrt D
        self.mean = np.full((self.D, self.D), 1 / self.D, np.float32)
        self.z, self.bent = torch.empty(hidden * (2 if config.mlp == "swiglu" else 1)), torch.empty(hidden)
        self.z_array, self.bent_array = self.z.numpy(), self.bent.numpy()
        self.eps, self.tiny = model.norm.eps or TINY, np.array(TINY, np.float32)
        self.factor, self.zero, self.one = (np.array(n, np.float32) for n in (1, 0, 1))  # sooner than mere numbers

    def _affines(self, block: Block) -> list[Tensor]:
        """Those of a block: to q, k and v; from the heads to the stream; into the MLP; out of it."""
        mlp, projection = block.mlp, block.attention.projection
        heads = [projection.head_weights(h) for h in range(self.H)]
        q, k, v, *biases = (torch.cat(part) for part in zip(*heads, strict=True))  # three (C, C), three (C,) or none
        qkv = affine(torch.cat([q, k, v]), torch.cat(biases) if biases else None)
        output = affine(block.attention.output.weight, block.attention.output.bias)
        up, down = affine(mlp.up.weight, mlp.up.bias), affine(mlp.down.weight, mlp.down.bias)
        if not self.config.qk_norm:
            qkv[:, : len(q)] /= math.sqrt(self.D)
        if mlp.kind == "gelu":  # gelu(x) = z (1 + erf z) / sqrt 2, where z = x / sqrt 2
            up /= math.sqrt(2)
            down[:-1] /= math.sqrt(2)
        if mlp.kind == "swiglu":  # silu(x) = z (1 + tanh z), where z = x / 2
            up = torch.cat([affine(mlp.gate.weight, mlp.gate.bias) / 2, up], dim=1)
        return [after(block.norm_1, qkv), self._centred(output), after(block.norm_2, up), self._centred(down)]

    def _centred(self, rows: Tensor) -> Tensor:
        """Rows (n, C) as they are added to the stream."""
        return rows - rows.mean(dim=1, keepdim=True) if self.config.norm == "layernorm" else rows

    def __call__(self, id: int, caches: Sequence[KVCache]) -> np.ndarray:
        """Reads one character after those in `caches`, which `GPT.forward` began -> logits (1, V) of what follows."""
        if caches is not self.caches:
            self.caches = caches
            self.memory = [(cache.keys[0].mT.numpy(), cache.values[0].numpy()) for cache in caches]
        position = caches[0].length
        x = self.tokens[id] if self.positions is None else self.tokens[id] + self.positions[position]
        scores = torch.empty(self.H, 1, position + 1)
        scores_array = scores.numpy()
        for (qkv, output, up, down), (keys, values), cache in zip(self.blocks, self.memory, caches, strict=True):
            qkv(self._normalised(x), self.qkv)
            if self.config.qk_norm:
                self._normalise_heads()
            if self.turns is not None:
                self._turn(*self.turns[:, position])
            keys[:, :, position], values[:, position] = self.k, self.v
            np.matmul(self.q[:, None], keys[:, :, : position + 1], scores_array)  # (H, 1, D) @ (H, D, S)
            torch.softmax(scores, -1, out=scores)
            x = x + output(np.matmul(scores_array, values[:, : position + 1]).reshape(-1))  # (H, 1, S) @ (H, S, D)
            up(self._normalised(x), self.z_array)
            x = x + down(self._bend())
            cache.length += 1
        logits = self.output(self._normalised(x))[None]
        softcap = self.config.logit_softcap
        return softcap * np.tanh(logits) if softcap else logits

    def _normalised(self, x: np.ndarray) -> np.ndarray:
        """x over the root of its mean square: LayerNorm and RMSNorm, without their gains, of what has mean 0."""
        self.factor[()] = (float(x.dot(x)) / len(x) + self.eps) ** -0.5
        return x * self.factor

    def _normalise_heads(self) -> None:
        """QK-norm: every head of q and k gets a mean square of 1, and then q its 1 / sqrt(D)."""
        heads = self.qkv[: 2 * self.k.size].reshape(-1, self.D)
        heads *= self.lengths / np.sqrt((heads * heads).dot(self.mean) + self.tiny)

    def _turn(self, cos: np.ndarray, sin: np.ndarray) -> None:
        """Rotary positions: as in `Rotary`, for q and k at once."""
        heads = self.qkv[: 2 * self.k.size]
        swapped = heads.reshape(-1, 2, self.D // 2)[:, ::-1].reshape(-1)
        heads *= cos
        heads += swapped * sin

    def _bend(self) -> np.ndarray:
        """The activation of z, from `up` to `down`."""
        z, bent = self.z_array, self.bent_array
        if self.config.mlp == "relu2":
            np.maximum(z, self.zero, out=bent)
            bent *= bent
            return bent
        if self.config.mlp == "gelu":
            torch.erf(self.z, out=self.bent)
        else:
            z, up = z.reshape(2, -1)
            np.tanh(z, bent)
            z *= up
        bent += self.one
        bent *= z
        return bent


def affine(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x -> weight x + bias as one matrix (in + 1, out), in float64, for an x that ends in 1."""
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight.T, bias[None]]).double()


def after(norm: nn.Module, matrix: Tensor) -> Tensor:
    """The affine `matrix` of what comes out of `norm`, with the gains and the bias of `norm` worked in."""
    shift = getattr(norm, "bias", None)
    bias = matrix[-1:] if shift is None else matrix[-1:] + shift.double() @ matrix[:-1]
    return torch.cat([norm.weight.double()[:, None] * matrix[:-1], bias])


def products(affines: Sequence[Tensor]) -> list[Product | PanelProduct]:
    """Each of these matrices, ready to be multiplied with; all in one piece of memory, which has larger pages."""
    large = sum(matrix.numel() for matrix in affines) > LARGE
    parts = [array(panels(matrix[:-1]) if large else matrix[:-1]) for matrix in affines]
    memory = np.split(np.concatenate([part.ravel() for part in parts]), np.cumsum([part.size for part in parts[:-1]]))
    weights = (piece.reshape(part.shape) for piece, part in zip(memory, parts, strict=True))
    biases = (array(matrix[-1]) for matrix in affines)
    return [(PanelProduct if large else Product)(*both) for both in zip(weights, biases, strict=True)]


def panels(matrix: Tensor) -> Tensor:
    """(in, out) -> (panels, in, PANEL), with columns of zeros at the end where they do not divide."""
    return F.pad(matrix, (0, -matrix.size(1) % PANEL)).unflatten(1, (-1, PANEL)).transpose(0, 1)


def array(matrix: Tensor) -> np.ndarray:
    return matrix.float().contiguous().numpy()
