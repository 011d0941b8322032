"""Conversion to and from GPT-2's parameter names, which nanoGPT and Hugging Face both use.

The weight of a linear layer is (out, in) in nanoGPT, as in PyTorch and in this project; in Hugging
Face's GPT-2 it is (in, out).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from checkpointing import checkpoint as checkpoints
from checkpointing import run_dir
from checkpointing.checkpoint import Checkpoint
from common.errors import (
    CheckpointError,
    ConfigError,
    escape,
    first_few,
    path_word,
    program,
    script,
    shell_command,
)
from common.files import write_atomic
from common.lock import only_writer
from configs.fields import brief
from configs.schema import Config, ModelConfig
from model.gpt import GPT, copy_slices
from training.state import Progress

PREFIX = "transformer."
MODULES = {  # name of a module here -> in GPT-2
    "token_embedding": f"{PREFIX}wte",
    "position_embedding": f"{PREFIX}wpe",
    "final_norm": f"{PREFIX}ln_f",
    "lm_head": "lm_head",
}
BLOCK_MODULES = {  # the same inside a block; GPT-2 has one matrix for q, k and v
    "attn_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
TOKEN_EMBEDDING, LM_HEAD = f"{PREFIX}wte.weight", "lm_head.weight"
EMBEDDINGS = (TOKEN_EMBEDDING, f"{PREFIX}wpe.weight", LM_HEAD)  # these never have biases
EMPTY = torch.empty(0)
CAUSAL_MASK = re.compile(r".*\.attn\.(masked_)?bias")  # older GPT-2 code saves the mask


def gpt2_name(name: str) -> str:
    """Return GPT-2's name of a parameter of `GPT.named_slices`.

    `blocks.0.mlp.up` -> `transformer.h.0.mlp.c_fc.weight`
    """
    module = name.removesuffix(".bias")
    kind = "weight" if module == name else "bias"
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
        return f"{PREFIX}h.{block[1]}.{BLOCK_MODULES[block[2]]}.{kind}"
    return f"{MODULES[module]}.{kind}"


def gpt2_slices(model: GPT) -> dict[str, list[Tensor]]:
    """Return every parameter of a classic GPT by GPT-2's name, as a list of slices of its rows.

    The slices are views of the parameters, as in `GPT.named_slices`, in any layout.
    """
    named = {}
    for name, slices in model.named_slices().items():
        named.setdefault(gpt2_name(name), []).extend(slices)
    return named


def gpt2_tensors(model: GPT) -> dict[str, Tensor]:
    """Return a copy of every parameter by GPT-2's name, with linear layers (out, in)."""
    with torch.no_grad():
        return {name: torch.cat(slices) for name, slices in gpt2_slices(model).items()}


def import_model(
    shown_path: str,
    settings: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    ids: Mapping[str, int],
) -> Checkpoint:
    """Build the checkpoint of a model with GPT-2's names and linear layers (out, in).

    `settings` are those of ModelConfig: n_layer, n_head, n_embd, block_size, dropout. Whether the
    model has biases and tied weights follows from its tensors. `ids` maps each character to its id,
    which stays the same. `shown_path` is the path of the model, for messages.

    Raises CheckpointError unless every setting, tensor and character fits.
    """
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if not CAUSAL_MASK.fullmatch(name)
    }
    embedding, lm_head = tensors.get(TOKEN_EMBEDDING, EMPTY), tensors.get(LM_HEAD, EMPTY)
    if lm_head.dtype == embedding.dtype and torch.equal(lm_head, embedding):
        tensors.pop(LM_HEAD, None)  # tied
    vocabulary = vocabulary_of(shown_path, ids)
    if embedding.dim() == 2 and len(embedding) != len(vocabulary):
        raise CheckpointError(
            f"{shown_path}: the model has {len(embedding):,} tokens, the vocabulary "
            f"{len(vocabulary):,} characters; give the vocabulary of this model"
        )
    model = _build_model(shown_path, settings, tensors, len(vocabulary))
    with torch.no_grad():
        for name, slices in gpt2_slices(model).items():
            copy_slices(tensors[name], slices)
        weights = {
            f"model.{name}": torch.cat(slices) for name, slices in model.named_slices().items()
        }
    return Checkpoint(
        config=Config(model=model.config),
        vocabulary=vocabulary,
        data={"name": shown_path, "sha256": "", "characters": 0},
        progress=asdict(Progress()),
        environment={},
        events={"number": 0, "size": 0},
        tensors=weights,
        shown_path=shown_path,
    )


def _build_model(
    shown_path: str, settings: Mapping[str, object], tensors: Mapping[str, Tensor], vocab_size: int
) -> GPT:
    """Build a new model for these tensors; raise CheckpointError unless every tensor fits."""
    bias = any(name.endswith(".bias") for name in tensors)
    try:
        config = ModelConfig(**settings, bias=bias, tied=LM_HEAD not in tensors)
    except ConfigError as error:
        raise CheckpointError(f"{shown_path}: {error}") from None
    checkpoints.check_model_size(shown_path, tensors.values(), config, vocab_size)
    model = GPT(config, vocab_size)
    checkpoints.check_tensors(shown_path, tensors, gpt2_slices(model))
    return model


def vocabulary_of(shown_path: str, ids: Mapping[str, int]) -> str:
    """Return the characters in the order of their ids.

    Raises CheckpointError unless the keys are single characters and the ids are 0, 1, 2 and so on.
    """
    longer = [token for token in ids if type(token) is not str or len(token) != 1]
    if longer:
        tokens = first_few(brief(token) for token in longer)
        raise CheckpointError(
            f"{shown_path}: the vocabulary has tokens that are not single characters: {tokens}; "
            "only character-level models can be imported"
        )
    numbers = ids.values()
    if any(type(number) is not int for number in numbers) or set(numbers) != set(range(len(ids))):
        raise CheckpointError(f"{shown_path}: the ids of the vocabulary must be 0, 1, 2 and so on")
    return "".join(sorted(ids, key=ids.get))


def write_run(folder: Path, saved: Checkpoint) -> None:
    """Write a checkpoint to a new run folder: config.yaml, best.safetensors, last.safetensors.

    Raises ConfigError if the folder holds a run, ResourceError if it cannot be written.
    """
    with only_writer(folder):
        if run_dir.holds_run(folder):
            raise ConfigError(
                f"out_dir: {escape(folder)} already holds a run; choose another --out_dir"
            )
        run_dir.write_settings(folder, saved.config)
        content = checkpoints.to_bytes(saved)
        for name in (checkpoints.BEST, checkpoints.LAST):
            write_atomic(folder / name, content)


def import_report(saved: Checkpoint, folder: str) -> str:
    """Return what an importing command prints when the run folder is complete."""
    parameters = checkpoints.build_model(saved).parameter_count()
    command = shell_command([program("python"), script("sample.py"), "--ckpt", path_word(folder)])
    return (
        f"imported {saved.shown_path}: {parameters:,} parameters, "
        f"{len(saved.vocabulary):,} characters; now try:\n  {command}"
    )
