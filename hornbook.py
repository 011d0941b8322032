"""All of Hornbook in one file: read a text, train a small GPT on it, and let it write.

    python hornbook.py [TEXT ...] [--max_iters N]

After 1,400 steps on Tiny Shakespeare (11 to 18 minutes on two cores, validation loss 1.407):

    Ay, as it would not see the time traitors
    That I muster down, let me so, the rest, then,

Each heading names its part's full version; the constants are its settings. The first 20 losses
equal those of `python train.py configs/shakespeare.yaml --device=cpu --dtype=float32`.
B windows, T new characters, S cached and new, C = N_EMBD, H = N_HEAD, D = C / H, V vocabulary size
"""

import argparse
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

# ---- settings: configs/ has other recipes --------------------------------------------------------
MAX_ITERS = 1400  # 2.9 epochs of Tiny Shakespeare
BATCH_SIZE, BLOCK_SIZE = 4, 512  # windows per step, characters per window
N_LAYER, N_HEAD, N_EMBD = 3, 4, 256  # 2.4 million parameters
N_PREVIOUS = 2  # each input also embeds the two characters before it
LOGIT_SOFTCAP = 15.0  # logits stay between -15 and 15, however sure the model gets
LEARNING_RATE = 0.02  # the peak, for Muon and AdamW alike
WARMUP_RATIO, COOLDOWN_RATIO = 1 / 70, 6 / 7  # shares of the run: 20 steps up, 1,200 steps down
MUON_MOMENTUM, BETA1, BETA2 = 0.9, 0.9, 0.99  # BETA1 and BETA2 are AdamW's
WEIGHT_DECAY, GRAD_CLIP = 0.1, 1.0  # longer gradients are scaled down to GRAD_CLIP
# Rereading a text makes a model overconfident, so outside training its logits are scaled down.
LOGIT_SCALE_DROP, MIN_LOGIT_SCALE = 0.03, 0.8  # the scale is max(0.8, 1 - 0.03 * epochs)
TEMPERATURE = 0.7  # below 1, likely characters become likelier still
SEED = 1337


# ---- the text and its vocabulary: data/ has encodings and downloads ------------------------------
def read(paths):
    """Return the vocabulary, the training ids, and the validation ids: each text's last tenth."""
    texts = [Path(path).read_text(encoding="utf-8-sig") for path in paths]  # -sig: no BOM
    vocabulary = sorted(set("".join(texts)))
    id_of = {character: i for i, character in enumerate(vocabulary)}
    train_text = "".join(text[: int(0.9 * len(text))] for text in texts)
    validation_text = "".join(text[int(0.9 * len(text)) :] for text in texts)
    if len(train_text) < BLOCK_SIZE + 2:
        raise ValueError(f"{len(train_text)} training characters; use {BLOCK_SIZE + 2} or more")
    ids = [torch.tensor([id_of[c] for c in text]) for text in (train_text, validation_text)]
    return vocabulary, *ids


# ---- the windows of an epoch: data/batches.py has lists and micro-batches ------------------------
def windows(length, epoch):
    """Return windows (start, end), shuffled, that cover range(length) once."""
    rng = np.random.RandomState((SEED, epoch))  # the same numbers in every version of NumPy
    # The first cut is random: no character but the first begins a window in every epoch.
    first_cut = 1 + int(BLOCK_SIZE * rng.random_sample())
    count = math.ceil(length / BLOCK_SIZE) + 1  # the ends may be short, the last one empty
    cuts = [0] + [min(first_cut + BLOCK_SIZE * i, length) for i in range(count)]
    return [(cuts[i], cuts[i + 1]) for i in rng.permutation(count)]


def batches(ids):
    """Yield inputs and targets (B, T) forever: a target is the character after its input."""
    all_windows = (w for epoch in itertools.count() for w in windows(len(ids) - 1, epoch))
    while True:
        inputs = torch.zeros(BATCH_SIZE, BLOCK_SIZE, dtype=torch.int64)
        targets = torch.full((BATCH_SIZE, BLOCK_SIZE), -100)  # cross_entropy ignores -100: padding
        for row, (start, end) in enumerate(itertools.islice(all_windows, BATCH_SIZE)):
            inputs[row, : end - start] = ids[start:end]
            targets[row, : end - start] = ids[start + 1 : end + 1]
        yield inputs, targets


# ---- attention: model/attention.py has 24 equivalent versions ------------------------------------
def attention(q, k, v):
    """Return the mean of the values v for each query q, weighted by how well the keys k fit q."""
    T, S, D = q.size(2), k.size(2), q.size(3)  # q (B, H, T, D): the last T of S; k, v (B, H, S, D)
    scores = q @ k.mT / math.sqrt(D)  # (B, H, T, S)
    future = torch.arange(S) > torch.arange(S - T, S)[:, None]  # (T, S): key after query
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)  # each row sums to 1
    return weights @ v  # (B, H, T, D)


