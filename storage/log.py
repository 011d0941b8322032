"""The log of a run: lines and a bar on the console, metrics.csv, TensorBoard.

The log never changes the run, and a failure to write it never ends the run. At an evaluation, it
lets the model write a sample. TensorBoard sorts by tag: `train/` comes from steps, `setup/`
describes the run, everything else comes from evaluations.
"""

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tqdm import tqdm

from common.console import say
from common.files import METRICS, runs_near, script_command, shell_command
from common.messages import counted, first_few, printable, quoted_character
from configs.command import ARCHITECTURE, TrainCommand, to_yaml
from configs.fields import format_escapes
from configs.schema import to_flat
from data.corpus import length_advice
from model.parameters import parameter_count
from storage.checkpoint import Checkpoint
from training.device import environment
from training.evaluate import BITS_PER_NAT, Evaluation
from training.samples import attention_images, sample_texts
from training.state import Run, StepResult

# of metrics.csv, after step and minutes: tags of TensorBoard
COLUMNS = ["train/loss", "train/lr", "train/grad_norm"]
COLUMNS += ["val/loss", "val/train_loss", "val/exact_match"]
CSV_HEADER = ",".join(["step", "minutes", *COLUMNS]) + "\n"
LR_TAGS = ("train/lr", "train/lr/muon")  # of AdamW, and of Muon if it is used
# fine-tuning with this share of the parent's learning rates was best on both texts that were tried
FINE_TUNE_FACTOR = 0.3


def say_origin(command: TrainCommand, checkpoint: Checkpoint | None, run: Run) -> None:
    """Print from which checkpoint a run starts, and what the user should know about that."""
    if command.resume and command.mode != "resumed":
        # the first start of a script that always resumes, or a misspelled --out_dir
        runs = runs_near(command.folder)
        hint = f"; other runs: {first_few(runs)}" if runs else ""
        say(f"{command.folder} has no run to resume: starting one{hint}")
    if checkpoint is None:
        return

    now, before = run.settings.train, checkpoint.settings.train
    if command.mode == "resumed":
        file = command.config_file
        own_settings = f" with its own settings and length, not those of {file}" if file else ""
        step = f"step {run.progress.step:,} of {now.max_iters:,}"
        say(f"resuming {command.folder} at {step}{own_settings}")
        here = environment(run.runtime, run.world.size)
        if checkpoint.environment != here:
            change = f"{checkpoint.environment} -> {here}"
            say(f"note: {change}: the result will differ from an uninterrupted run")
        return

    say(f"the architecture is that of {checkpoint.path}")
    in_file, settings = command.settings_in_file, to_flat(run.settings)
    ignored = [f"{n} {v}" for n, v in in_file.items() if n in ARCHITECTURE and v != settings[n]]
    if ignored:
        rope = "block_size" in in_file and settings["positions"] == "rope"
        hint = "; as an option, block_size counts" if rope else ""
        say(f"note: of {command.config_file}, these do not count: {', '.join(ignored)}{hint}")
    if new := run.corpus.tokenizer.vocabulary[len(checkpoint.vocabulary) :]:
        say(f"new characters ({len(new):,}): {first_few(map(quoted_character, new))}")
    say("note: on text that this parent was trained on, the validation loss is too low")
    rates = ("learning_rate", "muon_learning_rate")[: len(run.optimizers)]
    if all(getattr(now, name) == getattr(before, name) for name in rates):
        lower = " ".join(f"--{name}={FINE_TUNE_FACTOR * getattr(now, name):g}" for name in rates)
        say(f"note: on two texts, lower learning rates were best for fine-tuning: {lower}")


