"""The log of a run: lines and a bar on the console, TensorBoard, metrics.csv.

The log only reads the run, and a failure to write it never ends the run. TensorBoard sorts by tag:
`train/` comes from steps, `setup/` describes the run, everything else comes from evaluations.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter, summary
from tqdm import tqdm

from common.console import (
    discard_output,
    escape,
    executable,
    path_argument,
    printable,
    script_path,
    shell_command,
)
from common.errors import counted
from configs.command import Command
from configs.fields import with_escapes
from configs.schema import flat_settings
from data.summary import length_advice
from model.parameters import parameter_count
from run import pictures
from run.folder import METRICS
from training import health
from training.evaluate import BITS_PER_NAT, Evaluation, Probe
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
# The page of charts, the most important first. The losses share a chart: alone, a curve with few
# points would be cut off, because TensorBoard takes most of them for outliers.
CHARTS = {
    "training loss and validation loss": ["^train/loss$", "^val/loss$"],
    "generalization gap": ["^val/gap$"],
    "validation loss by position in the context": ["^val/loss_at/"],
    "learning rates": ["^train/lr"],
    "characters per second": ["^train/tokens_per_sec$"],
}
POSITIONS = (1, 8, 64, 512)  # positions in the context whose validation loss is logged
SECONDS_BETWEEN_LINES = 30  # if the output is a file, which has no bar


def info(*lines: object) -> None:
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

    def __init__(self, run: Run, folder: Path | None):
        self.run, self.folder = run, folder
        self.pictures = run.config.train.log == "pictures"
        self.began, self.first_step = time.monotonic(), run.progress.step
        self.predictions, self.seconds = 0, 0.0  # since the last logged step
        self.last_line: float | None = None  # when the speed or the loss was printed
        self.train_loss_at_best: float | None = None
        self.warned: set[str | Path] = set()  # health warnings, and paths that cannot be written

        # TensorBoard writes in a thread; suppress the traceback of an error there, since the next
        # flush raises it again
        self.thread_hook, threading.excepthook = threading.excepthook, self._on_thread_error

        # metrics.csv and TensorBoard; if one cannot be opened, warn and leave it None
        self.writer = self.metrics = None
        if folder:
            with self._or_warn(folder / METRICS):
                self.metrics = Metrics(folder / METRICS, self.first_step)
            # purge the steps after the checkpoint: they will be logged again; +1 keeps the
            # checkpoint's own evaluation, which will not
            with self._or_warn(folder):
                self.writer = SummaryWriter(folder, purge_step=self.first_step + 1)

        # the bar, on a terminal
        self.bar = tqdm(
            total=run.config.train.max_iters,
            initial=self.first_step,
            # short words, so that a terminal of 80 columns has room for the bar itself
            bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=folder is None or not sys.stderr.isatty(),
        )

    def start(self) -> None:
        """Log the text, the model and the device."""
        run, model, corpus = self.run, self.run.model, self.run.corpus
        config, train = model.config, run.config.train

        # which text, which model, on which device, for how long
        device = [str(run.runtime), str(run.world), f"{config.kernel} attention"]
        lines = [
            *corpus.summary,
            f"model       {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
            f"context {config.block_size}: {parameter_count(model):,} parameters",
            f"device      {', '.join(filter(None, device))}",
            f"training    {counted(train.max_iters, 'step')}, {run.planned_epochs:,.1f} epochs, "
            f"dropout {config.dropout:g}, logit_scale {config.logit_scale:g}",
        ]
        if note := length_advice(corpus.train, corpus.val, config.block_size):
            lines.append(note)
        info(*lines)

        # to TensorBoard: the same lines and every setting, the charts, a row in the tab HParams
        settings = flat_settings(run.config)
        lines += [
            f"vocabulary  {corpus.tokenizer.vocabulary}",
            f"corpus      {corpus.name}, SHA-256 {corpus.sha256}",
            "",
            *(f"{name:<33}{value}" for name, value in settings.items()),
        ]
        charts = {title: ["Multiline", tags] for title, tags in CHARTS.items()}
        # without the part that declares the settings, TensorBoard shows those first that differ
        _, hparams, _ = summary.hparams(settings, {})
        layout = summary.custom_scalars({"training": charts})
        self._write(self.first_step, [code_block("setup/run", lines), layout, hparams])

    def step(self, result: StepResult) -> None:
        """Log a step: every log_interval steps its scalars, now and then a line."""
        run, train = self.run, self.run.config.train
        step, vocab_size = run.progress.step, run.model.vocab_size

        # the first step is the slowest: estimate the remaining time from its end on
        if step == self.first_step + 1:
            self.began = time.monotonic()

        # the speed is a mean over the steps between two lines
        self.predictions += result.predictions
        self.seconds += result.seconds

        # a simple test: an untrained model should guess uniformly
        if step == 1:
            info(
                f"first loss  {result.loss:.3f}; a uniform guess has "
                f"ln({vocab_size}) = {math.log(vocab_size):.3f}"
            )
        self._warn(health.step_warnings(step, result.loss, result.grad_norm, vocab_size))

        # every log_interval steps, and at both ends: the bar and the curves
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

    def evaluation(self, result: Evaluation) -> None:
        """Log an evaluation: losses, samples, health warnings and attention maps."""
        run, progress = self.run, self.run.progress
        step, val_loss, train_loss = result.step, result.val_loss, result.train_loss
        scalars = {
            "val/loss": val_loss,
            "val/bpc": val_loss * BITS_PER_NAT,
            "val/train_loss": train_loss,
            "val/gap": val_loss - train_loss,
        }

        # if the model uses its context, later characters are easier to predict
        for position, loss in enumerate(result.loss_by_position.tolist(), 1):
            if position in POSITIONS and not math.isnan(loss):  # NaN: nothing counts there
                scalars[f"val/loss_at/{position}"] = loss

        # the share of right answers to the questions of the validation list
        exact_match = ""
        if result.exact_match is not None:
            scalars["val/exact_match"] = result.exact_match
            answers = counted(len(run.corpus.val.segments), "answer")
            exact_match = f"; exact match {result.exact_match:.2%} of {answers}"
        self._write_scalars(step, scalars)

        # of the losses, only these two are printed; the others are in TensorBoard
        best = " (best so far)" if result.improved else ""
        info(
            f"step {step:,}: validation loss {val_loss:.4f}{best}, "
            f"loss on training text {train_loss:.4f}{exact_match}"
        )
        self.last_line = time.monotonic()

        # a sample, and the first few wrong answers
        texts = {
            "samples/wrong_answers": "\n".join(result.wrong_answers),
            "samples/text": result.sample,
        }
        for tag, text in texts.items():
            if text:
                self._write(step, [code_block(tag, text.split("\n"))])
                info(*(f"  | {line}" for line in text.strip("\n").split("\n")))

        # warn of overfitting (a resumed run compares with its first evaluation), and of dead heads
        if result.improved or self.train_loss_at_best is None:
            self.train_loss_at_best = train_loss
        self._warn(
            health.loss_warnings(
                progress.evals_since_best, progress.best_step, self.train_loss_at_best, train_loss
            )
        )
        if result.probe:
            maps, max_iters = result.probe.attention, run.config.train.max_iters
            self._warn(health.attention_warnings(step, max_iters, maps))

        # attention maps and the likeliest next characters for a fixed text
        if result.probe and self.pictures:
            self._write(step, views(result.probe, run.corpus.tokenizer.vocabulary))

    def end(self, command: Command) -> None:
        """Print how a run has ended, and the commands to use its model."""
        folder, minutes = Path(command.out_dir), (time.monotonic() - command.started) / 60
        progress, train = self.run.progress, self.run.config.train

        # a finished run that is resumed has nothing to do
        if progress.step == self.first_step:
            # it has reached max_iters, or run out of patience
            changes = []
            if progress.step >= train.max_iters:
                changes.append(f"--max_iters={2 * progress.step}")
            elif "train.max_iters" in command.options:  # more steps alone do not help
                changes.append(f"--max_iters={train.max_iters}")
            if self.run.out_of_patience:
                changes.append("--patience=0")
            longer = command.resume_command(*changes)
            info(f"already finished, at step {progress.step:,}; to train longer:", f"  {longer}")
        elif progress.step >= train.max_iters:
            info(f"finished after {minutes:.1f} minutes")
        else:
            info(
                f"finished after {minutes:.1f} minutes, at step {progress.step:,} of "
                f"{train.max_iters:,}: the validation loss did not improve "
                f"(patience {train.patience})"
            )

        # the result, and the commands to use it
        best = "no validation loss was finite"
        if progress.best_loss is not None:
            best = f"best validation loss {progress.best_loss:.4f} at step {progress.best_step:,}"
        sample = [executable("python"), script_path("sample.py"), "--ckpt", path_argument(folder)]
        if question := self.run.corpus.question:  # a model of answers wants to be asked
            sample.append(f"--prompt={with_escapes(question)}")
        tensorboard = [executable("tensorboard"), "--logdir", path_argument(folder.parent)]
        info(
            f"{folder}: {best}; now try:",
            f"  {shell_command(sample)}",
            f"  {shell_command(tensorboard)}",
        )

    def close(self) -> None:
        """Close the bar and TensorBoard's file, however the run has ended."""
        with suppress(OSError):
            self.bar.close()
        if self.writer:
            with self._or_warn(self.folder):
                self.writer.close()
        threading.excepthook = self.thread_hook

    def _show_progress(self, step: int, loss: float, tokens_per_sec: float) -> None:
        """Move the bar; print the speed once, and to a file also a line now and then."""
        with suppress(OSError):
            # `update` draws the bar, so do not draw it here
            postfix = f"loss {loss:.3f}, {tokens_per_sec:,.0f} char/s"
            self.bar.set_postfix_str(postfix, refresh=False)
            self.bar.update(step - self.bar.n)

        now, left = time.monotonic(), self.run.config.train.max_iters - step
        done = step - self.first_step - 1  # without the first step
        if done == 0 or left == 0:
            return
        minutes = (now - self.began) / done * left / 60

        # the speed once; then, in a file, the progress
        if self.last_line is None:
            speed = f"{tokens_per_sec:,.0f} characters per second"
            info(f"speed       {speed}: about {minutes:.1f} minutes left")
            self.last_line = now
        elif not sys.stdout.isatty() and now - self.last_line >= SECONDS_BETWEEN_LINES:
            info(f"step {step:,}: loss {loss:.3f}, about {minutes:.1f} minutes left")
            self.last_line = now

    def _warn(self, warnings: Iterable[health.HealthWarning]) -> None:
        """Log health warnings, each of them once per process."""
        for name, text in warnings:
            if name not in self.warned:
                info(text)
                tag = f"health/{name.replace(' ', '_')}"
                self._write(self.run.progress.step, [summary.text(tag, text)])
            self.warned.add(name)

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
                info(f"warning: {path}: the log is not written ({reason}); training continues")
            self.warned.add(path)

    def _on_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        """Print no traceback for a thread that could not write a file."""
        if not isinstance(failure.exc_value, OSError):
            self.thread_hook(failure)


