"""Strings that break careless pages, and a checkpoint full of them."""

import dataclasses

import torch

from checkpointing import checkpoint
from configs.schema import ModelConfig
from model.gpt import GPT

HOSTILE = "\x00\x07\t\n\r\x1b !\"'&<>/\\`${}ab\x7f\u200b\u202e\u2028\ufffd\u05d0\U0001f600"


MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=12, block_size=8)
NAME = "</script><!--<script>\u2028\"'`{{weights}}\x1b[2J"  # of the text


def hostile_checkpoint(smoke, folder):
    """A checkpoint with hostile strings wherever a file can have them."""
    saved = checkpoint.load(smoke / "best.safetensors")
    config = dataclasses.replace(saved.config, model=MODEL)
    tensors = GPT(config.model, len(HOSTILE)).named_slices()
    saved = dataclasses.replace(
        saved,
        config=config,
        vocabulary=HOSTILE,
        data=dataclasses.replace(saved.data, name=f"/home/somebody/{NAME}"),
        tensors={f"model.{name}": torch.cat(rows).detach() for name, rows in tensors.items()},
    )
    (folder / "hostile.safetensors").write_bytes(checkpoint.to_bytes(saved))
    return folder / "hostile.safetensors"
