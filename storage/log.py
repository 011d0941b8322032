"""The log of a run: lines and a bar on the console, metrics.csv, TensorBoard.

The log only reads the run, and a failure to write it never ends the run. TensorBoard sorts by tag:
`train/` comes from steps, `setup/` describes the run, everything else comes from evaluations.
"""

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.console import discard_output, script_command, shell_command
from common.stop import Stop
from common.words import escape_controls, plural, printable
from configs.command import Command
from configs.fields import format_escapes
from configs.schema import flat_settings
from data.summary import length_advice
from model.attention import fastest_kernel
from model.inspect import attention_maps
from model.parameters import parameter_count
from storage.folder import METRICS
from training.evaluate import BITS_PER_NAT, Evaluation
from training.samples import write_texts
from training.state import Run
from training.step import StepResult

COLUMNS = {  # of metrics.csv, after step and minutes -> tag in TensorBoard
    "batch_loss": "train/loss",
    "learning_rate": "train/lr",
    "grad_norm": "train/grad_norm",
    "val_loss": "val/loss",
    "train_loss": "val/train_loss",
    "exact_match": "val/exact_match",
}
HEADER = ",".join(["step", "minutes", *COLUMNS])
SECONDS_BETWEEN_LINES = 30  # if the output is a file, which has no bar
PROBE_LENGTH = 32  # characters whose attention is shown


