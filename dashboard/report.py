"""Console and TensorBoard output of a run. It only reads the run; nothing here affects training.

Tags under `train/` come from steps, `setup/` describes the run, the others come from evaluations.
TensorBoard sorts tags by name: these put losses before pictures, and samples before settings.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary

from common.console import path_word, program, script, shell_command
from configs.command import Command
from configs.fields import with_escapes
from configs.schema import flat_settings
from dashboard import summaries
from dashboard.logger import Logger, info
from data.items import long_item_notes
from data.summary import size_advice
from model.parameters import parameter_count
from run import pictures
from training.evaluate import BITS_PER_NAT, Evaluation, Probe
from training.health import SPIKE_WINDOW, HealthWarning
from training.state import Run
from training.step import StepResult


class Report:
    """The reports of one run."""

    def __init__(self, run: Run, logger: Logger):
        self.run, self.logger = run, logger
        self.pictures = run.config.train.log == "pictures"
        self.steps, self.tokens, self.seconds = 0, 0, 0.0  # since the last logged step
        self.first_step = run.progress.step
        self.speed_printed = False

    def log_start(self, *, new_model: bool, unchanged: bool) -> None:
        """Print the text, the model and the device, and log them to TensorBoard.

        Only with a `new_model` can another size be advised. If the run is resumed `unchanged`, its
        folder has the log already, in a file of its own.
        """
        run, model, corpus = self.run, self.run.model, self.run.corpus
        parameters = parameter_count(model)
        config, train = model.config, run.config.train
        batches = train.max_iters * train.gradient_accumulation_steps
        # what a reader wants to know first: which text, which model, on what, for how long
        lines = [
            *corpus.summary,
            f"model       {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
            f"context {config.block_size}: {parameters:,} parameters",
            f"device      {run.runtime}{run.world}, {config.kernel} attention",
            f"training    {train.max_iters:,} steps, {run.batches.epochs(batches):,.1f} epochs, "
            f"dropout {config.dropout:g}, logit_scale {config.logit_scale:g}",
        ]
        if corpus.item_format:
            lines += long_item_notes(corpus.train, corpus.val, run.config.model.block_size)
        elif new_model:
            lines += filter(None, [size_advice(parameters, corpus.characters)])
        info(*lines)

        # the same in TensorBoard, with more details
        if not (unchanged and self.logger.is_described):
            vocabulary, settings = corpus.tokenizer.vocabulary, flat_settings(run.config)
            lines += [
                f"vocabulary  {vocabulary[:100]}{'...' * (len(vocabulary) > 100)}",
                f"ratio       {parameters / len(corpus.train):.2g} parameters per character",
                f"corpus      {corpus.name}, SHA-256 {corpus.sha256}",
            ]
            table = summaries.table(settings, ("setting", "value"))
            self.logger.describe(
                [
                    summaries.text("setup/run", f"{summaries.code_block(lines)}\n{table}"),
                    summaries.charts(),
                    summaries.hparams(settings),
                ]
            )

    def log_step(self, result: StepResult) -> None:
        """Report loss spikes and warnings, and scalars every log_interval steps."""
        run, progress = self.run, self.run.progress
        step, settings = progress.step, run.config.train
        self.steps += 1
        self.tokens += result.tokens
        self.seconds += result.seconds

        # what cannot wait for the next logged step
        if result.spike:
            info(
                f"step {step:,}: loss {result.loss:.3f} is far above the mean of the last "
                f"{SPIKE_WINDOW} (spikes so far: {progress.spikes:,})"
            )
        if step == 1:  # the simplest test of a model: does it begin with a guess?
            vocab_size = run.model.vocab_size
            info(
                f"first loss  {result.loss:.3f}; a uniform guess has "
                f"ln({vocab_size}) = {math.log(vocab_size):.3f}"
            )
        self._log_warnings("train", result.warnings)

        # every log_interval steps, and at both ends: the bar and the curves
        if step % settings.log_interval == 0 or step in (1, settings.max_iters):
            tokens_per_sec = self.tokens / self.seconds
            # once: how long will it take? The first step is left out, because it is slower
            if 1 < step < settings.max_iters and not self.speed_printed:
                minutes = (settings.max_iters - step) * self.seconds / self.steps / 60
                info(
                    f"speed       {tokens_per_sec:,.0f} characters per second: about "
                    f"{minutes:.1f} minutes left"
                )
                self.speed_printed = True
            self.steps, self.tokens, self.seconds = 0, 0, 0.0
            self.logger.progress(step, result.loss, tokens_per_sec)
            self.logger.scalars(step, self._step_scalars(result, tokens_per_sec))

    def log_evaluation(self, result: Evaluation) -> None:
        """Report the losses, the sample and, if they are enabled, the pictures of an evaluation."""
        step, val_loss, train_loss = result.step, result.val_loss, result.train_loss
        scalars = {
            "val/loss": val_loss,
            "val/bpc": val_loss * BITS_PER_NAT,
            "val/train_loss": train_loss,
            "val/gap": val_loss - train_loss,
        }
        exact_match = ""
        if result.exact_match is not None:
            scalars["val/exact_match"] = result.exact_match
            answers = len(self.run.corpus.val.segments)
            exact_match = f"; exact match {result.exact_match:.2%} of {answers:,} answers"
        self.logger.scalars(step, scalars)
        # bits per character and the gap are in TensorBoard; two losses fit on a line
        best = " (best so far)" if result.improved else ""
        info(
            f"step {step:,}: validation loss {val_loss:.4f}{best}, "
            f"loss on training text {train_loss:.4f}{exact_match}"
        )
        if result.wrong_answers:
            self.logger.sample(step, "\n".join(result.wrong_answers), "samples/wrong_answers")
        if result.sample:
            self.logger.sample(step, result.sample, "samples/text")
        self._log_warnings("val", result.warnings)
        if result.probe and self.pictures:
            self.logger.summaries(step, figures(result, self.run.corpus.tokenizer.vocabulary))

    def log_end(self, command: Command) -> None:
        """Report the best loss of a finished run, and the commands to use it."""
        folder, minutes = Path(command.out_dir), (time.monotonic() - command.started) / 60
        progress = self.run.progress
        sample = shell_command(
            [program("python"), script("sample.py"), "--ckpt", path_word(folder), *self._question()]
        )
        tensorboard = shell_command([program("tensorboard"), "--logdir", path_word(folder.parent)])

        # how it ended; a finished run that is resumed has nothing to do
        if progress.step > self.first_step:
            info(f"finished after {minutes:.1f} minutes{self._early_stopping()}")
        else:
            change = f"--max_iters={2 * self.run.config.train.max_iters}"
            if self.run.out_of_patience:
                change = "--patience=0"
            longer = command.resume_command(change)
            info(f"already finished, at step {progress.step:,}; to train longer:", f"  {longer}")

        # what to do with it
        best = "no validation loss was finite"
        if progress.best_loss is not None:
            best = f"best validation loss {progress.best_loss:.4f} at step {progress.best_step:,}"
        info(
            f"{folder}: {best}; now try:",
            f"  {sample}",
            f"  {tensorboard}",
        )

    def _question(self) -> Iterator[str]:
        """Yield an option that asks the model a question, if it has learned to answer."""
        corpus = self.run.corpus
        if corpus.val.targets is not None:
            start, end = corpus.val.segments[0]
            item = corpus.tokenizer.decode(corpus.val.ids[start + 1 : end])
            yield f"--prompt={with_escapes(corpus.item_format.question(item))}"

    def _early_stopping(self) -> str:
        """Return why the run ended before max_iters, or "" if it did not."""
        progress, train = self.run.progress, self.run.config.train
        if progress.step >= train.max_iters:
            return ""
        return (
            f", at step {progress.step:,} of {train.max_iters:,}: the validation loss did not "
            f"improve (patience {train.patience})"
        )

    def _step_scalars(self, result: StepResult, tokens_per_sec: float) -> dict[str, float]:
        run, progress = self.run, self.run.progress
        scalars = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/tokens_per_sec": tokens_per_sec,
            "train/total_epochs": run.epochs,
            "train/spikes": progress.spikes,
            "train/lr": run.lr,
            **{f"train/lr/{name}": lr for name, lr in run.other_lrs.items()},
        }
        return scalars

    def _log_warnings(self, section: str, warnings: list[HealthWarning]) -> None:
        for name, text in warnings:
            tag = f"{section}/health/{name.replace(' ', '_')}"
            self.logger.warning(self.run.progress.step, tag, text)


def figures(result: Evaluation, vocabulary: str) -> Iterator[Summary]:
    """Make the summaries of an evaluation: next characters, attention maps, loss by position."""
    probe = result.probe
    yield summaries.text("samples/top_next", summaries.code_block(top_next(probe, vocabulary)))
    # what the heads of a layer look at
    for layer, maps in enumerate(probe.attention, 1):
        image = pictures.attention_maps(maps.numpy(), probe.text, layer)
        yield summaries.picture(f"views/attention_layer_{layer}", image)
    # does the model use its context? then later characters are easier to predict
    counted = np.flatnonzero(~np.isnan(result.loss_by_position))
    uniform = math.log(len(vocabulary))
    title = "validation loss by position in the context (nats); dashed: uniform guess"
    chart = pictures.curve(1 + counted, result.loss_by_position[counted], uniform, title)
    yield summaries.picture("views/loss_by_position", chart)


def top_next(probe: Probe, vocabulary: str) -> list[str]:
    """Return the five likeliest characters after the probe's text, one per line."""
    probabilities, ids = probe.next_probs.sort(descending=True)
    rows = zip(probabilities[:5].tolist(), ids[:5].tolist(), strict=True)
    lines = [f"{probability:6.1%}  {pictures.name(vocabulary[i])}" for probability, i in rows]
    return [f"after {probe.text}", *lines]
