"""The state of a run: settings, model and optimizers, and `Progress`, its counters and losses."""

import math
from dataclasses import dataclass, replace

import torch

from configs.fields import Checked, setting
from configs.schema import (
    DROPOUT_BY_EPOCHS,
    LOGIT_SCALE_DROP,
    MIN_LOGIT_SCALE,
    MIN_WEIGHTS_PER_CHARACTER,
    Config,
)
from data.batches import Batches
from data.corpus import Corpus
from model.gpt import GPT
from training.device import Runtime
from training.distributed import World
from training.optimizers import build_optimizers

EVALUATIONS = 10  # of a run with `eval_interval: auto`
TRAIN_FRACTION = 0.1  # evaluate on so many training characters for each validation character


@dataclass
class Progress(Checked):
    """The counters and losses of a run.

    A checkpoint stores them, so each is declared and checked as a setting is. From the first
    release on, fields may be added, never removed or renamed.
    """

    step: int = setting(0, "steps done", at_least=0)
    last_eval_step: int = setting(0, "step of the last evaluation", at_least=0)
    best_loss: float | None = setting(
        None, "lowest validation loss so far, nats per character; None: there is none", at_least=0
    )
    best_step: int = setting(0, "step of the lowest validation loss", at_least=0)
    train_loss_at_best: float | None = setting(
        None, "loss on training text at that step", at_least=0
    )
    evals_since_best: int = setting(0, "evaluations since then", at_least=0)

    def record_evaluation(self, val_loss: float, train_loss: float) -> bool:
        """Record an evaluation; return whether its validation loss is the lowest so far."""
        self.last_eval_step = self.step
        finite = math.isfinite(val_loss) and math.isfinite(train_loss)
        improved = finite and (self.best_loss is None or val_loss < self.best_loss)
        if improved:
            self.best_loss = val_loss
            self.best_step = self.step
            self.evals_since_best = 0
            self.train_loss_at_best = train_loss
        else:
            self.evals_since_best += 1
        return improved

    def is_overfitting(self, train_loss: float) -> bool:
        """Return whether only the loss on training text has fallen since the best step."""
        # one evaluation without an improvement is noise, three are not
        before = self.train_loss_at_best
        return self.evals_since_best >= 3 and before is not None and train_loss < before - 0.01


class Run:
    """A GPT in training with its settings, text, optimizers and progress, which starts at 0.

    `settings` are those that a checkpoint stores. In them, dropout and eval_interval are numbers.
    Every other `auto` stays: on another machine, that of the device may mean something else.
    """

    def __init__(self, settings: Config, corpus: Corpus, runtime: Runtime, world: World):
        train, block_size = settings.train, settings.model.block_size
        self.corpus, self.runtime, self.world, self.progress = corpus, runtime, world, Progress()
        self.rows = world.rows(train.batch_size)  # the rows of each batch that this rank computes
        self.batches = Batches(corpus.train, block_size, train.batch_size, settings.seed)
        # the windows of each evaluation: of a long text, all would take longer than the training
        val, max_val = corpus.val, settings.data.max_val or len(corpus.val)
        self.val = val.at_most(max_val, block_size)
        train_size = int(TRAIN_FRACTION * min(len(val), max_val))
        self.train_sample = corpus.train.evenly_spaced(train_size, block_size)
        self.planned_epochs = self.batches.epochs(
            train.max_iters * train.gradient_accumulation_steps
        )
        self.settings = settings = resolve(settings, self.planned_epochs, corpus)

        config = replace(settings.model, logit_scale=1.0)
        self.model = GPT(config, len(corpus.tokenizer), settings.seed).to(runtime.device)
        self.update_logit_scale()
        # wrapped in DDP if there are several ranks, then compiled if that is set
        self.ddp_model = self.forward = world.wrap(self.model)
        if settings.compile:
            self.forward = torch.compile(self.ddp_model)
        self.optimizers = build_optimizers(self.model, train, runtime.dtype)

    def update_logit_scale(self) -> None:
        """Set the model's logit_scale; `auto` depends on the epochs read so far."""
        scale = self.settings.model.logit_scale
        if scale == "auto":  # with each epoch, the model becomes more overconfident on other text
            scale = max(MIN_LOGIT_SCALE, round(1 - LOGIT_SCALE_DROP * self.epochs, 2))
        self.model.config = replace(self.model.config, logit_scale=scale)

    @property
    def epochs(self) -> float:
        """The average number of times that each training character has been read so far."""
        batches = self.progress.step * self.settings.train.gradient_accumulation_steps
        return self.batches.epochs(batches)

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

    @property
    def lr(self) -> float:
        """The learning rate of AdamW in the last step."""
        return self.optimizers[0].lr

    @property
    def muon_lr(self) -> float | None:
        """The learning rate of Muon in the last step; None without Muon."""
        return self.optimizers[1].lr if len(self.optimizers) > 1 else None


def resolve(settings: Config, epochs: float, corpus: Corpus) -> Config:
    """Replace the `auto` of dropout and eval_interval; name the sources that were read.

    `epochs` is how often the whole run reads the text.
    """
    model, train = settings.model, settings.train
    if model.dropout == "auto":
        # with each epoch the model memorizes more, but a small one memorizes little
        weights = 12 * model.n_layer * model.n_embd**2  # in the blocks
        is_small = weights < MIN_WEIGHTS_PER_CHARACTER * corpus.characters
        dropout = 0.0 if is_small else max(p for e, p in DROPOUT_BY_EPOCHS if epochs >= e)
        model = replace(model, dropout=dropout)
    if train.eval_interval == "auto":
        train = replace(train, eval_interval=math.ceil(train.max_iters / EVALUATIONS))
    data = replace(settings.data, sources=corpus.sources)
    return replace(settings, data=data, model=model, train=train)
