"""Import a character-level model of nanoGPT as a run: sample from it, fine-tune it, look at it.

    python convert.py out-shakespeare-char/ckpt.pt --vocabulary=input.txt --out_dir=out/nanogpt

The vocabulary is not in ckpt.pt, so give the text that the model was trained on: nanoGPT's ids are
indices into its sorted distinct characters. ckpt.pt is a pickle; `torch.load(weights_only=True)`
takes tensors and plain values from it, and runs nothing.

nanoGPT: https://github.com/karpathy/nanoGPT
"""

import argparse
from math import log
from pathlib import Path

import common  # noqa: F401 - before torch, because it refuses an older Python

# isort: split
import torch
from torch import Tensor

from common.console import CheckpointError, ConfigError, DataError, prepare_console, say
from common.files import expand_home, holds_run, script_command, write_atomic
from configs.schema import Config, DataConfig, ModelConfig, TrainConfig
from data.batches import Split, evaluation_windows
from data.tokenizer import CharTokenizer
from storage.checkpoint import BEST, Checkpoint, model_of, to_bytes
from storage.checks import locked
from storage.folder import write_settings
from training.device import select_runtime
from training.evaluate import exact_loss

GPT2 = {  # the architecture of nanoGPT, in the settings of this project
    "positions": "learned",
    "n_previous": 0,
    "norm": "layernorm",
    "activation": "gelu",
    "qk_norm": False,
    "residual_init": "scaled",
    "tie_weights": True,
    "logit_softcap": 0.0,
}
ADAMW = TrainConfig(optimizer="adamw", learning_rate=1e-3, schedule="cosine", min_lr_ratio=0.1)
SHARED = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
NAME_PARTS = {  # a part of a parameter's name in nanoGPT -> here; applied in this order
    "_orig_mod.": "",  # the prefix of a compiled model
    "module.": "",  # and of one that several GPUs trained
    "transformer.h.": "blocks.",
    "transformer.wte": "token_embedding",
    "transformer.wpe": "position_embedding",
    "transformer.ln_f": "final_norm",
    ".ln_1": ".attn_norm",
    ".attn.c_attn": ".attention.qkv",
    ".attn.c_proj": ".attention.out_proj",
    ".ln_2": ".mlp_norm",
    ".mlp.c_fc": ".mlp.up",
    ".mlp.c_proj": ".mlp.down",
    ".weight": "",
}


def main(argv: list[str] | None = None) -> int:
    """Import the checkpoint that the arguments name; return the exit code."""
    prepare_console()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("ckpt", type=expand_home, help="ckpt.pt of nanoGPT")
    parser.add_argument("--vocabulary", type=expand_home, required=True, metavar="TEXT")
    parser.add_argument("--encoding", default="utf-8", help="of the text; default: utf-8")
    parser.add_argument("--out_dir", type=expand_home, required=True, help="folder of the new run")
    options = parser.parse_args(argv)

    # read everything before anything is written
    checkpoint = read_nanogpt(options.ckpt, options.vocabulary, options.encoding)

    # write a run folder with one checkpoint: `best`, which sampling and --init_from load
    with locked(options.out_dir):
        if holds_run(options.out_dir):
            raise ConfigError(f"out_dir: {options.out_dir} holds a run; choose another --out_dir")
        write_settings(options.out_dir, checkpoint.settings)
        write_atomic(options.out_dir / BEST, to_bytes(checkpoint))

    command = script_command("sample.py", "--ckpt", options.out_dir)
    say(f"imported {options.ckpt}; now try:", f"  {command}")
    return 0


def read_nanogpt(path: Path, text: Path, encoding: str) -> Checkpoint:
    """Read a ckpt.pt of nanoGPT, trained on a text; raise CheckpointError if the two do not fit."""
    try:  # as nanoGPT reads it: a byte order mark is a character
        characters = text.read_text(encoding)
    except (OSError, UnicodeError, LookupError) as error:
        raise DataError(
            f"{text}: cannot be read: {error}; name the text or its --encoding"
        ) from error
    vocabulary = "".join(sorted(set(characters)))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        args = {"bias": True} | content["model_args"]  # early versions have no `bias`
        tensors = our_tensors(content["model"], args["n_head"])
        vocab_size, shared = args["vocab_size"], {name: args[name] for name in SHARED}
        model = ModelConfig(**GPT2, **shared, attention_dropout=args["dropout"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; name a ckpt.pt of nanoGPT") from error
    except Exception as error:  # PyTorch's message says how to run the pickle: hide it
        raise CheckpointError(
            f"{path}: not a checkpoint of nanoGPT ({type(error).__name__}); nothing in it was run"
        ) from error

    # only a character-level model can be imported; GPT-2's vocabulary has about 50,000 tokens
    if vocab_size != len(vocabulary):
        raise CheckpointError(
            f"{path}: the model has {vocab_size:,} tokens, --vocabulary {len(vocabulary):,} "
            "distinct characters; only a character-level model can be imported, with the text "
            "that it was trained on"
        )

    # a checkpoint without optimizer state can be sampled from and fine-tuned, not resumed
    config = Config(data=DataConfig(encoding=encoding), model=model, train=ADAMW)
    checkpoint = Checkpoint(config, vocabulary, tensors, {"name": text.name}, path=path)
    model = model_of(checkpoint)  # checks the tensors

    # Of another text with as many distinct characters, the model is confidently wrong. A uniform
    # guess has the loss ln V; a model that has learned nothing may be just above it: 0.1 nats.
    split = Split(CharTokenizer(vocabulary).encode(characters[: 16 * model.config.block_size + 1]))
    windows = evaluation_windows(split, model.config.block_size, batch_size=16)
    loss = exact_loss(model, windows, select_runtime("cpu", "float32"))
    if loss > log(vocab_size) + 0.1:
        raise CheckpointError(
            f"{path}: a loss of {loss:.2f} on --vocabulary, worse than a uniform guess; give the "
            "text that the model was trained on"
        )
    return checkpoint


def our_tensors(state_dict: dict[str, Tensor], n_head: int) -> dict[str, Tensor]:
    """Return the tensors of a nanoGPT model under the names of a checkpoint."""
    tensors = {}
    for name, tensor in state_dict.items():
        for theirs, ours in NAME_PARTS.items():
            name = name.replace(theirs, ours)

        if ".attention.qkv" in name:  # (3*H*D, C) -> (3, H, D, C)
            tensor = tensor.unflatten(0, (3, n_head, -1))
        # leave out lm_head, which is tied to the token embedding, and the causal mask
        if name != "lm_head" and not name.endswith(".attn.bias"):
            tensors[f"model.{name}"] = tensor.float()
    return tensors


if __name__ == "__main__":
    raise SystemExit(main())
