"""Console and TensorBoard output of a run. It only reads the run; nothing here affects training.

Tags under `run/` describe the run, those under `train/` come from steps, the others from
evaluations.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary

from common.console import path_word, program, script, shell_command
from common.user_text import with_escapes
from configs.cli import Command
from configs.schema import flat_settings
from dashboard import plots, summaries
from dashboard.logger import Logger, info
from data.items import long_item_notes
from data.summary import size_advice
from model.runtime import dtype_name
from training.evaluate import BITS_PER_NAT, Evaluation, Probe
from training.health import SPIKE_WINDOW, HealthWarning
from training.state import Run
from training.step import StepResult


class Report:
    """The reports of one run."""

    def __init__(self, run: Run, logger: Logger):
        self.run, self.logger = run, logger
        self.pictures = run.config.train.log == "pictures"
        self.tokens, self.seconds = 0, 0.0  # since the last logged step
        self.first_step = run.progress.step

    def log_start(self, *, unchanged: bool) -> None:
        """Print the text, the model and the device, and log them to TensorBoard.

        If the run is resumed `unchanged`, its folder has the log already, in a file of its own.
        """
        run, model, corpus = self.run, self.run.model, self.run.corpus
        parameters = model.parameter_count()
        lines = [
            *corpus.summary,
            f"model       {parameters:,} parameters, {parameters / len(corpus.train):.2g} per "
            f"training character; {model.flops_per_token() / 1e6:.1f} MFLOP per training character",
            f"device      {run.runtime}{run.world}; attention kernel: {run.config.model.kernel}",
        ]
        if corpus.item_format:
            lines += long_item_notes(corpus.train, corpus.val, run.config.model.block_size)
        elif run.progress.step == 0:
            lines += filter(None, [size_advice(parameters, corpus.characters)])
        info(*lines)
        # scalars alone are for short runs, for which this measurement is too slow
        if self.pictures:
            gflops = run.runtime.peak_flops / 1e9
            info(f"peak        {gflops:,.0f} GFLOP/s measured, with a large matrix product")
        if not (unchanged and self.logger.is_described):
            settings = resolved_settings(run)
            text = f"corpus      {corpus.name}, SHA-256 {corpus.sha256}"
            config = summaries.table(settings, ("setting", "value"))
            self.logger.describe(
                [
                    summaries.text("run/config", config),
                    summaries.text("run/corpus", summaries.code_block([text, *lines])),
                    summaries.charts(),
                    summaries.hparams(settings),
                ]
            )

    def log_step(self, result: StepResult) -> None:
        """Report loss spikes and warnings, and scalars every log_interval steps."""
        run, progress = self.run, self.run.progress
        step, settings = progress.step, run.config.train
        self.tokens += result.tokens
        self.seconds += result.seconds
        if result.spike:
            info(
                f"step {step:,}: loss {result.loss:.3f} is far above the mean of the last "
                f"{SPIKE_WINDOW} (spikes so far: {progress.spikes:,})"
            )
        if step == 1:
            vocab_size = run.model.vocab_size
            info(
                f"first loss  {result.loss:.3f}; an untrained model starts near ln({vocab_size}) = "
                f"{math.log(vocab_size):.3f}: every character equally likely"
            )
        self._log_warnings("train", result.warnings)
        if step % settings.log_interval == 0 or step in (1, settings.max_iters):
            tokens_per_sec = self.tokens / self.seconds
            self.tokens, self.seconds = 0, 0.0
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
        info(
            f"step {step:,}: validation loss {val_loss:.4f} "
            f"({val_loss * BITS_PER_NAT:.4f} bits per character"
            f"{'; the best so far' if result.improved else ''}), loss on training text "
            f"{train_loss:.4f}{exact_match}"
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
        if progress.step > self.first_step:
            info(f"finished after {minutes:.1f} minutes{self._early_stopping()}")
        else:
            changes = {"max_iters": 2 * progress.step}
            if self.run.out_of_patience:
                changes = {"patience": 0}
            longer = command.repeat_command(resume=True, changes=changes)
            info(f"already finished, at step {progress.step:,}; to train longer:", f"  {longer}")
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
            "train/epoch": run.epochs,
            "train/spikes": progress.spikes,
            "train/lr": run.lr,
            **{f"train/lr/{name}": lr for name, lr in run.other_lrs.items()},
        }
        if self.pictures:
            peak = run.runtime.peak_flops * run.world.size
            # model FLOPs utilization (MFU)
            scalars["train/share_of_peak"] = tokens_per_sec * run.model.flops_per_token() / peak
        return scalars

    def _log_warnings(self, section: str, warnings: list[HealthWarning]) -> None:
        for name, text in warnings:
            tag = f"{section}/health/{name.replace(' ', '_')}"
            self.logger.warning(self.run.progress.step, tag, text)


def resolved_settings(run: Run) -> dict[str, bool | int | float | str]:
    """Return every setting with the value that `auto` stands for."""
    config, settings = run.config, flat_settings(run.config)
    automatic = {
        "model.attention_dropout": config.model.dropout,
        "train.cooldown_iters": config.train.cooldown,
        "train.save_interval": config.train.eval_interval,
        "device": run.runtime.device.type,
        "dtype": dtype_name(run.runtime.dtype),
    }
    return settings | {name: automatic[name] for name in automatic if settings[name] == "auto"}


def figures(result: Evaluation, vocabulary: str) -> Iterator[Summary]:
    """Make the summaries of an evaluation: next characters, attention maps, loss by position."""
    probe = result.probe
    yield summaries.text("samples/next", summaries.code_block(top_next(probe, vocabulary)))
    for layer, heads in enumerate(probe.attention, 1):
        for head, weights in enumerate(heads.numpy(), 1):
            image = plots.attention(weights, probe.text, f"layer {layer}, head {head}")
            yield summaries.picture(f"attention/layer_{layer}_head_{head}", image)
    counted = np.flatnonzero(~np.isnan(result.loss_by_position))
    uniform = math.log(len(vocabulary))
    title = "validation loss by position in the context (nats); dashed: uniform guess"
    chart = plots.curve(1 + counted, result.loss_by_position[counted], uniform, title)
    yield summaries.picture("val/loss_by_position", chart)


def top_next(probe: Probe, vocabulary: str) -> list[str]:
    """Return the five likeliest characters after the probe's text, one per line."""
    probabilities, ids = probe.next_probs.sort(descending=True)
    rows = zip(probabilities[:5].tolist(), ids[:5].tolist(), strict=True)
    lines = [f"{probability:6.1%}  {plots.name(vocabulary[i])}" for probability, i in rows]
    return [f"after {probe.text}", *lines]
