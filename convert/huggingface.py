"""Export a model as a GPT-2 of Hugging Face's `transformers`.

What can be exported has GPT-2's architecture: the `nanogpt_*.yaml` recipes and imported models. In
a GPT-2 of transformers the weight of a linear layer is (in, out), and every linear layer and norm
has a bias: a model without biases is exported with zeros.
"""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

from torch import Tensor

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from checkpointing.run_dir import holds_run
from common.console import prepare_console, print_note, print_result, print_text
from common.errors import ConfigError, ResourceError, first_few
from common.files import write_atomic
from configs.fields import Checked, brief, setting
from configs.options import command_help, parse_conversion
from configs.schema import ModelConfig
from convert.gpt2 import EMBEDDINGS, gpt2_tensors, parameters_not_in_gpt2
from data.tokenizer import UNK, CharTokenizer
from model.gpt import GPT
from model.parameters import parameter_count

USAGE = """\
usage: python -m convert.huggingface RUN --out_dir=DIR

  python -m convert.huggingface out/nanogpt_cpu --out_dir=out/hf
"""
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
GPT2_ARCHITECTURE = {  # a model with these settings is a GPT-2
    "positions": "learned",
    "token_shifts": 0,
    "norm": "layernorm",
    "mlp": "gelu",
    "qk_norm": False,
    "logit_softcap": 0.0,
    "logit_scale": 1.0,
}
SETTING_NAMES = {  # name of a setting here -> in a config.json of GPT-2
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "dropout_p": "resid_pdrop",
    "attention_dropout_p": "attn_pdrop",
}
FIXED = {  # settings of GPT-2 without a counterpart here, and the values that models here have
    "model_type": "gpt2",
    "activation_function": "gelu",  # exact; the default of transformers is an approximation
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_inner": None,
}
SPLIT = {  # pre-tokenizer: every character becomes a token
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}


@dataclass(frozen=True)
class ExportOptions(Checked):
    """Options of convert.huggingface."""

    out_dir: str = setting(MISSING, "folder of the exported model; required")


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print_text(command_help(USAGE, ExportOptions))
        return 0
    source, options = parse_conversion(argv, ExportOptions, "run to export")
    export_run(Path(source), Path(options.out_dir))
    return 0


def export_run(source: Path, folder: Path) -> None:
    """Export the best checkpoint of a run.

    Raises ConfigError for a model that is not a GPT-2, and for a folder that already holds a model.
    """
    saved, note = checkpoints.find(source, "best")
    if note:
        print_note(note)
    check_is_gpt2(saved.path, saved.config.model)
    model = checkpoints.build_model(saved)
    if others := parameters_not_in_gpt2(model):
        raise ConfigError(
            f"{saved.path}: transformers has no GPT-2 with the parameters {first_few(others)}; "
            "allowed: those named in convert/gpt2.py; train a model without the others"
        )
    contents = exported_files(model, saved.vocabulary, str(folder))
    existing = [name for name in contents if (folder / name).exists()]
    if existing or holds_run(folder):
        raise ConfigError(
            f"out_dir: {folder} already holds {existing[0] if existing else 'a run'}; "
            "choose another --out_dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {folder} ({error.strerror}); choose another --out_dir"
        ) from error
    for name, content in contents.items():
        write_atomic(folder / name, content)
    print_result(f"exported {saved.path} to {folder}; its README.md shows how to load it")


def check_is_gpt2(path: Path, config: ModelConfig) -> None:
    """Raise ConfigError with the settings that differ, unless the model is a GPT-2."""
    others = [
        f"{name} {brief(getattr(config, name))} (GPT-2: {brief(value)})"
        for name, value in GPT2_ARCHITECTURE.items()
        if getattr(config, name) != value
    ]
    if others:
        raise ConfigError(
            f"{path}: transformers has no GPT-2 with {', '.join(others)}; models that can be "
            "exported are those of configs/nanogpt_cpu.yaml and nanogpt_gpu.yaml"
        )


def exported_files(model: GPT, vocabulary: str, folder: str) -> dict[str, bytes]:
    """Return the contents of the files of an exported model, by name."""
    config = model.config
    files = {
        "README.md": model_card(model, vocabulary, folder),
        "generation_config.json": to_json({"bos_token_id": None, "eos_token_id": None}),
        "tokenizer_config.json": to_json(
            {
                # without a class, transformers uses the tokenizer of GPT-2, with different ids
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                # without this, transformers 4 passes token_type_ids, and GPT-2 embeds them
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": config.block_size,
            }
        ),
        TOKENIZER: to_json(tokenizer_tree(vocabulary)),
        CONFIG: to_json(gpt2_config(config, len(vocabulary))),
    }
    weights = file_format.serialize({"format": "pt"}, gpt2_weights(model))
    return {WEIGHTS: weights, **{name: text.encode() for name, text in files.items()}}


def gpt2_config(config: ModelConfig, vocab_size: int) -> dict[str, object]:
    """Return the arguments of `transformers.GPT2Config` for a model that is a GPT-2."""
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTING_NAMES.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        **settings,
        "embd_pdrop": config.dropout_p,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def gpt2_weights(model: GPT) -> dict[str, Tensor]:
    """Return the state dict of `transformers.GPT2LMHeadModel` for a model that is a GPT-2."""
    tensors = gpt2_tensors(model)
    if not model.config.bias:
        biased = [name for name in tensors if name not in EMBEDDINGS]
        for name in biased:
            bias = f"{name.removesuffix('.weight')}.bias"
            tensors[bias] = tensors[name].new_zeros(len(tensors[name]))
    return {name: transpose_linear(name, tensor) for name, tensor in tensors.items()}


def transpose_linear(name: str, tensor: Tensor) -> Tensor:
    """Convert the weight of a linear layer between (out, in) and (in, out)."""
    is_linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return tensor.T.contiguous() if is_linear and tensor.dim() == 2 else tensor


def tokenizer_tree(vocabulary: str) -> dict[str, object]:
    """Return the tokenizer.json with one token per character.

    An unknown character becomes U+FFFD if the vocabulary contains U+FFFD; otherwise it is an error.
    """
    ids = {character: i for i, character in enumerate(vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": SPLIT,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": UNK},
    }


def model_card(model: GPT, vocabulary: str, folder: str) -> str:
    """Return the README.md of an exported model."""
    config, prompt = model.config, CharTokenizer(vocabulary).start
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# A character-level GPT-2

{parameter_count(model):,} parameters, {config.n_layer} layers, {config.n_head} heads, embedding
size {config.n_embd}, context length {config.block_size}, {len(vocabulary):,} distinct characters.
Exported by Hornbook.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {json.dumps(folder)}  # the path of this folder
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer({json.dumps(prompt)}, return_tensors="pt")
options = {{"do_sample": True, "temperature": 0.8, "max_new_tokens": {config.block_size - 1}}}
print(tokenizer.decode(model.generate(**inputs, **options)[0]))
```

- A token is a character. No token marks the beginning or the end of a text.
- A character outside of the vocabulary is an error, or U+FFFD if the vocabulary contains that.
- The prompt and the generated text together must fit into the context.
"""


def to_json(tree: object) -> str:
    return json.dumps(tree, indent=2) + "\n"


if __name__ == "__main__":
    prepare_console()
    raise SystemExit(main(sys.argv[1:]))
