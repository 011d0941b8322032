"""The GPT: embeddings, a stack of pre-norm blocks, a final norm and the output matrix.

Start reading at `GPT.forward`. Attention is in attention.py.

B batch, T new tokens, C n_embd, V vocabulary
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.schema import ModelConfig
from model.attention import INIT_STD, MultiHeadAttention
from model.dropout import dropout
from model.kv_cache import KVCache, LayerCache
from model.parameters import set_tensors, tensor_parts
from model.rotary import Rotary

NORMS = {
    "layernorm": lambda config: nn.LayerNorm(config.n_embd, bias=config.bias),
    "rmsnorm": lambda config: nn.RMSNorm(config.n_embd),
}


class MLP(nn.Module):
    """The feed-forward branch: C -> 4C -> C with GELU or ReLU^2 (So et al. 2021, Primer).

    SwiGLU (Shazeer 2020) has a gate and 8/3 C hidden features, for the same number of parameters.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        C = config.n_embd
        self.activation, self.dropout = config.activation, config.dropout
        hidden_size = 4 * C
        if self.activation == "swiglu":
            hidden_size = (8 * C // 3 + 7) // 8 * 8  # rounded up to a multiple of 8
        self.up = nn.Linear(C, hidden_size, config.bias)
        self.gate = nn.Linear(C, hidden_size, config.bias) if self.activation == "swiglu" else None
        self.down = nn.Linear(hidden_size, C, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself: (B, T, C) -> (B, T, C)."""
        # up: each hidden feature can be read as a detector of one pattern in the token
        if self.activation == "gelu":
            hidden = F.gelu(self.up(x))  # (B, T, 4C)
        elif self.activation == "relu2":
            hidden = F.relu(self.up(x))
            hidden = hidden * hidden  # autocast would run `square` in float32
        else:
            hidden = F.silu(self.gate(x)) * self.up(x)  # (B, T, 8/3 C)
        # down: each active feature adds its column of the matrix to the output
        return dropout(self.down(hidden), self.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """A pre-norm residual block (GPT-2): attention across tokens, then an MLP on each token."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None):
        super().__init__()
        self.attn_norm = NORMS[config.norm](config)
        self.attention = MultiHeadAttention(
            config.n_embd,
            config.n_head,
            layout=config.layout,
            kernel=config.kernel,
            bias=config.bias,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            rotary=rotary,
            qk_norm=config.qk_norm,
        )
        self.mlp_norm = NORMS[config.norm](config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Add both branches to the residual stream: (B, T, C) -> (B, T, C)."""
        # communicate: each token gathers what it needs from the tokens before it
        x = x + self.attention(self.attn_norm(x), causal=True, cache=cache)  # (B, T, C)
        # then compute, each token on its own
        return x + self.mlp(self.mlp_norm(x))  # (B, T, C)


class GPT(nn.Module):
    """The model of Radford et al. 2019 (GPT-2), with the modern parts that `config` selects.

    The initial weights depend on `config` and `seed`, but not on the attention layout. Dropout is a
    number here: training/state.py replaces `auto`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seed: int = 0):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        C, V = config.n_embd, vocab_size

        rope = config.positions == "rope"
        rotary = Rotary(C // config.n_head, config.block_size) if rope else None
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = None if rope else nn.Embedding(config.block_size, C)
        # [0] embeds the previous token, [1] the one before it, and so on
        self.previous_embeddings = nn.ModuleList(
            nn.Embedding(V, C) for _ in range(config.n_previous)
        )

        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.n_layer))

        self.final_norm = NORMS[config.norm](config)
        self.lm_head = nn.Linear(C, V, bias=False)
        if config.tie_weights:  # weight tying: the input embedding is the output projection too
            self.lm_head.weight = self.token_embedding.weight

        self.reset_parameters(torch.Generator().manual_seed(seed))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw matrices and embeddings from N(0, 0.02^2), as nanoGPT does; biases are 0.

        The last matrix of each branch is smaller or zero, as `residual_init` says. Norms stay as
        PyTorch makes them: weight 1, bias 0.
        """
        # scaled, as in GPT-2: the sum of the 2 n_layer branches has the same size at any depth
        scaled = self.config.residual_init == "scaled"
        residual_std = INIT_STD / (2 * self.config.n_layer) ** 0.5 if scaled else 0.0

        weights = {}
        for name, (shape, _) in tensor_parts(self).items():
            std = residual_std if name.endswith((".out_proj", ".down")) else INIT_STD
            if name.endswith(".bias") or (len(shape) > 1 and not std):
                weights[name] = torch.zeros(shape)
            elif len(shape) > 1:
                weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
        set_tensors(self, weights)

    def new_cache(self) -> KVCache:
        """Create an empty cache, for the texts of one batch."""
        return KVCache(self.config)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Compute the next-token logits of ids: (B, T) -> (B, T, V).

        With a cache, `ids` continue the texts that the cache has read, and are added to it.

        Raises ValueError for more than block_size tokens, cached ones included.
        """
        T, all_ids = ids.size(1), ids if cache is None else cache.ids_with(ids)  # (B, S)
        S = all_ids.size(1)
        if self.config.block_size < S:
            raise ValueError(f"{S} tokens exceed block_size {self.config.block_size}")
        # previous embeddings need the ids before the new ones
        start = max(0, S - T - self.config.n_previous)
        x = self.embed(all_ids[:, start:], start)[:, -T:]  # (B, T, C)

        # the residual stream: every block reads it and adds to it
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer_cache in zip(self.blocks, layers, strict=True):
            x = block(x, layer_cache)  # (B, T, C)

        if cache is not None:
            cache.ids = all_ids
        return self.unembed(x)  # (B, T, V)

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """Embed ids (B, N), the first at position `start`: (B, N, C)."""
        x = self.token_embedding(ids)
        # previous embeddings: add that of the token n positions earlier, zero where there is none
        # Padding shifts to the right by n; the slice drops what has been pushed out at the end.
        for n, embedding in enumerate(self.previous_embeddings, 1):
            x = x + F.pad(embedding(ids), (0, 0, n, 0))[:, : ids.size(1)]
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start : start + ids.size(1)]
        return dropout(x, self.config.dropout, self.training)

    def unembed(self, stream: Tensor) -> Tensor:
        """Compute logits from the residual stream after a block: (..., C) -> (..., V)."""
        logits = self.lm_head(self.final_norm(stream))
        # soft cap: between -cap and cap (Gemma 2, Riviere et al. 2024, section 2)
        cap = self.config.logit_softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        return logits


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the cross-entropy of targets (B, T) under logits (B, T, V) in nats, in float32.

    Padding does not count: its targets are -100, the default `ignore_index` of PyTorch.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
