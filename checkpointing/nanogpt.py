"""Import a character-level nanoGPT model (https://github.com/karpathy/nanoGPT) as a run folder.

ckpt.pt is a PyTorch archive, which foreign.py loads. meta.pkl is a pickle; the parser in this file
knows only dicts, strings and integers, so it can run no code.
"""

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from pickletools import genops
from typing import TYPE_CHECKING

from common.errors import CheckpointError, ConfigError, DataError, escape, run_script
from common.files import read_regular
from configs.cli import command_help, load_conversion
from configs.fields import Checked, setting

if TYPE_CHECKING:
    from torch import Tensor

USAGE = """\
usage: python -m checkpointing.nanogpt CKPT --meta=META|--vocabulary=TEXT --out_dir=DIR

  python -m checkpointing.nanogpt out-shakespeare-char/ckpt.pt \\
      --meta=data/shakespeare_char/meta.pkl --out_dir=out/imported
"""
REQUIRED_ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size")
BPE_SIZES = (50257, 50304)  # tokens of GPT-2, and nanoGPT's next multiple of 64
COMPILED = "_orig_mod."  # prefix of parameter names that torch.compile adds
MAX_META = 2**21  # bytes; 65,535 characters take 1.2 million
MAX_TEXT = 2**28  # bytes


@dataclass(frozen=True)
class ImportOptions(Checked):
    """Options of checkpointing.nanogpt."""

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
        print(command_help(USAGE, ImportOptions))
        return 0
    path, options = load_conversion(argv, ImportOptions, "ckpt.pt of nanoGPT")
    if options.meta:
        ids = read_meta(Path(options.meta))
    else:
        ids = ids_of_text(Path(options.vocabulary))

    from checkpointing import gpt2

    settings, tensors = read_checkpoint(Path(path))
    saved = gpt2.import_model(escape(path), settings, tensors, ids)
    gpt2.write_run(Path(options.out_dir), saved)
    print(gpt2.import_report(saved, options.out_dir))
    return 0


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, "Tensor"]]:
    """Return the ModelConfig settings and the tensors of the model in a ckpt.pt.

    Raises CheckpointError for a file that is not a nanoGPT checkpoint, and for a BPE model.
    """
    from torch import Tensor

    from checkpointing import foreign

    shown_path, content = escape(path), foreign.load(path)
    parts = [
        content.get(name) if type(content) is dict else None for name in ("model", "model_args")
    ]
    if any(not isinstance(part, dict) for part in parts):
        raise CheckpointError(
            f"{shown_path}: not a nanoGPT checkpoint: it has no model or model_args"
        )
    # dict.items, because a forged OrderedDict may have attributes in place of its methods
    weights, arguments = (dict(dict.items(part)) for part in parts)
    vocab_size = arguments.get("vocab_size")
    if type(vocab_size) is int and vocab_size in BPE_SIZES:
        raise CheckpointError(
            f"{shown_path}: its {vocab_size:,} tokens are GPT-2's BPE tokens; only "
            "character-level models can be imported, such as one trained on data/shakespeare_char"
        )
    missing = [name for name in REQUIRED_ARGUMENTS if name not in arguments]
    if missing:
        raise CheckpointError(f"{shown_path}: model_args has no {', '.join(missing)}")
    if any(type(name) is not str or type(each) is not Tensor for name, each in weights.items()):
        raise CheckpointError(f"{shown_path}: model must map names to tensors")
    if sum(each.nbytes for each in weights.values()) > 2 * path.stat().st_size:
        raise CheckpointError(f"{shown_path}: its tensors are larger than the file")
    tensors = {name.removeprefix(COMPILED): each for name, each in weights.items()}
    names = [*REQUIRED_ARGUMENTS, "dropout"]
    return {name: arguments[name] for name in names if name in arguments}, tensors


def read_meta(path: Path) -> dict[str, int]:
    """Return the ids of the characters in a meta.pkl.

    Raises CheckpointError for a file that is missing, too large, or contains anything other than
    dicts of strings and integers.
    """
    try:
        meta = parse_meta(bytes(read_regular(path, MAX_META)))
    except CheckpointError as error:
        raise CheckpointError(f"{escape(path)}: {error}") from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise CheckpointError(f"{escape(path)}: {reason}") from error
    except Exception as error:  # pickletools and malformed pickles raise several types
        raise CheckpointError(
            f"{escape(path)}: not a meta.pkl of nanoGPT ({type(error).__name__})"
        ) from error
    if type(meta) is not dict or type(meta.get("stoi")) is not dict:
        raise CheckpointError(
            f"{escape(path)}: it has no stoi, the ids of the characters; instead give "
            "--vocabulary=TEXT, the text that the model was trained on"
        )
    return meta["stoi"]


def parse_meta(pickle: bytes) -> object:
    """Interpret a pickle of dicts, strings and integers of at most 32 bits.

    No opcode that imports or calls something is implemented. Only strings can be referenced again,
    so the result is not larger than the pickle. Raises CheckpointError for any
    other opcode, and various exceptions for a malformed pickle.
    """
    stack, marks, memo = [], [], {}
    for opcode, argument, _ in genops(pickle):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT1" | "BININT2" | "BININT":
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "SETITEM" | "SETITEMS":  # the dict is below its keys and values
                first = marks.pop() if opcode.name == "SETITEMS" else len(stack) - 2
                items = stack[first:]
                del stack[first:]
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET" if type(memo[argument]) is str:
                stack.append(memo[argument])
            case "STOP":
                return stack.pop()
            case name:
                raise CheckpointError(
                    f"pickle opcode {name}; allowed: dicts, strings and integers; instead "
                    "give --vocabulary=TEXT, the text that the model was trained on"
                )


def ids_of_text(path: Path) -> dict[str, int]:
    """Return the ids that nanoGPT assigns to the characters of a text file.

    nanoGPT's prepare.py converts line endings to \\n, then numbers the sorted characters. Raises
    DataError if the file cannot be read.
    """
    try:
        text = read_regular(path, MAX_TEXT).decode()
    except OSError as error:
        raise DataError(f"{escape(path)}: {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{escape(path)}: not UTF-8 at byte {error.start}; iconv -t UTF-8 converts it"
        ) from None
    characters = set(text.replace("\r\n", "\n").replace("\r", "\n"))
    return {character: i for i, character in enumerate(sorted(characters))}


if __name__ == "__main__":
    sys.exit(run_script(main))
