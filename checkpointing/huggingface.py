"""Export a model to Hugging Face's `transformers` as a GPT-2, and import one from there.

transformers stores linear layers as (in, out), and always has biases: a model without gets zeros.
"""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError, ResourceError, escape, run_script
from common.files import read_regular, write_atomic
from configs.cli import command_help, load_bridge
from configs.fields import Checked, brief, setting
from configs.schema import ModelConfig
from data.tokenizer import UNK, CharTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model.gpt import GPT

USAGE = """\
usage: python -m checkpointing.huggingface RUN|MODEL --out_dir=DIR

  python -m checkpointing.huggingface out/nanogpt_cpu --out_dir=hf      export a run
  python -m checkpointing.huggingface hf --out_dir=out/imported         import a model
"""
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CLASSIC = {  # the settings under which our model is a GPT-2
    "positions": "learned",
    "token_shifts": 0,
    "ngram_embeddings": 0,
    "norm": "layernorm",
    "mlp": "gelu",
    "qk_norm": False,
    "logit_softcap": 0.0,
}
SIZES = {  # our settings -> those of GPT-2
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}
FIXED = {  # settings of GPT-2 that are no settings here
    "model_type": "gpt2",
    "activation_function": "gelu",  # exact; the default of transformers is an approximation
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_inner": None,
}
DEFAULTS = FIXED | {  # of transformers, where a config.json leaves a setting out
    "model_type": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": True,
}
SPLIT = {  # into single characters
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
MAX_JSON = 2**24  # bytes


@dataclass(frozen=True)
class BridgeOptions(Checked):
    """Options of checkpointing.huggingface."""

    out_dir: str = setting(MISSING, "folder of the exported model, or of the new run; required")


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(command_help(USAGE, BridgeOptions))
        return 0
    source, options = load_bridge(argv, BridgeOptions, "run to export, or model to import")
    if (Path(source) / CONFIG).exists():
        import_folder(Path(source), options.out_dir)
    else:
        export_run(Path(source), Path(options.out_dir))
    return 0


# ------------------------------------------------------------------------------------------- export


def export_run(source: Path, folder: Path) -> None:
    """Export the best checkpoint of a run, with its EMA weights if it has them.

    Raises ConfigError for a model that is no GPT-2, and for a folder that holds a model.
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


def check_classic(origin: str, config: ModelConfig) -> None:
    """Raise ConfigError, with the settings in the way, for a model that is no GPT-2."""
    others = [
        f"{name} {brief(getattr(config, name))} (GPT-2: {brief(value)})"
        for name, value in CLASSIC.items()
        if getattr(config, name) != value
    ]
    if others:
        raise ConfigError(
            f"{origin}: transformers has no GPT-2 with {', '.join(others)}; models that can be "
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
                # without a class transformers takes GPT-2's own, whose ids are others
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                # without this transformers 4 adds token types, and GPT-2 an embedding for each
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
    sizes = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    if config.attention_dropout == "auto":
        sizes["attn_pdrop"] = config.dropout
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        **sizes,
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

    An unknown character becomes U+FFFD if the vocabulary has it, and is an error if not.
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

folder = {json.dumps(folder)}
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
    """Import a model that this program exported, trained further by transformers or not.

    Raises CheckpointError for any other model.
    """
    from checkpointing import file_format, gpt2

    sizes, tied = read_gpt2_config(source / CONFIG)
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
    saved = gpt2.import_model(escape(source), sizes, tensors, ids)
    gpt2.write_run(Path(out_dir), saved)
    print(gpt2.import_report(saved, out_dir))


def read_gpt2_config(path: Path) -> tuple[dict[str, object], bool]:
    """Return the settings of ModelConfig in a config.json, and whether its weights are tied.

    Raises CheckpointError for settings that our model does not have.
    """
    settings = DEFAULTS | read_json(path)
    n_embd = settings.get("n_embd")
    if type(n_embd) is int and settings["n_inner"] == 4 * n_embd:
        settings["n_inner"] = None
    others = [name for name, value in FIXED.items() if settings[name] != value]
    if others:
        found = ", ".join(f"{name} {brief(settings[name])}" for name in others)
        allowed = ", ".join(f"{name} {brief(FIXED[name])}" for name in others)
        raise CheckpointError(
            f"{escape(path)}: not a model of this program: {found}; allowed: {allowed}"
        )
    sizes = {ours: settings.get(theirs) for ours, theirs in SIZES.items()}
    if sizes["attention_dropout"] == sizes["dropout"]:
        sizes["attention_dropout"] = "auto"
    return sizes, settings["tie_word_embeddings"] is True


def read_tokenizer(path: Path) -> dict[str, int]:
    """Return the ids of the characters; raise CheckpointError for a tokenizer of another kind."""
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
    """Read a JSON object of bounded size and depth; raise CheckpointError if it is none."""
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
