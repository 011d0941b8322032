"""Export a model as a GPT-2 of Hugging Face's `transformers`, and import an exported model.

In a GPT-2 of transformers the weight of a linear layer is (in, out), and every linear layer and
norm has a bias: a model without biases is exported with zeros.
"""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError, ResourceError, escape, run_script
from common.files import read_regular, write_atomic
from configs.cli import command_help, load_conversion
from configs.fields import Checked, brief, setting
from configs.schema import ModelConfig
from data.tokenizer import UNK, CharTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model.gpt import GPT

USAGE = """\
usage: python -m checkpointing.huggingface RUN|MODEL --out_dir=DIR

  python -m checkpointing.huggingface out/nanogpt_cpu --out_dir=out/hf  export a run
  python -m checkpointing.huggingface out/hf --out_dir=out/imported     import a model
"""
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CLASSIC = {  # a model with these settings is a GPT-2; "classic" below means such a model
    "positions": "learned",
    "token_shifts": 0,
    "ngram_embeddings": 0,
    "norm": "layernorm",
    "mlp": "gelu",
    "qk_norm": False,
    "logit_softcap": 0.0,
}
SETTING_NAMES = {  # name of a setting here -> in a config.json of GPT-2
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
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
DEFAULTS = FIXED | {  # what transformers assumes for settings that a config.json omits
    "model_type": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": True,
}
SPLIT = {  # pre-tokenizer: every character becomes a token
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
MAX_JSON = 2**24  # bytes


@dataclass(frozen=True)
class ConversionOptions(Checked):
    """Options of checkpointing.huggingface."""

    out_dir: str = setting(MISSING, "folder of the exported model, or of the new run; required")


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(command_help(USAGE, ConversionOptions))
        return 0
    source, options = load_conversion(argv, ConversionOptions, "run to export, or model to import")
    if (Path(source) / CONFIG).exists():
        import_folder(Path(source), options.out_dir)
    else:
        export_run(Path(source), Path(options.out_dir))
    return 0


# ------------------------------------------------------------------------------------------- export


def export_run(source: Path, folder: Path) -> None:
    """Export the best checkpoint of a run.

    Raises ConfigError for a model that is not a GPT-2, and for a folder that already holds a model.
    """
    from checkpointing import checkpoint as checkpoints
    from checkpointing.run_dir import holds_run

    path, note = checkpoints.resolve(source, "best")
    if note:
        print(note, file=sys.stderr)
    saved = checkpoints.load(path)
    check_classic(escape(path), saved.config.model)
    model = checkpoints.build_model(saved)
    contents = exported_files(model, saved.vocabulary, str(folder))
    existing = [name for name in contents if (folder / name).exists()]
    if existing or holds_run(folder):
        raise ConfigError(
            f"out_dir: {escape(folder)} already holds {existing[0] if existing else 'a run'}; "
            "choose another --out_dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"out_dir: cannot write to {escape(folder)} ({error.strerror}); choose another "
            "--out_dir"
        ) from error
    for name, content in contents.items():
        write_atomic(folder / name, content)
    print(f"exported {escape(path)} to {escape(folder)}; its README.md shows how to load it")


def check_classic(shown_path: str, config: ModelConfig) -> None:
    """Raise ConfigError with the settings that differ, unless the model is a GPT-2."""
    others = [
        f"{name} {brief(getattr(config, name))} (GPT-2: {brief(value)})"
        for name, value in CLASSIC.items()
        if getattr(config, name) != value
    ]
    if others:
        raise ConfigError(
            f"{shown_path}: transformers has no GPT-2 with {', '.join(others)}; models that can be "
            "exported are those of configs/nanogpt_cpu.yaml and nanogpt_gpu.yaml"
        )


def exported_files(model: "GPT", vocabulary: str, folder: str) -> dict[str, bytes]:
    """Return the contents of the files of an exported model, by name."""
    from checkpointing import file_format

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
    """Return the arguments of `transformers.GPT2Config` for a classic model."""
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTING_NAMES.items()}
    if config.attention_dropout == "auto":
        settings["attn_pdrop"] = config.dropout
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        **settings,
        "embd_pdrop": config.dropout,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def gpt2_weights(model: "GPT") -> dict[str, "Tensor"]:
    """Return the state dict of `transformers.GPT2LMHeadModel` for a classic model."""
    from checkpointing.gpt2 import EMBEDDINGS, gpt2_tensors

    tensors = gpt2_tensors(model)
    if not model.config.bias:
        biased = [name for name in tensors if name not in EMBEDDINGS]
        for name in biased:
            bias = f"{name.removesuffix('.weight')}.bias"
            tensors[bias] = tensors[name].new_zeros(len(tensors[name]))
    return {name: transpose_linear(name, tensor) for name, tensor in tensors.items()}


def transpose_linear(name: str, tensor: "Tensor") -> "Tensor":
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


def model_card(model: "GPT", vocabulary: str, folder: str) -> str:
    """Return the README.md of an exported model."""
    config, prompt = model.config, CharTokenizer(vocabulary).start
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# A character-level GPT-2

{model.parameter_count():,} parameters, {config.n_layer} layers, {config.n_head} heads, embedding
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


# ------------------------------------------------------------------------------------------- import


def import_folder(source: Path, out_dir: str) -> None:
    """Import a model that this program exported, even after more training with transformers.

    Raises CheckpointError for any other model.
    """
    from checkpointing import file_format, gpt2

    settings, tied = read_gpt2_config(source / CONFIG)
    ids = read_tokenizer(source / TOKENIZER)
    tensors = {
        name: transpose_linear(name, tensor)
        for name, tensor in file_format.read_foreign(source / WEIGHTS).items()
        if not gpt2.CAUSAL_MASK.fullmatch(name) and not (tied and name == gpt2.LM_HEAD)
    }
    biases = [name for name in tensors if name.endswith(".bias")]
    if not any(tensors[name].any() for name in biases):
        for name in biases:
            del tensors[name]
    saved = gpt2.import_model(escape(source), settings, tensors, ids)
    gpt2.write_run(Path(out_dir), saved)
    print(gpt2.import_report(saved, out_dir))


def read_gpt2_config(path: Path) -> tuple[dict[str, object], bool]:
    """Convert a config.json to settings of ModelConfig; also return whether the weights are tied.

    Raises CheckpointError for settings that ModelConfig does not have.
    """
    theirs = DEFAULTS | read_json(path)
    n_embd = theirs.get("n_embd")
    if type(n_embd) is int and theirs["n_inner"] == 4 * n_embd:
        theirs["n_inner"] = None
    others = [name for name, value in FIXED.items() if theirs[name] != value]
    if others:
        found = ", ".join(f"{name} {brief(theirs[name])}" for name in others)
        allowed = ", ".join(f"{name} {brief(FIXED[name])}" for name in others)
        raise CheckpointError(
            f"{escape(path)}: not a model of this program: {found}; allowed: {allowed}"
        )
    settings = {name: theirs.get(their_name) for name, their_name in SETTING_NAMES.items()}
    if settings["attention_dropout"] == settings["dropout"]:
        settings["attention_dropout"] = "auto"
    return settings, theirs["tie_word_embeddings"] is True


def read_tokenizer(path: Path) -> dict[str, int]:
    """Return the ids of the characters; raise CheckpointError for any other kind of tokenizer."""
    tree, ours = read_json(path), tokenizer_tree("")
    same = all(
        tree.get(name) == ours[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")
    )
    model = tree.get("model")
    if not same or type(model) is not dict or model.get("type") != ours["model"]["type"]:
        raise CheckpointError(
            f"{escape(path)}: not a tokenizer of single characters; only models that this program "
            "exported can be imported"
        )
    if type(model.get("vocab")) is not dict:
        raise CheckpointError(f"{escape(path)}: it has no vocab")
    return model["vocab"]


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object of bounded size and depth; raise CheckpointError if it is not one."""
    from checkpointing import file_format

    try:
        tree = file_format.parse_json(read_regular(path, MAX_JSON).decode())
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{escape(path)}: {reason}") from error
    except (UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{escape(path)}: invalid JSON") from error
    if type(tree) is not dict:
        raise CheckpointError(f"{escape(path)}: not a JSON object")
    return tree


if __name__ == "__main__":
    sys.exit(run_script(main))
