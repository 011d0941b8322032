"""A checkpoint: the complete state of a run at one step. Loading checks every part of it.

`capture` makes a checkpoint from a run, `restore` makes a run from a checkpoint. file_format.py
converts a checkpoint to the bytes of a file and back.
"""

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpointing import file_format
from common.console import shorten
from common.errors import CheckpointError, NonFiniteError, first_few
from configs.fields import Checked, error_context, setting
from configs.schema import Config, ModelConfig, estimate_parameters, flat_settings, from_dict
from data.corpus import Corpus
from data.tokenizer import CharTokenizer
from model.gpt import GPT
from model.parameters import copy_slices, load_tensors, named_slices
from model.runtime import Runtime
from training.distributed import SINGLE_PROCESS, World
from training.environment import Environment, environment_of
from training.optimizers import ADAMW_STEPS, MOMENTS
from training.schedule import lr_multiplier
from training.state import Progress, Run

# Names of the files in a run folder. Every module that uses them imports this one.
SUFFIX = ".safetensors"
LAST, PREV, BEST = (f"{name}{SUFFIX}" for name in ("last", "prev", "best"))
SETTINGS_FILE = "config.yaml"
METRICS = "metrics.csv"
EVENTS = "events.out.tfevents.{:010d}"  # of TensorBoard
# The event file that describes the run. Number 0: TensorBoard reads the files in order of name.
DESCRIPTION = EVENTS.format(0) + ".run"
# A marker file, from the start of a run to its first checkpoint. It shows that the event files in
# the folder belong to a run without a checkpoint, so the next run may remove them.
NO_CHECKPOINT_YET = ".no-checkpoint-yet"
# the checkpoint that is wanted from a run folder -> the files to try, in this order
FALLBACK = {"last": (LAST, PREV, BEST), "best": (BEST, LAST, PREV)}
# Model settings that may differ from the checkpoint's: its weights fit any value of them, and the
# new value takes effect. (A new residual_init would not: the weights are already initialized.)
CHANGEABLE_SETTINGS = ("attention", "kernel", "dropout", "attention_dropout", "logit_scale")
FIXED_ON_RESUME = {
    "train.optimizer": "the state of one optimizer does not fit another",
    "data.min_count": "the vocabulary in the checkpoint was made with it",
    "data.separator": "it decides what is trained on, and what validates",
    "data.answer_after": "it decides which characters count for the loss",
}
MAX_EXCESS_BYTES = 2**22  # a config may describe this many more bytes than the file has


@dataclass(frozen=True)
class TextInfo(Checked):
    """The text that a run is trained on."""

    name: str = setting("", "for messages: plays, book.txt")
    sha256: str | None = setting(None, "of the text, as data.text.Text defines it")
    characters: int = setting(0, "in all files together", "[0, 1e15]")
    val_sha256: str | None = setting(None, "of the validation text, if that is a text of its own")


@dataclass(frozen=True)
class EventPosition(Checked):
    """The end of the event files when a checkpoint was saved; a resume cuts off the rest."""

    number: int = setting(0, "of the event file that was written then", "[0, 1e10)")
    size: int = setting(0, "of that file, in bytes", "[0, 1e15]")


SECTIONS = {  # of the metadata of a file, besides the vocabulary
    "config": Config,
    "data": TextInfo,
    "progress": Progress,
    "environment": Environment,
    "events": EventPosition,
}


