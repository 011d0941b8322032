"""A whole GPT in one file: read a text, train a small GPT on it, and let it write.

    python hornbook.py [TEXT ...] [--max_iters N]

Read it from the end: `main` is the program, and each part above it explains one of its words. The
letters in the comments are the sizes of tensors:

    B  windows in a batch          C  N_EMBD: numbers that describe a character
    T  new characters in each      H  N_HEAD: heads
    S  new and earlier ones        D  C / H: numbers that describe it in one head
    V  characters there are

The settings are those of configs/shakespeare.yaml, and a test checks that train.py computes the
same losses from them. Each heading names the full version of its part.

A plain GPT has no embeddings of previous characters, no QK-norm (`rms_norm`) and no soft cap. The
first lower the loss, the others allow a high learning rate. docs/gpt.md, sections 4 and 5, explains
all three; docs/research.md measures them.
"""

import argparse
import math
import os
import sys
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# ---- settings: configs/ ------------------------------------------------------------------------
MAX_ITERS = 1400  # steps: 2.9 epochs of Tiny Shakespeare
BATCH_SIZE = 4  # windows in a step
BLOCK_SIZE = 512  # characters in a window
N_LAYER = 3
N_HEAD = 4
N_EMBD = 256
N_PREVIOUS = 2  # each character also embeds the two before it
LOGIT_SOFTCAP = 15.0  # logits stay between -15 and 15, however sure the model gets
LEARNING_RATE = 0.02  # the peak, of both optimizers
WARMUP_RATIO = 1 / 70  # the share of the steps in which it rises
COOLDOWN_RATIO = 6 / 7  # the share of the steps in which it falls
MUON_MOMENTUM = 0.9
ADAMW_BETAS = 0.9, 0.99
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0  # longer gradients are scaled down to this length
TEMPERATURE = 0.7  # below 1, likely characters become likelier still
SEED = 1337


