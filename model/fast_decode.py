"""One decoding step for one text: what `GPT.forward` computes with caches and T = 1, faster.

`prefill` lets `GPT.forward` read a text; each `step` then reads one more token. For a single token
all products are matrix-vector products: there is little to compute, and the time goes into calling
functions and reading weights. So everything that can be prepared is prepared once:

- Weights are stored as (in, out), with q, k and v side by side, and with norm weights and constant
  factors multiplied in. Inputs end in a 1, for which matrices have one more row: the bias.
- LayerNorm subtracts the mean. Here everything that is added to the residual stream is centered in
  advance, so the mean of the stream stays 0 and what is left of LayerNorm is RMSNorm.
- Output buffers are preallocated and shared by NumPy and PyTorch, so each operation uses the faster
  one.

C n_embd, H n_head, D head size, S tokens so far, V vocabulary
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
from model.kv_cache import new_caches

MAX_WEIGHTS_IN_CACHE = 2**22  # of the CPU: 16 MB in float32
PANEL = 16  # columns of a panel, the unit in which `build_matvecs` stores a large matrix
EPS = torch.finfo(torch.float32).eps  # as in nn.RMSNorm


class FastDecoder:
    """A model's weights, copied into the form that is fastest for one token in float32 on a CPU.

    It has the keys and values of the tokens that it has read, up to block_size of them. `threads`
    is the number of PyTorch threads that is fastest for it.
    """

    @torch.no_grad()
    def __init__(self, model: GPT):
        config, mlp = model.config, model.blocks[0].mlp
        rotary = model.blocks[0].attention.rotary
        C, H, D, V = config.n_embd, config.n_head, config.n_embd // config.n_head, model.vocab_size
        self.model, self.config = model, config
        self.ids = np.zeros(config.block_size, np.int64)  # the tokens that were read
        self.length = 0  # how many
        self.keys_values: list[tuple[np.ndarray, np.ndarray]] = []  # of each layer

        # embeddings
        self.token_embedding = self._centered(model.token_embedding.weight).numpy()  # (V, C)
        self.previous_embeddings = [
            self._centered(embedding.weight).numpy() for embedding in model.previous_embeddings
        ]
        self.position_embedding = self.cos_sin = None
        if rotary:
            self.cos_sin = rotary.cos_sin.repeat(1, 1, 2 * H).numpy()  # (2, positions, 2C): q and k
        else:
            self.position_embedding = self._centered(model.position_embedding.weight).numpy()

        # constants as arrays, because NumPy is slower with Python numbers
        self.norm_eps = model.final_norm.eps or EPS
        self.eps, self.zero, self.one = (np.array(n, np.float32) for n in (EPS, 0, 1))
        self.factor = np.array(1, np.float32)
        self.head_size = D
        self.qk_scale = np.repeat(np.float32([D**-0.5, 1]), C).reshape(-1, D)  # (2H, D)
        self.averaging = np.full((D, D), 1 / D, np.float32)  # x @ averaging: each row's mean

        # buffers: inputs of products end in a 1, for the bias; outputs are padded to whole panels
        hidden = mlp.up.out_features
        up_size = 2 * hidden if config.mlp == "swiglu" else hidden
        normed, heads, activated = (torch.ones(size + 1) for size in (C, C, hidden))
        qkv, branch_out, up_out, logits = (
            torch.empty(size + -size % PANEL) for size in (3 * C, C, up_size, V)
        )
        self.residual = np.empty(C, np.float32)
        self.normed, self.activated = normed.numpy()[:-1], activated.numpy()[:-1]
        self.heads = heads.numpy()[:-1].reshape(H, 1, D)
        self.qkv, self.branch_out = qkv.numpy()[: 3 * C], branch_out.numpy()[:C]
        self.q, self.k, self.v = self.qkv.reshape(3, H, 1, D)
        self.up_out, self.logits = up_out.numpy()[:up_size], logits.numpy()[:V]
        self.erf = partial(torch.erf, up_out[:hidden], out=activated[:-1])  # NumPy has no erf

        # matrix-vector products: (input, matrix, output) of each
        tasks = []
        for block in model.blocks:
            to_qkv, out_proj, up, down = self._matrices(block)
            tasks += [
                (normed, to_qkv, qkv),
                (heads, out_proj, branch_out),
                (normed, up, up_out),
                (activated, down, branch_out),
            ]
        lm_head = fold_norm(model.final_norm, with_bias_row(model.lm_head.weight))
        # with a soft-cap, logits are scale * cap * tanh(. / cap); without, the matrix is scaled
        cap, scale = config.logit_softcap, config.logit_scale
        self.scaled_cap = scale * cap
        lm_head = lm_head / cap if cap else scale * lm_head
        large = sum(matrix.numel() for _, matrix, _ in tasks) > MAX_WEIGHTS_IN_CACHE
        *calls, self.lm_head = build_matvecs([*tasks, (normed, lm_head, logits)], large)
        self.blocks = [calls[i : i + 4] for i in range(0, len(calls), 4)]
        self.threads = choose_threads(calls) if large else 1

    def _matrices(self, block: Block) -> list[Tensor]:
        """Return a block's matrices (in + 1, out): qkv, output projection, MLP up, MLP down."""
        mlp, projection = block.mlp, block.attention.projection
        heads = [projection.head_weights(h) for h in range(projection.n_head)]
        q, k, v, *biases = (torch.cat(part) for part in zip(*heads, strict=True))  # (C, C), (C,)
        qkv = with_bias_row(torch.cat([q, k, v]), torch.cat(biases) if biases else None)
        out_proj = with_bias_row(block.attention.out_proj.weight, block.attention.out_proj.bias)
        up = with_bias_row(mlp.up.weight, mlp.up.bias)
        down = with_bias_row(mlp.down.weight, mlp.down.bias)
        if not self.config.qk_norm:
            qkv[:, : len(q)] /= math.sqrt(self.config.n_embd // self.config.n_head)
        if mlp.activation == "gelu":  # gelu(x) = z (1 + erf z) / sqrt 2, where z = x / sqrt 2
            up /= math.sqrt(2)
            down[:-1] /= math.sqrt(2)
        if mlp.activation == "swiglu":  # silu(x) = z (1 + tanh z), where z = x / 2
            up = torch.cat([with_bias_row(mlp.gate.weight, mlp.gate.bias) / 2, up], dim=1)
        return [
            fold_norm(block.attn_norm, qkv),
            self._centered(out_proj),
            fold_norm(block.mlp_norm, up),
            self._centered(down),
        ]

    def _centered(self, rows: Tensor) -> Tensor:
        """Subtract the mean of each row (n, C) for a LayerNorm model.

        Then the residual stream has mean 0, and LayerNorm equals RMSNorm.
        """
        if self.config.norm == "layernorm":
            return rows - rows.mean(dim=1, keepdim=True)
        return rows

    @torch.inference_mode()
    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """Forget the old context and read ids (T,); return the logits (1, V) after them."""
        caches = new_caches(self.config)
        logits = self.model(torch.from_numpy(ids)[None], caches)[:, -1]  # (1, V)
        # views of each layer's cache, in which `step` stores more: keys (H, D, block_size),
        # values (H, block_size, D)
        self.keys_values = [(c.keys[0].mT.numpy(), c.values[0].numpy()) for c in caches]
        self.length = len(ids)
        self.ids[: self.length] = ids
        return logits.numpy()

    def step(self, token: int) -> np.ndarray:
        """Read one more token, after a prefill; return the logits (1, V) that follow it.

        The context, with this token, has at most block_size tokens.
        """
        residual, position, ids = self.residual, self.length, self.ids
        ids[position], self.length = token, position + 1
        scores = torch.empty(len(self.heads), 1, position + 1)  # (H, 1, S)
        weights = scores.numpy()  # the same memory: the softmax is computed in place

        # embeddings of the token, of those before it (token shifts), of the position
        residual[:] = self.token_embedding[token]
        for distance, embedding in enumerate(self.previous_embeddings[:position], 1):
            residual += embedding[ids[position - distance]]
        if self.position_embedding is not None:
            residual += self.position_embedding[position]

        for products, (keys, values) in zip(self.blocks, self.keys_values, strict=True):
            project_qkv, project_out, project_up, project_down = products
            # attention norm
            self._norm()
            # q, k and v for this position
            project_qkv()
            if self.config.qk_norm:
                self._qk_norm()
            # RoPE on q and k
            if self.cos_sin is not None:
                self._apply_rope(*self.cos_sin[:, position])
            # store k and v
            keys[:, :, position], values[:, position] = self.k[:, 0], self.v[:, 0]
            # attention: scores (the scale is in q), softmax, weighted sum of the values, all heads
            np.matmul(self.q, keys[:, :, : position + 1], weights)  # (H, 1, D) @ (H, D, S)
            torch.softmax(scores, -1, out=scores)
            np.matmul(weights, values[:, : position + 1], self.heads)  # (H, 1, S) @ (H, S, D)
            # output projection, residual connection
            project_out()
            residual += self.branch_out
            # MLP norm
            self._norm()
            # MLP, residual connection
            project_up()
            self._activation()
            project_down()
            residual += self.branch_out

        # final norm, logits
        self._norm()
        self.lm_head()
        cap = self.scaled_cap
        return cap * np.tanh(self.logits)[None] if cap else self.logits[None].copy()

    def _norm(self) -> None:
        """Compute RMSNorm of the residual stream. For a LayerNorm model see `_centered`."""
        mean_square = float(self.residual.dot(self.residual)) / len(self.residual)
        self.factor[()] = (mean_square + self.norm_eps) ** -0.5
        np.multiply(self.residual, self.factor, self.normed)

    def _qk_norm(self) -> None:
        """Scale each head of q and k to a mean square of 1, and q by 1 / sqrt(D)."""
        heads = self.qkv.reshape(-1, self.head_size)[: len(self.qk_scale)]  # (2H, D)
        heads *= self.qk_scale / np.sqrt((heads * heads).dot(self.averaging) + self.eps)

    def _apply_rope(self, cos: np.ndarray, sin: np.ndarray) -> None:
        """Rotate q and k, as `Rotary` does; cos and sin are (2C,)."""
        heads = self.qkv[: len(cos)]
        swapped = heads.reshape(-1, 2, self.head_size // 2)[:, ::-1].reshape(-1)
        heads *= cos
        heads += swapped * sin

    def _activation(self) -> None:
        """Apply the activation function to the output of the up projection."""
        x, activated = self.up_out, self.activated
        if self.config.mlp == "relu2":
            np.maximum(x, self.zero, out=activated)
            activated *= activated
            return
        if self.config.mlp == "gelu":
            self.erf()
        else:
            x, up = x.reshape(2, -1)
            np.tanh(x, activated)
            x *= up
        activated += self.one
        activated *= x


def with_bias_row(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return weight (out, in) and bias as one matrix (in + 1, out), for inputs that end in a 1."""
    row = weight.new_zeros(1, len(weight)) if bias is None else bias[None]
    return torch.cat([weight.T, row])


def fold_norm(norm: nn.Module, matrix: Tensor) -> Tensor:
    """Multiply the weights and bias of a norm into the matrix (in + 1, out) that follows it."""
    bias_row = matrix[-1:]
    if getattr(norm, "bias", None) is not None:
        bias_row = bias_row + norm.bias @ matrix[:-1]
    return torch.cat([norm.weight[:, None] * matrix[:-1], bias_row])


def build_matvecs(
    tasks: Sequence[tuple[Tensor, Tensor, Tensor]], large: bool
) -> list[Callable[[], object]]:
    """Build for each (x, matrix, y) a function that writes x (in + 1,) times the matrix into y.

    If `large`, the matrix is stored as contiguous panels of PANEL columns, which PyTorch's threads
    share and read sequentially. All matrices are in one allocation, so that the operating system
    can use huge pages.
    """
    matrices = [to_panels(matrix) if large else matrix for _, matrix, _ in tasks]
    sizes, calls = [matrix.numel() for matrix in matrices], []
    memory = torch.from_numpy(np.empty(sum(sizes), np.float32)).split(sizes)
    for (x, _, y), matrix, storage in zip(tasks, matrices, memory, strict=True):
        weight = storage.view(matrix.shape).copy_(matrix)
        if large:
            x_rows = x.expand(len(weight), 1, -1)  # (panels, 1, in + 1)
            calls.append(partial(torch.bmm, x_rows, weight, out=y.view(-1, 1, PANEL)))
        else:
            y = y.numpy()[: matrix.size(1)]
            calls.append(partial(x.numpy().dot, weight.numpy(), y))
    return calls


def choose_threads(calls: Sequence[Callable[[], object]]) -> int:
    """Return the faster number of threads, 1 or all, under the machine's present load."""
    threads = torch.get_num_threads()
    seconds = dict.fromkeys((1, threads), 0.0)  # the last one tried, the current number, stays set
    for count in [*seconds] * 5:
        torch.set_num_threads(count)
        began = time.perf_counter()
        for call in calls:
            call()
        seconds[count] += time.perf_counter() - began
    return min(seconds, key=seconds.get)


def to_panels(matrix: Tensor) -> Tensor:
    """Split a matrix (in, out) into panels (panels, in, PANEL), padded with zero columns."""
    padded = F.pad(matrix, (0, -matrix.size(1) % PANEL))
    return padded.unflatten(1, (-1, PANEL)).transpose(0, 1)
