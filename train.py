"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

`build` makes a run, `training_loop` trains it. A checkpoint stores the settings of its run, and
--resume reads them from there.

On the same machine, a resumed run ends bit-identical to an uninterrupted one. A checkpoint has all
that accumulates: weights, optimizer state and progress. Everything else is a function of the seed
and the step: batches, dropout and learning rate.
"""

import os

from configs.command import Command, parse_train

if __name__ == "__main__":
    COMMAND = parse_train()  # importing torch takes seconds: report mistakes before that
    # On a busy machine, waiting OpenMP threads should sleep. OpenMP reads this when torch is
    # imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.console import script_command, shell_command
from common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    counted,
    first_few,
)
from common.files import holds_run, runs_in
from common.stop import Interrupted, Stop
from configs.schema import Config, DataConfig
from data.corpus import Corpus, load_corpus
from data.tokenizer import describe
from run import checkpoint as checkpoints
from run import differences
from run.checkpoint import Checkpoint
from run.folder import CheckpointManager, only_writer, prepare_folder
from run.log import Log, info
from training.device import available_devices, keep_freed_memory, select_runtime
from training.distributed import World
from training.duration import fit_to_minutes
from training.evaluate import evaluate
from training.state import Run
from training.step import TrainStep

# fine-tuning with this share of the parent's learning rates was best on both texts that were tried
FINE_TUNE_FACTOR = 0.3


def main(command: Command) -> int:
    """Train the run of a command; return the exit code."""
    keep_freed_memory()
    folder = command.folder
    with (
        World.from_environment() as world,
        only_writer(folder) if world.is_main else nullcontext(),
    ):
        run, saved = build(command, world)

        # from here on a signal such as Ctrl-C only sets a flag: the loop saves, then stops
        with Stop(verbose=world.is_main) as stop:
            try:
                return train_in_folder(command, run, saved, stop)
            except NonFiniteError as error:
                last = f"the last checkpoint is {folder / checkpoints.LAST}"
                advice = "resume it with a lower learning rate"
                raise NonFiniteError(f"{error}; {last}; {advice}") from None


# --------------------------------------------------------------------------------- building the run


def build(command: Command, world: World) -> tuple[Run, Checkpoint | None]:
    """Build the run of a command: a new one, or that of a checkpoint, which is returned too."""
    saved = checkpoint_to_resume(command)
    run = build_resumed(command, saved, world) if saved else build_new(command, world)
    world.require_equal(
        {
            "max_iters": run.settings.train.max_iters,
            "text": (run.corpus.sha256, run.corpus.val_sha256),
            "dtype": run.config.dtype,
            "step": run.progress.step,
        }
    )
    return run, saved


def checkpoint_to_resume(command: Command) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run.

    Raises ConfigError if a new run would replace one that is there.
    """
    folder = command.folder
    if not command.resumes:
        if holds_run(folder) and not command.overwrite:
            raise ConfigError(
                f"out_dir: {folder} already holds a run; --resume continues it, --overwrite "
                "replaces it, another --out_dir leaves it alone"
            )
        return None

    if not holds_run(folder):
        # the first start of a script that always resumes, or a misspelled --out_dir
        beside = runs_in(folder.parent)
        runs = f"; runs beside it: {first_few(beside)}" if beside else ""
        info(f"{folder} has no run to resume: starting one{runs}")
        return None

    return checkpoints.find(folder, "last", notify=info)


def build_new(command: Command, world: World) -> Run:
    """Build a new run, with weights from the seed or from another model (--init_from)."""
    parent = None
    if command.init_from:
        parent = checkpoints.find(Path(command.init_from), "best", notify=info)
        settings, replaced = differences.fine_tuning_settings(command, parent)
        if replaced:
            info(f"the architecture is that of {parent.path}: {', '.join(replaced)}")
    else:
        settings = command.new_settings()

    runtime = select_runtime(settings.device, settings.dtype)
    world.connect(runtime.device)
    with world.one_rank_first():
        corpus = load_corpus(
            data_settings(command, settings),
            vocabulary=parent.vocabulary if parent else None,
            add_characters=command.new_characters == "add",
        )

    make_run = partial(Run, corpus=corpus, runtime=runtime, world=world)
    if command.minutes:
        settings, timing = fit_to_minutes(command.minutes, command.began, settings, make_run)
        steps = f"{counted(settings.train.max_iters, 'step')} of {timing.step:.3f} s"
        evaluations = f"evaluations of {timing.evaluation:.1f} s"
        info(f"--minutes={command.minutes:g}: {steps}, and {evaluations}")

    run = make_run(settings)
    if parent:
        start_from(run, parent)
    return run


