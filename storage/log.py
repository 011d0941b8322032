"""The log of a run: lines and a bar on the console, TensorBoard, metrics.csv.

The log only reads the run, and a failure to write it never ends the run. TensorBoard sorts by tag:
`train/` comes from steps, `setup/` describes the run, everything else comes from evaluations.
"""

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter, summary
from tqdm import tqdm

from common import files
from common.console import discard_output, escape, printable, script_command, shell_command
from common.errors import counted
from common.stop import Stop
from configs.command import Command
from configs.fields import with_escapes
from configs.schema import flat_settings
from data.summary import length_advice
from model.attention import fastest_kernel
from model.parameters import parameter_count
from storage import pictures
from storage.folder import METRICS, METRICS_OLD
from training.evaluate import BITS_PER_NAT, Evaluation
from training.samples import Probe, run_probe, write_texts
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
HEADER = ",".join(["step", "minutes", *COLUMNS]) + "\n"
# a row that a kill has not cut; its minutes
WHOLE_ROW = re.compile(rf"^\d+,(\d+\.\d+)(?:,[^,\n]*){{{len(COLUMNS)}}}\n", re.MULTILINE)
# The page of charts, the most important first. The losses share a chart: alone, a curve with few
# points would be cut off, because TensorBoard takes most of them for outliers.
CHARTS = {
    "training loss and validation loss": ["^train/loss$", "^val/loss$"],
    "generalization gap": ["^val/gap$"],
    "learning rates": ["^train/lr"],
    "characters per second": ["^train/tokens_per_sec$"],
}
SECONDS_BETWEEN_LINES = 30  # if the output is a file, which has no bar


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

    A run that is resumed has a new `Log`, which continues the files.
    """

    def __init__(self, run: Run, folder: Path | None, stop: Stop):
        self.run, self.folder, self.stop = run, folder, stop
        self.began, self.first_step = time.monotonic(), run.progress.step
        self.predictions, self.seconds = 0, 0.0  # since the last logged step
        self.last_line: float | None = None  # when the speed or the loss was printed
        self.warned: set[str | Path] = set()  # of overfitting, and of paths that cannot be written

        # if one cannot be opened, warn and leave it None
        self.writer = self.metrics = None
        if folder:
            with self._or_warn(folder / METRICS):
                self.metrics = Metrics(folder / METRICS)
            # purge the steps after the checkpoint: they will be logged again; +1 keeps the
            # checkpoint's own evaluation, which will not
            with self._or_warn(folder):
                self.writer = SummaryWriter(folder, purge_step=self.first_step + 1)

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
        device = [str(run.runtime), processes, f"{kernel} attention"]
        lines = [
            *corpus.summary,
            f"model       {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
            f"context {config.block_size}: {parameter_count(model):,} parameters",
            f"device      {', '.join(filter(None, device))}",
            f"training    {counted(train.max_iters, 'step')}, {run.planned_epochs:,.1f} epochs, "
            f"dropout {config.dropout:g}, logit_scale {config.logit_scale}",
        ]
        if note := length_advice(corpus.train, corpus.val, config.block_size):
            lines.append(note)
        say(*lines)

        # to TensorBoard: the same lines and every setting, and the charts
        lines += [
            f"vocabulary  {corpus.tokenizer.vocabulary}",
            f"corpus      {corpus.name}, SHA-256 {corpus.sha256}",
            "",
            *(f"{name:<33}{value}" for name, value in flat_settings(run.settings).items()),
        ]
        charts = {title: ["Multiline", tags] for title, tags in CHARTS.items()}
        layout = summary.custom_scalars({"training": charts})
        self._write(self.first_step, [code_block("setup/run", lines), layout])

    def step(self, result: StepResult) -> None:
        """Log a step: every log_interval steps its scalars, now and then a line."""
        run, train = self.run, self.run.settings.train
        step, vocab_size = run.progress.step, run.model.vocab_size

        # the first step is the slowest: estimate the remaining time from its end on
        if step == self.first_step + 1:
            self.began = time.monotonic()

        # the speed is a mean over the steps between two lines
        self.predictions += result.predictions
        self.seconds += result.seconds

        # a simple test: an untrained model should guess uniformly
        if step == 1:
            say(
                f"first loss  {result.loss:.3f}; a uniform guess has "
                f"ln({vocab_size}) = {math.log(vocab_size):.3f}"
            )

        if step % train.log_interval == 0 or step in (1, train.max_iters):
            tokens_per_sec = self.predictions / self.seconds
            self.predictions, self.seconds = 0, 0.0
            self._show_progress(step, result.loss, tokens_per_sec)
            scalars = {
                "train/loss": result.loss,
                "train/grad_norm": result.grad_norm,
                "train/tokens_per_sec": tokens_per_sec,
                "train/total_epochs": run.epochs,
                "train/lr": run.lr,
            }
            if run.muon_lr is not None:
                scalars["train/lr/hidden"] = run.muon_lr
            self._write_scalars(step, scalars)

    def evaluation(self, result: Evaluation, *, improved: bool) -> None:
        """Log an evaluation: its losses, then a sample, wrong answers and attention maps."""
        run, progress = self.run, self.run.progress
        step, val_loss, train_loss = progress.step, result.val_loss, result.train_loss
        # the last position that occurs: there the model sees the most context
        val_losses = result.val_losses
        last = np.flatnonzero(val_losses.counts)[-1]
        scalars = {
            "val/loss": val_loss,
            "val/bpc": val_loss * BITS_PER_NAT,
            "val/train_loss": train_loss,
            "val/gap": val_loss - train_loss,
            f"val/loss_at/{last + 1}": float(val_losses.nats[last] / val_losses.counts[last]),
        }
        exact_match = ""
        if result.exact_match is not None:
            scalars["val/exact_match"] = result.exact_match
            answers = counted(len(run.val.segments), "answer")
            exact_match = f"; exact match {result.exact_match:.2%} of {answers}"
        self._write_scalars(step, scalars)

        best = " (best so far)" if improved else ""
        say(
            f"step {step:,}: validation loss {val_loss:.4f}{best}, "
            f"loss on training text {train_loss:.4f}{exact_match}"
        )
        self.last_line = time.monotonic()

        texts = write_texts(run, result)
        self._leave_bar_if_stopping()
        for tag, text in texts.items():
            if text:
                self._write(step, [code_block(tag, text.split("\n"))])
                say(*(f"  | {line}" for line in text.strip("\n").split("\n")))
        if math.isfinite(val_loss):
            self._write(step, probe_summaries(run_probe(run), run.corpus.tokenizer.vocabulary))

        if progress.is_overfitting(train_loss) and "overfitting" not in self.warned:
            say(
                f"overfitting: the validation loss has not improved since step "
                f"{progress.best_step:,}, while the loss on training text fell from "
                f"{progress.train_loss_at_best:.4f} to {train_loss:.4f}; try more model.dropout"
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
            sample.append(f"--prompt={with_escapes(question)}")
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
        if self.writer:
            with self._or_warn(self.folder):
                self.writer.close()

    def _show_progress(self, step: int, loss: float, tokens_per_sec: float) -> None:
        """Move the bar; print the speed once, and to a file also a line now and then."""
        self._leave_bar_if_stopping()
        with suppress(OSError):
            # `update` draws the bar, so do not draw it here
            postfix = f"loss {loss:.3f}, {tokens_per_sec:,.0f} char/s"
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
            time_left += f" and {counted(evaluations, 'evaluation')}"

        if self.last_line is None:
            speed = f"{tokens_per_sec:,.0f} characters per second"
            say(f"speed       {speed}: {time_left} left")
            self.last_line = now
        elif not sys.stdout.isatty() and now - self.last_line >= SECONDS_BETWEEN_LINES:
            say(f"step {step:,}: loss {loss:.3f}, {time_left} left")
            self.last_line = now

    def _leave_bar_if_stopping(self) -> None:
        """Draw the bar no more after Ctrl-C: the echoed ^C has made it wrap."""
        self.bar.disable |= self.stop.requested

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write to TensorBoard and metrics.csv, by tag."""
        if self.metrics:
            with self._or_warn(self.metrics.path):
                self.metrics.add(step, scalars)
        self._write(step, [summary.scalar(tag, value) for tag, value in scalars.items()])

    def _write(self, step: int, entries: Iterable[Summary]) -> None:
        """Write to TensorBoard and flush, so that a short run is shown and a kill loses nothing."""
        if not self.writer:
            return
        # after an error the writer stays None: no more attempts
        writer, self.writer = self.writer, None
        with self._or_warn(self.folder):
            for entry in entries:
                writer.file_writer.add_summary(entry, step)
            writer.flush()
            self.writer = writer

    @contextmanager
    def _or_warn(self, path: Path) -> Iterator[None]:
        """Turn an OSError into a warning; print it once for each path."""
        try:
            yield
        except OSError as error:
            if path not in self.warned:
                reason = error.strerror or error
                say(f"warning: {path}: the log is not written ({reason}); training continues")
            self.warned.add(path)