# ---- the text: data/text.py ----------------------------------------------------------------------
def read(paths):
    """Return the vocabulary, the training ids, and the validation ids: each text's last tenth."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
        except OSError as error:
            fail(f"{path}: {error.strerror}; name a .txt file")
        except UnicodeDecodeError:
            fail(f"{path}: not UTF-8; convert it: iconv -f cp1252 -t UTF-8 OLD > NEW")
    if len(texts) > 1:  # the last line of one must not run into the first line of the next
        texts = [text.removesuffix("\n") + "\n" for text in texts if text]
    vocabulary = sorted(set("".join(texts)))
    id_of = {character: i for i, character in enumerate(vocabulary)}
    train_text = "".join(text[: int(0.9 * len(text))] for text in texts)
    val_text = "".join(text[int(0.9 * len(text)) :] for text in texts)
    if min(len(train_text), len(val_text), len(vocabulary)) < 2:
        fail(f"{paths[0]}: too few characters, or all the same; name a longer text")
    train_ids, val_ids = (torch.tensor([id_of[c] for c in text]) for text in (train_text, val_text))
    return vocabulary, train_ids, val_ids


def fail(mistake):
    """End the program with one line and exit code 2."""
    print(f"error: {mistake}", file=sys.stderr)
    sys.exit(2)


# ---- the batches: data/batches.py ----------------------------------------------------------------
def windows(length, epoch):
    """Return windows (start, end), shuffled, that cover range(length) once."""
    if length <= BLOCK_SIZE:
        return [(0, length)]
    rng = np.random.RandomState((SEED, epoch))
    first_cut = 1 + int(BLOCK_SIZE * rng.random_sample())  # random: other windows in each epoch
    n = math.ceil(length / BLOCK_SIZE) + 1  # those at the ends may be short, the last one empty
    cuts = [0] + [min(first_cut + BLOCK_SIZE * i, length) for i in range(n)]
    return [(cuts[i], cuts[i + 1]) for i in rng.permutation(n)]


def batches(ids):
    """Yield inputs and targets (B, T) forever: a target is the character after its input."""
    endless = (window for epoch in count() for window in windows(len(ids) - 1, epoch))
    while True:
        batch = list(islice(endless, BATCH_SIZE))
        inputs = pad_sequence([ids[a:b] for a, b in batch], batch_first=True)
        targets = [ids[a + 1 : b + 1] for a, b in batch]
        yield inputs, pad_sequence(targets, batch_first=True, padding_value=-100)  # -100: no target


# ---- attention: model/attention.py has 24 equivalent versions ------------------------------------
def attention(q, k, v):
    """Return for each query the mean of the values, weighted by how well their keys fit it."""
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
    """What was read, at first nothing: ids (B, S), keys and values of each layer (B, H, S, D)."""

    def __init__(self, B):
        self.ids = torch.zeros(B, 0, dtype=torch.int64)
        self.layers = [[torch.zeros(B, N_HEAD, 0, N_EMBD // N_HEAD)] * 2 for _ in range(N_LAYER)]


# ---- the GPT: model/gpt.py -----------------------------------------------------------------------
class Block(nn.Module):
    """Attention over each character and all before it, then an MLP on each alone."""

    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(N_EMBD, bias=False)  # mean 0, deviation 1, learned weights
        self.query = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what a character looks for
        self.key = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what it is found by
        self.value = nn.Linear(N_EMBD, N_EMBD, bias=False)  # what it hands over
        self.out_proj = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.mlp_norm = nn.LayerNorm(N_EMBD, bias=False)
        self.up = nn.Linear(N_EMBD, 4 * N_EMBD, bias=False)
        self.down = nn.Linear(4 * N_EMBD, N_EMBD, bias=False)

    def forward(self, x, cached):
        """Map x (B, T, C) to (B, T, C); add its keys and values to the cached ones."""
        normed = self.attn_norm(x)
        q, k, v = self.query(normed), self.key(normed), self.value(normed)  # each (B, T, C)
        q, k, v = (t.unflatten(-1, (N_HEAD, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])  # |score| <= sqrt(D) = 8
        start = cached[0].size(2)  # the position of the first new character
        q, k = rotate(q, start), rotate(k, start)  # now scores depend on relative positions
        cached[:] = torch.cat([cached[0], k], dim=2), torch.cat([cached[1], v], dim=2)
        y = attention(q, *cached).transpose(1, 2).flatten(2)  # (B, T, C): heads side by side
        x = x + self.out_proj(y)
        hidden = F.relu(self.up(self.mlp_norm(x))).square()  # (B, T, 4C)
        return x + self.down(hidden)


class GPT(nn.Module):
    """Map ids to logits: at each character, one for every character that may come next."""

    def __init__(self, V):
        super().__init__()
        self.token_embedding = nn.Embedding(V, N_EMBD)
        self.previous_embeddings = nn.ModuleList(nn.Embedding(V, N_EMBD) for _ in range(N_PREVIOUS))
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.final_norm = nn.LayerNorm(N_EMBD, bias=False)
        self.lm_head = nn.Linear(N_EMBD, V, bias=False)
        generator = torch.Generator().manual_seed(SEED)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight")):
                nn.init.zeros_(parameter)  # at first, a block passes its input on unchanged
            elif parameter.dim() == 2:  # the weights of a LayerNorm stay 1
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, ids, cache=None):
        """Return logits (B, T, V) for ids (B, T), which go on where the cache ends and join it."""
        B, T = ids.shape
        cache = cache or Cache(B)  # in training, nothing was read before
        cache.ids = torch.cat([cache.ids, ids], dim=1)  # (B, S)
        recent = cache.ids[:, -T - N_PREVIOUS :]  # the new ones, and those before that they embed
        x = self.token_embedding(recent)
        for n, embedding in enumerate(self.previous_embeddings, 1):
            x = x + F.pad(embedding(recent), (0, 0, n, 0))[:, :-n]  # shifted right by n
        x = x[:, -T:]  # (B, T, C): those of the new ones
        for block, cached in zip(self.blocks, cache.layers, strict=True):
            x = block(x, cached)  # (B, T, C)
        logits = self.lm_head(self.final_norm(x))  # (B, T, V)
        return LOGIT_SOFTCAP * torch.tanh(logits / LOGIT_SOFTCAP)


# ---- the optimizers, Muon (Jordan et al. 2024) and AdamW: training/optimizers.py -----------------
@torch.no_grad()
def muon_step(weight, average, lr):
    """Step equally far along each singular direction of the gradient, not mostly the first."""
    average.lerp_(weight.grad, 1 - MUON_MOMENTUM)  # of the gradients so far
    update = weight.grad.lerp(average, MUON_MOMENTUM)  # the newest counts more: Nesterov
    update = orthogonalize(F.normalize(update, dim=-1))  # rows of equal length first: MuonEq-R
    rows, columns = weight.shape
    weight.mul_(1 - lr * WEIGHT_DECAY)
    weight.sub_(lr * max(1.0, rows / columns) ** 0.5 * update)  # a tall update has short rows


def orthogonalize(X):
    """Newton-Schulz: bring all but the tiniest singular values of X to between 0.7 and 1.2."""
    tall = X.size(0) > X.size(1)
    X = X.mT if tall else X  # so that X X^T is the smaller product
    X = X / (torch.linalg.matrix_norm(X) + 1e-7)  # no singular value is above 1
    for _ in range(5):  # each singular value z becomes 3.4445 z - 4.7750 z^3 + 2.0315 z^5:
        A = X @ X.mT  # docs/gpt.md, section 7, says why these constants
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.mT if tall else X


def lr_multiplier(step, max_iters):
    """Rise briefly to 1, stay there, then fall to 0."""
    rise = (step + 1) / (int(WARMUP_RATIO * max_iters) + 1)
    fall = (max_iters - step) / max(1, int(COOLDOWN_RATIO * max_iters))
    return min(rise, 1.0, fall)


# ---- the exact loss: training/evaluate.py --------------------------------------------------------
@torch.inference_mode()
def validation_loss(model, ids):
    """Return the mean loss over every character but the first, each predicted once."""
    total = 0.0
    for start in tqdm(range(0, len(ids) - 1, BLOCK_SIZE), desc="validation", leave=False):
        window = ids[start : start + BLOCK_SIZE + 1]  # its first prediction sees one character
        logits = model(window[None, :-1])[0]  # (T, V)
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(ids) - 1)


# ---- writing with a KV cache: model/generate.py goes on past BLOCK_SIZE --------------------------
@torch.inference_mode()
def generate(model, vocabulary, number):
    """Yield up to BLOCK_SIZE characters; the model reads each of them only once."""
    ids, cache = torch.tensor([[0]]), Cache(1)  # start with character 0, usually a newline
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(number):
        logits = model(ids, cache)[:, -1]  # (1, V)
        probabilities = (logits / TEMPERATURE).softmax(dim=-1)
        ids = torch.multinomial(probabilities, 1, generator=generator)  # (1, 1)
        yield vocabulary[ids.item()]


# ---- the program: train.py also resumes, and computes in bfloat16 or on a GPU --------------------
def train(model, ids, max_iters):
    """Train the model; return the loss of each step."""
    # Muon moves the matrices of the blocks, AdamW all the rest
    averages = {p: torch.zeros_like(p) for p in model.blocks.parameters() if p.dim() == 2}
    tables = [p for p in model.parameters() if p.dim() == 2 and p not in averages]  # lm_head too
    norm_weights = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": tables}, {"params": norm_weights, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY)

    losses, endless, bar = [], batches(ids), tqdm(range(max_iters))
    for step in bar:
        inputs, targets = next(endless)  # (B, T)
        logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # in nats per character
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)  # of all parameters together
        lr = LEARNING_RATE * lr_multiplier(step, max_iters)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for matrix, average in averages.items():
            muon_step(matrix, average, lr)
        model.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def main(paths, max_iters):
    """Train on texts; print the loss on what was held out, and a sample."""
    vocabulary, train_ids, val_ids = read(paths)
    print(f"training on {len(train_ids):,} characters of {', '.join(map(str, paths))}")
    model = GPT(len(vocabulary))
    train(model, train_ids, max_iters)
    print(f"validating on {len(val_ids):,}")
    print(f"validation loss {validation_loss(model, val_ids):.4f}\n")
    for character in generate(model, vocabulary, BLOCK_SIZE - 1):
        print(character, end="", flush=True)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # not that of a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: those in data/")
    parser.add_argument("--max_iters", type=int, default=MAX_ITERS, help=f"default: {MAX_ITERS}")
    parser.error = fail
    options = parser.parse_args()
    if options.max_iters < 1:
        fail(f"--max_iters: {options.max_iters}; name 1 or more")
    data = Path(__file__).parent / "data"
    texts = options.texts or list(data.glob("tinyshakespeare/input.txt"))  # train.py downloads it
    main(texts or sorted(data.glob("plays/*.txt")), options.max_iters)
