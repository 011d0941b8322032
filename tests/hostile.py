"""Strings that break careless pages, and a checkpoint full of them."""

from configs.schema import ModelConfig
from model.gpt import GPT
from run.checkpoint import TextInfo
from tests.variants import save_model

HOSTILE = "\x00\x07\t\n\r\x1b !\"'&<>/\\`${}ab\x7f\u200b\u202e\u2028\ufffd\u05d0\U0001f600"
NAME = "</script><!--<script>\u2028\"'`{{weights}}\x1b[2J"  # of the text


def hostile_checkpoint(folder):
    """A checkpoint with hostile strings wherever a file can have them."""
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=12, block_size=8), len(HOSTILE))
    data = TextInfo(name=f"/home/somebody/{NAME}")
    return save_model(folder / "hostile.safetensors", model, HOSTILE, data=data)
