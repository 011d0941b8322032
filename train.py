"""The training of a character-level GPT on a text: python train.py configs/shakespeare.yaml

`build_run` makes a run, new or from a checkpoint; `training_loop` trains it.

On the same machine, a resumed run ends bit-identical to an uninterrupted one. A checkpoint has the
settings and all that accumulates: weights, optimizer state and progress. Everything else is a
function of the seed and the step: batches, dropout and learning rate.
"""

import math
import os

from configs.command import Command, parse_train

if __name__ == "__main__":
    COMMAND = parse_train()  # before importing torch, which takes seconds
    # read when torch is imported: waiting OpenMP threads soon sleep, for a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from common.console import script_command, shell_command
from common.errors import CheckpointError, ConfigError, NonFiniteError, UserError
from common.files import holds_run, runs_in
from common.stop import Interrupted, Stop
from common.words import first_few, plural, quoted_character
from configs.schema import Config, DataConfig
from data.corpus import Corpus, load_corpus
from data.text import TextNotFound
from storage.checkpoint import LAST, Checkpoint, load_preferred, load_weights, restore
from storage.differences import changed_environment, fine_tuning_settings, resumed_settings
from storage.folder import SETTINGS_FILE, Saver, locked, logs_in, prepare_folder
from storage.log import Log, say
from training.device import available_devices, keep_freed_memory, select_runtime
from training.distributed import World
from training.duration import settings_for_minutes
from training.evaluate import evaluate
from training.state import Run
from training.step import train_step

# fine-tuning with this share of the parent's learning rates was best on both texts that were tried
FINE_TUNE_FACTOR = 0.3


def main(command: Command) -> int:
    """Train the run of a command; return the exit code."""
    keep_freed_memory()
    world = World()
    with locked(command.folder) if world.is_main else nullcontext():
        exit_code = build_and_train(command, world)
    world.close()  # not before the run has gone: DDP may wait forever for a group that has ended
    return exit_code


def build_and_train(command: Command, world: World) -> int:
    """Build a run and train it; return the exit code."""
    run, checkpoint = build_run(command, world)
    # from here on a signal such as Ctrl-C only sets a flag: the loop saves, then stops
    with Stop(verbose=world.is_main) as stop:
        try:
            return train_in_folder(command, run, checkpoint, stop)
        except NonFiniteError as error:
            last = f"the last checkpoint is {command.folder / LAST}"
            advice = "resume it with a lower learning rate"
            raise NonFiniteError(f"{error}; {last}; {advice}") from None


# --------------------------------------------------------------------------------- building the run


def build_run(command: Command, world: World) -> tuple[Run, Checkpoint | None]:
    """Build a new run, or continue that of a checkpoint; return the run and the checkpoint."""
    checkpoint = checkpoint_to_resume(command)
    if checkpoint:
        run = build_resumed(command, checkpoint, world)
    else:
        run = build_new(command, world)
    world.require_equal(
        {
            "max_iters": run.settings.train.max_iters,
            "text": (run.corpus.sha256, run.corpus.val_sha256),
            "dtype": run.runtime.dtype,
            "step": run.progress.step,
        }
    )
    return run, checkpoint


