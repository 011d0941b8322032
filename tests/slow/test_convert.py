"""convert.py: models of nanoGPT are imported with the same logits, or refused in one line."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import convert
from common.console import UserError
from storage.checkpoint import load_model
from tests.runs import snapshot, train

TEXT = "".join(random.Random(0).choices("\n !,.aAbBcdefghio\xe9\u2028\U0001f600", k=600))
ARGS = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": False,
    "vocab_size": len(set(TEXT)), "dropout": 0.1,
}  # fmt: skip


def random_gpt2(args, scale=0.05):
    """Return a model of Hugging Face with the architecture and random weights of one of nanoGPT.

    With small logits, it guesses about uniformly, as a model does that has learned nothing.
    """
    sizes = {name: args[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = GPT2Config(n_positions=args["block_size"], activation_function="gelu", **sizes)
    model, generator = GPT2LMHeadModel(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias") and not args["bias"]:
                parameter.zero_()
            if "ln_f" in name:
                parameter *= scale
    return model


def weights_of(model, args):
    """Return the state dict that nanoGPT has for a model of Hugging Face, which transposes some."""
    return {
        name: tensor.T.contiguous() if ".c_" in name and tensor.dim() == 2 else tensor
        for name, tensor in model.state_dict().items()
        if args["bias"] or not name.endswith(".bias")
    }


def save(path, args=ARGS, weights=None):
    """Write what nanoGPT's ckpt.pt has, but for the state of its optimizer."""
    weights = weights or weights_of(random_gpt2(args), args)
    torch.save({"model": weights, "model_args": args}, path)


@pytest.fixture
def files(tmp_path):
    """The folder of a ckpt.pt and the text of its training."""
    save(tmp_path / "ckpt.pt")
    # nanoGPT reads it in Python's text mode: a line end is a newline
    (tmp_path / "text.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    return tmp_path


def import_run(folder, *more):
    """Import the files in a folder; return the folder of the run."""
    words = [folder / "ckpt.pt", f"--vocabulary={folder / 'text.txt'}", f"--out_dir={folder}/run"]
    assert convert.main([*map(str, words), *more]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [({"bias": True, "n_head": 4}, ""), ({"n_layer": 3, "block_size": 5}, "module._orig_mod.")],
)
def test_import_has_the_logits(changes, prefix, files):
    args = ARGS | changes
    theirs = random_gpt2(args)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)}  # old versions save it
    named = {prefix + name: each for name, each in (weights_of(theirs, args) | masks).items()}
    stored = {name: value for name, value in args.items() if value is not True}  # not its `bias`
    save(files / "ckpt.pt", stored, named)
    model, tokenizer = load_model(import_run(files))
    assert tokenizer.vocabulary == "".join(sorted(set(TEXT))) and model.config.dropout == 0.1
    ids = torch.randint(len(tokenizer), (1, args["block_size"]))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (model(ids) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_import_is_fine_tuned(files):
    """On the text of the import, in its encoding."""
    (files / "text.txt").write_text(TEXT, "utf-16-le")
    run = import_run(files, "--encoding=utf-16-le")
    options = [f"--sources={files / 'text.txt'}", "--val_fraction=0.2", "--dtype=float32"]
    options += ["--max_iters=1", "--warmup_ratio=0", "--eval_interval=1", f"--out_dir={files}/more"]
    code, output = train(run / "config.yaml", f"--init_from={run}", *options)
    assert code == 0, output
    assert load_model(files / "more")[1].vocabulary == "".join(sorted(set(TEXT)))


def test_import_into_a_run(files):
    """It is refused, and leaves the run as it is."""
    run = import_run(files)
    before = snapshot(run)
    with pytest.raises(UserError, match="holds a run; choose another"):
        import_run(files)
    assert snapshot(run) == before


class Harmful:
    """An object whose pickle calls a function that leaves a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


REFUSED = {  # what changes the files, words of the error
    "no ckpt.pt": (lambda files: (files / "ckpt.pt").unlink(), "ckpt.pt: No such file"),
    "a call in it": (lambda files: save(files / "ckpt.pt", weights=Harmful()),
                     "; nothing in it was run"),
    "another text": (lambda files: (files / "text.txt").write_text("another text"),
                     "the model has 20 tokens, --vocabulary 9 distinct characters"),
    "a text that the model guesses badly": (
        lambda files: save(files / "ckpt.pt", weights=weights_of(random_gpt2(ARGS, 1), ARGS)),
        "worse than a uniform guess; give the text"),
    "not UTF-8": (lambda files: (files / "text.txt").write_bytes(b"caf\xe9"),
                  "'utf-8' codec can't decode byte 0xe9 in position 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_import_refused(case, files, monkeypatch):
    """It leaves nothing behind, and nothing in a pickle runs."""
    monkeypatch.chdir(files)
    change, words = REFUSED[case]
    change(files)
    with pytest.raises(UserError, match=words):
        import_run(files)
    assert not (files / "run").exists() and not (files / "harmed").exists()
