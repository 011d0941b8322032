"""A checkpoint is a run at one step, complete in itself, and no part of it is taken on trust.

The file is the business of sealed.py. Here is what it holds, what each part must be, and which file
of a run is read.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from torch import Tensor

from checkpointing import file_format
from common.errors import CheckpointError, ConfigError, printable
from configs.fields import shown
from configs.schema import Config, estimate_parameters, from_dict, to_dict
from data.tokenizer import CharTokenizer
from model.gpt import GPT
from training.optimizers import Optimizer

FALLBACK = {"last": ("last.pt", "prev.pt"), "best": ("best.pt", "last.pt", "prev.pt")}
MAX_EXCESS = (
    2**22
)  # bytes that a config may ask for beyond those of the weights: a mistake, then, and no attack
Plain = int | float | str | bool | None


@dataclass
class Checkpoint:
    """A run after some step; to sample from it or to go on, nothing else is needed.

    One cannot be made with a part of the wrong kind: CheckpointError says which. What the tensors
    must be is known only beside a model, so that is checked by `build_model` and `load_optimizers`.
    """

    config: Config
    vocabulary: str  # distinct characters, sorted; a token is a place in it
    data: dict[str, Plain]  # the text's name, SHA-256 and number of characters
    model: dict[str, Tensor]  # GPT.state_dict(), of a compiled or distributed one too
    ema: (
        dict[str, Tensor] | None
    )  # the same of the moving average of the weights, where there is one
    optimizers: list[dict]  # the state_dict() of each
    progress: dict[
        str, Plain | list[Plain]
    ]  # step, best loss, and what else changes from step to step
    environment: dict[str, Plain]  # what must be the same for bit-exactness
    origin: str = field(
        default="checkpoint", compare=False
    )  # the file that it was read from, for messages

    def __post_init__(self):
        if not isinstance(self.config, Config):
            self._refuse("config", "a Config", self.config)
        if type(self.vocabulary) is not str:
            self._refuse("vocabulary", "text", self.vocabulary)
        try:
            CharTokenizer(self.vocabulary)
        except ValueError as error:
            raise CheckpointError(f"{self.origin}: the vocabulary is none: {error}") from error
        self.model = self._tensors("model", self.model)
        self.ema = None if self.ema is None else self._tensors("ema", self.ema)
        if type(self.optimizers) is not list:
            self._refuse("optimizers", "a list", self.optimizers)
        for name in ("data", "progress", "environment"):
            self._check_plain(name, getattr(self, name))
        for name, kind in {"name": str, "sha256": str, "characters": int}.items():
            if type(self.data.get(name)) is not kind:
                self._refuse(f"data.{name}", f"of type {kind.__name__}", self.data.get(name))

    def _tensors(self, name: str, tensors: object) -> dict[str, Tensor]:
        """The tensors by the names that they have in an unwrapped model."""
        if not isinstance(tensors, Mapping):
            self._refuse(name, "a mapping", tensors)
        for key, tensor in tensors.items():
            if type(key) is not str or not isinstance(tensor, Tensor):
                self._refuse(name, "tensors by name", tensor)
        return {
            key.replace("_orig_mod.", "").removeprefix("module."): tensor
            for key, tensor in tensors.items()
        }

    def _check_plain(self, name: str, values: object) -> None:
        if type(values) is not dict:
            self._refuse(name, "a mapping", values)
        for key, value in values.items():
            for each in value if type(value) is list else [value]:
                if type(key) is not str or type(each) not in file_format.PLAIN:
                    self._refuse(name, "numbers and texts by name", each)

    def _refuse(self, name: str, allowed: str, value: object):
        raise CheckpointError(f"{self.origin}: {name} must be {allowed}, but is {shown(value)}")


# ------------------------------------------------------------------------------ writing and reading


def seal(checkpoint: Checkpoint) -> bytes:
    """The bytes of its file, for `sealed.write`."""
    parts = {
        each.name: getattr(checkpoint, each.name)
        for each in fields(checkpoint)
        if each.name != "origin"
    }
    return file_format.seal(parts | {"config": to_dict(checkpoint.config)})


def load(path: Path) -> Checkpoint:
    """The checkpoint in a file; CheckpointError where there is none, or none that this program
    wrote.
    """
    payload, origin = file_format.read(path), printable(path)
    names = [each.name for each in fields(Checkpoint) if each.name != "origin"]
    if type(payload) is not dict or set(payload) != set(names):
        raise CheckpointError(
            f"{origin}: not a checkpoint of this program, which holds {', '.join(names)}"
        )
    try:
        config = from_dict(payload["config"])
    except ConfigError as error:
        raise CheckpointError(f"{origin}: the config in it is wrong: {error}") from error
    return Checkpoint(**payload | {"config": config}, origin=origin)


def resolve(path: Path, prefer: str) -> tuple[Path, str | None]:
    """The file to read for `path`, a file or the folder of a run; and a line to say where it is not
    the first choice.

    `prefer` is "last" or "best": where that file of a folder is missing or damaged, an older one
    stands in. A file that was named is read or refused. CheckpointError where none is whole; it
    names those nearby that are.
    """
    choices = [path / name for name in FALLBACK[prefer]] if os.path.isdir(path) else [path]
    faults = []
    for choice in choices:
        try:
            file_format.verify(choice)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return choice, f"{faults[0]}; reading {printable(choice)} instead" if faults else None
    good = [printable(each) for each in _nearby(path)]
    others = (
        f"good ones nearby, newest first: {', '.join(good)}"
        if good
        else "there is no good one nearby"
    )
    raise CheckpointError(f"{'; '.join(faults)}; {others}")


def _nearby(path: Path) -> list[Path]:
    """Up to five whole checkpoints, the newest first: those beside `path`, or failing that further
    up.
    """
    for folder in filter(os.path.isdir, (path, *path.parents)[:3]):
        found = [
            file
            for pattern in ("*.pt", "*/*.pt")
            for file in folder.glob(pattern)
            if file.is_file()
        ]
        newest = sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)[:5]
        if whole := [file for file in newest if _is_whole(file)]:
            return whole
    return []


def _is_whole(path: Path) -> bool:
    try:
        file_format.verify(path)
    except CheckpointError:
        return False
    return True


# -------------------------------------------------------------------------------------------- using


def build_model(checkpoint: Checkpoint, *, ema: bool) -> GPT:
    """The GPT of a checkpoint, with its weights or, `ema`, with their moving average (which there
    must be).

    CheckpointError unless every tensor of both is what the config makes; that is seen before any is
    loaded.
    """
    _check_size(checkpoint)
    model = GPT(checkpoint.config.model, len(checkpoint.vocabulary))
    kept = (
        {"model": checkpoint.model}
        if checkpoint.ema is None
        else {"model": checkpoint.model, "ema": checkpoint.ema}
    )
    for name, tensors in kept.items():
        _check_tensors(f"{checkpoint.origin}: {name}", tensors, model.state_dict())
    model.load_state_dict(kept["ema" if ema else "model"])
    return model


def load_optimizers(checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> None:
    """Give freshly made optimizers the state of a checkpoint; their rates and decays stay: settings
    are no state.

    CheckpointError unless every tensor is such as theirs.
    """
    if len(checkpoint.optimizers) != len(optimizers):
        raise CheckpointError(
            f"{checkpoint.origin}: it has {len(checkpoint.optimizers)} optimizers, its config "
            f"makes {len(optimizers)}"
        )
    for i, (optimizer, saved) in enumerate(zip(optimizers, checkpoint.optimizers, strict=True)):
        where = f"{checkpoint.origin}: optimizer {i}"
        made = optimizer.state_dict()
        if not _has_groups(saved, made["param_groups"]):
            raise CheckpointError(
                f"{where}: it is no state of the parameters that its config makes"
            )
        state = _flat(saved["state"])
        _check_tensors(where, state, _flat(made["state"]))
        if len({tensor.item() for tensor in state.values() if tensor.dim() == 0}) > 1:
            raise CheckpointError(f"{where}: its parameters took different numbers of steps")
        optimizer.load_state_dict(saved)


def _check_size(checkpoint: Checkpoint) -> None:
    """CheckpointError where a small file would make a large model."""
    model = checkpoint.config.model
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in checkpoint.model.values()
    }
    held = sum(storage.nbytes() for storage in storages.values())
    made = 4 * estimate_parameters(model, len(checkpoint.vocabulary))
    if made > held + MAX_EXCESS:
        raise CheckpointError(
            f"{checkpoint.origin}: its weights are {held:,} bytes, its config makes {made:,}"
        )


def _check_tensors(where: str, found: Mapping[str, object], made: Mapping[str, Tensor]) -> None:
    """CheckpointError unless `found` has the names, shapes and dtypes of `made`, and is dense and
    finite.
    """
    missing = [name for name in made if name not in found]
    unknown = [name for name in found if name not in made]
    if missing or unknown:
        raise CheckpointError(f"{where}: missing: {_few(missing)}; unknown: {_few(unknown)}")
    other = [
        f"{name} is {_kind(found[name])}, its config makes {_kind(made[name])}"
        for name in made
        if _kind(found[name]) != _kind(made[name])
    ]
    if other:
        raise CheckpointError(f"{where}: {_few(other)}")
    infinite = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if infinite:
        raise CheckpointError(f"{where}: numbers that are not finite in {_few(infinite)}")


def _few(names: Sequence[str]) -> str:
    """The first five, and how many there are more."""
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return printable(", ".join(names[:5])) + more or "none"


def _kind(value: object) -> str:
    """Such as `float32 (65, 128)`."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)}" + ("" if file_format.is_dense(value) else ", not dense")


def _has_groups(saved: object, groups: list[dict]) -> bool:
    """Whether `saved` is the state_dict of an optimizer with the parameters of these groups."""
    if type(saved) is not dict or set(saved) != {"state", "param_groups"}:
        return False
    state, theirs = saved["state"], saved["param_groups"]
    if type(state) is not dict or type(theirs) is not list:
        return False
    per_parameter = all(type(i) is int and type(each) is dict for i, each in state.items())
    same = [type(each) is dict and each.get("params") for each in theirs] == [
        each["params"] for each in groups
    ]
    return per_parameter and same


def _flat(state: dict[int, dict]) -> dict[str, object]:
    return {f"{i}.{name}": value for i, each in state.items() for name, value in each.items()}
