"""convert.py: models of nanoGPT are imported with the same logits, or refused in one line."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import convert
from common.console import CheckpointError, DataError, UserError
from storage.checkpoint import BEST, LAST, load_checkpoint, load_model
from tests.runs import run_sample, train

TEXT = "".join(random.Random(0).choices("\n !,.aAbBcdefghio\xe9\u2028\U0001f600", k=600))


def model_args(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=False, **others):
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    return {**sizes, "bias": bias, "vocab_size": len(set(TEXT)), "dropout": 0.1, **others}


def random_gpt2(args):
    """Return a model of Hugging Face with the architecture and random weights of one of nanoGPT."""
    sizes = {name: args[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = GPT2Config(n_positions=args["block_size"], activation_function="gelu", **sizes)
    model, generator = GPT2LMHeadModel(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias") and not args["bias"]:
                parameter.zero_()
            if "ln_f" in name:  # small logits: as a model does, it guesses no worse than uniformly
                parameter *= 0.05
    return model


def weights_of(model, args):
    """Return the state dict that nanoGPT has for a model of Hugging Face, which transposes some."""
    return {
        name: tensor.T.contiguous() if ".c_" in name and tensor.dim() == 2 else tensor
        for name, tensor in model.state_dict().items()
        if args["bias"] or not name.endswith(".bias")
    }


def save(path, args, weights=None, **others):
    """Write a ckpt.pt as nanoGPT's train.py does, with the state of its optimizer."""
    content = {
        "model": weights or weights_of(random_gpt2(args), args),
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


@pytest.mark.parametrize(
    ("shape", "prefix"), [((2, 4, 16, 12, True), ""), ((3, 2, 12, 5, False), "module._orig_mod.")]
)
def test_import_has_the_logits(shape, prefix, files):
    args = model_args(*shape)
    theirs = random_gpt2(args)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)}  # old versions save it
    weights = weights_of(theirs, args) | masks
    named = {prefix + name: tensor for name, tensor in weights.items()}
    stored = {name: value for name, value in args.items() if value is not True}  # not its `bias`
    save(files / "ckpt.pt", stored, named)
    model, tokenizer = load_model(import_run(files))
    assert tokenizer.vocabulary == "".join(sorted(set(TEXT))) and model.config.dropout == 0.1
    ids = torch.randint(len(tokenizer), (args["block_size"],))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        difference = (model(ids[None])[0] - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()


def test_import_is_fine_tuned_not_resumed(files):
    run = import_run(files)
    options = [run / "config.yaml", f"--sources={files / 'text.txt'}", "--max_iters=1"]
    options += ["--warmup_ratio=0", "--eval_interval=1", "--dtype=float32"]
    more = ["--val_fraction=0.2", f"--out_dir={files / 'more'}"]
    code, output = train(*options, f"--init_from={run}", *more)
    assert code == 0, output
    settings = load_checkpoint(files / "more" / LAST).settings.train
    assert (settings.optimizer, settings.learning_rate) == ("adamw", 1e-3)  # nanoGPT's
    code, output = train(run)
    assert code == 2 and f"{run}/last.safetensors: " in output


def test_import_into_a_run_is_refused(files):
    best = import_run(files) / BEST
    before = best.read_bytes()
    save(files / "ckpt.pt", model_args(n_layer=1))
    with pytest.raises(UserError, match="holds a run; choose another"):
        import_run(files)
    assert best.read_bytes() == before


@pytest.mark.parametrize(("mark", "encoding"), [("\ufeff", "utf-8"), ("", "utf-16-le")])
def test_import_in_an_encoding(mark, encoding, files):
    """It is that of the model; a byte order mark is a character, as for nanoGPT."""
    (files / "text.txt").write_text(mark + TEXT, encoding)
    save(files / "ckpt.pt", model_args(vocab_size=len(set(mark + TEXT))))
    run = import_run(files, f"--encoding={encoding}")
    assert load_model(run)[1].vocabulary == "".join(sorted(set(mark + TEXT)))
    assert "predictions" in run_sample(run, f"--score={files / 'text.txt'}")[0]


def test_import_with_another_text(files):
    """It is refused, though it has as many characters: the model guesses worse than uniformly."""
    args = model_args(bias=True)
    ids = torch.arange(4 * len(set(TEXT))).view(-1, 10) % len(set(TEXT))  # the next one is 1 higher
    model = random_gpt2(args)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    save(files / "ckpt.pt", args, weights_of(model, args))
    (files / "text.txt").write_text("TSRQPONMLKJIHGFEDCBA" * 30)
    with pytest.raises(CheckpointError, match="worse than a uniform guess; give the text"):
        import_run(files)
    assert not (files / "run").exists()
    (files / "text.txt").write_text("".join(sorted(set(TEXT))) * 30, "utf-8")
    import_run(files)


class Harmful:
    """An object whose pickle calls a function that leaves a file."""

    def __reduce__(self):
        return open, ("harmed", "w")


REFUSED = {  # what changes the files, words of the error
    "no ckpt.pt": (lambda files: (files / "ckpt.pt").unlink(), "ckpt.pt: No such file"),
    "another text": (lambda files: (files / "text.txt").write_text("another text"),
                     "the model has 20 tokens, --vocabulary 9 distinct characters"),
    "not UTF-8": (lambda files: (files / "text.txt").write_bytes(b"caf\xe9"),
                  "'utf-8' codec can't decode byte 0xe9 in position 3"),
    "other sizes": (lambda files: save(files / "ckpt.pt", model_args(),
                                       model_args=model_args(n_layer=3)),
                    "not as its settings describe: blocks.2.attention"),
    **{f"{name}, zipped {zipped}": (
        lambda files, hostile=hostile, zipped=zipped: torch.save(
            {"model": hostile}, files / "ckpt.pt", _use_new_zipfile_serialization=zipped),
        "; nothing in it was run")
       for name, hostile in {"a call": Harmful(), "a class": random.Random}.items()
       for zipped in (True, False)},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_import_is_refused(case, files, monkeypatch):
    """It leaves nothing behind, nothing in a pickle runs, and no class is loaded."""
    monkeypatch.chdir(files)
    change, words = REFUSED[case]
    change(files)
    with pytest.raises((CheckpointError, DataError)) as caught:
        import_run(files)
    assert words in str(caught.value)
    assert not (files / "run").exists() and not (files / "harmed").exists()
