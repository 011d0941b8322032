"""All of Hornbook in one file: read a text, train a small GPT on it, and let it write.

    python hornbook.py [TEXT ...] [--steps N]

After 1,400 steps on Tiny Shakespeare (18 minutes on two cores, validation loss 1.405) it writes:

    My fair ordering were thou grace the time
    Of riches all and storms to importune,
    Thou takest my prayers can subject of men

Each heading says where the full version of its part is. The weights are, bit for bit, those of
`python train.py configs/shakespeare.yaml --device=cpu --dtype=float32 --kernel=batched`; lines
marked "as train.py" are written as they are only for that. Shapes: B windows in a batch, T
characters in a call, S in the cache, C width, H heads, D = C / H, V characters in the vocabulary.
"""

import argparse
import itertools
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

# ------------------------------------------------------------ constants: configs/ has other recipes
STEPS, BATCH, CONTEXT = 1400, 4, 512  # 2.9 epochs of Tiny Shakespeare
LAYERS, HEADS, WIDTH = 3, 4, 256  # 2.4 million parameters
TOKEN_SHIFTS = 2  # each character is also told which two come before it
SOFT_CAP = 15.0  # logits stay between -15 and 15, however sure the model gets
# On new text a trained model is too sure of itself, so outside training its logits are scaled down
LOGIT_SCALE = 0.91  # 1 - 0.03 * epochs; train.py computes it from the epochs read so far
LEARNING_RATE = 0.02  # at its peak, of both Muon and AdamW
WARMUP, COOLDOWN = 1 / 70, 6 / 7  # shares of the run: it rises for 20 steps, falls for 1,200
MOMENTUM, BETAS = 0.9, (0.9, 0.99)  # of Muon, of AdamW
WEIGHT_DECAY = 0.1  # of both
GRAD_CLIP = 1.0  # a longer gradient is scaled down to this length
TEMPERATURE = 0.7  # below 1, likely characters become likelier still
SEED = 1337


# ----------------------------------- the text and its vocabulary: data/ has encodings and downloads
def read(paths):
    """Return the vocabulary, the training ids, and the validation ids: each text's last tenth."""
    texts = [Path(path).read_text(encoding="utf-8") for path in paths]
    vocabulary = sorted(set("".join(texts)))
    id_of = {character: i for i, character in enumerate(vocabulary)}
    train_text = "".join(text[: int(0.9 * len(text))] for text in texts)
    validation_text = "".join(text[int(0.9 * len(text)) :] for text in texts)
    ids = [torch.tensor([id_of[c] for c in text]) for text in (train_text, validation_text)]
    return vocabulary, *ids


# ---------------------------------- an epoch's windows: data/batches.py has lists and micro-batches
def windows(length):
    """Yield windows (start, end) for ever: those of an epoch cover range(length) once, shuffled."""
    count = math.ceil(length / CONTEXT) + 1  # one more, because the first may be short
    for epoch in itertools.count():
        rng = np.random.RandomState((SEED, epoch))  # the same numbers in every version of NumPy
        first_cut = 1 + int(CONTEXT * rng.random_sample())  # no character is first in every epoch
        cuts = [0] + [min(first_cut + CONTEXT * i, length) for i in range(count)]
        for i in rng.permutation(count):  # window i is between two cuts; the last may be empty
            yield cuts[i], cuts[i + 1]


def batches(ids):
    """Yield inputs and targets (B, T) for ever: a target is the character after its input."""
    all_windows = windows(len(ids) - 1)  # the last character has none after it
    while True:
        inputs = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
        targets = torch.full((BATCH, CONTEXT), -100)  # cross_entropy leaves out -100: padding
        for row, (start, end) in enumerate(itertools.islice(all_windows, BATCH)):
            inputs[row, : end - start] = ids[start:end]
            targets[row, : end - start] = ids[start + 1 : end + 1]
        yield inputs, targets