def rotate(x, start):
    """RoPE: rotate the features i and i + D/2, as a pair, by position * 10000^(-2i/D) radians."""
    T, D = x.shape[-2:]  # of (B, H, T, D), at the positions start, start + 1, ...
    frequencies = 10_000.0 ** (-torch.arange(0, D, 2) / D)  # (D/2,)
    angles = torch.arange(start, start + T)[:, None] * frequencies  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)  # each (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Cache:
    """The keys and values of a text so far: no character looks ahead, so they never change."""

    def __init__(self):
        self.ids = torch.zeros(1, 0, dtype=torch.int64)  # (1, S); S is 0 at first
        nothing = torch.zeros(1, N_HEAD, 0, N_EMBD // N_HEAD)
        self.keys, self.values = [nothing] * N_LAYER, [nothing] * N_LAYER  # each (1, H, S, D)


# ---- the block: model/gpt.py has SwiGLU, dropout -------------------------------------------------
class Block(nn.Module):
    """Attention over each character and all before it, then an MLP on each alone."""

    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(N_EMBD, bias=False)  # mean 0, deviation 1, learned gains
        self.query = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what a character looks for
        self.key = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what it is found by
        self.value = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what it hands over
        self.out_proj = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.mlp_norm = nn.LayerNorm(N_EMBD, bias=False)
        self.up = nn.Linear(N_EMBD, 4 * N_EMBD, bias=False)
        self.down = nn.Linear(4 * N_EMBD, N_EMBD, bias=False)

    def forward(self, x, layer, cache=None):
        normed = self.attn_norm(x)  # (B, T, C)
        q, k, v = self.query(normed), self.key(normed), self.value(normed)
        q, k, v = (t.unflatten(-1, (N_HEAD, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))  # QK-norm: |score| <= sqrt(D) = 8
        start = 0 if cache is None else cache.keys[layer].size(2)  # position of the first query
        q, k = rotate(q, start), rotate(k, start)  # now scores depend on relative positions
        if cache is not None:
            k = cache.keys[layer] = torch.cat([cache.keys[layer], k], dim=2)  # (B, H, S, D)
            v = cache.values[layer] = torch.cat([cache.values[layer], v], dim=2)
        gathered = attention(q, k, v).transpose(1, 2).flatten(2)  # (B, T, C): heads side by side
        x = x + self.out_proj(gathered)
        hidden = F.relu(self.up(self.mlp_norm(x))).square()  # (B, T, 4C); ReLU^2 beat GELU here
        return x + self.down(hidden)  # (B, T, C)


# ---- the GPT: model/gpt.py also embeds positions -------------------------------------------------
class GPT(nn.Module):
    """Map ids to logits: at each character, one for every character that may come next."""

    def __init__(self, V):
        super().__init__()
        self.token_embedding = nn.Embedding(V, N_EMBD)
        self.previous_embeddings = nn.ModuleList(nn.Embedding(V, N_EMBD) for _ in range(N_PREVIOUS))
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.final_norm = nn.LayerNorm(N_EMBD, bias=False)
        self.lm_head = nn.Linear(N_EMBD, V, bias=False)
        self.logit_scale = 1.0  # `train` lowers it: see LOGIT_SCALE_DROP
        # `out_proj` and `down` begin at 0, so at first a block passes its input on unchanged. Then
        # the logits are noise with the standard deviation sigma = 0.02 sqrt(C) = 0.32, and the loss
        # is about ln V + sigma^2 / 2: noise has mean 0, but e^noise has mean e^(sigma^2 / 2).
        generator = torch.Generator().manual_seed(SEED)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # the gains of a LayerNorm stay 1
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, ids, cache=None):
        """Return logits (B, T, V) for ids (B, T), which follow those in the cache, if any."""
        T = ids.size(1)
        if cache is not None:
            cache.ids = torch.cat([cache.ids, ids], dim=1)  # (B, S)
            ids = cache.ids[:, -T - N_PREVIOUS :]  # the new ones and those before that they embed
        x = self.token_embedding(ids)  # (B, T, C), with a cache up to (B, T + N_PREVIOUS, C)
        for n, table in enumerate(self.previous_embeddings, 1):
            x = x + F.pad(table(ids), (0, 0, n, 0))[:, :-n]  # shifted right by n, zero-filled
        x = x[:, -T:]  # (B, T, C): those of the new characters
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)  # (B, T, C)
        logits = self.lm_head(self.final_norm(x))  # (B, T, V)
        logits = LOGIT_SOFTCAP * torch.tanh(logits / LOGIT_SOFTCAP)
        return logits if self.training else self.logit_scale * logits


# ---- Muon (Jordan et al. 2024) and AdamW: training/optimizers.py ---------------------------------
@torch.no_grad()
def muon_step(weight, momentum, lr):
    """Step equally far along each singular direction of the gradient, not mostly the first."""
    momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)  # an average of the gradients
    update = weight.grad.lerp(momentum, MUON_MOMENTUM)  # the newest counts more: Nesterov
    update = orthogonalize(F.normalize(update, dim=-1))  # rows of equal length first: MuonEq-R
    rows, columns = weight.shape  # a tall update has short rows: lengthened below
    weight.mul_(1 - lr * WEIGHT_DECAY)
    weight.sub_(lr * max(1.0, rows / columns) ** 0.5 * update)