def start_from(run: Run, parent: Checkpoint) -> None:
    """Give a new run the weights of another model; print what its user should know."""
    checkpoints.load_weights(parent, run.model)
    if new := run.corpus.tokenizer.vocabulary[len(parent.vocabulary) :]:
        info(f"new characters ({len(new):,}): {first_few(map(describe, new))}")
    info(
        "note: if the parent was trained on some of this validation text, the validation loss is "
        "too low"
    )

    # suggest lower learning rates, if they are still the parent's
    now, before = run.settings.train, parent.settings.train
    rates = ["learning_rate"]
    if now.optimizer == "muon":
        rates.append("muon_learning_rate")
    if all(getattr(now, name) == getattr(before, name) for name in rates):
        lower = " ".join(f"--{name}={FINE_TUNE_FACTOR * getattr(now, name):g}" for name in rates)
        info(f"note: on two texts, lower learning rates were best for fine-tuning: {lower}")


def build_resumed(command: Command, saved: Checkpoint, world: World) -> Run:
    """Build a run in the state of a checkpoint, and print what has changed since."""
    settings = differences.resumed_settings(command, saved)
    # trained on a GPU, resumed on a laptop
    if settings.device not in ("auto", *available_devices()) and "device" not in command.options:
        info(f"note: no {settings.device.upper()} device on this machine; continuing with auto")
        settings = replace(settings, device="auto")
    if command.minutes:
        info(f"--minutes: the run keeps its {settings.train.max_iters:,} steps")

    runtime = select_runtime(settings.device, settings.dtype)
    world.connect(runtime.device)
    with world.one_rank_first():
        corpus = load_resumed_corpus(command, saved, settings)

    run = Run(settings, corpus, runtime, world)
    checkpoints.restore(saved, run)
    file = command.config_file
    own_settings = f" with its own settings, not those of {file}" if file else ""
    info(f"resuming {command.folder} at step {run.progress.step:,}{own_settings}")

    if lines := differences.unasked_changes(saved, run, command.options):
        info(*lines, "the result will not be bit-identical to that of an uninterrupted run")
    return run


def load_resumed_corpus(command: Command, saved: Checkpoint, settings: Config) -> Corpus:
    """Read the text of a resumed run, which must be the same, wherever it is.

    Raises CheckpointError if it is not, DataError if it is missing.
    """
    # without a separate validation text, a part of the training text was held out
    if settings.data.val_sources and not saved.text.val_sha256 and not command.allow_data_change:
        raise CheckpointError(
            f"{saved.path}: the run began without val_sources; adding them would train it on the "
            "text that it held out; omit them, or allow it with --allow_data_change"
        )
    data = data_settings(command, settings)
    if command.allow_data_change:
        return load_corpus(data, vocabulary=saved.vocabulary)
    try:
        same_text = (saved.text.sha256, saved.text.val_sha256)
        return load_corpus(data, sha256s=same_text, vocabulary=saved.vocabulary)
    except (DataError, CheckpointError) as error:
        folder = command.folder
        moved = f"if it has moved: {script_command('train.py', folder)} --data.sources=PATH"
        new_run = f"to train a new run on another text: --init_from={folder}"
        error.args = (f"{error}; {moved}; {new_run}",)
        raise


def data_settings(command: Command, settings: Config) -> DataConfig:
    """Return the settings of the text; sources from the command line have no fallback."""
    if "data.sources" in command.options and "data.fallback" not in command.options:
        return replace(settings.data, fallback="")
    return settings.data


# -------------------------------------------------------------------------------- training the run


def train_in_folder(command: Command, run: Run, saved: Checkpoint | None, stop: Stop) -> int:
    """Train a run in its folder; print what to do with the result; return the exit code."""
    folder, is_main = command.folder, run.world.is_main
    # up to here, nothing in the folder has been changed
    manager = None
    if is_main:
        prepare_folder(folder, resumed=saved is not None, settings=run.settings)
        # last.safetensors has this state already, unless an option has changed the settings
        already_saved = (
            saved is not None
            and saved.path.name == checkpoints.LAST
            and saved.settings == run.settings
        )
        manager = CheckpointManager(folder, run, info, already_saved=already_saved)

    with closing(Log(run, folder if is_main else None, stop)) as log:
        log.start()
        exit_code = training_loop(run, stop, log, manager)

    if exit_code:
        info(f"stopped and saved at step {run.progress.step:,}; to resume:")
        if run.world.size > 1:
            info(f"  start this with the same torchrun: {shell_command(['train.py', folder])}")
        else:
            info(f"  {script_command('train.py', folder)}")
    else:
        log.end(command)
    return exit_code


def training_loop(run: Run, stop: Stop, log: Log, manager: CheckpointManager | None) -> int:
    """Train until the last step, or until the run is asked to stop; return the exit code.

    Only rank 0 has a `manager`, which saves; it also logs evaluations.
    """
    world, max_iters = run.world, run.config.train.max_iters
    train_step = TrainStep(run)
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
        exit_code, out_of_patience = world.all_max(stop.exit_code, run.out_of_patience)
        done = exit_code > 0 or out_of_patience > 0 or run.progress.step >= max_iters

        # save if a save is due: all that a resume needs; the best weights have their own file
        if manager:
            manager.save(as_best=improved, final=done)
        if done:
            return exit_code

        # one optimization step; raises NonFiniteError, before the update, if the run has diverged
        if result := train_step():  # None if it had no predictions
            log.step(result)


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