# ------------- attention, with RoPE and QK-norm: model/attention.py writes it in 6 x 4 equal ways
class Cache:
    """The memory of S characters, at first none. Every batch and every text gets a new one."""

    def __init__(self, B):
        self.ids = torch.zeros(B, 0, dtype=torch.int64)  # (B, S)
        nothing = torch.zeros(B, HEADS, 0, WIDTH // HEADS)
        self.keys, self.values = [nothing] * LAYERS, [nothing] * LAYERS  # each (B, H, S, D)


def attention(q, k, v, cache, layer):
    """Return, for each query q, the mean of the values v, weighted by how well the keys k fit q."""
    q, k = rms_norm(q), rms_norm(k)  # (B, H, T, D): equally long, so that no score can explode
    start = cache.keys[layer].size(2)  # position of the first new character
    q, k = rotate(q, start), rotate(k, start)  # so that a score knows how far apart the two are
    # as nobody looks ahead, the keys and values of earlier characters are what they were
    k = cache.keys[layer] = torch.cat([cache.keys[layer], k], dim=2)  # (B, H, S, D), T included
    v = cache.values[layer] = torch.cat([cache.values[layer], v], dim=2)  # both now remembered
    S, D = k.shape[2:]
    scores = q @ k.mT / math.sqrt(D)  # (B, H, T, S): how well each key fits, within sqrt(D) = 8
    future = torch.arange(S) > torch.arange(start, S)[:, None]  # (T, S)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)  # each row sums to 1
    return weights @ v  # (B, H, T, D)


def rms_norm(x):
    """QK-norm: scale each vector (..., D) to a root mean square of 1."""
    return x * ((x * x).mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()


def rotate(x, start):
    """RoPE: rotate the features i and i + D/2, as a pair, by position * 10000^(-2i/D) radians."""
    T, D = x.shape[-2:]  # of (B, H, T, D), at the positions start, start + 1, ...
    frequencies = 10_000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)  # (D/2,)
    angles = torch.arange(start, start + T)[:, None] * frequencies  # (T, D/2)
    cos = torch.cat([angles, angles], dim=1).cos().float()  # (T, D)
    sin = torch.cat([-angles, angles], dim=1).sin().float()
    # roll swaps the two of a pair: (a, b) becomes (a cos - b sin, b cos + a sin)
    return torch.addcmul(x * cos, x.roll(D // 2, dims=-1), sin)  # x cos + rolled sin; as train.py


# --------------------------------------- the block: model/gpt.py has GELU, SwiGLU, RMSNorm, dropout
class Block(nn.Module):
    """Attention, where characters learn from those before, then an MLP, on each by itself."""

    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(WIDTH, bias=False)  # mean 0, deviation 1, times learned gains
        # what a character looks for, what it is found by, what it hands over: queries, keys, values
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cache, layer):
        qkv = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)  # each (B, T, C)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv)  # (B, H, T, D)
        gathered = attention(q, k, v, cache, layer)  # (B, H, T, D)
        x = x + self.out_proj(gathered.transpose(1, 2).flatten(2))  # (B, T, C): heads side by side
        hidden = F.relu(self.up(self.mlp_norm(x)))  # (B, T, 4C)
        return x + self.down(hidden * hidden)  # (B, T, C); ReLU squared: better here than GELU


# ----------------------------------- the GPT, with token shifts: model/gpt.py also embeds positions
class GPT(nn.Module):
    """Characters in; at each of them, a logit for every character that may come next."""

    def __init__(self, V):
        super().__init__()
        self.token_embedding = nn.Embedding(V, WIDTH)
        previous = (nn.Embedding(V, WIDTH) for _ in range(TOKEN_SHIFTS))
        self.previous_embeddings = nn.ModuleList(previous)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, V, bias=False)

        # `out_proj` and `down` begin at 0, so at first a block passes its input on unchanged. Then
        # the logits are noise with the standard deviation sigma = 0.02 sqrt(C) = 0.32, and the loss
        # is about ln V + sigma^2 / 2: the mean of e^noise is e^(sigma^2 / 2), the mean of noise 0.
        generator = torch.Generator().manual_seed(SEED)
        # in the order of the parameters; what begins at 0 draws no numbers: as train.py
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight")):
                parameter.data.zero_()
            elif parameter.dim() == 2:  # a matrix or a table; the gains of a LayerNorm stay 1
                parameter.data.normal_(0.0, 0.02, generator=generator)

    def forward(self, ids, cache):
        """Return the logits (B, T, V) of new characters, ids (B, T), after those in the cache."""
        cache.ids = torch.cat([cache.ids, ids], dim=1)  # (B, S)
        x = self.token_embedding(ids)  # (B, T, C): the stream, to which everything is added
        for n, table in enumerate(self.previous_embeddings, 1):
            shifted = F.pad(table(cache.ids), (0, 0, n, 0))[:, :-n]  # (B, S, C): n places later
            x = x + shifted[:, -ids.size(1) :]  # each new one gets what stands n before it, if any
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)  # (B, T, C)
        logits = SOFT_CAP * torch.tanh(self.lm_head(self.final_norm(x)) / SOFT_CAP)  # (B, T, V)
        return logits if self.training else LOGIT_SCALE * logits


