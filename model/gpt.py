"""A GPT: token ids in, logits out. Embeddings, a stack of blocks, a norm and the output matrix.

B batch, S tokens of the text so far, T of them read now, C n_embd, V vocabulary
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.schema import ModelConfig
from model.attention import Attention, attention_weights, draw_, itself
from model.dropout import drop
from model.kv_cache import KVCache
from model.rotary import Rotary

NORMS = {
    "layernorm": lambda config: nn.LayerNorm(config.n_embd, bias=config.bias),
    "rmsnorm": lambda config: nn.RMSNorm(config.n_embd),
}
INIT_STD = 0.02


class MLP(nn.Module):
    """C -> 4 C -> C with GELU or ReLU^2 (So et al. 2021, Primer); SwiGLU (Shazeer 2020) gates 8/3 C
    at equal cost.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, self.kind, self.dropout = config.n_embd, config.mlp, config.dropout
        hidden = 4 * C if self.kind != "swiglu" else (8 * C // 3 + 7) // 8 * 8
        self.up = nn.Linear(C, hidden, config.bias)
        self.gate = nn.Linear(C, hidden, config.bias) if self.kind == "swiglu" else None
        self.down = nn.Linear(hidden, C, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        if self.kind == "gelu":
            hidden = F.gelu(self.up(x))
        elif self.kind == "relu2":
            hidden = F.relu(self.up(x))
            hidden = hidden * hidden  # unlike `square`, in bfloat16 where autocast has it
        else:
            hidden = F.silu(self.gate(x)) * self.up(x)
        return drop(self.down(hidden), self.dropout, self.training)

    def matrices(self) -> list[Tensor]:
        return [layer.weight for layer in (self.up, self.gate, self.down) if layer is not None]


class Block(nn.Module):
    """Pre-norm residual block (GPT-2): attention moves information between tokens, the MLP works on
    each.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary | None):
        super().__init__()
        self.norm_1 = NORMS[config.norm](config)
        self.attention = Attention(
            config.n_embd,
            config.n_head,
            layout=config.attention,
            kernel=config.kernel,
            bias=config.bias,
            dropout=config.dropout,
            attention_dropout=config.dropout
            if config.attention_dropout == "auto"
            else config.attention_dropout,
            rotary=rotary,
            qk_norm=config.qk_norm,
        )
        self.norm_2 = NORMS[config.norm](config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attention(self.norm_1(x), cache=cache)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """The model of Radford et al. 2019 (GPT-2), with the modern parts that `config` names.

    `seed` alone decides the initial weights: they are the same in every attention layout.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seed: int = 0):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        rotary = (
            Rotary(config.n_embd // config.n_head, config.block_size)
            if config.positions == "rope"
            else None
        )
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.position_embedding = (
            nn.Embedding(config.block_size, config.n_embd) if rotary is None else None
        )
        shifts = range(config.token_shifts)
        self.shift_embeddings = nn.ModuleList(
            nn.Embedding(vocab_size, config.n_embd) for _ in shifts
        )
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.n_layer))
        self.norm = NORMS[config.norm](config)
        self.output = nn.Linear(config.n_embd, vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.token_embedding.weight
        self.reset_parameters(torch.Generator().manual_seed(seed))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """GPT-2's initialisation: N(0, 0.02^2), biases 0; what ends a residual branch starts
        smaller, or at 0.
        """
        scaled = self.config.residual_init == "scaled"
        residual_std = INIT_STD / (2 * self.config.n_layer) ** 0.5 if scaled else 0.0
        for block in self.blocks:
            block.attention.reset_parameters(generator, INIT_STD, residual_std)
            for layer in (block.mlp.up, block.mlp.gate, block.mlp.down):
                for parameter in () if layer is None else layer.parameters():
                    std = residual_std if layer is block.mlp.down else INIT_STD
                    draw_(parameter, std if parameter.dim() == 2 else 0.0, generator)
        for parameter in self.embeddings():
            draw_(parameter, INIT_STD, generator)

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """ids (B, S) -> logits (B, T, V) of what follows each of the last T, which are those that
        were not read before.

        `caches`, one a layer, hold what was read before; without them it is nothing, and T = S.
        ValueError past block_size, and where nothing is new.
        """
        start, end = caches[0].length if caches else 0, ids.size(1)
        if end > self.config.block_size:
            raise ValueError(
                f"{end} tokens are more than block_size {self.config.block_size}; read fewer"
            )
        if caches and end <= start:
            raise ValueError(
                f"the caches hold {start} tokens, of a text of {end}; give the whole text, and "
                f"read more"
            )
        x = self.token_embedding(ids[:, start:])  # (B, T, C)
        for n, embedding in enumerate(
            self.shift_embeddings, 1
        ):  # token shift (Peng et al. 2023, RWKV), of the ids
            before = embedding(ids[:, max(0, start - n) : max(0, end - n)])
            x = x + F.pad(
                before, (0, 0, end - start - before.size(1), 0)
            )  # the text begins with nothing before it
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        x = drop(x, self.config.dropout, self.training)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        logits = self.output(self.norm(x))  # (B, T, V)
        if (
            self.config.logit_softcap
        ):  # Gemma 2: smooth limits, which a rare large logit cannot leave
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        return logits

    @torch.inference_mode()
    def attention_maps(self, ids: Tensor) -> list[Tensor]:
        """Who reads whom in ids (T,): for each layer (H, T, T), each row adding up to 1.

        No kernel returns them; they are made again from each layer's own queries and keys
        (docs/attention.md, 6).
        """
        maps = []

        def note(layer: Attention, arguments: tuple[Tensor]) -> None:
            q, k, _ = layer.queries_keys_values(*arguments)
            maps.append(attention_weights(q, k, causal=True)[0])

        hooks = [block.attention.register_forward_pre_hook(note) for block in self.blocks]
        try:
            self(ids[None])
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    def new_caches(self) -> list[KVCache]:
        """Empty caches for one generation of a batch of any size, one a layer."""
        return [KVCache(self.config.block_size) for _ in self.blocks]

    def matrices(self, of: Callable[[Tensor], Tensor] = itself) -> list[list[Tensor]]:
        """The hidden matrices, the same in every layout, each as its blocks of rows: views of
        `of(parameter)`.

        Queries, keys and values are three (H*D, C) matrices, each head's rows one block.
        """
        matrices = []
        for block in self.blocks:
            projection = block.attention.projection
            heads = [projection.head_weights(h, of) for h in range(projection.n_head)]
            matrices += [[head[part] for head in heads] for part in range(3)]
            matrices += [
                [of(weight)] for weight in (block.attention.output.weight, *block.mlp.matrices())
            ]
        return matrices

    def hidden_parameters(self) -> list[nn.Parameter]:
        """The parameters that `matrices` are views of."""
        storages = {
            block.untyped_storage().data_ptr() for rows in self.matrices() for block in rows
        }
        return [
            parameter
            for parameter in self.parameters()
            if parameter.untyped_storage().data_ptr() in storages
        ]

    def embeddings(self) -> list[nn.Parameter]:
        """What is indexed by a token or a position; the output matrix among them where it is not
        tied.
        """
        output = None if self.config.tied else self.output
        layers = (self.token_embedding, self.position_embedding, output, *self.shift_embeddings)
        return [layer.weight for layer in layers if layer is not None]

    def views(self, of: Callable[[Tensor], Tensor] = itself) -> list[Tensor]:
        """Every parameter, as views of `of(parameter)` in an order and in shapes that are the same
        in every layout.
        """
        projections = [block.attention.projection for block in self.blocks]
        in_layouts = {
            id(parameter) for projection in projections for parameter in projection.parameters()
        }
        views = [
            of(parameter) for parameter in self.parameters() if id(parameter) not in in_layouts
        ]
        for projection in projections:
            for h in range(projection.n_head):
                views += projection.head_weights(h, of)
        return views

    def with_attention(self, layout: str | None = None, kernel: str | None = None) -> "GPT":
        """The same function with its attention written in another way; no number changes. None
        keeps the choice.
        """
        config = dataclasses.replace(
            self.config,
            attention=layout or self.config.attention,
            kernel=kernel or self.config.kernel,
        )
        weight = self.token_embedding.weight
        other = GPT(config, self.vocab_size).to(weight.device, weight.dtype).train(self.training)
        copy_views(self, other)
        return other

    def parameter_count(self) -> int:
        """Weights without position embeddings, as nanoGPT counts them."""
        positions = 0 if self.position_embedding is None else self.position_embedding.weight.numel()
        return sum(parameter.numel() for parameter in self.parameters()) - positions

    def flops_per_token(self) -> int:
        """Floating-point operations to train on one token: 6 N + 12 L C T (Chowdhery et al. 2022,
        PaLM, appendix B).
        """
        config = self.config
        return 6 * self.parameter_count() + 12 * config.n_layer * config.n_embd * config.block_size


@torch.no_grad()
def copy_views(
    source: GPT,
    target: GPT,
    source_of: Callable[[Tensor], Tensor] = itself,
    target_of: Callable[[Tensor], Tensor] = itself,
) -> None:
    """Copy what `source_of` keeps for each parameter of `source` into its place for `target`,
    whatever the layouts.
    """
    for theirs, ours in zip(source.views(source_of), target.views(target_of), strict=True):
        ours.copy_(theirs)
