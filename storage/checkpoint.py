"""A checkpoint: the complete state of a run at one step, in a safetensors file.

`capture` makes a checkpoint from a run, `restore` gives a run the state of a checkpoint. `to_bytes`
and `load_checkpoint` convert it to a file and back. A loaded checkpoint has been checked.

The metadata of the file are strings: JSON, and the vocabulary. One entry is the SHA-256 of the
others and of all tensors, which detects damage, not forgery. Nothing in the file can be run.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import CheckpointError, NonFiniteError, UserError
from common.files import CHECKPOINT_FILES, home_path, runs_near
from common.words import first_few, shorten
from configs.fields import Checked, error_context, setting
from configs.schema import Config, ModelConfig, from_dict
from data.tokenizer import CharTokenizer
from model.gpt import GPT
from model.parameters import load_tensors, named_tensors
from training.device import environment
from training.optimizers import MOMENTS, state_of
from training.state import Progress, Run

LAST, BEST = CHECKPOINT_FILES
# the checkpoint that is preferred in a run folder -> the files to try, in this order
FALLBACK = {"last": (LAST,), "best": (BEST, LAST)}
FORMAT = "3"  # of the file


@dataclass(frozen=True)
class TextInfo(Checked):
    """The text that a run is trained on."""

    name: str = setting("", "for messages: plays, book.txt")
    sha256: str | None = setting(None, "of the text, as data.text.Text defines it")
    val_sha256: str | None = setting(None, "of the separate validation text, if there is one")
    question: str = setting("", "of a validation item, if items have answers")


SECTIONS = {  # the JSON sections of a file, checked like a config file
    "settings": Config,
    "model": ModelConfig,
    "text": TextInfo,
    "progress": Progress,
}


@dataclass
class Checkpoint:
    """A run at one step: all that sampling needs. A resume needs the text as well.

    A tensor's name is its kind and its parameter: "model.blocks.0.mlp.up" is a weight, and
    "momentum.blocks.0.mlp.up" its momentum. Names and shapes are the same in every attention layout
    (see `named_splits`). `restore` and `build_model` check that the tensors fit the model. The best
    weights are saved without moments.

    Raises ValueError for a vocabulary that is empty or has a character twice.
    """

    settings: Config  # of the run, for a resume
    model: ModelConfig  # settings.model with the logit_scale of these weights as a number
    vocabulary: str  # distinct characters; a token id is an index into it
    tensors: dict[str, Tensor]
    text: TextInfo = field(default_factory=TextInfo)
    progress: Progress = field(default_factory=Progress)
    environment: dict[str, str] = field(default_factory=dict)  # see training.device.environment
    path: Path = field(default=Path("checkpoint"), compare=False)  # of the file

    def __post_init__(self):
        CharTokenizer(self.vocabulary)  # checks it

    def of_kind(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of a kind by the names of `named_tensors`."""
        tensors, prefix = self.tensors, f"{kind}."
        return {n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)}

    def without_moments(self) -> "Checkpoint":
        """Return a checkpoint with the weights alone: a third to a half of the size."""
        weights = {n: tensor for n, tensor in self.tensors.items() if n.startswith("model.")}
        return replace(self, tensors=weights)


# ------------------------------------------------------------------------------- run <-> checkpoint


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Return a copy of all tensors of a run's state by name: weights and moments."""
    tensors = {f"model.{name}": tensor for name, tensor in named_tensors(run.model).items()}
    state = state_of(run.optimizers)
    for kind in MOMENTS:
        moments = named_tensors(run.model, lambda p, kind=kind: state[p].get(kind))
        tensors |= {f"{kind}.{name}": tensor for name, tensor in moments.items()}
    return tensors


