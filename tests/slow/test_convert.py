"""convert.py: models of nanoGPT are imported with the same logits, or refused in one line."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

import convert
from common.errors import CheckpointError, DataError, UserError
from storage import load_model
from tests.commands import exit_code, sample_main
from tests.conftest import printed
from tests.runs import contents, train

TEXT = "".join(random.Random(0).choices("\n !,.aAbBcdefghio\xe9\u2028\U0001f600", k=600))
CHARACTERS = sorted(set(TEXT))


def model_args(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=False, **others):
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    return {**sizes, "bias": bias, "vocab_size": len(CHARACTERS), "dropout": 0.1, **others}


def random_weights(args):
    """Return the state dict of nanoGPT's model.py, with random numbers."""
    C, V, generator = args["n_embd"], args["vocab_size"], torch.Generator().manual_seed(1)
    shapes = {"wte": (V, C), "wpe": (args["block_size"], C), "ln_f": (C,)}
    for i in range(args["n_layer"]):
        shapes |= {f"h.{i}.ln_1": (C,), f"h.{i}.ln_2": (C,)}
        shapes |= {f"h.{i}.attn.c_attn": (3 * C, C), f"h.{i}.attn.c_proj": (C, C)}
        shapes |= {f"h.{i}.mlp.c_fc": (4 * C, C), f"h.{i}.mlp.c_proj": (C, 4 * C)}
    weights = {}
    for name, shape in shapes.items():
        random = 0.3 * torch.randn(shape, generator=generator)
        weights[f"transformer.{name}.weight"] = random + (len(shape) == 1)
        if args["bias"] and name not in ("wte", "wpe"):
            weights[f"transformer.{name}.bias"] = torch.randn(shape[0], generator=generator)
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}


def nanogpt_logits(weights, args, ids):
    """nanoGPT's forward pass, written out: ids (T,) -> logits (T, V)."""

    def norm(x, name):
        bias = weights.get(f"{name}.bias")
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], bias, 1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    T, H = len(ids), args["n_head"]
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:T]
    for i in range(args["n_layer"]):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")  # (T, 3C)
        q, k, v = (part.unflatten(1, (H, -1)).transpose(0, 1) for part in qkv.chunk(3, dim=1))
        scores = q @ k.mT / math.sqrt(q.size(-1))  # (H, T, T)
        scores = scores.masked_fill(torch.ones(T, T).triu(1) == 1, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)  # (T, C)
        x = x + linear(mixed, f"{block}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["lm_head.weight"].T


def save(path, args, weights=None, prefix="", **others):
    """Write a ckpt.pt as nanoGPT's train.py does, with the state of its optimizer."""
    weights = weights or random_weights(args)
    content = {
        "model": {prefix + name: tensor for name, tensor in weights.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
        "model_args": args,
        "config": {"out_dir": "out", "learning_rate": 1e-3, "device": "cuda"},
    }
    torch.save(content | others, path)


@pytest.fixture
def files(tmp_path):
    """The folder of a ckpt.pt and the text of its training."""
    save(tmp_path / "ckpt.pt", model_args())
    # nanoGPT reads it in Python's text mode: a line end is a newline
    (tmp_path / "text.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    return tmp_path


def import_run(folder, *more):
    """Import the files in a folder; return the folder of the run."""
    words = [folder / "ckpt.pt", f"--vocabulary={folder / 'text.txt'}", f"--out_dir={folder}/run"]
    assert convert.main([*map(str, words), *more]) == 0
    return folder / "run"


def refusal(folder):
    """Return the one line of an import that must be refused, and leave nothing behind."""
    with pytest.raises(CheckpointError) as caught:
        import_run(folder)
    assert caught.value.exit_code == 4 and not (folder / "run").exists()
    return printed(caught.value)


@pytest.mark.parametrize(
    ("shape", "prefix"), [((2, 4, 16, 12, True), ""), ((3, 2, 12, 5, False), "_orig_mod.")]
)
def test_logits_are_those_of_nanogpt(shape, prefix, files):
    args = model_args(*shape)
    weights = random_weights(args)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)}  # old versions save it
    save(files / "ckpt.pt", args, weights | masks, prefix)
    model, tokenizer = load_model(import_run(files))
    assert tokenizer.vocabulary == "".join(CHARACTERS) and model.config.dropout == 0.1
    ids = torch.randint(len(CHARACTERS), (args["block_size"],))
    expected = nanogpt_logits(weights, args, ids)
    with torch.no_grad():
        difference = (model(ids[None])[0] - expected).abs().max()
    assert difference < 1e-5 * max(1, expected.abs().max())


def test_an_imported_model_is_fine_tuned_but_not_resumed(files):
    run = import_run(files)
    options = [run / "config.yaml", f"--sources={files / 'text.txt'}", "--max_iters=1"]
    options += ["--warmup_ratio=0", "--eval_interval=1", "--dtype=float32"]
    more = ["--val_fraction=0.2", f"--out_dir={files / 'more'}"]
    code, output = train(*options, f"--init_from={run}", *more)
    assert code == 0, output
    settings = contents(files / "more" / "last.safetensors")["settings"]["train"]
    assert (settings["optimizer"], settings["learning_rate"]) == ("adamw", 1e-3)  # nanoGPT's
    code, output = train(run)
    assert code == 4 and f"start a new run from its best weights: --init_from={run}" in output


def test_a_folder_with_a_run_is_left_alone(files):
    best = import_run(files) / "best.safetensors"
    before = best.read_bytes()
    save(files / "ckpt.pt", model_args(n_layer=1))
    with pytest.raises(UserError, match="holds a run; choose another") as caught:
        import_run(files)
    assert caught.value.exit_code == 2 and best.read_bytes() == before


def test_a_text_is_decoded_as_nanogpt_does_so_that_a_mark_in_utf_8_is_a_character(files):
    characters = f"\ufeff{TEXT}"
    (files / "text.txt").write_bytes(characters.encode())
    save(files / "ckpt.pt", model_args(vocab_size=len(set(characters))))
    _, tokenizer = load_model(import_run(files))
    assert tokenizer.vocabulary == "".join(sorted(set(characters)))


def test_the_encoding_of_the_text_is_that_of_the_model(files):
    (files / "text.txt").write_text(TEXT, "utf-16-le")
    run = import_run(files, "--encoding=utf-16-le")
    assert exit_code(sample_main, [f"--ckpt={run}", f"--score={files / 'text.txt'}"]) == 0


# ---------------------------------------------------------------------------------- what is refused


def test_a_text_that_the_model_was_not_trained_on_is_refused(files):
    (files / "text.txt").write_text("another text")
    assert "the model has 20 tokens, --vocabulary 9 distinct characters" in refusal(files)


def test_a_vocabulary_that_cannot_be_read_is_refused(files):
    (files / "text.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError) as caught:
        import_run(files)
    message = "text.txt: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 3"
    assert caught.value.exit_code == 3 and message in printed(caught.value)


def test_what_is_no_model_of_nanogpt_is_refused(files):
    save(files / "ckpt.pt", model_args(), model_args=model_args(n_layer=3))
    assert "missing: blocks.2.attn_norm" in refusal(files)


class Harmful:
    """An object whose pickle calls a function that leaves a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


@pytest.mark.parametrize("hostile", [Harmful(), random.Random], ids=["a call", "a class"])
@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_pickle_runs_and_no_class_is_loaded(hostile, zipped, files, monkeypatch):
    monkeypatch.chdir(files)
    content = {"model": hostile}
    torch.save(content, files / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert "not a checkpoint of nanoGPT; nothing in it was run" in refusal(files)
    assert not (files / "harmed").exists()