class Metrics:
    """metrics.csv: the numbers of a run, for spreadsheets and scripts.

    Each logged step and each evaluation is a row; missing values are empty. The file is appended
    to, never rewritten, so after a kill and a resume some steps are there twice. Raises OSError if
    the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path, self.began = path, time.monotonic()
        old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if old and not old.startswith(HEADER):
            files.rename(path, path.with_name(METRICS_OLD))
            say(f"{path}: it has other columns than this run; it is kept as {METRICS_OLD}")
            old = ""
        minutes = WHOLE_ROW.findall(old)
        self.minutes_before = float(minutes[-1]) if minutes else 0.0
        self.unwritten = ""  # rows that could not be written come with the next one

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append a row with the values of these TensorBoard tags."""
        # count the minutes before a resume too, so that they never run backwards
        minutes = self.minutes_before + (time.monotonic() - self.began) / 60
        cells = [f"{scalars[tag]:.7g}" if tag in scalars else "" for tag in COLUMNS.values()]
        self.unwritten += f"{step},{minutes:.3f},{','.join(cells)}\n"
        # open and close it for each row: a kill loses none, and other programs can read the file
        with open(self.path, "ab+") as file:
            start = ""
            if file.tell() == 0:
                start = HEADER
            else:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a kill or a full disk has cut the last row
                    start = "\n"
            file.write((start + self.unwritten).encode())
        self.unwritten = ""


def code_block(tag: str, lines: Iterable[str]) -> Summary:
    """Return a text summary that TensorBoard shows as it is, not as Markdown.

    Control characters except tabs are escaped: a carriage return would end the block.
    """
    escaped = [escape(line, keep="\t") for line in lines]
    # Markdown shows lines with four leading spaces as code
    return summary.text(tag, "".join(f"    {line}\n" for line in escaped))


def probe_summaries(probe: Probe, vocabulary: str) -> Iterator[Summary]:
    """Yield the summaries of a probe: the likeliest next characters, and attention maps."""
    probabilities, ids = probe.next_probs.sort(descending=True)
    likeliest = [
        f"{probability:6.1%}  {pictures.label_of(vocabulary[i])}"
        for probability, i in zip(probabilities[:5].tolist(), ids[:5].tolist(), strict=True)
    ]
    yield code_block("samples/top_next", [f"after {probe.text}", *likeliest])

    for layer, maps in enumerate(probe.attention, 1):
        image = pictures.draw_attention_maps(maps.numpy(), probe.text, layer).convert("RGB")
        tag = f"views/attention_layer_{layer}"
        yield summary.image(tag, np.asarray(image), dataformats="HWC")
