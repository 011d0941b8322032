"""Models of nanoGPT: imported with the same logits, or refused in one line."""

import dataclasses
import io
import math
import os
import pickle
import random
import zipfile

import pytest
import torch
from torch.nn import functional as F

from checkpointing import checkpoint as checkpoints
from common.errors import CheckpointError, UserError
from configs.schema import LAYOUTS
from convert import nanogpt
from tests.commands import sample_main
from tests.conftest import printed
from tests.runs import train

TEXT = "".join(random.Random(0).choices("\n !,.aAbBcdefghio\xe9\u2028\U0001f600", k=600))
CHARACTERS = sorted(set(TEXT))
SHAPES = [  # n_layer, n_head, n_embd, block_size, bias, tied, compiled
    (1, 1, 8, 8, False, True, False),
    (2, 4, 16, 12, True, True, True),
    (3, 2, 12, 5, False, False, True),
    (2, 3, 24, 16, True, False, False),
]


def model_args(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=False, **others):
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    return {**sizes, "bias": bias, "vocab_size": len(CHARACTERS), "dropout": 0.1, **others}


def random_weights(args, tied=True):
    """The state dict of nanoGPT's model.py, with random numbers."""
    C, V, generator = args["n_embd"], args["vocab_size"], torch.Generator().manual_seed(1)

    def draw(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    weights = {"transformer.wte.weight": draw(V, C)}
    weights["transformer.wpe.weight"] = draw(args["block_size"], C)
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    linear |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    modules = {
        f"transformer.h.{i}.{name}": shape
        for i in range(args["n_layer"])
        for name, shape in ({"ln_1": (C,), "ln_2": (C,)} | linear).items()
    }
    for name, shape in (modules | {"transformer.ln_f": (C,)}).items():
        weights[f"{name}.weight"] = draw(*shape) + (len(shape) == 1)
        if args["bias"]:
            weights[f"{name}.bias"] = draw(shape[0])
    head = weights["transformer.wte.weight"].detach() if tied else draw(V, C)  # one memory
    weights["lm_head.weight"] = head
    return weights


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


def save(path, weights, args, compiled=False, **others):
    """Write a ckpt.pt as nanoGPT's train.py does, with the state of its optimizer."""
    betas = (0.9, 0.99)  # one tuple in both groups
    moments = {"step": torch.tensor(250.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    groups = [
        {"lr": 1e-3, "betas": betas, "weight_decay": decay, "fused": None, "params": [i]}
        for i, decay in enumerate((0.1, 0.0))
    ]
    content = {
        "model": {("_orig_mod." if compiled else "") + key: w for key, w in weights.items()},
        "optimizer": {"state": {0: moments}, "param_groups": groups},
        "model_args": args,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "learning_rate": 1e-3, "compile": True, "device": "cuda"},
    }
    torch.save(content | others, path)


def meta_of(characters):
    stoi = {character: i for i, character in enumerate(characters)}
    itos = {i: character for i, character in enumerate(characters)}
    return {"vocab_size": len(stoi), "itos": itos, "stoi": stoi}


@pytest.fixture
def files(tmp_path):
    """The folder of a ckpt.pt, its meta.pkl and its text."""
    args = model_args()
    save(tmp_path / "ckpt.pt", random_weights(args), args)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta_of(CHARACTERS)))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8", newline="")
    return tmp_path


def import_run(folder, out="run", **options):
    """Import the files in a folder; return the folder of the run."""
    options = options or {"meta": folder / "meta.pkl"}
    words = [f"--{name}={value}" for name, value in options.items()]
    assert nanogpt.main([str(folder / "ckpt.pt"), f"--out_dir={folder / out}", *words]) == 0
    return folder / out


def refusal(folder, exit_code=4, **options):
    """Return the one line of an import that must be refused and leave nothing behind."""
    with pytest.raises(UserError) as caught:
        import_run(folder, **options)
    assert caught.value.exit_code == exit_code, caught.value
    assert not (folder / "run").exists()
    return printed(caught.value)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_those_of_nanogpt_and_characters_keep_their_ids(shape, files):
    *sizes, bias, tied, compiled = shape
    args = model_args(*sizes, bias)
    weights = random_weights(args, tied)
    save(files / "ckpt.pt", weights, args, compiled)
    shuffled = random.Random(3).sample(CHARACTERS, len(CHARACTERS))
    (files / "meta.pkl").write_bytes(pickle.dumps(meta_of(shuffled)))
    saved = checkpoints.load(import_run(files) / "best.safetensors")
    assert saved.vocabulary == "".join(shuffled)
    ids = torch.randint(len(CHARACTERS), (args["block_size"],))
    expected = nanogpt_logits(weights, args, ids)
    for layout in ("fused", LAYOUTS[sum(sizes) % len(LAYOUTS)]):
        config = dataclasses.replace(saved.config.model, attention=layout)
        model = checkpoints.build_model(saved, config).eval()
        with torch.no_grad():
            difference = (model(ids[None])[0] - expected).abs().max()
        assert difference < 1e-5 * max(1, expected.abs().max())
    assert (config.bias, config.tied, config.dropout) == (bias, tied, 0.1)