class Metrics:
    """metrics.csv: the numbers of a run, for spreadsheets and scripts.

    Each logged step and each evaluation is a row; missing values are empty. A run that continues at
    `step` repeats the later steps, so their rows are removed. Raises OSError if the file cannot be
    read.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.began = path, time.monotonic()

        # keep whole rows up to `step`; each begins with the step and the minutes
        old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        rows = re.finditer(r"^(\d+),(\d+\.\d+),.*\n", old, re.MULTILINE)
        kept = [row for row in rows if int(row[1]) <= step]
        self.minutes_before = float(kept[-1][2]) if kept else 0.0

        # the first write replaces the file; rows that could not be written come with the next one
        self.mode, self.unwritten = "w", [HEADER, *(row[0] for row in kept)]

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append a row with the values of these TensorBoard tags."""
        # count the minutes before a resume too, so that they never run backwards
        minutes = self.minutes_before + (time.monotonic() - self.began) / 60
        cells = [f"{scalars[tag]:.7g}" if tag in scalars else "" for tag in COLUMNS.values()]
        self.unwritten.append(f"{step},{minutes:.3f},{','.join(cells)}\n")
        # open and close it for each row: a kill loses none, and other programs can read the file
        with open(self.path, self.mode, encoding="ascii", newline="") as file:
            file.writelines(self.unwritten)
        self.mode, self.unwritten = "a", []


def code_block(tag: str, lines: Iterable[str]) -> Summary:
    """Return a text summary that TensorBoard shows as it is, not as Markdown.

    Control characters except tabs are escaped: a carriage return would end the block.
    """
    escaped = [escape(line, keep="\t") for line in lines]
    # Markdown shows lines with four leading spaces as code
    return summary.text(tag, "".join(f"    {line}\n" for line in escaped))


def views(probe: Probe, vocabulary: str) -> Iterator[Summary]:
    """Yield the summaries of a probe: the likeliest next characters, and attention maps."""
    # the five likeliest next characters
    probabilities, ids = probe.next_probs.sort(descending=True)
    likeliest = [
        f"{probability:6.1%}  {pictures.label_of(vocabulary[i])}"
        for probability, i in zip(probabilities[:5].tolist(), ids[:5].tolist(), strict=True)
    ]
    yield code_block("samples/top_next", [f"after {probe.text}", *likeliest])

    # a picture for each layer, with a map for each head
    for layer, maps in enumerate(probe.attention, 1):
        image = pictures.attention_maps(maps.numpy(), probe.text, layer).convert("RGB")
        tag = f"views/attention_layer_{layer}"
        yield summary.image(tag, np.asarray(image), dataformats="HWC")
