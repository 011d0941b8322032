"""Import a character-level nanoGPT model (https://github.com/karpathy/nanoGPT) as a run folder.

Both of nanoGPT's files are pickles. Here ckpt.pt is read by `torch.load(weights_only=True)`, and
meta.pkl by an unpickler that refuses every class and function. So no code in them can run.
"""

import io
import pickle
import re
import sys
import warnings
from dataclasses import MISSING, dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpointing import checkpoint as checkpoints
from checkpointing import run_dir
from checkpointing.checkpoint import Checkpoint, TextInfo
from checkpointing.run_dir import only_writer
from common.console import (
    path_word,
    prepare_console,
    print_note,
    print_result,
    print_text,
    program,
    script,
    shell_command,
    shorten,
)
from common.errors import CheckpointError, ConfigError, DataError, first_few
from common.files import read_regular, write_atomic
from configs.fields import Checked, brief, setting
from configs.options import command_help, parse_conversion
from configs.schema import Config, ModelConfig
from convert.gpt2 import LM_HEAD, TOKEN_EMBEDDING, gpt2_slices
from model.gpt import GPT
from model.parameters import copy_slices, named_slices, parameter_count

USAGE = """\
usage: python -m convert.nanogpt CKPT --meta=META|--vocabulary=TEXT --out_dir=DIR

  python -m convert.nanogpt out-shakespeare-char/ckpt.pt \\
      --meta=data/shakespeare_char/meta.pkl --out_dir=out/imported
"""
ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "dropout")  # of nanoGPT's GPTConfig
BPE_SIZES = (50257, 50304)  # tokens of GPT-2, and nanoGPT's next multiple of 64
COMPILED = "_orig_mod."  # prefix of parameter names that torch.compile adds
CAUSAL_MASK = re.compile(r".*\.attn\.(masked_)?bias")  # older GPT-2 code saves the mask
MAX_CKPT = 2**36  # bytes
MAX_META = 2**21  # bytes; 65,535 characters take 1.2 million
MAX_TEXT = 2**28  # bytes


@dataclass(frozen=True)
class ImportOptions(Checked):
    """Options of convert.nanogpt."""

    out_dir: str = setting(MISSING, "folder of the new run; required")
    meta: str | None = setting(
        None, "the meta.pkl beside train.bin: the characters and their ids in the model"
    )
    vocabulary: str | None = setting(
        None, "without a meta.pkl: the text that the model was trained on, in UTF-8"
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.meta is None) == (self.vocabulary is None):
            raise ConfigError(
                "give either --meta=META, the meta.pkl beside train.bin, or --vocabulary=TEXT, the "
                "text that the model was trained on"
            )


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print_text(command_help(USAGE, ImportOptions))
        return 0
    path, options = parse_conversion(argv, ImportOptions, "ckpt.pt of nanoGPT")
    if options.meta:
        vocabulary = read_meta(Path(options.meta))
    else:
        vocabulary = vocabulary_of_text(Path(options.vocabulary))
    settings, tensors = read_checkpoint(Path(path))
    saved = to_checkpoint(Path(path), settings, tensors, vocabulary)
    write_run(Path(options.out_dir), saved)
    folder = path_word(options.out_dir)
    command = shell_command([program("python"), script("sample.py"), "--ckpt", folder])
    parameters = parameter_count(checkpoints.build_model(saved))
    print_result(
        f"imported {path}: {parameters:,} parameters, {len(vocabulary):,} characters; now try:",
        f"  {command}",
    )
    return 0


