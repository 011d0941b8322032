"""The forward pass of a single token in NumPy, one statement per operation, as in `GPT.forward`.

For one text on a CPU this is about twice as fast: each operation is so small that PyTorch spends
more time around it than in it. `build_decoder` in generate.py compares the two.

C n_embd, H n_head, D head size, S tokens up to this one, V vocabulary
"""

import numpy as np
import torch
from torch.nn import functional as F

from model.gpt import GPT
from model.kv_cache import GPTCache
from model.parameters import named_slices

LAYERNORM_EPS = 1e-5  # both are PyTorch's defaults
RMS_EPS = float(np.finfo(np.float32).eps)


class Decoder:
    """The parameters of a float32 model as NumPy arrays, by the names of `named_slices`."""

    @torch.no_grad()
    def __init__(self, model: GPT):
        self.config, self.rotary = model.config, model.blocks[0].attention.rotary
        slices = named_slices(model)
        self.parameters = {name: torch.cat(slices[name]).numpy() for name in slices}

    def step(self, token: int, cache: GPTCache) -> np.ndarray:
        """Read the id of the next token, after one or more in the cache; return logits (V,)."""
        config, position = self.config, cache.length
        S = position + 1
        C, H, D = config.n_embd, config.n_head, config.n_embd // config.n_head

        # the residual stream begins with the embedding of the token
        x = self.parameters["token_embedding"][token].copy()  # (C,)
        # token shifts: add those of the tokens before it
        if config.token_shifts:
            recent = cache.recent_ids[0].tolist()
            for n, earlier in enumerate(reversed(recent)):
                x += self.parameters[f"previous_embeddings.{n}"][earlier]
            cache.remember(torch.tensor([[*recent, token]]))
        # and that of the position, or RoPE below
        if config.positions == "learned":
            x += self.parameters["position_embedding"][position]

        for i, layer_cache in enumerate(cache.layers):
            block = f"blocks.{i}"
            h = self.norm(x, f"{block}.attn_norm")
            q = self.linear(h, f"{block}.attention.query").reshape(H, D)
            k = self.linear(h, f"{block}.attention.key").reshape(H, D)
            v = self.linear(h, f"{block}.attention.value").reshape(H, D)
            if config.qk_norm:
                q, k = rms_norm(q), rms_norm(k)
            # RoPE: rotate each pair of features, i and i + D/2, which roll swaps
            if self.rotary:
                cos, sin = self.rotary.cos_sin[:, position].numpy()  # each (D,)
                q = q * cos + np.roll(q, D // 2, axis=1) * sin
                k = k * cos + np.roll(k, D // 2, axis=1) * sin
            # store key and value in the cache, whose arrays are views of its tensors
            keys = layer_cache.keys[0].numpy()  # (H, block_size, D)
            values = layer_cache.values[0].numpy()
            keys[:, position] = k
            values[:, position] = v
            layer_cache.length = S
            # scores: the query against the keys of all tokens up to this one
            scores = keys[:, :S] @ q[:, :, None] / D**0.5  # (H, S, 1)
            # softmax
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            # weighted sum of the values
            y = weights.swapaxes(1, 2) @ values[:, :S]  # (H, 1, D)
            x += self.linear(y.reshape(C), f"{block}.attention.out_proj")

            h = self.norm(x, f"{block}.mlp_norm")
            up = self.linear(h, f"{block}.mlp.up")
            if config.mlp == "gelu":
                hidden = F.gelu(torch.from_numpy(up)).numpy()  # NumPy has no erf
            elif config.mlp == "relu2":
                hidden = np.maximum(up, 0) ** 2
            else:
                gate = self.linear(h, f"{block}.mlp.gate")
                hidden = F.silu(torch.from_numpy(gate)).numpy() * up
            x += self.linear(hidden, f"{block}.mlp.down")

        lm_head = "token_embedding" if config.tied else "lm_head"
        logits = self.linear(self.norm(x, "final_norm"), lm_head)  # (V,)
        if config.logit_softcap:
            logits = config.logit_softcap * np.tanh(logits / config.logit_softcap)
        return config.logit_scale * logits

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """Apply the linear layer of this name."""
        y = self.parameters[name] @ x
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Apply the LayerNorm or RMSNorm of this name to x (C,)."""
        if self.config.norm == "rmsnorm":
            return rms_norm(x) * self.parameters[name]
        x = x - x.sum() / len(x)
        x = x / np.sqrt(x.dot(x) / len(x) + LAYERNORM_EPS) * self.parameters[name]
        bias = self.parameters.get(f"{name}.bias")
        return x if bias is None else x + bias


def rms_norm(x: np.ndarray) -> np.ndarray:
    """Scale each row of (..., D) to a root mean square of 1."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1] + RMS_EPS)
