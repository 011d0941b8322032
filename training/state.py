"""All that training changes - weights, their average, optimizers, progress - and how a checkpoint
keeps it.
"""

import copy
import math
from dataclasses import asdict, dataclass, field, fields
from typing import get_args, get_origin

import torch

from checkpointing import checkpoint as checkpoints
from checkpointing.checkpoint import Checkpoint
from common.errors import CheckpointError, printable
from configs.schema import Config
from data.corpus import Corpus
from model.gpt import GPT, copy_views
from training import optimizers
from training.health import NOTICES
from training.runtime import Runtime

SPELLING = {"attention", "kernel"}  # other words for the same function: converted on the way
ONLY_TRAINING = {
    "dropout",
    "attention_dropout",
    "residual_init",
}  # part of the model's section, not of its function


@dataclass
class Progress:
    """Where a run stands; plain numbers, saved with it."""

    step: int = 0  # steps done
    evaluated: int = 0  # the step of the last evaluation
    best_loss: float = math.inf  # lowest validation loss so far, in nats per character
    best_step: int = 0
    stale: int = 0  # evaluations since the best
    known_at_best: float = math.inf  # loss of the known text when validation was at its best
    told: list[str] = field(default_factory=list)  # of health.NOTICES
    losses: list[float] = field(default_factory=list)  # of the last steps, to tell a spike by
    spikes: int = 0
    skipped: int = 0  # steps left out because their loss or gradient was not finite
    skipped_in_a_row: int = 0
    loss_scale: float = 65536.0  # of float16 training
    loss_scale_steady: int = 0  # steps since it last changed

    @classmethod
    def restore(cls, saved: Checkpoint) -> "Progress":
        """CheckpointError unless all of it is there, and can be."""
        kinds = {each.name: each.type for each in fields(cls)}
        wrong = kinds.keys() ^ saved.progress.keys()
        wrong |= {
            name for name in kinds.keys() - wrong if not _can_be(saved.progress[name], kinds[name])
        }
        if not wrong:
            progress = cls(**saved.progress)
            in_order = progress.best_step <= progress.evaluated <= progress.step
            if in_order and progress.skipped_in_a_row <= progress.skipped <= progress.step:
                return progress
        names = ", ".join(sorted(wrong)) or "its steps contradict each other"
        raise CheckpointError(
            f"{saved.origin}: this cannot be the progress of a run: {printable(names)}"
        )


def _can_be(value: object, kind: type) -> bool:
    """Whether something saved is of this kind, no number in it negative or NaN, and no name
    unknown.
    """
    if get_origin(kind) is not list:
        return type(value) is kind and (value in NOTICES if kind is str else value >= 0)
    return type(value) is list and all(_can_be(each, *get_args(kind)) for each in value)