def orthogonalize(X):
    """Newton-Schulz: bring all but the tiniest singular values of X to between 0.7 and 1.2."""
    tall = X.size(0) > X.size(1)
    X = X.mT if tall else X  # so that X X^T is the smaller product
    X = X / (torch.linalg.matrix_norm(X) + 1e-7)  # no singular value is above 1
    for _ in range(5):  # each singular value z becomes 3.4445 z - 4.7750 z^3 + 2.0315 z^5
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.mT if tall else X


# ---- the learning rate: training/schedule.py has three schedules ---------------------------------
def lr_multiplier(step, max_iters):
    """Rise briefly to 1, stay there, then fall to 0."""
    rise = (step + 1) / (int(WARMUP_RATIO * max_iters) + 1)
    fall = (max_iters - step) / max(1, int(COOLDOWN_RATIO * max_iters))
    return min(rise, 1.0, fall)


# ---- the loop: train.py and training/ have resuming, several processes and bfloat16 --------------
def train(model, ids, max_iters):
    """Yield the loss of each step: Muon moves the matrices of the blocks, AdamW all the rest."""
    momentum_of = {p: torch.zeros_like(p) for p in model.blocks.parameters() if p.dim() == 2}
    others = [p for p in model.parameters() if p.dim() == 2 and p not in momentum_of]
    gains = [p for p in model.parameters() if p.dim() == 1]  # of the LayerNorms
    groups = [{"params": others}, {"params": gains, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(BETA1, BETA2), weight_decay=WEIGHT_DECAY)
    steps_per_epoch = len(windows(len(ids) - 1, 0)) / BATCH_SIZE
    for step, (inputs, targets) in enumerate(itertools.islice(batches(ids), max_iters)):
        model.train()  # the caller may evaluate between two steps
        logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # in nats per character
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)  # of all parameters together
        lr = LEARNING_RATE * lr_multiplier(step, max_iters)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for matrix, momentum in momentum_of.items():
            muon_step(matrix, momentum, lr)
        model.zero_grad()
        drop = LOGIT_SCALE_DROP * (step + 1) / steps_per_epoch
        model.logit_scale = max(MIN_LOGIT_SCALE, round(1 - drop, 2))
        yield loss.item()


# ---- the exact loss: training/evaluate.py --------------------------------------------------------
@torch.inference_mode()
def validation_loss(model, ids):
    """Return the mean loss over every character but the first, each predicted once."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, BLOCK_SIZE):
        window = ids[start : start + BLOCK_SIZE + 1]  # its first prediction sees one character
        logits = model(window[None, :-1])[0]  # (T, V)
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(ids) - 1)


# ---- writing with a KV cache: model/generate.py goes on past BLOCK_SIZE --------------------------
@torch.inference_mode()
def write(model, vocabulary, count):
    """Yield `count` characters: at most BLOCK_SIZE, because later positions were never trained."""
    model.eval()
    ids, cache = torch.tensor([[0]]), Cache()  # start with character 0, usually a newline
    rng = np.random.default_rng(SEED)
    for _ in range(count):
        logits = model(ids, cache)[0, -1].double().numpy()  # (V,)
        sums = np.exp((logits - logits.max()) / TEMPERATURE).cumsum()  # unnormalized
        threshold = (1 - rng.random()) * sums[-1]  # in (0, sum]: probability 0 is never drawn
        ids = torch.tensor([[sums.searchsorted(threshold)]])  # the first sum to reach it
        yield vocabulary[ids.item()]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: those in data/")
    parser.add_argument("--max_iters", type=int, default=MAX_ITERS, help=f"default: {MAX_ITERS}")
    options = parser.parse_args()
    data = Path(__file__).parent / "data"
    paths = options.texts or list(data.glob("tinyshakespeare/input.txt"))  # train.py downloads it
    paths = paths or sorted(data.glob("plays/*.txt"))  # the bundled plays: other losses
    try:
        vocabulary, train_ids, validation_ids = read(paths)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or too short
        parser.exit(3, f"error: {', '.join(map(str, paths))}: {error}\n")
    print(f"{len(train_ids):,} training characters of {', '.join(map(str, paths))}")
    model = GPT(len(vocabulary))
    bar = tqdm(train(model, train_ids, options.max_iters), total=options.max_iters)
    for loss in bar:
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    print(f"validation loss {validation_loss(model, validation_ids):.4f}\n")
    for character in write(model, vocabulary, 500):  # 500 is less than BLOCK_SIZE
        print(character, end="", flush=True)
    print("\n\nNext: python train.py configs/shakespeare.yaml saves its model and can resume.")