def checkpoint_to_resume(command: Command) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run.

    Raises ConfigError if a new run would replace one that is there.
    """
    folder = command.folder
    if command.overwrite:
        return None
    if not command.resumes:
        if holds_run(folder):
            raise ConfigError(
                f"out_dir: {folder} already holds a run; --resume continues it, --overwrite "
                "replaces it, another --out_dir leaves it alone"
            )
        if logs_in(folder):
            raise ConfigError(
                f"out_dir: {folder} holds the log of a run whose checkpoints are gone; --overwrite "
                "replaces it, another --out_dir leaves it alone"
            )
        return None

    if not holds_run(folder):
        # the first start of a script that always resumes, or a misspelled --out_dir
        runs = runs_in(folder.parent)
        hint = f"; runs beside it: {first_few(runs)}" if runs else ""
        say(f"{folder} has no run to resume: starting one{hint}")
        return None

    return load_preferred(folder, "last", notify=say)


def build_new(command: Command, world: World) -> Run:
    """Build a new run, with weights from the seed or from its parent, the model of --init_from."""
    parent = None
    if command.init_from:
        parent = load_preferred(Path(command.init_from), "best", notify=say)
        settings, replaced = fine_tuning_settings(command, parent)
        if replaced:
            changes = ", ".join(replaced)
            say(f"the architecture is that of {parent.path}, not of the config: {changes}")
    else:
        settings = command.new_settings()

    runtime = select_runtime(settings.device, settings.dtype)
    world.connect(runtime.device)
    corpus = load_corpus(
        data_settings(command, settings),
        vocabulary=parent.vocabulary if parent else None,
        add_characters=command.new_characters == "add",
    )

    make_run = partial(Run, corpus=corpus, runtime=runtime, world=world)
    if command.minutes:
        settings, timing = settings_for_minutes(command.minutes, command.began, settings, make_run)
        steps = f"{plural(settings.train.max_iters, 'step')} of {timing.step:.3f} s"
        length = f"{steps}, and evaluations of {timing.evaluation:.1f} s"
        say(f"--minutes={command.minutes:g}: {length}")
        # + 1: the evaluation that was timed
        evaluations = math.ceil(settings.train.max_iters / settings.train.eval_interval) + 1
        if evaluations * timing.evaluation > 60 * command.minutes / 4:
            say(
                "note: evaluations take more than a quarter of the time; a smaller --max_val "
                "shortens them"
            )

    run = make_run(settings)
    if parent:
        copy_weights_of(parent, run)
    return run


def copy_weights_of(parent: Checkpoint, run: Run) -> None:
    """Give a new run the weights of its parent; print what the user should know."""
    load_weights(parent, run.model)
    if new := run.corpus.tokenizer.vocabulary[len(parent.vocabulary) :]:
        say(f"new characters ({len(new):,}): {first_few(map(quoted_character, new))}")
    say(
        "note: if the parent was trained on some of this validation text, the validation loss is "
        "too low"
    )

    now, before = run.settings.train, parent.settings.train
    rates = ["learning_rate"]
    if now.optimizer == "muon":
        rates.append("muon_learning_rate")
    if all(getattr(now, name) == getattr(before, name) for name in rates):
        lower = " ".join(f"--{name}={FINE_TUNE_FACTOR * getattr(now, name):g}" for name in rates)
        say(f"note: on two texts, lower learning rates were best for fine-tuning: {lower}")


def build_resumed(command: Command, checkpoint: Checkpoint, world: World) -> Run:
    """Build a run in the state of a checkpoint, and print what has changed since."""
    settings, before = resumed_settings(command, checkpoint), checkpoint.settings
    # trained on a GPU, resumed on a laptop
    if settings.device not in ("auto", *available_devices()) and "device" not in command.options:
        say(f"note: no {settings.device.upper()} device on this machine; continuing with auto")
        settings = replace(settings, device="auto")
    if command.minutes:
        say(f"--minutes: the run keeps its {settings.train.max_iters:,} steps")

    runtime = select_runtime(settings.device, settings.dtype)
    world.connect(runtime.device)
    corpus = load_resumed_corpus(command, checkpoint, settings)

    run = Run(settings, corpus, runtime, world)
    restore(checkpoint, run)
    file = command.config_file
    own_settings = f" with its own settings, not those of {file}" if file else ""
    say(f"resuming {command.folder} at step {run.progress.step:,}{own_settings}")

    # `auto` chose these for the length of the run when it began
    kept = {"dropout": before.model.dropout, "eval_interval": before.train.eval_interval}
    kept = {name: value for name, value in kept.items() if name not in command.options}
    if kept and settings.train.max_iters != before.train.max_iters:
        values = " and ".join(f"{name} {value:g}" for name, value in kept.items())
        advice = " ".join(f"--{name}=auto" for name in kept)
        say(f"note: the run keeps {values}; for the new length: {advice}")
    if changes := changed_environment(checkpoint, run):
        say(f"note: {changes}: the result will differ from an uninterrupted run")
    return run


def load_resumed_corpus(command: Command, checkpoint: Checkpoint, settings: Config) -> Corpus:
    """Read the text of a resumed run: the file may have moved, but the text must be the same.

    Raises CheckpointError for another text, DataError for one that cannot be read.
    """
    # no fallback: the checkpoint names the sources that were read when the run began
    data, folder = replace(settings.data, fallback=""), command.folder
    try:
        # without a separate validation text, a part of the training text was held out
        if data.val_sources and not checkpoint.text.val_sha256:
            raise CheckpointError("val_sources: this run validates on a part of its own text")
        expected = (checkpoint.text.sha256, checkpoint.text.val_sha256)
        return load_corpus(data, expected=expected, vocabulary=checkpoint.vocabulary)
    except TextNotFound as error:
        moved = script_command("train.py", folder, "--sources=PATH")
        # after a question, such as "did you mean X?", a new sentence
        link = " If" if str(error).endswith("?") else "; if"
        error.args = (f"{error}{link} it has moved: {moved}",)
        raise
    except CheckpointError as error:
        new_run = new_run_command(command, checkpoint, data)
        raise CheckpointError(
            f"{error}; a run keeps its texts; to train a new one, from these weights: {new_run}"
        ) from None


def new_run_command(command: Command, checkpoint: Checkpoint, data: DataConfig) -> str:
    """Return the command that trains a new run on other texts, from the weights of a run."""
    folder = command.folder
    new_folder = next(f"{folder}-{n}" for n in count(2) if not holds_run(Path(f"{folder}-{n}")))
    words = [folder / SETTINGS_FILE, f"--init_from={folder}", f"--out_dir={new_folder}"]
    for name in ("sources", "val_sources"):
        words += [f"--{name}={source}" for source in command.options.get(name, ())]
    words.append("--dropout=auto")
    with suppress(UserError):  # the new run will report it
        corpus = load_corpus(data, vocabulary=checkpoint.vocabulary, add_characters=True)
        if corpus.tokenizer.vocabulary != checkpoint.vocabulary:
            words.append("--new_characters=add")
    return script_command("train.py", *words)


def data_settings(command: Command, settings: Config) -> DataConfig:
    """Return the settings of the text; sources from the command line have no fallback."""
    if "sources" in command.options and "fallback" not in command.options:
        return replace(settings.data, fallback="")
    return settings.data


# -------------------------------------------------------------------------------- training the run


def train_in_folder(command: Command, run: Run, checkpoint: Checkpoint | None, stop: Stop) -> int:
    """Train a run in its folder; print what to do with the result; return the exit code."""
    folder, is_main = command.folder, run.world.is_main
    # up to here, nothing in the folder has been changed
    saver = None
    if is_main:
        prepare_folder(folder, overwrite=command.overwrite, settings=run.settings)
        # `last` has this state already, unless an option has changed the settings
        already_saved = checkpoint is not None and checkpoint.settings == run.settings
        saver = Saver(folder, run, say, already_saved=already_saved)

    with closing(Log(run, folder if is_main else None, stop)) as log:
        log.start()
        exit_code = training_loop(run, stop, log, saver)

    if exit_code:
        say(f"stopped and saved at step {run.progress.step:,}; to resume:")
        if run.world.size > 1:
            say(f"  start this with the same torchrun: {shell_command(['train.py', folder])}")
        else:
            say(f"  {script_command('train.py', folder)}")
    else:
        log.end(command)
    return exit_code


def training_loop(run: Run, stop: Stop, log: Log, saver: Saver | None) -> int:
    """Train until the last step, or until the run is asked to stop; return the exit code.

    Only rank 0 has a `saver`; it also logs evaluations.
    """
    world, max_iters = run.world, run.settings.train.max_iters
    while True:
        # once in a while, and at the end: evaluate
        improved = False
        if run.evaluation_due and not stop.requested:
            with suppress(Interrupted):  # a stop was requested; the resumed run evaluates again
                result = evaluate(run, stop)
                improved = run.progress.record_evaluation(result.val_loss, result.train_loss)
                if world.is_main:
                    log.evaluation(result, improved=improved)

        # if one process is asked to stop, or out of patience, all of them stop at this step
        exit_code, out_of_patience = map(int, world.max(stop.exit_code, run.out_of_patience))
        done = exit_code > 0 or out_of_patience > 0 or run.progress.step >= max_iters

        # save if a save is due: all that a resume needs; the best weights have their own file
        if saver:
            saver.save(as_best=improved, final=done)
        if done:
            return exit_code

        # one optimization step; raises NonFiniteError, before the update, if the run has diverged
        result = train_step(run)
        if result.predictions:  # in a tiny batch, all windows can be parts of questions
            log.step(result)


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