class Run:
    """A model in training. `Run(...)` begins one; `Run.resume(...)` goes on from a checkpoint, bit
    for bit.
    """

    def __init__(self, model: GPT, config: Config, corpus: Corpus, runtime: Runtime):
        self.config, self.corpus, self.runtime = config, corpus, runtime
        self.model = model.to(runtime.device)
        self.average = copy.deepcopy(self.model) if config.train.ema else None
        self.optimizers = optimizers.build(self.model, config.train, runtime.dtype)
        self.progress = Progress()
        scaled = runtime.dtype == torch.float16 and runtime.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=scaled)

    @classmethod
    def resume(cls, saved: Checkpoint, config: Config, corpus: Corpus, runtime: Runtime) -> "Run":
        """The run that `saved` keeps, in the layout that `config` names."""
        theirs = cls(checkpoints.build_model(saved, ema=False), saved.config, corpus, runtime)
        checkpoints.load_optimizers(saved, theirs.optimizers)
        ours = cls(
            theirs.model.with_attention(config.model.attention, config.model.kernel),
            config,
            corpus,
            runtime,
        )
        optimizers.copy_state(theirs.model, theirs.optimizers, ours.model, ours.optimizers)
        if ours.average is not None and saved.ema is not None:
            copy_views(checkpoints.build_model(saved, ema=True), ours.average)
        ours.progress = Progress.restore(saved)
        if ours.scaler.is_enabled():
            scale = {
                "scale": ours.progress.loss_scale,
                "_growth_tracker": ours.progress.loss_scale_steady,
            }
            ours.scaler.load_state_dict(ours.scaler.state_dict() | scale)
        return ours

    @property
    def best_model(self) -> GPT:
        """What is evaluated and sampled: the average of the weights where there is one."""
        return self.model if self.average is None else self.average

    @property
    def evaluation_due(self) -> bool:
        step, settings = self.progress.step, self.config.train
        return self.progress.evaluated < step and (
            step % settings.eval_interval == 0 or step >= settings.max_iters
        )

    @property
    def save_due(self) -> bool:
        step, settings = self.progress.step, self.config.train
        every = (
            settings.eval_interval if settings.save_interval == "auto" else settings.save_interval
        )
        return step > 0 and step % every == 0

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.config.train.patience <= self.progress.stale

    @property
    def rate(self) -> float:
        """The learning rate of the step, of AdamW's first group."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def other_rates(self) -> dict[str, float]:
        """The learning rate of the step by what it moves, of all other groups."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {group["name"]: group["lr"] for group in groups[1:]}

    @property
    def is_finite(self) -> bool:
        """Whether a checkpoint of it could be read: every weight, average and moment is finite."""
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        tensors = [
            *self.model.parameters(),
            *self.best_model.parameters(),
            *(t for s in states for t in s.values()),
        ]
        return all(tensor.isfinite().all() for tensor in tensors)

    @property
    def bytes(self) -> int:
        """At most what a checkpoint takes on the disk: AdamW keeps two numbers a weight,
        Muon one.
        """
        return (3 + (self.average is not None)) * sum(
            each.nbytes for each in self.model.parameters()
        )

    def update_scale(self) -> bool:
        """Let float16's scaler take note of the step; whether it answers an overflow with a lower
        scale, 1 or more.
        """
        before = self.scaler.get_scale()
        self.scaler.update()
        return 1 <= self.scaler.get_scale() < before

    @torch.no_grad()
    def update_average(self) -> None:
        """Exponential moving average, of fewer steps at the start so that it forgets the initial
        weights.
        """
        step = self.progress.step
        decay = min(self.config.train.ema, step / (step + 10))
        for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)

    def checkpoint(self) -> Checkpoint:
        """Everything that going on, and sampling, needs."""
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            self.progress.loss_scale, self.progress.loss_scale_steady = (
                state["scale"],
                state["_growth_tracker"],
            )
        return Checkpoint(
            config=self.config,
            vocabulary=self.corpus.tokenizer.vocabulary,
            data=_identity(self.corpus),
            model=self.model.state_dict(),
            ema=None if self.average is None else self.average.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            progress=asdict(self.progress),
            environment=self.runtime.environment(),
        )


def _identity(corpus: Corpus) -> dict[str, str | int]:
    identity = {"name": corpus.name, "sha256": corpus.sha256, "characters": corpus.characters}
    return identity | ({"val_sha256": corpus.val_sha256} if corpus.val_sha256 else {})


def settings(config: Config) -> dict[str, object]:
    """Every setting by `section.name`, but for where the run and its text lie."""
    places = ("out_dir", "data.sources", "data.val_sources")
    return {name: value for name, value in _flat(asdict(config)).items() if name not in places}


def differences(saved: Config, config: Config) -> dict[str, str]:
    """Setting by setting, `section.name: saved -> now`, of what differs."""
    theirs, ours = settings(saved), settings(config)
    return {
        name: f"{name} {printable(theirs[name])} -> {printable(ours[name])}"
        for name in ours
        if ours[name] != theirs[name]
    }


def check_same_model(path: object, saved: Config, config: Config) -> None:
    """CheckpointError (exit 4) with the difference where `config` names another architecture than
    the checkpoint's.
    """
    free = {f"model.{name}" for name in SPELLING | ONLY_TRAINING}
    other = [
        line
        for name, line in differences(saved, config).items()
        if name.startswith("model.") and name not in free
    ]
    if other:
        raise CheckpointError(
            f"{printable(path)}: the checkpoint holds another model than the config names "
            f"({'; '.join(other)}); "
            "only model.attention, model.kernel and the dropouts may differ; set the rest back, or "
            "start a new run"
        )


def _flat(settings: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for name, value in settings.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


def environment_changes(saved: Checkpoint, corpus: Corpus, runtime: Runtime) -> list[str]:
    """What differs from where the checkpoint was written, `name: saved -> now`: the machine, the
    name of the text.
    """
    now = runtime.environment() | {
        f"data.{name}": value for name, value in _identity(corpus).items()
    }
    then = (
        {"ranks": 1}
        | saved.environment
        | {f"data.{name}": value for name, value in saved.data.items()}
    )
    return [
        f"{printable(name)} {printable(then.get(name))} -> {printable(now.get(name))}"
        for name in sorted(now.keys() | then.keys())
        if then.get(name) != now.get(name)
    ]