# -------------------------------------- Muon (Jordan et al. 2024) and AdamW: training/optimizers.py
@torch.no_grad()
def muon_step(weight, momentum, count, lr):
    """Move `count` stacked matrices equally far in all directions of their gradients."""
    momentum.lerp_(weight.grad, 1 - MOMENTUM)  # a running mean of the gradients
    update = weight.grad.lerp(momentum, MOMENTUM)  # the newest counts more: Nesterov
    weight.mul_(1 - lr * WEIGHT_DECAY)
    for matrix, change in zip(weight.chunk(count), update.chunk(count), strict=True):  # views
        change = orthogonalize(F.normalize(change, dim=-1))  # each row, an output, counts equally
        rows, columns = matrix.shape  # the rows of a tall one come out short: lengthen them
        matrix.add_(change, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalize(X):
    """Bring the singular values of X, its stretch in each direction, close to 1 (0.7 to 1.2)."""
    tall = X.size(0) > X.size(1)
    X = X / (torch.linalg.matrix_norm(X) + 1e-7)  # no singular value is above 1
    X = X.mT if tall else X  # so that X X^T is the small one
    for _ in range(5):  # each singular value z becomes 3.4445 z - 4.7750 z^3 + 2.0315 z^5
        A = X @ X.mT
        P = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A; as train.py
        X = torch.addmm(X, P, X, beta=3.4445)  # 3.4445 X + P X
    return X.mT if tall else X


# ----------------------------------------------------- the schedule: training/schedule.py has three
def lr_multiplier(step, steps):
    """Rise briefly to 1, hold, then fall to 0."""
    rise = (step + 1) / (int(WARMUP * steps + 1e-6) + 1)  # 1e-6: rounding, as train.py
    fall = (steps - step) / max(1, int(COOLDOWN * steps + 1e-6))
    return min(rise, 1.0, fall)


# ------------------- the loop: train.py and training/ have resuming, several processes and bfloat16
def train(model, ids, steps):
    """Yield the loss of each step: Muon moves the matrices of the blocks, AdamW all the rest."""
    matrices = [(name, p) for name, p in model.blocks.named_parameters() if p.dim() == 2]
    # a weight, its momentum, and how many matrices it is: qkv is three, each with its own step
    muon = [(p, torch.zeros_like(p), 3 if "qkv" in name else 1) for name, p in matrices]
    tables = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" not in name]
    gains = [p for p in model.parameters() if p.dim() == 1]  # of the LayerNorms
    groups = [{"params": tables}, {"params": gains, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for step, (inputs, targets) in enumerate(itertools.islice(batches(ids), steps)):
        model.train()  # validation_loss and write switch to eval
        logits = model(inputs, Cache(BATCH))  # (B, T, V); an empty cache: nothing came before
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # in nats per character
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)  # of all parameters together
        lr = LEARNING_RATE * lr_multiplier(step, steps)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for weight, momentum, count in muon:
            muon_step(weight, momentum, count, lr)
        model.zero_grad()
        yield loss.item()


# ------------------------------------------------------------- the exact loss: training/evaluate.py
@torch.inference_mode()
def validation_loss(model, ids):
    """Return the mean loss over every character but the first, each predicted once."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = ids[start : start + CONTEXT + 1]  # its first prediction sees one character
        logits = model(window[None, :-1], Cache(1))[0]  # (T, V)
        total += F.cross_entropy(logits, window[1:], reduction="none").double().sum().item()
    return total / (len(ids) - 1)


# -------------------------------- writing with a KV cache: model/generate.py goes on beyond CONTEXT
@torch.inference_mode()
def write(model, vocabulary, count):
    """Yield `count` characters, one by one: at most CONTEXT, the positions that were trained."""
    model.eval()
    ids, cache = torch.tensor([[0]]), Cache(1)  # 0: a newline, in most vocabularies
    numbers = 1 - np.random.Generator(np.random.PCG64((SEED, 0))).random(1 + count)  # in (0, 1]
    for number in numbers[1:]:  # the first is for the newline, which is not drawn; as sample.py
        logits = model(ids, cache)[0, -1].double().numpy()  # (V,)
        totals = np.exp((logits - logits.max()) / TEMPERATURE).cumsum()  # odds, added up
        ids = torch.tensor([[totals.searchsorted(number * totals[-1])]])  # the first to reach it
        yield vocabulary[ids.item()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: those in data/")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    data = Path(__file__).parent / "data"
    texts = options.texts or list(data.glob("tinyshakespeare/input.txt"))  # train.py downloads it
    texts = texts or sorted(data.glob("plays/*.txt"))  # another text: its losses do not compare
    vocabulary, train_ids, validation_ids = read(texts)
    print(f"{len(train_ids):,} training characters of {', '.join(map(str, texts))}")
    if len(train_ids) < CONTEXT + 2:
        parser.exit(3, f"error: {len(train_ids)} training characters; {CONTEXT + 2} are needed\n")
    model = GPT(len(vocabulary))
    bar = tqdm(train(model, train_ids, options.steps), total=options.steps)
    for loss in bar:
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    print(f"validation loss {validation_loss(model, validation_ids):.4f}\n")
    for character in write(model, vocabulary, 500):  # 500 is less than CONTEXT
        print(character, end="", flush=True)
    print("\n\nNext: python train.py configs/shakespeare.yaml saves its model and can resume.")
