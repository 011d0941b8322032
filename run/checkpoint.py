"""A checkpoint: the complete state of a run at one step.

`capture` makes a checkpoint from a run, `restore` gives a run the state of a checkpoint.
`to_bytes` and `load` convert it to a file and back, in the format of file_format.py. A loaded
checkpoint has been checked.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError, NonFiniteError, first_few
from common.files import CHECKPOINT_FILES, home_path, runs_in
from configs.fields import Checked, error_context, setting
from configs.schema import Config, ModelConfig, from_dict
from data.tokenizer import CharTokenizer
from model.gpt import GPT
from model.parameters import copy_slices, load_tensors, named_slices
from run import file_format
from training.device import environment_of, select_runtime
from training.resolve import resolve
from training.state import Progress, Run

LAST, PREV, BEST, BEST_BEFORE = CHECKPOINT_FILES
# what is preferred of a run folder, a place to resume or the best weights -> the files to try
FALLBACK = {"last": (LAST, PREV), "best": (BEST, LAST, PREV)}


@dataclass(frozen=True)
class TextInfo(Checked):
    """The text that a run is trained on."""

    name: str = setting("", "for messages: plays, book.txt")
    sha256: str | None = setting(None, "of the text, as data.text.Text defines it")
    characters: int = setting(0, "total number in all files", at_least=0)
    val_sha256: str | None = setting(None, "of the separate validation text, if there is one")
    epochs: float = setting(0.0, "planned for the whole run", at_least=0)
    question: str = setting("", "of a validation item, if items have answers")

    @property
    def validated_sha256(self) -> str | None:
        """The digest of the text that the run validates on: losses on another do not compare."""
        return self.val_sha256 or self.sha256


SECTIONS = {  # the JSON sections of a file, checked like a config file
    "config": Config,  # `Checkpoint.settings`
    "data": TextInfo,  # `Checkpoint.text`
    "progress": Progress,
}


@dataclass
class Checkpoint:
    """A run at one step. It is all that sampling needs; a resume needs the text as well.

    A tensor's name is its kind and its parameter: "model.blocks.0.mlp.up" is a weight, and
    "momentum.blocks.0.mlp.up" its momentum. Names and shapes are the same in every attention layout
    (see `named_slices`). `restore` and `build_model` check that they fit the model. The best
    weights are saved without moments.

    Raises ValueError for a vocabulary that is empty or has a character twice.
    """

    settings: Config  # as the user gave them: an `auto` is still `auto`
    vocabulary: str  # distinct characters; a token id is an index into it
    tensors: dict[str, Tensor]
    text: TextInfo = field(default_factory=TextInfo)
    progress: Progress = field(default_factory=Progress)
    environment: dict[str, str] = field(default_factory=dict)  # see `environment_of`
    path: Path = field(default=Path("checkpoint"), compare=False)  # of the file

    def __post_init__(self):
        CharTokenizer(self.vocabulary)  # checks it

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of the model, by the names of `named_slices`."""
        return {
            name.removeprefix("model."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("model.")
        }

    def without_moments(self) -> "Checkpoint":
        """Return a checkpoint with the weights alone: half of the size with Muon, or a third."""
        return replace(self, tensors={f"model.{name}": w for name, w in self.weights.items()})


# ------------------------------------------------------------------------------- run <-> checkpoint


def capture(run: Run) -> Checkpoint:
    """Copy the state of a run into a checkpoint; raise NonFiniteError if a tensor is not finite."""
    # a checkpoint that cannot be resumed must not replace one that can
    tensors = {}
    for name, slices in _tensors_of(run).items():
        tensors[name] = torch.cat([view.detach() for view in slices])
        if not tensors[name].isfinite().all():
            raise NonFiniteError(
                f"after step {run.progress.step:,}, at learning rate {run.lr:.3g}: "
                "the weights or their moments are no longer finite"
            )

    # no generator states: train.py says why
    return Checkpoint(
        settings=run.settings,
        vocabulary=run.corpus.tokenizer.vocabulary,
        text=text_info(run),
        progress=replace(run.progress),
        environment=environment_of(run.runtime, run.world.size),
        tensors=tensors,
    )


def restore(saved: Checkpoint, run: Run) -> None:
    """Give a new run the state of a checkpoint: weights, moments and progress.

    The best loss begins anew if the run validates on another text, and the patience if the run has
    another length or patience, so that a finished run trains on to its new end. Raises
    CheckpointError for tensors that do not fit the model and the optimizers of the run.
    """
    named = _tensors_of(run)
    check_tensors(saved.path, saved.tensors, named)

    # the slices are views: this writes into the model and the optimizers
    with torch.no_grad():
        for name, slices in named.items():
            copy_slices(saved.tensors[name], slices)
    run.progress = replace(saved.progress)
    if text_info(run).validated_sha256 != saved.text.validated_sha256:
        run.progress = Progress(step=saved.progress.step)
    before, now = saved.settings.train, run.settings.train
    if (before.max_iters, before.patience) != (now.max_iters, now.patience):
        run.progress.evals_since_best = 0


def load_weights(saved: Checkpoint, model: GPT) -> None:
    """Copy the weights of a checkpoint into a model, whose vocabulary may have more characters.

    Raises CheckpointError for weights that do not fit.
    """
    weights, named = saved.weights, named_slices(model)
    # new characters are at the end of the vocabulary; they keep their initial rows
    if model.vocab_size > len(saved.vocabulary):
        for name in weights.keys() & named.keys():
            old, new = weights[name], torch.cat(named[name]).detach()
            weights[name] = torch.cat([old, new[len(old) :]])
    check_tensors(saved.path, weights, named)
    load_tensors(model, weights)


def build_model(saved: Checkpoint, config: ModelConfig | None = None) -> GPT:
    """Build a model with the weights of a checkpoint; raise CheckpointError unless they fit.

    `config` must be resolved (no `auto`) and have the architecture of the checkpoint; the kernel,
    for example, may differ. Without it, `auto` values are those for float32 on a CPU.
    """
    if config is None:
        on_cpu = select_runtime("cpu", "float32")
        text = saved.text
        config = resolve(saved.settings, on_cpu, text.epochs, text.characters).model
    model = GPT(config, len(saved.vocabulary))
    load_weights(saved, model)
    return model


def load_model(path: str | Path) -> tuple[GPT, CharTokenizer]:
    """Load the model of a checkpoint or a run folder, with its tokenizer, to use it in Python.

        import torch
        from run import load_model
        from model.generate import Sampler, generate
        from model.inspect import attention_maps

        model, tokenizer = load_model("out/shakespeare")
        ids = torch.from_numpy(tokenizer.encode("To be, or not to be")).long()
        logits = model(ids[None])[0]  # (T, V)
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])  # nats per character
        new = generate(model, ids[None], Sampler(seed=1, temperature=0.7), max_new_tokens=200)
        text = tokenizer.decode(torch.cat(list(new)))
        maps = attention_maps(model, ids)  # of each layer: (H, T, T)

    The model is on the CPU, in evaluation mode. For a run folder, this loads best.safetensors; if
    that is damaged, it warns and falls back to another checkpoint. Raises CheckpointError if there
    is none. For the exact loss of a long text see `training.evaluate.exact_loss`.
    """
    saved = find(Path(path), "best", notify=partial(warnings.warn, stacklevel=3))
    return build_model(saved).eval(), CharTokenizer(saved.vocabulary)


def _tensors_of(run: Run) -> dict[str, list[Tensor]]:
    """Return all tensors of a run's state by name, as slices: views of its memory."""
    named = {f"model.{name}": slices for name, slices in named_slices(run.model).items()}
    for optimizer in run.optimizers:
        named |= optimizer.state_slices(run.model)
    return named


def text_info(run: Run) -> TextInfo:
    corpus = run.corpus
    name = corpus.name.encode(errors="replace").decode()  # a folder's name need not be UTF-8
    return TextInfo(
        name=name,
        sha256=corpus.sha256,
        characters=corpus.characters,
        val_sha256=corpus.val_sha256,
        epochs=run.planned_epochs,
        question=corpus.question,
    )


def check_tensors(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Sequence[Tensor]]
) -> None:
    """Raise CheckpointError unless the tensors have the expected names and shapes and are finite.

    `expected` has a list of slices for each (see `named_slices`).
    """
    missing = first_few(name for name in expected if name not in found)
    unknown = first_few(name for name in found if name not in expected)
    if missing or unknown:
        raise CheckpointError(f"{path}: missing: {missing or 'none'}; unknown: {unknown or 'none'}")

    # slices are blocks of rows, so the lengths add up
    for name, slices in expected.items():
        shape = (sum(map(len, slices)), *slices[0].shape[1:])
        if found[name].shape != shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(found[name].shape)}, its config describes {shape}"
            )

    not_finite = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if not_finite:
        raise CheckpointError(f"{path}: not finite: {first_few(not_finite)}")