@dataclass
class Checkpoint:
    """A run at one step. It is all that sampling needs; resuming also needs the text.

    `tensors` are named by role and parameter, "model.blocks.0.mlp.up", with the roles model,
    exp_avg, exp_avg_sq and momentum, and the parameters as in `named_slices`: they do not
    depend on the attention layout. `restore` and `build_model` check their names and shapes against
    a model.

    Raises ValueError for a vocabulary that is empty or has a character twice.
    """

    config: Config
    vocabulary: str  # distinct characters; a token id is an index into it
    tensors: dict[str, Tensor]
    data: TextInfo = field(default_factory=TextInfo)
    progress: Progress = field(default_factory=Progress)
    environment: Environment = field(default_factory=Environment)
    events: EventPosition = field(default_factory=EventPosition)
    path: Path = field(default=Path("checkpoint"), compare=False)  # of the file

    def __post_init__(self):
        CharTokenizer(self.vocabulary)  # checks it

    def role(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one role by parameter name, {} if there are none."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }


# ------------------------------------------------------------------------------- run <-> checkpoint


def capture(run: Run, events: EventPosition) -> Checkpoint:
    """Copy the state of a run into a checkpoint; raise NonFiniteError if a tensor is not finite."""
    tensors = {}
    for name, slices in _tensors_of(run).items():
        tensors[name] = torch.cat([view.detach() for view in slices])
        if not tensors[name].isfinite().all():
            raise NonFiniteError(
                f"after step {run.progress.step:,}, at learning rate {run.lr:.3g}: "
                "the weights are no longer finite"
            )
    return Checkpoint(
        config=run.config,
        vocabulary=run.corpus.tokenizer.vocabulary,
        data=text_info(run.corpus),
        progress=replace(run.progress),
        environment=environment_of(run.runtime, run.world.size),
        events=events,
        tensors=tensors,
    )


def restore(
    saved: Checkpoint,
    config: Config,
    corpus: Corpus,
    runtime: Runtime,
    world: World = SINGLE_PROCESS,
) -> Run:
    """Rebuild the run of a checkpoint with `config`, which may differ from the saved config.

    Raises CheckpointError for a tensor that does not fit the model and the optimizers of `config`.
    """
    _check_saved_model_size(saved)
    model = GPT(config.model, len(saved.vocabulary))
    run = Run(model, config, corpus, runtime, world)
    # the weights, and the moments of the optimizers
    named = _tensors_of(run)
    check_tensors(saved.path, saved.tensors, named)
    with torch.no_grad():
        for name, slices in named.items():
            copy_slices(saved.tensors[name], slices)
    # the counters and losses
    run.progress = replace(saved.progress)
    return run


def check_has_optimizer_state(saved: Checkpoint) -> None:
    """Raise CheckpointError for an imported model: it has weights only."""
    if all(name.startswith("model.") for name in saved.tensors):
        raise CheckpointError(
            f"{saved.path}: an imported model, which has no optimizer state to resume from; "
            "start a new run with --init_from"
        )


def build_model(saved: Checkpoint, config: ModelConfig | None = None) -> GPT:
    """Build the model of a checkpoint.

    `config` may differ from the saved one in CHANGEABLE_SETTINGS. Raises CheckpointError
    unless every weight fits.
    """
    _check_saved_model_size(saved)
    model = GPT(config or saved.config.model, len(saved.vocabulary))
    named = {f"model.{name}": slices for name, slices in named_slices(model).items()}
    # leave out the optimizers' state; check_tensors refuses anything else
    optimizer_state = {f"{role}.{name}" for role in MOMENTS for name in named_slices(model)}
    optimizer_state.add(ADAMW_STEPS)
    tensors = {
        name: tensor for name, tensor in saved.tensors.items() if name not in optimizer_state
    }
    check_tensors(saved.path, tensors, named)
    load_tensors(model, saved.role("model"))
    return model


def load_model(path: str | Path) -> tuple[GPT, CharTokenizer]:
    """Load the model of a checkpoint or a run folder, with its tokenizer, to use it in Python.

        import torch
        from checkpointing import load_model
        from model.generate import Sampler, generate
        from model.inspect import attention_maps

        model, tokenizer = load_model("out/shakespeare")
        ids = torch.from_numpy(tokenizer.encode("To be, or not to be")).long()
        logits = model(ids[None])[0]  # (T, V)
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])  # nats per character
        new = generate(model, ids[None], Sampler(seed=1, temperature=0.7), max_new_tokens=200)
        text = tokenizer.decode(torch.cat(list(new)))
        maps = attention_maps(model, ids)  # of each layer: (H, T, T)

    The model is on the CPU, in evaluation mode. From a run folder it is the best one; if that is
    damaged, another one, with a warning. The errors are those of `find`. For the exact loss of a
    long text see `training.evaluate.exact_loss`.
    """
    saved, note = find(Path(path), "best")
    if note:
        warnings.warn(note, stacklevel=2)
    return build_model(saved).eval(), CharTokenizer(saved.vocabulary)


def add_characters(saved: Checkpoint, vocabulary: str, seed: int) -> Checkpoint:
    """Extend the vocabulary of a checkpoint, for `build_model`; the old one must be its beginning.

    Every matrix with one row per character gets a row for each new character, with the weights that
    a new model of this seed has there. All other weights stay the same. Raises CheckpointError
    unless every weight fits.
    """
    build_model(saved)  # checks names and shapes
    tensors = {}
    new = GPT(saved.config.model, len(vocabulary), seed)
    for name, slices in named_slices(new).items():
        old, new = saved.tensors[f"model.{name}"], torch.cat(slices).detach()
        new[: len(old)] = old
        tensors[f"model.{name}"] = new
    return replace(saved, vocabulary=vocabulary, tensors=tensors)


def _tensors_of(run: Run) -> dict[str, list[Tensor]]:
    """Return all tensors of a checkpoint by name, as slices that are views of the run's memory."""
    named = {f"model.{name}": slices for name, slices in named_slices(run.model).items()}
    for optimizer in run.optimizers:
        named |= optimizer.named_slices(run.model)
    return named


def text_info(corpus: Corpus) -> TextInfo:
    name = corpus.name.encode(errors="replace").decode()  # a folder's name need not be UTF-8
    return TextInfo(name, corpus.sha256, corpus.characters, corpus.val_sha256)


def _check_saved_model_size(saved: Checkpoint) -> None:
    weights = saved.role("model").values()
    check_model_size(saved.path, weights, saved.config.model, len(saved.vocabulary))


def check_model_size(
    path: Path, weights: Iterable[Tensor], config: ModelConfig, vocab_size: int
) -> None:
    """Raise CheckpointError if the config describes a far larger model than the file has."""
    in_file = sum(tensor.nbytes for tensor in weights)
    implied = 4 * estimate_parameters(config, vocab_size)
    if implied > in_file + MAX_EXCESS_BYTES:
        raise CheckpointError(
            f"{path}: its weights have {in_file:,} bytes, but its config describes a "
            f"model of {implied:,} bytes"
        )


def check_tensors(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Sequence[Tensor]]
) -> None:
    """Raise CheckpointError unless names, shapes and dtypes are as expected and all is finite.

    `expected` has each tensor as a list of slices (see `named_slices`).
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing or unknown:
        raise CheckpointError(f"{path}: missing: {_names(missing)}; unknown: {_names(unknown)}")
    for name, slices in expected.items():
        shape = (sum(map(len, slices)), *slices[0].shape[1:])
        have, want = (
            _describe(found[name].dtype, found[name].shape),
            _describe(slices[0].dtype, shape),
        )
        if have != want:
            raise CheckpointError(f"{path}: {name} is {have}, its config describes {want}")
    infinite = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if infinite:
        raise CheckpointError(f"{path}: not finite: {_names(infinite)}")


def _names(names: Sequence[str]) -> str:
    return first_few(names) or "none"


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return a description such as `float32 (65, 128)`."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


# --------------------------------------------------------------------------------- writing, loading


def to_bytes(checkpoint: Checkpoint) -> bytearray:
    """Serialize a checkpoint, for `write_atomic`."""
    metadata = {
        name: json.dumps(asdict(getattr(checkpoint, name)), allow_nan=False) for name in SECTIONS
    }
    metadata["vocabulary"] = checkpoint.vocabulary
    return file_format.to_bytes(metadata, checkpoint.tensors)


def load(path: Path) -> Checkpoint:
    """Load a checkpoint; raise CheckpointError if it is missing or any part is invalid."""
    metadata, tensors = file_format.read(path)
    with file_format.checkpoint_errors(path):
        sections = {}
        for name, section in SECTIONS.items():
            with error_context(name):
                sections[name] = from_dict(file_format.parse_json(metadata[name]), section)
        return Checkpoint(**sections, vocabulary=metadata["vocabulary"], tensors=tensors, path=path)


def find(path: Path, prefer: str) -> tuple[Checkpoint, str | None]:
    """Load the checkpoint of a run folder, or a single one; return also a note, if there is one.

    In a folder, `prefer` selects last.safetensors or best.safetensors; if that file is missing or
    damaged, another checkpoint in the folder is loaded instead, and the note says so. A single
    checkpoint is loaded or refused. Raises CheckpointError, which names the newest undamaged
    checkpoint of the folder, if there is one.
    """
    choices = [path / name for name in FALLBACK[prefer]] if os.path.isdir(path) else [path]
    faults = []
    for choice in choices:
        try:
            saved = load(choice)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            note = f"{faults[0]}; using {choice} instead" if faults else None
            return saved, note
    if newest := _newest_undamaged(choices[0].parent, tried=choices):
        faults.append(f"the newest undamaged checkpoint there is {newest}")
    raise CheckpointError("; ".join(faults))


def find_on_all(world: World, path: Path, prefer: str) -> tuple[Checkpoint, str | None]:
    """Find a checkpoint on rank 0, as `find` does; every other rank loads the file chosen there."""
    saved = note = None
    with world.raise_on_all():
        if world.is_main:
            saved, note = find(path, prefer)
    chosen = world.all_gather(saved.path if saved else None)[0]
    with world.raise_on_all():
        return saved or load(chosen), note


def _newest_undamaged(folder: Path, tried: Sequence[Path]) -> Path | None:
    """Return the newest checkpoint in a folder that is not damaged and has not been tried."""
    with suppress(OSError):  # another process may remove a file meanwhile
        files = [file for file in folder.glob(f"*{SUFFIX}") if file not in tried]
        for path in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            with suppress(CheckpointError):
                file_format.verify(path)
                return path
    return None


# ------------------------------------------------------------------------- what differs on resuming


def config_changes(saved: Config, config: Config) -> dict[str, str]:
    """Return `NAME SAVED -> NOW` for every setting that differs, by its full name."""
    then, now = flat_settings(saved), flat_settings(config)
    return {
        name: f"{name} {_shortened(then[name])} -> {_shortened(now[name])}"
        for name in now
        if now[name] != then[name]
    }


def learning_rate_changes(saved: Checkpoint, config: Config) -> list[str]:
    """Return a line if another schedule changes the learning rate where the run is resumed."""
    step = saved.progress.step
    if not 0 < step < config.train.max_iters:
        return []
    before = lr_multiplier(step - 1, saved.config.train)
    if before == lr_multiplier(step - 1, config.train):
        return []
    after = lr_multiplier(step, config.train)
    return [f"the learning rate goes from {before:.0%} to {after:.0%} of its peak"]


def best_loss_is_comparable(saved: Checkpoint, config: Config, corpus: Corpus) -> bool:
    """Return whether a saved best loss has the validation text and the logit_scale of this run."""
    if saved.config.model.resolved_logit_scale != config.model.resolved_logit_scale:
        return False
    now = _validation_text(config, text_info(corpus))
    return _validation_text(saved.config, saved.data) == now


def was_trained_on(saved: Checkpoint, config: Config, corpus: Corpus) -> bool:
    """Return whether a run was trained on text that is validation text now."""
    if corpus.val_sha256:
        return corpus.val_sha256 == saved.data.sha256
    then, now = saved.config.data, config.data
    trained = 1.0 if saved.data.val_sha256 else 1 - then.val_fraction
    more = trained > 1 - now.val_fraction or then.separator != now.separator
    return corpus.sha256 == saved.data.sha256 and more


def _validation_text(config: Config, text: TextInfo) -> tuple[object, ...]:
    """Return what identifies a validation text: its SHA-256, or a fraction of the source text."""
    split = () if text.val_sha256 else (text.sha256, config.data.val_fraction)
    return (text.val_sha256, *split)


def _shortened(value: object) -> str:
    """Shorten a value from a checkpoint, for a message."""
    return shorten(str(value), 200)


def check_same_model(saved: Checkpoint, config: Config) -> None:
    """Raise CheckpointError with the differences if a config describes another model."""
    changeable = {f"model.{name}" for name in CHANGEABLE_SETTINGS}
    changes = config_changes(saved.config, config)
    other = [
        changes[name] for name in changes if name.startswith("model.") and name not in changeable
    ]
    if other:
        raise CheckpointError(
            f"{saved.path}: the config describes a different model from the checkpoint's "
            f"({'; '.join(other)}); only {', '.join(sorted(changeable))} may differ; set the rest "
            "back, or start a new run without this checkpoint"
        )


def check_fixed_settings(saved: Checkpoint, config: Config) -> None:
    """Raise CheckpointError if a setting of FIXED_ON_RESUME has changed."""
    then, now = flat_settings(saved.config), flat_settings(config)
    for name, reason in FIXED_ON_RESUME.items():
        if then[name] != now[name]:
            raise CheckpointError(
                f"{saved.path}: its run used {name} {then[name] or 'none'}, the config has "
                f"{now[name] or 'none'}; {reason}; set it back, or start a new run with --init_from"
            )


def environment_changes(saved: Checkpoint, run: Run) -> list[str]:
    """Return `NAME SAVED -> NOW` for every difference in the environment and the text."""
    environment = environment_of(run.runtime, run.world.size)
    now = asdict(environment) | _flat_text_info(text_info(run.corpus))
    then = asdict(saved.environment) | _flat_text_info(saved.data)
    return [
        f"{name} {_shortened(then[name])} -> {_shortened(now[name])}"
        for name in sorted(now)
        if then[name] != now[name]
    ]


def _flat_text_info(text: TextInfo) -> dict[str, object]:
    return {f"data.{name}": value for name, value in asdict(text).items()}
