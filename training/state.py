"""The state of a run: settings, model and optimizers, and `Progress`, its counters and losses."""

import math
from dataclasses import dataclass, replace

import torch

from common.console import NonFiniteError
from configs.schema import Config
from data.batches import Batches
from data.corpus import Corpus
from model.gpt import GPT
from training.device import Runtime
from training.distributed import World
from training.optimizers import build_optimizers

# `dropout: auto` is 0 if the blocks have fewer than 1.5 weights per character, because so small a
# model memorizes little; otherwise that of the last row whose epochs the run reaches
MIN_WEIGHTS_PER_CHARACTER = 1.5
DROPOUT_BY_EPOCHS = ((0, 0.0), (5, 0.05), (7, 0.1), (9, 0.2), (16, 0.3))
# `eval_interval: auto`: so many evaluations of a run, and at least so many steps between them
EVALUATIONS, MIN_EVAL_INTERVAL = 10, 10
TRAIN_PER_VAL = 0.1  # evaluate on so many training characters for each validation character


@dataclass
class Progress:
    """The counters and losses of a run.

    A checkpoint stores them. From the first release on, fields may be added, never removed or
    renamed.

    step              steps done
    last_eval_step    step of the last evaluation
    best_loss         lowest validation loss so far, nats per character; None: there is none
    best_step         its step
    evals_since_best  evaluations since then
    """

    step: int = 0
    last_eval_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0

    @property
    def is_best(self) -> bool:
        """True if the weights of this step have the lowest validation loss so far."""
        return self.best_loss is not None and self.best_step == self.step

    def record_evaluation(self, val_loss: float) -> None:
        """Record an evaluation of this step."""
        self.last_eval_step = self.step
        best_loss = math.inf if self.best_loss is None else self.best_loss
        if val_loss < best_loss:  # not if it is NaN
            self.best_loss = val_loss
            self.best_step = self.step
            self.evals_since_best = 0
        else:
            self.evals_since_best += 1


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    loss           mean over all predictions of the step, nats per character
    grad_norm      gradient norm before clipping
    n_predictions  number of predictions that count, over all processes (ranks)
    seconds        duration of the step
    """

    loss: float
    grad_norm: float
    n_predictions: int
    seconds: float


class Run:
    """A GPT in training with its settings, text, optimizers and progress, which starts at 0.

    `settings` are those that a checkpoint stores: resolved, but for what depends on the machine.
    """

    def __init__(self, settings: Config, corpus: Corpus, runtime: Runtime, world: World):
        train, block_size = settings.train, settings.model.block_size
        self.settings, self.corpus, self.runtime, self.world = settings, corpus, runtime, world
        self.progress = Progress()
        # of each batch, the rows that this rank computes
        self.rank_rows = world.rows(train.batch_size)
        self.batches = Batches(corpus.train, block_size, train.batch_size, settings.seed)
        # the windows of each evaluation: of a long text, all would take longer than the training
        val, max_val_chars = corpus.val, settings.data.max_val_chars or len(corpus.val)
        self.val_excerpt = val.evenly_spaced(max_val_chars, block_size)
        train_size = int(TRAIN_PER_VAL * min(len(val), max_val_chars))
        self.train_excerpt = corpus.train.evenly_spaced(train_size, block_size)

        self.model = GPT(settings.model, len(corpus.tokenizer), settings.seed).to(runtime.device)
        # only for training steps, which all have the same shape
        self.compiled_model = torch.compile(self.model) if settings.compile else self.model
        self.optimizers = build_optimizers(self.model, train, runtime.dtype)
        # what a checkpoint has of each parameter, by kind: itself, and its moments
        self.state_by_kind = {"model": {p: p for p in self.model.parameters()}}
        for optimizer in self.optimizers:
            self.state_by_kind |= optimizer.moments

    def divergence_error(self, what: str) -> NonFiniteError:
        """Return the error for a run that has diverged."""
        lr = self.optimizers[0].lr
        return NonFiniteError(
            f"after step {self.progress.step:,}, at learning rate {lr:.3g}: {what}; the last "
            f"checkpoint is in {self.settings.out_dir}; resume it with a lower learning rate"
        )

    def epochs_at(self, step: int) -> float:
        """Return how often, on average, each training character has been read at a step."""
        return self.batches.epochs(step * self.settings.train.gradient_accumulation_steps)

    @property
    def evaluation_due(self) -> bool:
        """True at a step that evaluates: every eval_interval steps, and the last one."""
        step, train = self.progress.step, self.settings.train
        due = step % train.eval_interval == 0 or step >= train.max_iters
        # not at step 0, where `last_eval_step` begins, and not again after a resume
        return due and step > self.progress.last_eval_step

    @property
    def out_of_patience(self) -> bool:
        """True if the run should stop early; never with `patience: 0`."""
        return 0 < self.settings.train.patience <= self.progress.evals_since_best


def resolve_auto(settings: Config, corpus: Corpus) -> Config:
    """Replace what is `auto` by what that means for a text and a length of the run.

    `device`, `dtype` and `kernel` stay `auto`: a resume may run on another machine. The sources
    become those that were read.
    """
    model, train = settings.model, settings.train
    if model.dropout == "auto":
        # with each epoch the model memorizes more, but a small one memorizes little
        batches = Batches(corpus.train, model.block_size, train.batch_size, settings.seed)
        epochs = batches.epochs(train.max_iters * train.gradient_accumulation_steps)
        weights = 12 * model.n_layer * model.n_embd**2  # in the blocks
        is_small = weights < MIN_WEIGHTS_PER_CHARACTER * (len(corpus.train) + len(corpus.val))
        dropout = 0.0 if is_small else max(p for e, p in DROPOUT_BY_EPOCHS if epochs >= e)
        model = replace(model, dropout=dropout)
    if train.eval_interval == "auto":
        interval = max(MIN_EVAL_INTERVAL, math.ceil(train.max_iters / EVALUATIONS))
        train = replace(train, eval_interval=interval)
    data = replace(settings.data, sources=corpus.text.sources, fallback="")
    return replace(settings, data=data, model=model, train=train)