def capture(run: Run) -> Checkpoint:
    """Copy the state of a run into a checkpoint; raise NonFiniteError if a tensor is not finite."""
    # a checkpoint that cannot be resumed must not replace one that can
    tensors = tensors_of(run)
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise NonFiniteError(
            f"after step {run.progress.step:,}, at learning rate {run.lr:.3g}: "
            "the weights or their moments are no longer finite"
        )

    # no generator states: train.py says why
    run.update_logit_scale()
    corpus = run.corpus
    name = corpus.name.encode(errors="replace").decode()  # a folder's name need not be UTF-8
    return Checkpoint(
        settings=run.settings,
        model=run.model.config,
        vocabulary=corpus.tokenizer.vocabulary,
        text=TextInfo(name, corpus.sha256, corpus.val_sha256, corpus.question),
        progress=replace(run.progress),
        environment=environment(run.runtime, run.world.size),
        tensors=tensors,
    )


def restore(checkpoint: Checkpoint, run: Run) -> None:
    """Give a new run the state of a checkpoint: weights, moments and progress.

    The patience begins anew if the run has another length or patience, so that a finished run
    trains on to its new end. Raises CheckpointError for tensors that do not fit the run.
    """
    check_tensors(checkpoint.path, checkpoint.tensors, tensors_of(run))
    load_tensors(run.model, checkpoint.of_kind("model"))
    state = state_of(run.optimizers)
    for kind in MOMENTS:
        load_tensors(run.model, checkpoint.of_kind(kind), lambda p, kind=kind: state[p][kind])
    adamw, *_ = run.optimizers
    adamw.step_counts.fill_(checkpoint.progress.step)

    run.progress = replace(checkpoint.progress)
    before, now = checkpoint.settings.train, run.settings.train
    if (before.max_iters, before.patience) != (now.max_iters, now.patience):
        run.progress.evals_since_best = 0


def load_weights(checkpoint: Checkpoint, model: GPT) -> None:
    """Copy the weights of a checkpoint into a model, whose vocabulary may have more characters.

    Raises CheckpointError for weights that do not fit.
    """
    weights, initial = checkpoint.of_kind("model"), named_tensors(model)
    # new characters are at the end of the vocabulary; they keep their initial rows
    old_size = len(checkpoint.vocabulary)
    for name in weights.keys() & initial.keys():
        old, new = weights[name], initial[name]
        if old.shape[:1] == (old_size,) and new.shape[:1] == (model.vocab_size,):
            weights[name] = torch.cat([old.to(new.device), new[old_size:]])
    check_tensors(checkpoint.path, weights, initial)
    load_tensors(model, weights)


def build_model(checkpoint: Checkpoint, **changed: str) -> GPT:
    """Build a model with the weights of a checkpoint; raise CheckpointError unless they fit.

    `changed` may name another attention layout or kernel.
    """
    model = GPT(replace(checkpoint.model, **changed), len(checkpoint.vocabulary))
    load_weights(checkpoint, model)
    return model