# ----------------------------------------------------------------------------------------- ckpt.pt


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the ModelConfig settings and the tensors of the model in a ckpt.pt.

    Raises CheckpointError for a file that is not a nanoGPT checkpoint, and for a BPE model.
    """
    try:
        file = io.BytesIO(read_regular(path, MAX_CKPT))
        with warnings.catch_warnings():  # of files that torch.save or nanoGPT did not write
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
            weights, arguments = content["model"], content["model_args"]
        tensors = {
            name.removeprefix(COMPILED): each.float() if each.is_floating_point() else each
            for name, each in weights.items()
            if not CAUSAL_MASK.fullmatch(name)
        }
        settings = {name: arguments[name] for name in ARGUMENTS}
        vocab_size = arguments.get("vocab_size")
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{path}: {reason}") from error
    except Exception as error:  # a foreign file may contain anything; torch raises a dozen types
        raise CheckpointError(
            f"{path}: not a nanoGPT checkpoint ({type(error).__name__}: {shorten(str(error), 100)})"
        ) from error
    if type(vocab_size) is int and vocab_size in BPE_SIZES:
        raise CheckpointError(
            f"{path}: its {vocab_size:,} tokens are GPT-2's BPE tokens; only "
            "character-level models can be imported, such as one trained on data/shakespeare_char"
        )
    return settings, tensors


def to_checkpoint(
    path: Path, settings: dict[str, object], tensors: dict[str, Tensor], vocabulary: str
) -> Checkpoint:
    """Build the checkpoint of a model with GPT-2's names and linear layers (out, in).

    Whether the model has biases and tied weights follows from its tensors. Raises CheckpointError
    unless every setting and every tensor fits.
    """
    embedding, lm_head = (tensors.get(name, torch.empty(0)) for name in (TOKEN_EMBEDDING, LM_HEAD))
    if lm_head.dtype == embedding.dtype and torch.equal(lm_head, embedding):
        tensors = {name: each for name, each in tensors.items() if name != LM_HEAD}  # tied
    if embedding.dim() == 2 and len(embedding) != len(vocabulary):
        raise CheckpointError(
            f"{path}: the model has {len(embedding):,} tokens, the vocabulary "
            f"{len(vocabulary):,} characters; give the vocabulary of this model"
        )
    bias = any(name.endswith(".bias") for name in tensors)
    try:
        config = ModelConfig(**settings, bias=bias, tied=LM_HEAD not in tensors)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    model = GPT(config, len(vocabulary))
    checkpoints.check_tensors(path, tensors, gpt2_slices(model))
    with torch.no_grad():
        for name, slices in gpt2_slices(model).items():
            copy_slices(tensors[name], slices)
        weights = {f"model.{name}": torch.cat(each) for name, each in named_slices(model).items()}
    return Checkpoint(
        config=Config(model=config),
        vocabulary=vocabulary,
        tensors=weights,
        data=TextInfo(name=str(path)),
        path=path,
    )


# -------------------------------------------------------------------------------------- vocabulary


class PlainUnpickler(pickle.Unpickler):
    """An unpickler of dicts, lists, strings and numbers: it loads no class and no function."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"foreign object {module}.{name}")


def read_meta(path: Path) -> str:
    """Return the characters in a meta.pkl, in the order of their ids.

    Raises CheckpointError for a file that is missing, too large, or has no ids of characters.
    """
    try:
        ids = PlainUnpickler(io.BytesIO(read_regular(path, MAX_META))).load()["stoi"]
        in_order = sorted(ids, key=ids.get)
        words = [token for token in in_order if len(token) != 1]
        numbered = [ids[token] for token in in_order] == list(range(len(ids)))
        vocabulary = "".join(in_order)
        vocabulary.encode()  # refuses surrogates
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{path}: {reason}") from error
    except Exception as error:  # a foreign pickle may contain anything, and fail in many ways
        raise CheckpointError(
            f"{path}: not a meta.pkl of characters ({type(error).__name__}: "
            f"{shorten(str(error), 100)}); instead give --vocabulary=TEXT, the text that "
            "the model was trained on"
        ) from error
    if words:
        raise CheckpointError(
            f"{path}: the vocabulary has tokens that are not single characters: "
            f"{first_few(map(brief, words))}; only character-level models can be imported"
        )
    if not numbered:
        raise CheckpointError(f"{path}: the ids of the characters must be 0, 1, 2, ...")
    return vocabulary


def vocabulary_of_text(path: Path) -> str:
    """Return the characters of a text in the order of the ids that nanoGPT gives them.

    nanoGPT's prepare.py converts line endings to \\n, then numbers the sorted characters. Raises
    DataError if the file cannot be read.
    """
    try:
        text = read_regular(path, MAX_TEXT).decode()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None
    return "".join(sorted(set(text.replace("\r\n", "\n").replace("\r", "\n"))))


# -------------------------------------------------------------------------------------- run folder


def write_run(folder: Path, saved: Checkpoint) -> None:
    """Write a checkpoint to a new run folder: config.yaml, best.safetensors, last.safetensors.

    Raises ConfigError if the folder holds a run, ResourceError if it cannot be written.
    """
    with only_writer(folder):
        if run_dir.holds_run(folder):
            raise ConfigError(f"out_dir: {folder} already holds a run; choose another --out_dir")
        if note := run_dir.write_settings(folder, saved.config):
            print_note(note)
        content = checkpoints.to_bytes(saved)
        for name in (checkpoints.BEST, checkpoints.LAST):
            write_atomic(folder / name, content)


if __name__ == "__main__":
    prepare_console()
    raise SystemExit(main(sys.argv[1:]))
