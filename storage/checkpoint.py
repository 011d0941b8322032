"""A checkpoint: the complete state of a run at one step, in a safetensors file.

`make_checkpoint` makes a checkpoint from a run, `restore` gives a run the state of a checkpoint.
`to_bytes` and `load_checkpoint` convert it to a file and back, which checks it.

The metadata of the file are JSON, and the SHA-256 of that and of all tensors, which detects damage,
not forgery. Nothing in the file can be run.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.console import CheckpointError
from common.files import BEST, LAST, SETTINGS_FILE, expand_home, files_of_run, script_command
from common.messages import first_few
from configs.schema import Config, flatten, from_flat
from data.tokenizer import CharTokenizer
from model.gpt import GPT
from model.parameters import named_tensors, set_tensors
from storage.checks import find_checkpoint
from training.device import environment
from training.state import Progress, Run

FORMAT = "hornbook 4"  # the version of the file
Tensors = Mapping[str, Tensor]  # by name


@dataclass
class Checkpoint:
    """A run at one step: all that sampling needs. A resume needs the text as well.

    A tensor's name is its kind and its parameter: "model.blocks.0.mlp.up" is a weight, and
    "momentum_buffer.blocks.0.mlp.up" its momentum. Names and shapes are the same in every attention
    layout (see `tensor_parts`). `restore` and `model_of` check that the tensors fit the model.
    The best weights are saved without moments.
    """

    settings: Config  # of the run, for a resume
    vocabulary: str  # distinct characters; a token id is an index into it
    tensors: dict[str, Tensor]
    text: dict[str, str | None] = field(default_factory=dict)  # its name, SHA-256s, a question
    progress: Progress = field(default_factory=Progress)
    environment: str = ""  # see training.device.environment
    path: Path | None = None  # of the file

    def tensors_of_kind(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of a kind by the names of `named_tensors`."""
        tensors, prefix = self.tensors, f"{kind}."
        return {n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)}

    def without_moments(self) -> "Checkpoint":
        """Return a checkpoint with the weights alone: a third to a half of the size."""
        weights = {n: tensor for n, tensor in self.tensors.items() if n.startswith("model.")}
        return replace(self, tensors=weights)


# ------------------------------------------------------------------------------- run <-> checkpoint


def state_tensors(run: Run) -> dict[str, Tensor]:
    """Return a copy of all tensors of a run's state by name: weights and moments."""
    return {
        f"{kind}.{name}": tensor
        for kind, of in run.state_by_kind.items()
        for name, tensor in named_tensors(run.model, of).items()
    }


def make_checkpoint(run: Run) -> Checkpoint:
    """Copy the state of a run into a checkpoint; raise NonFiniteError if a tensor is not finite."""
    # a checkpoint that cannot be resumed must not replace one that can
    tensors = state_tensors(run)
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise run.divergence_error("the weights or their moments are no longer finite")

    # no generator states: train.py says why
    corpus = run.corpus
    return Checkpoint(
        settings=run.settings,
        vocabulary=corpus.tokenizer.vocabulary,
        text={
            "name": Path(corpus.text.label).name,
            "sha256": corpus.text.sha256,
            "val_sha256": corpus.val_sha256,
            "question": corpus.question,
        },
        progress=replace(run.progress),
        environment=environment(run.runtime, run.world.size),
        tensors=tensors,
    )


def restore(checkpoint: Checkpoint, run: Run) -> None:
    """Give a new run the state of a checkpoint: weights, moments and progress.

    The patience begins anew if the run has another length or patience, so that a finished run
    trains on to its new end. Raises CheckpointError for another text than that of the checkpoint,
    and for tensors that do not fit the run.
    """
    check_text(checkpoint.text, run)
    check_tensors(checkpoint.path, checkpoint.tensors, state_tensors(run))
    for kind, of in run.state_by_kind.items():
        set_tensors(run.model, checkpoint.tensors_of_kind(kind), of)
    adamw, *_ = run.optimizers
    adamw.step_counts.fill_(checkpoint.progress.step)

    run.progress = replace(checkpoint.progress)
    before, now = checkpoint.settings.train, run.settings.train
    if (before.max_iters, before.patience) != (now.max_iters, now.patience):
        run.progress.evals_since_best = 0


def restore_weights(checkpoint: Checkpoint, model: GPT) -> None:
    """Copy the weights of a checkpoint into a model, whose vocabulary may have more characters.

    Raises CheckpointError for weights that do not fit.
    """
    weights, initial = checkpoint.tensors_of_kind("model"), named_tensors(model)
    # new characters are at the end of the vocabulary; they keep their initial rows
    old_size = len(checkpoint.vocabulary)
    for name in weights.keys() & initial.keys():
        old, new = weights[name], initial[name]
        if old.shape[:1] == (old_size,) and new.shape[:1] == (model.vocab_size,):
            weights[name] = torch.cat([old.to(new.device), new[old_size:]])
    check_tensors(checkpoint.path, weights, initial)
    set_tensors(model, weights)


def model_of(checkpoint: Checkpoint, **changed: str) -> GPT:
    """Build a model with the weights of a checkpoint; raise CheckpointError unless they fit.

    `changed` may name another attention layout or kernel.
    """
    model = GPT(replace(checkpoint.settings.model, **changed), len(checkpoint.vocabulary))
    restore_weights(checkpoint, model)
    return model