def test_the_text_of_the_training_stands_in_for_its_meta(files):
    with_meta = checkpoints.load(import_run(files) / "best.safetensors")
    (files / "text.txt").write_bytes((TEXT + "\r\n").encode())  # nanoGPT reads \r\n as \n
    again = import_run(files, "again", vocabulary=files / "text.txt")
    with_text = checkpoints.load(again / "best.safetensors")
    assert with_text.vocabulary == with_meta.vocabulary
    for name, tensor in with_meta.tensors.items():
        assert torch.equal(tensor, with_text.tensors[name])


def test_half_precision_and_the_masks_of_old_versions_are_read(files):
    args = model_args(bias=True)
    weights = random_weights(args)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 12, 12) for i in range(2)}
    save(files / "ckpt.pt", {name: each.half() for name, each in weights.items()} | masks, args)
    saved = checkpoints.load(import_run(files) / "best.safetensors")
    expected = weights["transformer.wte.weight"].half().float()
    assert torch.equal(saved.tensors["model.token_embedding"], expected)


def test_the_run_is_sampled_scored_and_trained_further_but_not_resumed(files, capsys):
    run = import_run(files)
    assert sample_main([f"--ckpt={run}", "--max_new_tokens=30"]) == 0
    assert len(capsys.readouterr().out) > 30
    assert sample_main([f"--ckpt={run}", f"--score={files / 'text.txt'}"]) == 0
    options = [run / "config.yaml", f"--data.sources={files / 'text.txt'}", "--max_iters=1"]
    options += ["--warmup_iters=0", "--eval_interval=1", "--dtype=float32"]
    code, output = train(*options, f"--init_from={run}", f"--out_dir={files / 'more'}")
    assert code == 0, output
    for path in (run, run / "best.safetensors"):
        code, output = train(*options, f"--out_dir={run}", f"--resume={path}")
        assert code == 4 and output.count("\n") == 1, output
        assert "an imported model, which has no optimizer state" in output
        assert "--init_from" in output


def test_sample_names_the_command_that_imports_a_checkpoint_of_nanogpt(files):
    with pytest.raises(UserError, match=r"python -m convert\.nanogpt CKPT --meta"):
        sample_main([f"--ckpt={files / 'ckpt.pt'}"])


def test_a_folder_with_a_run_is_left_alone(files):
    run = import_run(files)
    before = {path.name: path.read_bytes() for path in run.glob("[!.]*")}
    with pytest.raises(UserError, match="already holds a run") as caught:
        import_run(files)
    assert caught.value.exit_code == 2
    assert {path.name: path.read_bytes() for path in run.glob("[!.]*")} == before


# ---------------------------------------------------------------------------------- what is refused

WRONG_OPTIONS = [
    ([], "give one ckpt.pt of nanoGPT; given: none"),
    (["a.pt", "b.pt", "--out_dir=x", "--meta=m"], "given: ['a.pt', 'b.pt']"),
    (["a.pt", "--meta=m"], "--out_dir is missing"),
    (["a.pt", "--out_dir=x"], "give either --meta=META"),
    (["a.pt", "--out_dir=x", "--meta=m", "--vocabulary=t"], "give either --meta=META"),
    (["a.pt", "--out_dir=x", "--mata=m"], "did you mean --meta?"),
]


@pytest.mark.parametrize("arguments, words", WRONG_OPTIONS, ids=str)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(UserError) as caught:
        nanogpt.main(arguments)
    assert caught.value.exit_code == 2 and words in str(caught.value)