# --------------------------------------------------------------------------------- writing, loading


def to_bytes(checkpoint: Checkpoint) -> bytearray:
    """Serialize a checkpoint, for `write_atomic`."""
    # safetensors metadata are strings: JSON, except for the vocabulary
    parts = {
        "config": checkpoint.settings,
        "data": checkpoint.text,
        "progress": checkpoint.progress,
    }
    metadata = {name: json.dumps(asdict(part), allow_nan=False) for name, part in parts.items()}
    metadata["environment"] = json.dumps(checkpoint.environment)
    metadata["vocabulary"] = checkpoint.vocabulary
    return file_format.to_bytes(metadata, checkpoint.tensors)


def load(path: Path) -> Checkpoint:
    """Load a checkpoint; raise CheckpointError if it is missing or any part is invalid."""
    metadata, tensors = file_format.read(path)
    with file_format.checkpoint_errors(path):
        sections = {}
        for name, section in SECTIONS.items():
            with error_context(name):
                sections[name] = from_dict(json.loads(metadata[name]), section)
        return Checkpoint(
            settings=sections["config"],
            text=sections["data"],
            progress=sections["progress"],
            environment=dict(json.loads(metadata["environment"])),
            vocabulary=metadata["vocabulary"],
            tensors=tensors,
            path=path,
        )


def find(path: Path, prefer: str, notify: Callable[[str], object]) -> Checkpoint:
    """Load a checkpoint file; for a run folder, load the one that `prefer` names, last or best.

    If that is missing or damaged, the next of FALLBACK is loaded, and `notify` gets a line that
    says so. A path to a file has no fallback. Raises CheckpointError if no checkpoint can be
    loaded; for a wrong path it names the runs that exist.
    """
    path = home_path(path)
    choices = [path / name for name in FALLBACK[prefer]] if path.is_dir() else [path]
    faults = []
    for choice in choices:
        try:
            saved = load(choice)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            if faults:
                notify(f"{faults[0]}; using {choice} instead")
            return saved

    # the best weights lack the optimizer state; if there is no file at all, the path is wrong
    if prefer == "last" and (path / BEST).exists():
        faults.append(f"to start a new run from its best weights: --init_from={path}")
    elif not any(map(os.path.exists, choices)):
        runs = first_few(runs_in(path) or runs_in(path.parent) or runs_in(Path("out")))
        faults = [f"{path}: no checkpoint; runs that are there: {runs or 'none'}"]
    raise CheckpointError("; ".join(faults))
