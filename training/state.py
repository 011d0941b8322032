"""The state of a run: model and optimizers, and `Progress`, its counters and losses."""

import math
from dataclasses import dataclass

from configs.fields import Checked, setting
from configs.schema import Config
from data.batches import Batches
from data.corpus import Corpus
from model.gpt import GPT
from training import optimizers
from training.device import Runtime
from training.distributed import SINGLE_PROCESS, World
from training.resolve import resolve


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
    """A GPT in training with its settings, text, optimizers and progress, which starts at 0."""

    def __init__(
        self, settings: Config, corpus: Corpus, runtime: Runtime, world: World = SINGLE_PROCESS
    ):
        train = settings.train
        self.corpus, self.runtime, self.world = corpus, runtime, world
        self.rows = world.rows(train.batch_size)  # those of each batch that this rank computes

        self.batches = Batches(
            corpus.train, settings.model.block_size, train.batch_size, settings.seed
        )
        self.planned_epochs = self.batches.epochs(
            train.max_iters * train.gradient_accumulation_steps
        )

        # `settings` are as the user wrote them, and checkpoints store them. `config` has a value in
        # place of every `auto`, and everything else reads it.
        self.settings = settings
        self.config = resolve(settings, runtime, self.planned_epochs, corpus.characters)

        model = GPT(self.config.model, len(corpus.tokenizer), settings.seed)
        self.model = model.to(runtime.device)
        self.optimizers = optimizers.build_optimizers(self.model, self.config.train, runtime.dtype)
        self.progress = Progress()

    @property
    def epochs(self) -> float:
        """The average number of times that each training character has been read so far."""
        batches = self.progress.step * self.config.train.gradient_accumulation_steps
        return self.batches.epochs(batches)

    @property
    def evaluation_due(self) -> bool:
        """True at a step that evaluates: every eval_interval steps, and the last one."""
        step, train = self.progress.step, self.config.train
        due = step % train.eval_interval == 0 or step >= train.max_iters
        # not at step 0, where `last_eval_step` begins, and not again after a resume
        return due and step > self.progress.last_eval_step

    @property
    def out_of_patience(self) -> bool:
        """True if the run should stop early; never with `patience: 0`."""
        return 0 < self.config.train.patience <= self.progress.evals_since_best

    @property
    def lr(self) -> float:
        """The learning rate of AdamW in the last step."""
        return self.optimizers[0].lr

    @property
    def muon_lr(self) -> float | None:
        """The learning rate of Muon in the last step; None without Muon."""
        return self.optimizers[1].lr if self.config.train.optimizer == "muon" else None