class Log:
    """The log of one process of a run: a console, and on rank 0 files in the run folder.

    A resumed run has a new `Log`, which continues the files.
    """

    def __init__(self, command: TrainCommand, run: Run):
        self.command, self.run = command, run
        self.folder = folder = command.folder if run.world.is_main else None
        self.opened = self.began = time.monotonic()
        with suppress(OSError):  # a new run has no log
            rows = (command.folder / METRICS).read_text(encoding="ascii", errors="replace")
            # the minutes go on; a row that a kill has cut may lack them
            minutes = map(float, re.findall(r"^\d+,(\d+\.\d+),", rows, re.MULTILINE))
            self.opened -= 60 * max(minutes, default=0)
        self.first_step = run.progress.step
        self.n_predictions, self.seconds = 0, 0.0  # since the last logged step
        self.speed_said = False
        self.warned: set[str] = set()  # of metrics.csv or TensorBoard
        self.writer = None
        with self._warn_on_failure("TensorBoard"):
            if folder:
                # here, because it may be missing, or fail beside a broken TensorFlow
                from torch.utils.tensorboard import SummaryWriter

                # A resume purges the steps after its checkpoint, which it logs again; + 1 keeps the
                # evaluation of the checkpoint's own step, which it does not. TensorBoard ignores
                # the first purge_step that it reads, so a new run has one too. That one purges
                # nothing, even if it is read last because the clock went back before the resume.
                purge_step = self.first_step + 1 if command.mode == "resumed" else sys.maxsize
                self.writer = SummaryWriter(folder, purge_step=purge_step)

        self.bar = tqdm(
            total=run.settings.train.max_iters,
            initial=self.first_step,
            # short words, so that a terminal of 80 columns has room for the bar itself
            bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            disable=True if folder is None else None,  # None: unless it is a terminal
        )

    def start(self) -> None:
        """Log the text, the model and the device."""
        run, config, train = self.run, self.run.settings.model, self.run.settings.train
        sizes = ("n_layer", "n_head", "n_embd", "block_size")
        shape = ", ".join(f"{name} {getattr(config, name)}" for name in sizes)
        ranks = f", {run.world.size} processes" if run.world.size > 1 else ""
        text, split, *notes = run.corpus.summary
        if run.val_excerpt is not run.corpus.val:
            chars = f"{run.settings.data.max_val_chars:,} characters"
            split += f"; an evaluation predicts about {chars}, evenly spaced"
        lines = [
            text,
            split,
            *notes,
            f"model       {shape}: {parameter_count(run.model):,} parameters",
            f"device      {run.runtime}{ranks}",
            f"training    {counted(train.max_iters, 'step')}, "
            f"{run.epochs_at(train.max_iters):,.1f} epochs, dropout {config.dropout:g}",
        ]
        if note := length_advice(run.corpus, config.block_size):
            lines.append(note)
        say(*lines)
        settings = to_yaml(run.settings)
        self._write(self.first_step, {}, {"setup/run": "\n".join([*lines, settings])})

    def step(self, result: StepResult) -> None:
        """Log a step: its scalars every log_interval steps, and a line now and then."""
        run, train = self.run, self.run.settings.train
        step, vocab_size = run.progress.step, run.model.vocab_size

        # the first step is the slowest: estimate the remaining time from its end on
        if step == self.first_step + 1:
            self.began = time.monotonic()

        # the speed is a mean over the steps since the last logged one
        self.n_predictions += result.n_predictions
        self.seconds += result.seconds

        # a check of the model: before training, it should guess uniformly
        if step == 1:
            uniform = f"ln({vocab_size}) = {math.log(vocab_size):.3f}"
            say(f"first loss  {result.loss:.3f}; a uniform guess has {uniform}")

        if step % train.log_interval == 0 or step in (1, train.max_iters):
            chars_per_sec = self.n_predictions / self.seconds
            self.n_predictions, self.seconds = 0, 0.0
            with suppress(OSError):  # the terminal may be closed
                # `update` draws the bar, so do not draw it here
                postfix = f"loss {result.loss:.3f}, {chars_per_sec:,.0f} char/s"
                self.bar.set_postfix_str(postfix, refresh=False)
                self.bar.update(step - self.bar.n)
            if not self.speed_said and step > self.first_step + 1:
                say(f"speed       {chars_per_sec:,.0f} characters per second: {self._time_left()}")
                self.speed_said = True
            scalars = {
                "train/loss": result.loss,
                "train/grad_norm": result.grad_norm,
                "train/chars_per_sec": chars_per_sec,
                "train/total_epochs": run.epochs_at(step),
            }
            for tag, optimizer in zip(LR_TAGS, run.optimizers, strict=False):
                scalars[tag] = optimizer.lr
            self._write(step, scalars, {})

    def evaluation(self, result: Evaluation) -> None:
        """Log an evaluation: its losses, then a sample, wrong answers and attention maps."""
        run, progress = self.run, self.run.progress
        step, val_loss, train_loss = progress.step, result.val_loss, result.train_loss
        scalars = {
            "val/loss": val_loss,
            "val/bpc": val_loss * BITS_PER_NAT,
            "val/train_loss": train_loss,
            "val/gap": val_loss - train_loss,
        }
        exact_match = ""
        if result.exact_match is not None:
            scalars["val/exact_match"] = result.exact_match
            answers = counted(len(run.val_excerpt.documents), "answer")
            exact_match = f"; exact match {result.exact_match:.2%} of {answers}"

        best = " (best so far)" if progress.is_best else ""
        say(
            f"step {step:,}: validation loss {val_loss:.4f}{best}, "
            f"loss on training text {train_loss:.4f}{exact_match}; {self._time_left()}"
        )

        views = {}
        if math.isfinite(val_loss):
            views = {tag: text for tag, text in sample_texts(run, result).items() if text}
            for text in views.values():
                say(*(f"  | {line}" for line in text.strip("\n").split("\n")))
            views |= attention_images(run)
        self._write(step, scalars, views)

    def end(self, exit_code: int) -> None:
        """Print how the run has ended, and the commands for what may come next."""
        folder, minutes = self.command.folder, (time.monotonic() - self.command.began) / 60
        progress, train = self.run.progress, self.run.settings.train
        if exit_code:
            resume = script_command("train.py", folder)
            if self.run.world.size > 1:
                resume = f"start this with the same torchrun: {shell_command('train.py', folder)}"
            say(f"stopped and saved at step {progress.step:,}; to resume:", f"  {resume}")
            return

        ended = f"finished at step {progress.step:,} of {train.max_iters:,}"
        if progress.step < train.max_iters:
            ended += f" (no improvement, patience {train.patience})"
        elif progress.step == self.first_step:
            ended += " (a larger --max_iters trains it further)"
        best = "no validation loss was finite"
        if progress.best_loss is not None:
            best = f"best validation loss {progress.best_loss:.4f} at step {progress.best_step:,}"
        sample = ["--ckpt", folder]
        if question := self.run.corpus.question:  # a model of answers wants to be asked
            sample.append(f"--prompt={format_escapes(question)}")
        tensorboard = (sys.orig_argv[0], "-m", "tensorboard.main", "--logdir", folder.parent)
        say(
            f"{ended} after {minutes:.1f} minutes",
            f"{best}; now try:",
            f"  {script_command('sample.py', *sample)}",
            f"  {shell_command(*tensorboard)}",
        )

    def close(self) -> None:
        """Close the bar and TensorBoard's file, however the run has ended."""
        with suppress(Exception):  # all is written already
            self.bar.close()
            if self.writer:
                self.writer.close()

    def _time_left(self) -> str:
        """Return the time until the last step, if all goes on as since the end of the first one."""
        done = max(1, self.run.progress.step - self.first_step - 1)
        left = self.run.settings.train.max_iters - self.run.progress.step
        return f"about {(time.monotonic() - self.began) / done * left / 60:.1f} minutes left"

    @contextmanager
    def _warn_on_failure(self, part: str) -> Iterator[None]:
        """Go on without a part of the log that cannot be written, with one warning."""
        try:
            yield
        except Exception as error:
            if part not in self.warned:
                say(f"warning: {part} is not written ({error}); training continues")
            self.warned.add(part)

    def _write(self, step: int, scalars: Mapping[str, float], views: Mapping) -> None:
        """Write numbers to metrics.csv and TensorBoard, texts and images to TensorBoard, by tag."""
        if self.folder and scalars:
            with self._warn_on_failure(METRICS):
                minutes = (time.monotonic() - self.opened) / 60
                cells = [str(scalars.get(tag, "")) for tag in COLUMNS]
                # opened for each row: a kill loses none
                with open(self.folder / METRICS, "a+", encoding="ascii") as file:
                    file.seek(max(0, file.tell() - 1))
                    end = file.read()
                    if end != "\n":  # a new file, or its last row was cut
                        file.write("\n" if end else CSV_HEADER)
                    file.write(",".join([str(step), f"{minutes:.3f}", *cells]) + "\n")
        if self.writer and self.folder.is_dir():  # not while it is moved or deleted
            with self._warn_on_failure("TensorBoard"):
                for tag, value in scalars.items():
                    self.writer.add_scalar(tag, value, step)
                for tag, view in views.items():
                    if isinstance(view, str):
                        self.writer.add_text(tag, code_block(view), step)
                    else:
                        self.writer.add_images(tag, view, step)
                self.writer.flush()  # a kill loses nothing


def code_block(text: str) -> str:
    """Return a text that TensorBoard shows as it is, not as Markdown.

    Control characters are escaped: a carriage return would end the block.
    """
    # Markdown shows lines with four leading spaces as code
    return "".join(f"    {printable(line)}\n" for line in text.split("\n"))