def say(*lines: object) -> None:
    """Print lines above the progress bar. If the reader has gone (`| head`), training continues."""
    try:
        # tqdm draws the bar again below the lines
        tqdm.write(printable(lines), file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        discard_output()


class Log:
    """The log of one process of a run; without a folder, as on every rank but 0, only a console.

    A resumed run has a new `Log`, which continues the files.
    """

    def __init__(self, run: Run, folder: Path | None, stop: Stop):
        self.run, self.folder, self.stop = run, folder, stop
        self.opened = self.began = time.monotonic()
        self.first_step = run.progress.step
        self.predictions, self.seconds = 0, 0.0  # since the last logged step
        self.last_line: float | None = None  # when the speed or the loss was printed
        self.warned: set[str] = set()  # of overfitting, metrics.csv or TensorBoard
        self.minutes_before = last_minutes(folder / METRICS) if folder else 0.0
        self.writer = None  # of TensorBoard, once something is written

        self.bar = tqdm(
            total=run.settings.train.max_iters,
            initial=self.first_step,
            # short words, so that a terminal of 80 columns has room for the bar itself
            bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=folder is None or not sys.stderr.isatty(),
        )

    def start(self) -> None:
        """Log the text, the model and the device."""
        run, model, corpus = self.run, self.run.model, self.run.corpus
        config, train = run.settings.model, run.settings.train

        processes = f"{run.world.size} processes" if run.world.size > 1 else ""
        kernel = config.kernel
        if kernel == "auto":
            kernel = fastest_kernel(run.runtime.dtype, run.runtime.device, config.block_size)
        sizes = ("n_layer", "n_head", "n_embd", "block_size")
        shape = ", ".join(f"{name} {getattr(config, name)}" for name in sizes)
        device = [str(run.runtime), processes, f"{kernel} attention"]
        lines = [
            *corpus.summary,
            f"model       {shape}: {parameter_count(model):,} parameters",
            f"device      {', '.join(filter(None, device))}",
            f"training    {plural(train.max_iters, 'step')}, {run.planned_epochs:,.1f} epochs, "
            f"dropout {config.dropout:g}, logit_scale {config.logit_scale}",
        ]
        if note := length_advice(corpus.train, corpus.val, config.block_size):
            lines.append(note)
        say(*lines)

        # to TensorBoard: the same lines and every setting
        lines += [
            f"vocabulary  {corpus.tokenizer.vocabulary}",
            f"corpus      {corpus.name}, SHA-256 {corpus.sha256}",
            "",
            *(f"{name:<28}{value}" for name, value in flat_settings(run.settings).items()),
        ]
        self._write_tensorboard(self.first_step, {"setup/run": "\n".join(lines)})

    def step(self, result: StepResult) -> None:
        """Log a step: its scalars every log_interval steps, and a line now and then."""
        run, train = self.run, self.run.settings.train
        step, vocab_size = run.progress.step, run.model.vocab_size

        # the first step is the slowest: estimate the remaining time from its end on
        if step == self.first_step + 1:
            self.began = time.monotonic()

        # the speed is a mean over the steps since the last logged one
        self.predictions += result.predictions
        self.seconds += result.seconds

        # a check of the model: before training, it should guess uniformly
        if step == 1:
            say(
                f"first loss  {result.loss:.3f}; a uniform guess has "
                f"ln({vocab_size}) = {math.log(vocab_size):.3f}"
            )

        if step % train.log_interval == 0 or step in (1, train.max_iters):
            chars_per_sec = self.predictions / self.seconds
            self.predictions, self.seconds = 0, 0.0
            self._show_progress(step, result.loss, chars_per_sec)
            scalars = {
                "train/loss": result.loss,
                "train/grad_norm": result.grad_norm,
                "train/chars_per_sec": chars_per_sec,
                "train/total_epochs": run.epochs,
                "train/lr": run.lr,
            }
            if run.muon_lr is not None:
                scalars["train/lr/muon"] = run.muon_lr
            self._write_scalars(step, scalars)

    def evaluation(self, result: Evaluation, *, improved: bool) -> None:
        """Log an evaluation: its losses, then a sample, wrong answers and attention maps."""
        run, progress = self.run, self.run.progress
        step, val_loss, train_loss = progress.step, result.val_loss, result.train_loss
        # at the last position that occurs, the model sees the most context
        val_losses = result.val_losses
        last = np.flatnonzero(val_losses.counts)[-1]
        scalars = {
            "val/loss": val_loss,
            "val/bpc": val_loss * BITS_PER_NAT,
            "val/train_loss": train_loss,
            "val/gap": val_loss - train_loss,
            f"val/loss_at/{last + 1}": float(val_losses.sums[last] / val_losses.counts[last]),
        }
        exact_match = ""
        if result.exact_match is not None:
            scalars["val/exact_match"] = result.exact_match
            answers = plural(len(run.val.segments), "answer")
            exact_match = f"; exact match {result.exact_match:.2%} of {answers}"
        self._write_scalars(step, scalars)

        best = " (best so far)" if improved else ""
        say(
            f"step {step:,}: validation loss {val_loss:.4f}{best}, "
            f"loss on training text {train_loss:.4f}{exact_match}"
        )
        self.last_line = time.monotonic()

        texts = {tag: text for tag, text in write_texts(run, result).items() if text}
        self._leave_bar_if_stopping()
        for text in texts.values():
            say(*(f"  | {line}" for line in text.strip("\n").split("\n")))
        if math.isfinite(val_loss):
            self._write_tensorboard(step, texts | attention_images(run))

        if progress.is_overfitting(train_loss) and "overfitting" not in self.warned:
            say(
                f"overfitting: the validation loss has not improved since step "
                f"{progress.best_step:,}, while the loss on training text fell from "
                f"{progress.train_loss_at_best:.4f} to {train_loss:.4f}; try more dropout"
            )
            self.warned.add("overfitting")

    def end(self, command: Command) -> None:
        """Print how a run has ended, its best loss, and two commands to use its model."""
        folder, minutes = command.folder, (time.monotonic() - command.began) / 60
        progress, train = self.run.progress, self.run.settings.train

        ended = f"finished after {minutes:.1f} minutes"
        if progress.step == self.first_step:
            ended = (
                f"finished at step {progress.step:,}; --max_iters (or --patience) trains it further"
            )
        elif progress.step < train.max_iters:
            ended += (
                f", at step {progress.step:,} of {train.max_iters:,}: the validation loss did not "
                f"improve (patience {train.patience})"
            )

        best = "no validation loss was finite"
        if progress.best_loss is not None:
            best = f"best validation loss {progress.best_loss:.4f} at step {progress.best_step:,}"
        sample = ["--ckpt", folder]
        if question := self.run.corpus.question:  # a model of answers wants to be asked
            sample.append(f"--prompt={format_escapes(question)}")
        tensorboard = [sys.orig_argv[0], "-m", "tensorboard.main", "--logdir", folder.parent]
        say(
            ended,
            f"{best}; now try:",
            f"  {script_command('sample.py', *sample)}",
            f"  {shell_command(tensorboard)}",
        )

    def close(self) -> None:
        """Close the bar and TensorBoard's file, however the run has ended."""
        self._leave_bar_if_stopping()
        with suppress(OSError):
            self.bar.close()
        with suppress(Exception):  # all is written already
            if self.writer:
                self.writer.close()

    def _show_progress(self, step: int, loss: float, chars_per_sec: float) -> None:
        """Move the bar; print the speed once, and to a file also a line now and then."""
        self._leave_bar_if_stopping()
        with suppress(OSError):
            # `update` draws the bar, so do not draw it here
            postfix = f"loss {loss:.3f}, {chars_per_sec:,.0f} char/s"
            self.bar.set_postfix_str(postfix, refresh=False)
            self.bar.update(step - self.bar.n)

        train = self.run.settings.train
        now, left = time.monotonic(), train.max_iters - step
        done = step - self.first_step - 1  # without the first step
        if done == 0 or left == 0:
            return
        time_left = f"about {(now - self.began) / done * left / 60:.1f} minutes"
        # until the first evaluation, nobody knows how long one takes
        if self.run.progress.last_eval_step <= self.first_step:
            interval = train.eval_interval
            evaluations = math.ceil(train.max_iters / interval) - (step - 1) // interval
            time_left += f" and {plural(evaluations, 'evaluation')}"

        if self.last_line is None:
            speed = f"{chars_per_sec:,.0f} characters per second"
            say(f"speed       {speed}: {time_left} left")
            self.last_line = now
        elif not sys.stdout.isatty() and now - self.last_line >= SECONDS_BETWEEN_LINES:
            say(f"step {step:,}: loss {loss:.3f}, {time_left} left")
            self.last_line = now

    def _leave_bar_if_stopping(self) -> None:
        """Draw the bar no more after Ctrl-C: the echoed ^C has made it wrap."""
        self.bar.disable |= self.stop.requested

    @property
    def _has_folder(self) -> bool:
        """True on rank 0, but not while the folder is moved or deleted: a save makes it again."""
        return self.folder is not None and self.folder.is_dir()

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write to metrics.csv and TensorBoard, by tag."""
        if not self._has_folder:
            return
        # count the minutes before a resume too, so that they never run backwards
        minutes = self.minutes_before + (time.monotonic() - self.opened) / 60
        cells = [f"{scalars[tag]:.7g}" if tag in scalars else "" for tag in COLUMNS.values()]
        try:
            append_row(self.folder / METRICS, [str(step), f"{minutes:.3f}", *cells])
        except OSError as error:
            self._warn(METRICS, error)
        self._write_tensorboard(step, scalars)

    def _write_tensorboard(self, step: int, values: Mapping[str, float | str | Tensor]) -> None:
        """Write numbers, texts and images to TensorBoard, by tag; flush: a kill loses nothing.

        Whatever fails there, the run goes on without it.
        """
        if not self._has_folder or "TensorBoard" in self.warned:
            return
        try:
            if not self.writer:
                # here, because it may be missing, or fail beside a broken TensorFlow
                from torch.utils.tensorboard import SummaryWriter

                # purge the steps after the checkpoint, which will be logged again; + 1 keeps the
                # evaluation of the checkpoint's own step, which will not
                self.writer = SummaryWriter(self.folder, purge_step=self.first_step + 1)
            for tag, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(tag, code_block(value), step)
                elif isinstance(value, Tensor):
                    self.writer.add_images(tag, value, step)
                else:
                    self.writer.add_scalar(tag, value, step)
            self.writer.flush()
        except Exception as error:
            self.writer = None
            self._warn("TensorBoard", error)

    def _warn(self, part: str, error: Exception) -> None:
        """Warn once that a part of the log is not written."""
        if part not in self.warned:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            line = f"warning: {self.folder}: the log for {part} is not written"
            say(f"{line} ({reason or type(error).__name__}); training continues")
        self.warned.add(part)


def last_minutes(path: Path) -> float:
    """Return the minutes in the last row of metrics.csv; 0 if there is none."""
    with suppress(OSError, IndexError):
        rows = path.read_text(encoding="ascii", errors="replace")
        return float(re.findall(r"^\d+,(\d+\.\d+),", rows, re.MULTILINE)[-1])
    return 0.0


def append_row(path: Path, cells: Iterable[str]) -> None:
    """Append a row to metrics.csv; the newline comes first, and ends a row that a kill has cut.

    Each logged step and each evaluation is a row; missing values are empty. After a kill and a
    resume some steps are there twice.
    """
    # open and close it for each row: a kill loses none, and other programs can read the file
    with open(path, "a", encoding="ascii") as file:
        if file.tell() == 0:
            file.write(HEADER)
        file.write("\n" + ",".join(cells))


def code_block(text: str) -> str:
    """Return a text that TensorBoard shows as it is, not as Markdown.

    Control characters except tabs are escaped: a carriage return would end the block.
    """
    # Markdown shows lines with four leading spaces as code
    lines = [escape_controls(line, keep="\t") for line in text.split("\n")]
    return "".join(f"    {line}\n" for line in lines)


def attention_images(run: Run) -> dict[str, Tensor]:
    """Return what each layer attends to at the start of the validation text, as images by tag.

    An image (H, 1, 8 T, 8 T) has a square for each of H heads, with T rows, the queries, and T
    columns, the keys. White is a weight of 0, black of 1.
    """
    val = run.corpus.val
    start, end = max(val.segments, key=lambda segment: segment[1] - segment[0])
    length = min(PROBE_LENGTH, run.settings.model.block_size, end - start - 1)
    ids = torch.from_numpy(val.ids[start : start + length].astype(np.int64))
    images = {}
    for layer, weights in enumerate(attention_maps(run.model, ids.to(run.runtime.device)), 1):
        shades = 1 - weights.float().cpu().sqrt()  # the root keeps small weights visible
        images[f"views/attention_layer_{layer}"] = shades.kron(torch.ones(1, 8, 8))[:, None]
    return images