def load_model(path: str | Path) -> tuple[GPT, CharTokenizer]:
    """Load the model of a checkpoint or a run folder, with its tokenizer, to use it in Python.

        import torch
        from storage.checkpoint import load_model
        from model.generate import Sampler, generate
        from model.inspect import attention_maps

        model, tokenizer = load_model("out/shakespeare")
        ids = torch.from_numpy(tokenizer.encode("To be, or not to be")).long()
        logits = model(ids[None])[0]  # (T, V)
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])  # nats per character
        new = generate(model, ids[None], Sampler(seed=1, temperature=0.7), max_new_tokens=200)
        text = tokenizer.decode(torch.cat(list(new)))
        maps = attention_maps(model, ids)  # of each layer: (H, T, T)

    The model is on the CPU, in evaluation mode; `load_for_sampling` says which one of a folder.
    For the exact loss of a long text see `training.evaluate.exact_loss`.
    """
    checkpoint = load_for_sampling(path)
    return model_of(checkpoint).eval(), CharTokenizer(checkpoint.vocabulary)


def check_text(text: Mapping[str, str | None], run: Run) -> None:
    """Raise CheckpointError if a run has another text than before, and name the way to train on it.

    The files may have moved, but the characters must be the same.
    """
    before = {"sources": text.get("sha256"), "val_sources": text.get("val_sha256")}
    now = {"sources": run.corpus.text.sha256, "val_sources": run.corpus.val_sha256}
    changed = [name for name in now if now[name] != before[name]]
    if not changed:
        return
    folder = expand_home(run.settings.out_dir)
    words = [f"--{name}={s}" for name in changed for s in getattr(run.settings.data, name) or [""]]
    command = init_from_command(folder / SETTINGS_FILE, folder, *words, "--dropout=auto")
    raise CheckpointError(
        f"{' and '.join(changed)}: not the text of this run, by its SHA-256; a run keeps its "
        f"texts; to train a new one, from these weights: {command}"
    )


def init_from_command(config: Path | str, folder: Path, *options: str) -> str:
    """Return the command that trains a new run, beside the run in a folder, from its weights."""
    new = next(f"{folder}-{n}" for n in count(2) if not files_of_run(Path(f"{folder}-{n}")))
    words = (config, f"--init_from={folder}", f"--out_dir={new}", *options)
    return script_command("train.py", *words)


def check_tensors(path: Path, tensors: Tensors, expected: Tensors) -> None:
    """Raise CheckpointError unless the tensors have the expected names and shapes."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected_shapes = {name: tensor.shape for name, tensor in expected.items()}
    names = shapes.keys() | expected_shapes.keys()
    if wrong := [name for name in names if shapes.get(name) != expected_shapes.get(name)]:
        raise CheckpointError(f"{path}: not as its settings describe: {first_few(sorted(wrong))}")


# --------------------------------------------------------------------------------- writing, loading


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint's file, for `write_atomic`."""
    parts = json.dumps(asdict(replace(checkpoint, tensors={}, path=None)))
    tensors = {name: tensor.float().cpu() for name, tensor in checkpoint.tensors.items()}
    metadata = {FORMAT: parts, "sha256": checkpoint_digest(parts, tensors)}
    return safetensors.torch.save(tensors, metadata)


def load_checkpoint(path: Path, remedy: str = "") -> Checkpoint:
    """Load a checkpoint file.

    Raises CheckpointError, which ends with the `remedy`, if the file is missing, damaged or of
    another program.
    """
    try:
        # read once, not mapped: Windows and some network drives do not replace a mapped file
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text, sha256 = header["__metadata__"][FORMAT], header["__metadata__"]["sha256"]
        if sha256 != checkpoint_digest(text, tensors):
            raise ValueError("checksum mismatch")
        parts = json.loads(text) | {"tensors": tensors, "path": path}
        parts["settings"] = from_flat(flatten(parts["settings"]))
        parts["text"] = dict(parts["text"])
        parts["progress"] = Progress(**parts["progress"])
        CharTokenizer(parts["vocabulary"])  # checks it
        return Checkpoint(**parts)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing{remedy}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a Hornbook checkpoint of this version, or damaged ({error}){remedy}"
        ) from error


def checkpoint_digest(parts: str, tensors: Tensors) -> str:
    """Return the SHA-256 of the JSON and of the tensors' names, shapes, dtypes and bytes."""
    sha256 = hashlib.sha256(parts.encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        sha256.update(tensor.contiguous().numpy())
    return sha256.hexdigest()


def load_for_resume(folder: Path) -> Checkpoint:
    """Load the newest state of a run.

    Raises CheckpointError; if there are only weights, it names the way to train a new run from
    them.
    """
    remedy = ""
    if (folder / BEST).is_file():
        command = init_from_command("CONFIG", folder)
        remedy = f"; to train a new run from the best weights: {command}"
    return load_checkpoint(folder / LAST, remedy)


def load_for_sampling(path: str | Path) -> Checkpoint:
    """Load the checkpoint that `find_checkpoint` finds.

    Raises CheckpointError; it names the newest weights if the best are damaged.
    """
    file = find_checkpoint(path)
    last = file.with_name(LAST)
    has_last = file.name == BEST and last.is_file()
    return load_checkpoint(file, f"; the newest weights are in {last}" if has_last else "")