ARGS = model_args()
WRONG_MODELS = {
    "byte pairs": (
        {"model_args": {**ARGS, "vocab_size": 50304}},
        "50,304 tokens are GPT-2's BPE tokens",
    ),
    "no model": ({"model": None}, "not a nanoGPT checkpoint"),
    "no sizes": ({"model_args": {}}, "not a nanoGPT checkpoint (KeyError: 'n_layer')"),
    "sizes that differ": ({"model_args": {**ARGS, "n_embd": 18}}, "transformer.wte.weight is"),
    "more layers": ({"model_args": {**ARGS, "n_layer": 3}}, "missing: transformer.h.2.ln_1.weight"),
    "fewer layers": ({"model_args": {**ARGS, "n_layer": 1}}, "unknown: transformer.h.1.ln_1"),
    "heads": ({"model_args": {**ARGS, "n_head": 3}}, "not divisible by n_head 3"),
    "a size of the wrong type": ({"model_args": {**ARGS, "n_layer": [2]}}, "n_layer must be"),
    "a huge size": ({"model_args": {**ARGS, "block_size": 2**20}}, "its weights have"),
    "a tensor as a size": ({"model_args": {**ARGS, "n_layer": torch.ones(3)}}, "n_layer must be"),
    "a scalar": ({"model": {"transformer.wte.weight": torch.tensor(1.0)}}, "missing:"),
    "an unknown name": ({"model": {"\x1b[2J": torch.zeros(1)}}, r"unknown: \x1b[2J"),
    "nothing": ({"model": {}}, "missing: transformer.wte.weight"),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_what_is_no_model_of_ours_is_refused(name, files):
    changes, words = WRONG_MODELS[name]
    save(files / "ckpt.pt", random_weights(ARGS), ARGS, **changes)
    assert words in refusal(files)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(files, value):
    weights = random_weights(ARGS)
    weights["transformer.h.1.mlp.c_fc.weight"][3, 2] = value
    save(files / "ckpt.pt", weights, ARGS)
    assert "not finite: transformer.h.1.mlp.c_fc.weight" in refusal(files)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float64])
def test_weights_are_floats(files, dtype):
    weights = {name: each.to(dtype) for name, each in random_weights(ARGS).items()}
    save(files / "ckpt.pt", random_weights(ARGS), ARGS, model=weights)
    if dtype == torch.float64:
        assert import_run(files)
    else:
        assert str(dtype).removeprefix("torch.") in refusal(files)


WRONG_META = {
    "another number of characters": (meta_of(CHARACTERS[1:]), "the model has 20 tokens, the voc"),
    "words": ({"stoi": {"the": 0, "cat": 1}}, "not single characters: 'the', 'cat'"),
    "ids with a gap": ({"stoi": {"a": 0, "b": 2}}, "must be 0, 1, 2, ..."),
    "an id twice": ({"stoi": {"a": 0, "b": 0}}, "must be 0, 1, 2, ..."),
    "a surrogate": (
        meta_of([*CHARACTERS[1:], "\ud800"]),
        "not a meta.pkl of characters (UnicodeEncodeError",
    ),
    "no characters": ({"stoi": {}}, "vocabulary 0 characters"),
    "no stoi": ({"vocab_size": 65}, "instead give --vocabulary=TEXT"),
}


@pytest.mark.parametrize("name", WRONG_META)
def test_what_is_no_vocabulary_of_the_model_is_refused(name, files):
    meta, words = WRONG_META[name]
    (files / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert words in refusal(files)


def test_a_text_that_is_not_of_the_model_is_refused(files):
    path = files / "text.txt"
    path.write_text("another text")
    assert "give the vocabulary of this model" in refusal(files, vocabulary=path)
    path.write_bytes(b"a\xff")
    assert "not UTF-8 at byte 1" in refusal(files, 3, vocabulary=path)
    assert "No such file" in refusal(files, 3, vocabulary=files / "none.txt")


# ------------------------------------------------------------------------------------ hostile files


class Harmful:
    """An object whose pickle calls a function that leaves a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


PICKLES = {
    "a call": pickle.dumps(Harmful(), 2),
    "a call by name": pickle.dumps(Harmful(), 4),
    "a call inside": pickle.dumps({"stoi": Harmful(), "model": Harmful()}),
    "an instance": b"(X\x06\0\0\0harmedios\nmkdir\n.",
    "a class": pickle.dumps({"stoi": random.Random}),
    "a function": pickle.dumps({"stoi": os.getcwd}),
    "an object": pickle.dumps({"stoi": pytest.raises(ValueError).__class__}),
    "a persistent id": b"\x80\x02}X\x01\0\0\0aQs.",
    "an extension": b"\x80\x02\x82\x01.",
    "no such opcode": b"\x80\x02\xff.",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "text": b"First Citizen:\n" * 100,
    "noise": random.Random(1).randbytes(5000),
}


def archive_of(content):
    """Return a PyTorch archive with this pickle."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
    return archive.getvalue()


@pytest.mark.parametrize("name", PICKLES)
def test_nothing_in_a_pickle_runs_and_no_class_is_loaded(name, files, monkeypatch):
    trap = files / "trap"
    trap.mkdir()
    monkeypatch.chdir(trap)
    good = {file: (files / file).read_bytes() for file in ("ckpt.pt", "meta.pkl")}
    content = PICKLES[name]
    hostile = [("ckpt.pt", archive_of(content)), ("ckpt.pt", content), ("meta.pkl", content)]
    for file, bad in hostile:
        (files / file).write_bytes(bad)
        message = refusal(files)
        assert message.startswith(f"{files / file}: not a "), message
        with pytest.raises(CheckpointError):
            checkpoints.load(files / file)
        (files / file).write_bytes(good[file])
    assert not list(trap.iterdir())
    assert import_run(files)
