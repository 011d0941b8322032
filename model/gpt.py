"""The GPT: embeddings, a stack of pre-norm blocks, a final norm and the output matrix.

B batch, T new tokens, S total tokens, C n_embd, V vocabulary
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.schema import ModelConfig
from model.attention import MultiHeadAttention, attention_weights, identity, init_normal_
from model.dropout import dropout
from model.kv_cache import KVCache
from model.rotary import Rotary

NORMS = {
    "layernorm": lambda config: nn.LayerNorm(config.n_embd, bias=config.bias),
    "rmsnorm": lambda config: nn.RMSNorm(config.n_embd),
}
INIT_STD = 0.02
QKV_NAMES = ("query", "key", "value", "query.bias", "key.bias", "value.bias")


class MLP(nn.Module):
    """The feed-forward branch: C -> 4C -> C with GELU or ReLU^2 (So et al. 2021, Primer).

    SwiGLU (Shazeer 2020) has a gate and 8/3 C hidden features, for the same number of parameters.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, self.activation, self.dropout = config.n_embd, config.mlp, config.dropout_p
        hidden = 4 * C
        if self.activation == "swiglu":
            hidden = (8 * C // 3 + 7) // 8 * 8  # rounded up to a multiple of 8
        self.up = nn.Linear(C, hidden, config.bias)
        self.gate = nn.Linear(C, hidden, config.bias) if self.activation == "swiglu" else None
        self.down = nn.Linear(hidden, C, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token separately: (B, T, C) -> (B, T, C)."""
        if self.activation == "gelu":
            hidden = F.gelu(self.up(x))  # (B, T, 4C)
        elif self.activation == "relu2":
            hidden = F.relu(self.up(x))
            hidden = hidden * hidden  # autocast would run `square` in float32
        else:
            hidden = F.silu(self.gate(x)) * self.up(x)  # (B, T, 8/3 C)
        return dropout(self.down(hidden), self.dropout, self.training)  # (B, T, C)

    def layers(self) -> list[nn.Linear]:
        return [layer for layer in (self.up, self.gate, self.down) if layer is not None]


class Block(nn.Module):
    """A pre-norm residual block (GPT-2): attention across tokens, then an MLP on each token."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None):
        super().__init__()
        self.attn_norm = NORMS[config.norm](config)
        self.attention = MultiHeadAttention(
            config.n_embd,
            config.n_head,
            layout=config.attention,
            # train.py replaces `auto` with the best kernel for its device
            kernel="sdpa" if config.kernel == "auto" else config.kernel,
            bias=config.bias,
            dropout=config.dropout_p,
            attention_dropout=config.attention_dropout_p,
            rotary=rotary,
            qk_norm=config.qk_norm,
        )
        self.mlp_norm = NORMS[config.norm](config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Add both branches to the residual stream: (B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.attn_norm(x), cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The model of Radford et al. 2019 (GPT-2), with the modern parts that `config` selects.

    The initial weights depend on `config` and `seed`, but not on the attention layout.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seed: int = 0):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.ablated_heads: frozenset[tuple[int, int]] = frozenset()  # by `heads_off`
        C, V = config.n_embd, vocab_size

        # token and position embeddings (RoPE encodes positions in the attention instead)
        rope = config.positions == "rope"
        rotary = Rotary(C // config.n_head, config.block_size) if rope else None
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = None if rope else nn.Embedding(config.block_size, C)
        # token shifts: [0] embeds the previous token, [1] the one before it, and so on
        self.previous_embeddings = nn.ModuleList(
            nn.Embedding(V, C) for _ in range(config.token_shifts)
        )

        # the blocks, and the logits
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.n_layer))
        self.final_norm = NORMS[config.norm](config)
        self.lm_head = nn.Linear(C, V, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight
        self.reset_parameters(torch.Generator().manual_seed(seed))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialize matrices and embeddings from N(0, 0.02^2), as nanoGPT does; biases are 0.

        The last matrix of each branch is drawn from N(0, std^2) with std = 0.02 / sqrt(2 n_layer)
        instead, or is zero, as `residual_init` says.
        """
        # each block adds to the residual stream: the more there are, the less each may add
        scaled = self.config.residual_init == "scaled"
        residual_std = INIT_STD / (2 * self.config.n_layer) ** 0.5 if scaled else 0.0
        for block in self.blocks:
            block.attention.reset_parameters(generator, INIT_STD, residual_std)
            for layer in block.mlp.layers():
                std = residual_std if layer is block.mlp.down else INIT_STD
                for parameter in layer.parameters():
                    init_normal_(parameter, std if parameter.dim() == 2 else 0.0, generator)
        # the rest; norms stay as PyTorch makes them: weight 1, bias 0
        for parameter in self.embeddings_and_lm_head():
            init_normal_(parameter, INIT_STD, generator)

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Compute next-token logits (B, T, V) for the last T tokens of `ids` (B, S).

        Without caches T = S. With `caches` (one per layer), which hold the keys and values of the
        first S - T tokens, only the T new ones are computed. Even then `ids` has all tokens of the
        context, because the token shifts need them.

        Raises ValueError for more than block_size tokens, and if there is no new token.
        """
        start, end = caches[0].length if caches else 0, ids.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens exceed block_size {self.config.block_size}")
        if caches and end <= start:
            raise ValueError(
                f"ids has {end} tokens and the caches hold {start}; "
                "pass all tokens of the context, with at least one new one"
            )
        # embed the new tokens, which opens the residual stream
        x = self._embed(ids, start)  # (B, T, C)
        # every block reads the stream and adds to it
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)  # (B, T, C)
        # the logit of every character
        return self._logits(x)  # (B, T, V)

    def _logits(self, stream: Tensor) -> Tensor:
        """Compute logits from the residual stream after a block: (..., C) -> (..., V)."""
        logits = self.lm_head(self.final_norm(stream))
        cap = self.config.logit_softcap
        if cap:  # Gemma 2 (Riviere et al. 2024, section 2)
            logits = cap * torch.tanh(logits / cap)
        if not self.training:  # temperature scaling (Guo et al. 2017)
            logits = logits * self.config.resolved_logit_scale
        return logits

    def _embed(self, ids: Tensor, start: int) -> Tensor:
        """Embed the tokens of ids (B, S) at positions start to S - 1: (B, T, C)."""
        end, T = ids.size(1), ids.size(1) - start
        # the new tokens, and those before them that they need
        ids = ids[:, max(0, start - self.config.token_shifts) :]
        x = self.token_embedding(ids)
        # token shifts: add an embedding of the token n positions earlier; where there is none, zero
        for n, embedding in enumerate(self.previous_embeddings, 1):
            x = x + F.pad(embedding(ids), (0, 0, n, 0))[:, : ids.size(1)]
        x = x[:, -T:]  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        return dropout(x, self.config.dropout_p, self.training)

    @torch.inference_mode()
    def attention_maps(self, ids: Tensor) -> list[Tensor]:
        """Return the attention weights of each layer for ids (T,): a list of (H, T, T).

        Kernels do not return the weights, so they are recomputed from each layer's queries and
        keys (docs/attention.md, section 6). Every row sums to 1.
        """
        maps = []

        # before a layer runs, compute its weights from the same input
        def record(layer: MultiHeadAttention, arguments: tuple[Tensor]) -> None:
            q, k, _ = layer.queries_keys_values(*arguments)
            maps.append(attention_weights(q, k, causal=True)[0])

        hooks = [block.attention.register_forward_pre_hook(record) for block in self.blocks]
        try:  # the hooks go even if the forward pass fails
            self(ids[None])
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    @torch.inference_mode()
    def logit_lens(self, ids: Tensor) -> Tensor:
        """Return the logits that each block would give for ids (T,) if it were the last: (L, T, V).

        The final norm, `lm_head`, soft-cap and scale are applied to the residual stream after each
        block (nostalgebraist 2020, the logit lens). The last row is the model's own output.
        """
        streams = []

        def record(block: Block, arguments: tuple[Tensor], stream: Tensor) -> None:
            streams.append(stream)

        hooks = [block.register_forward_hook(record) for block in self.blocks]
        try:
            self(ids[None])
        finally:
            for hook in hooks:
                hook.remove()
        return self._logits(torch.cat(streams))  # (L, T, V)

    @contextmanager
    def heads_off(self, heads: Collection[tuple[int, int]]) -> Iterator[None]:
        """Ablate heads in a `with` block, each given as (layer, head), both counted from 0.

        The D columns of the output projection that read a head's result are zero meanwhile, so
        everything that is computed with the model does without the head, in every layout.

        Raises ValueError for a head that does not exist.
        """
        L, H = self.config.n_layer, self.config.n_head
        for layer, head in heads:
            if not (0 <= layer < L and 0 <= head < H):
                raise ValueError(
                    f"no head {head} in layer {layer}; allowed: heads 0 to {H - 1} "
                    f"in layers 0 to {L - 1}"
                )
        before, self.ablated_heads = self.ablated_heads, self.ablated_heads | {*heads}
        weights = [block.attention.out_proj.weight for block in self.blocks]  # each (C, H*D)
        saved = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for layer, head in heads:
                    weights[layer].unflatten(1, (H, -1))[:, head] = 0
            yield
        finally:
            self.ablated_heads = before
            with torch.no_grad():
                for weight, original in zip(weights, saved, strict=True):
                    weight.copy_(original)

    def new_caches(self) -> list[KVCache]:
        """Create empty caches, one per layer, for a batch of any size."""
        return [KVCache(self.config.block_size) for _ in self.blocks]

    # ---------------------------------------------------------------- parameters, in any layout

    def named_slices(
        self, tensor_of: Callable[[Tensor], Tensor] = identity
    ) -> dict[str, list[Tensor]]:
        """Return every parameter by name, as a list of slices of its rows.

        The names do not depend on the attention layout: they are paths of parameters without
        `.weight`, but attention has `query`, `key` and `value` instead of the layout's parameters.
        A query, key or value has one slice per head, any other parameter a single one:

            {"token_embedding": [(V, C)], "blocks.0.attention.query": [head 0's (D, C), ...], ...}

        `torch.cat(slices)` is the same tensor in every layout. The slices are views of
        `tensor_of(parameter)`: by default of the parameter itself, else of a tensor of its shape,
        such as its momentum.
        """
        slices = {}
        for name, parameter in self.named_parameters():
            # attention: the layout's parameters become heads; all other parameters stay whole
            block, separator, _ = name.partition(".attention.projection.")
            if not separator:
                row = torch.atleast_1d(tensor_of(parameter))  # a scalar of your own is one row
                slices[name.removesuffix(".weight")] = [row]
            elif f"{block}.attention.query" not in slices:
                projection = self.get_submodule(f"{block}.attention.projection")
                heads = [projection.head_weights(h, tensor_of) for h in range(projection.n_head)]
                # without biases, only the first three names apply
                for part, per_head in zip(QKV_NAMES, zip(*heads, strict=True), strict=False):
                    slices[f"{block}.attention.{part}"] = list(per_head)
        return slices

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in the parameters: `tensors` has one whole tensor per name of `named_slices`."""
        for name, slices in self.named_slices().items():
            copy_slices(tensors[name], slices)

    def block_matrices(
        self, tensor_of: Callable[[Tensor], Tensor] = identity
    ) -> list[list[Tensor]]:
        """Return the matrices of all blocks, which Muon updates, each as a list of slices.

        The slices are those of `named_slices`: in every layout those of a matrix have two
        dimensions, those of a bias or of a norm's weight have one.
        """
        return [
            slices
            for name, slices in self.named_slices(tensor_of).items()
            if name.startswith("blocks.") and slices[0].dim() == 2
        ]

    def block_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that Muon updates."""
        # find the parameters that the matrices are views of: a view shares its parameter's storage
        views = [view for slices in self.block_matrices() for view in slices]
        storages = {view.untyped_storage().data_ptr() for view in views}
        return [p for p in self.parameters() if p.untyped_storage().data_ptr() in storages]

    def embeddings_and_lm_head(self) -> list[nn.Parameter]:
        """Return the weights of the embeddings, and of lm_head if it is untied."""
        layers = [self.token_embedding, self.position_embedding]
        layers += [None if self.config.tied else self.lm_head, *self.previous_embeddings]
        return [layer.weight for layer in layers if layer is not None]

    def parameter_count(self) -> int:
        """Count the parameters without position embeddings, as nanoGPT does."""
        positions = self.position_embedding
        not_counted = 0 if positions is None else positions.weight.numel()
        return sum(parameter.numel() for parameter in self.parameters()) - not_counted

    def flops_per_token(self) -> int:
        """Return the FLOPs to train on one token: 6 N + 12 L C T.

        (Chowdhery et al. 2022, PaLM, appendix B; N parameters, L layers, T context.)
        """
        config = self.config
        attention = 12 * config.n_layer * config.n_embd * config.block_size
        return 6 * self.parameter_count() + attention


def copy_slices(source: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy a whole tensor into the views that store its slices (see `GPT.named_slices`)."""
    parts = source.split([len(view) for view in slices])
    for view, part in zip(slices, parts, strict=True):
        view.copy_(part)