def load_model(path: str | Path) -> tuple[GPT, CharTokenizer]:
    """Load the model of a checkpoint or a run folder, with its tokenizer, to use it in Python.

        import torch
        from storage import load_model
        from model.generate import Sampler, generate
        from model.inspect import attention_maps

        model, tokenizer = load_model("out/shakespeare")
        ids = torch.from_numpy(tokenizer.encode("To be, or not to be")).long()
        logits = model(ids[None])[0]  # (T, V)
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])  # nats per character
        new = generate(model, ids[None], Sampler(seed=1, temperature=0.7), max_new_tokens=200)
        text = tokenizer.decode(torch.cat(list(new)))
        maps = attention_maps(model, ids)  # of each layer: (H, T, T)

    The model is on the CPU, in evaluation mode. In a run folder, this is best.safetensors, or, with
    a warning, last.safetensors. Raises CheckpointError if neither can be loaded. For the exact
    loss of a long text see `training.evaluate.exact_loss`.
    """
    checkpoint = load_preferred(Path(path), "best", notify=partial(warnings.warn, stacklevel=3))
    return build_model(checkpoint).eval(), CharTokenizer(checkpoint.vocabulary)


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError unless the tensors have the expected shapes and are finite."""
    missing = first_few(name for name in expected if name not in tensors)
    unknown = first_few(name for name in tensors if name not in expected)
    if missing or unknown:
        raise CheckpointError(f"{path}: missing: {missing or 'none'}; unknown: {unknown or 'none'}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensors[name].shape)}, its config describes "
                f"{tuple(tensor.shape)}"
            )
    if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{path}: not finite: {first_few(not_finite)}")


# --------------------------------------------------------------------------------- writing, loading


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint's file, for `write_atomic`."""
    parts = {name: asdict(getattr(checkpoint, name)) for name in SECTIONS}
    parts["environment"] = checkpoint.environment
    metadata = {name: json.dumps(part, allow_nan=False) for name, part in parts.items()}
    metadata |= {"hornbook_format": FORMAT, "vocabulary": checkpoint.vocabulary}
    tensors = {name: tensor.float().cpu() for name, tensor in checkpoint.tensors.items()}
    return safetensors.torch.save(tensors, metadata | {"sha256": digest(metadata, tensors)})


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint; raise CheckpointError if it is missing, damaged or invalid in any part."""
    with checkpoint_errors(path):
        # read once, not mapped: Windows and some network drives do not replace a mapped file
        content = path.read_bytes()
        # of torch.save: zipped, or old; a safetensors file may begin so too, but JSON follows
        if content.startswith((b"PK\3\4", b"\x80")) and content[8:9] != b"{":
            raise CheckpointError(
                "is a pickle, not a Hornbook checkpoint; python convert.py imports the ckpt.pt of "
                "nanoGPT"
            )
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
        if "hornbook_format" not in metadata:
            raise CheckpointError("not a Hornbook checkpoint")
        if metadata["hornbook_format"] != FORMAT:
            raise CheckpointError("made by another version of Hornbook; train again")
        if metadata.pop("sha256", "") != digest(metadata, tensors):
            raise CheckpointError("checksum mismatch: the file is damaged")

        sections = {}
        for name, section in SECTIONS.items():
            with error_context(name):
                sections[name] = from_dict(json.loads(metadata[name]), section)
        return Checkpoint(
            **sections,
            environment=dict(json.loads(metadata["environment"])),
            vocabulary=metadata["vocabulary"],
            tensors=tensors,
            path=path,
        )


def digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of metadata and of the tensors' names, shapes, dtypes and bytes."""
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    sha256 = hashlib.sha256(json.dumps([metadata, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        sha256.update(tensors[name].contiguous().numpy())
    return sha256.hexdigest()


@contextmanager
def checkpoint_errors(path: Path):
    """Turn an error in reading a checkpoint into a CheckpointError that begins with its path."""
    try:
        yield
    except MemoryError:  # not the fault of the file
        raise
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a Hornbook checkpoint, or damaged ({error})") from error
    except Exception as error:  # the digest matched, so the writer produced invalid content
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{path}: its content is invalid ({reason})") from error


def load_preferred(path: Path, prefer: str, notify: Callable[[str], object]) -> Checkpoint:
    """Load a checkpoint file, or that of a run folder that `prefer` names: last or best.

    If the best one is missing or damaged, the last one is loaded, and `notify` gets a line that
    says so. A path to a file has no fallback. Raises CheckpointError if no checkpoint can be
    loaded; for a wrong path, the error names the runs that exist.
    """
    path = home_path(path)
    choices = [path / name for name in FALLBACK[prefer]] if path.is_dir() else [path]
    faults = []
    for choice in choices:
        try:
            checkpoint = load_checkpoint(choice)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            if faults:
                notify(f"{faults[0]}; using {choice} instead")
            return checkpoint

    # best weights without optimizer state cannot be resumed; if no file is there, the path is wrong
    if prefer == "last" and (path / BEST).exists():
        faults.append(f"to start a new run from its best weights: --init_from={path}")
    elif not any(choice.exists() for choice in choices):
        runs = first_few(runs_near(path))
        faults = [f"{path}: no checkpoint; runs that are there: {runs or 'none'}"]
    raise CheckpointError("; ".join(faults))
