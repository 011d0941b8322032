"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

`train` sets up a run, `loop` is the training loop. The command line is checked before torch is
imported, because that import takes seconds.

A resumed run ends bit-identical to an uninterrupted one. A checkpoint has all that accumulates:
weights, optimizer state and progress. Everything else is a function of the seed and the step:
batches, dropout and learning rate. Evaluations have random numbers of their own, and an interrupted
evaluation is not recorded but repeated.
"""

import os

from configs.cli import Command, parse_train

if __name__ == "__main__":
    COMMAND = parse_train()  # a mistake is answered before torch, whose import takes seconds
    # On a busy machine, waiting OpenMP threads should sleep. OpenMP reads this when torch is
    # imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from checkpointing import checkpoint as checkpoints
from checkpointing import run_dir
from checkpointing.checkpoint import Checkpoint
from checkpointing.failures import raise_if_user_error
from checkpointing.run_dir import CheckpointManager, only_writer
from common.errors import CheckpointError, NonFiniteError, first_few
from common.signals import Interrupted, Stop
from configs.scaling import changed_lengths, resolve_auto, scaled_to, scaling_note
from configs.schema import Config, ModelConfig, TrainConfig, flat_settings
from dashboard.event_file import truncate_events
from dashboard.logger import Logger, info
from dashboard.report import Report
from data.corpus import check_sizes, load_corpus
from data.tokenizer import describe
from model.gpt import GPT
from model.runtime import Runtime, select_runtime
from training.distributed import World
from training.duration import Speed, fit_to_time, measure_speed
from training.environment import keep_freed_memory, resolve_kernel
from training.evaluate import evaluate
from training.state import Run, training_batches
from training.step import TrainStep

TRAINED_ON_VALIDATION = (
    "it was trained on some of the validation text, so the validation loss is too low"
)
LEARNING_RATES = {"adamw": ["learning_rate"], "muon": ["learning_rate", "muon_learning_rate"]}
FINE_TUNING = 0.3  # of the parent's learning rates: the best fraction on two texts, see docs/log.md
TRIAL_ITERS = 10**6  # a max_iters that the trial run of --minutes never reaches


def main(command: Command) -> int:
    """Run a command; return its exit code."""
    # `stop` receives signals such as Ctrl-C, and knows when --time_limit ends the run; `world` is
    # all processes (ranks) of the run, usually this one alone
    with Stop(command.deadline) as stop, World(command.ranks, stop) as world:
        # no other command may write to the run folder meanwhile
        with only_writer(Path(command.out_dir)) if world.is_main else nullcontext():
            try:
                train(command, stop, world)
            except (NonFiniteError, RuntimeError, MemoryError) as error:
                # a diverged loss, or too little memory: one line with what to try
                raise_if_user_error(error, command, world, training_began=stop.signals_deferred)
                raise
        return stop.exit_code


def train(command: Command, stop: Stop, world: World) -> None:
    """Set up a run, train it, and print what to do with the result."""
    # the device, and the other processes
    runtime = connect(command, world)

    # the checkpoint to resume from, or the one to take the weights from
    saved, parent = find_checkpoints(command, world)

    # may this run write to the folder? nothing in it is changed yet
    folder, source = Path(command.out_dir), saved.path if saved else None
    world.on_rank_0(run_dir.check_run_dir, folder, source, command.overwrite)

    # the settings that depend on the device, on the checkpoint and on --minutes
    command = resolve_settings(command, saved, parent, runtime, stop, world)

    # the run: its text, model and optimizers. The first rank of each machine goes ahead: it may
    # download the text. All ranks must then have the same.
    run, changes = world.local_rank_0_first(build_run, command, saved, parent, runtime, world, info)
    world.check_same(
        {
            "data.sha256": run.corpus.sha256,
            "data.val_sha256": run.corpus.val_sha256,
            "dtype": runtime.dtype,
            "step": run.progress.step,
        }
    )

    # the folder again: remove what an earlier run left there, unless this one resumes it
    world.on_rank_0(prepare_folder, folder, saved, run)
    in_place = run_dir.is_in(source, folder)
    saved = parent = None  # frees their tensors
    if source:
        line = f"resuming from {source} at step {run.progress.step:,}"
        inexact = "the result will not be bit-identical to that of an uninterrupted run"
        info("; ".join([line, *changes, inexact] if changes else [line]))

    # Until here, a signal ended the command at once: there was nothing to save. From here on it
    # sets stop.requested, and the loop saves before it returns.
    stop.defer_signals(verbose=world.is_main)

    # train, with a report on the console and in the folder
    log_folder = folder if world.is_main else None
    with closing(Logger(log_folder, run.progress.step, run.config.train.max_iters)) as logger:
        report = Report(run, logger)
        new_model = not (source or command.init_from)
        report.log_start(new_model=new_model, unchanged=in_place and not changes)
        # a run resumed from last.safetensors need not save this state again
        saved_progress = run.progress if source == folder / run_dir.LAST else None
        manager = CheckpointManager(folder, info, logger.position, saved_progress)
        loop(run, stop, report, manager)

    # what to do with the result
    if stop.requested:
        to_resume = command.repeat_command(resume=True)
        info(f"stopped and saved at step {run.progress.step:,}; to resume:", f"  {to_resume}")
    else:
        report.log_end(command)


def loop(run: Run, stop: Stop, report: Report, manager: CheckpointManager) -> None:
    """Train until the last step, or until the run is asked to stop.

    Ctrl-C, other signals and --time_limit set `stop.requested`. A step in progress is finished, an
    evaluation is abandoned, and the run is saved. A second Ctrl-C ends the run without saving.
    With several ranks, they learn of the request together, in a step or an evaluation, so all of
    them stop at the same step.
    """
    world, max_iters = run.world, run.config.train.max_iters
    train_step = TrainStep(run, notify=info)
    while True:
        # every eval_interval steps and at the end, unless it was done before a resume: evaluate
        improved = False
        if run.evaluation_due and not stop.requested:
            with suppress(Interrupted):  # stop.requested is set; the resumed run evaluates again
                result = evaluate(run, stop)
                improved = result.improved
                report.log_evaluation(result)

        # save all that a resume needs: as best when improved; as last every save_interval steps,
        # and at the end
        done = stop.requested or run.out_of_patience or run.progress.step >= max_iters
        if improved or done or run.save_due:
            last = done or run.save_due
            world.on_rank_0(manager.save, run, as_best=improved, as_last=last, final=done)
        if done:
            return

        # one optimization step; raises NonFiniteError, before the update, if the run has diverged
        report.log_step(train_step())


# --------------------------------------------------------------------------------- setting up a run


def connect(command: Command, world: World) -> Runtime:
    """Select the device, and connect to the other ranks, which must have the same settings."""
    keep_freed_memory()
    runtime = select_runtime(command.config.device, command.config.dtype, world.ranks)
    world.init_process_group(runtime.device)
    world.check_same(flat_settings(command.config))
    return runtime


def find_checkpoints(command: Command, world: World) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Load the checkpoint to resume from, or the one to take the weights from (--init_from)."""
    saved = parent = note = None
    folder = Path(command.out_dir)
    # --init_from=PATH, --resume=PATH
    if command.init_from:
        parent, note = checkpoints.find_on_all(world, Path(command.init_from), "best")
    elif command.resume and command.resume != "auto":
        saved, note = checkpoints.find_on_all(world, Path(command.resume), "last")
    # --resume alone: the run in out_dir, if there is one
    elif command.resume and world.on_rank_0(run_dir.holds_run, folder):
        saved, note = checkpoints.find_on_all(world, folder, "last")
    elif command.resume and command.out_dir_given:  # which may be misspelled
        raise CheckpointError(
            f"out_dir: {folder} holds no run to resume; without --resume a new one starts there"
        )
    elif command.resume:
        note = f"nothing to resume in {folder}: starting from the beginning"
    if note:
        info(note)
    return saved, parent


def resolve_settings(
    command: Command,
    saved: Checkpoint | None,
    parent: Checkpoint | None,
    runtime: Runtime,
    stop: Stop,
    world: World,
) -> Command:
    """Replace `kernel: auto` with a kernel, and --minutes with the number of steps that fit."""
    command = command.with_config(model=resolve_kernel(command.config.model, runtime))

    before, note = command.config.train, command.scaling_note
    # --minutes: a resumed run keeps its number of steps, a new one is fitted to the time
    if command.minutes and saved:
        names = ("max_iters", "eval_interval", "save_interval")
        planned = {name: getattr(saved.config.train, name) for name in names}
        command = command.with_config(train=scaled_to(before, planned | command.given_train))
        note = (
            f"--minutes={command.minutes:g}: a resumed run keeps the number of steps that was "
            f"chosen when it began: {command.config.train.max_iters:,}"
        )
    elif command.minutes:
        fitted = fit_to_minutes(command, parent, runtime, stop, world)
        command = command.with_config(train=fitted)
        note = scaling_note(fitted.max_iters, changed_lengths(before, fitted))
    if note:
        info(note)
    return command


def fit_to_minutes(
    command: Command, parent: Checkpoint | None, runtime: Runtime, stop: Stop, world: World
) -> TrainConfig:
    """Time a few steps of a trial run; return the settings of the longest run in --minutes."""
    train, given, seconds = command.config.train, command.given_train, 60 * command.minutes

    def time_trial(model: ModelConfig) -> tuple[Run, Speed, TrainConfig]:
        """Build and time a run of this model; return it, its speed and the settings that fit."""
        began = time.monotonic()
        trial_length = scaled_to(train, given | {"max_iters": TRIAL_ITERS})
        trial_command = command.with_config(train=trial_length, model=model)
        trial, _ = world.local_rank_0_first(
            build_run, trial_command, None, parent, runtime, world, lambda *_: None
        )
        build_seconds = time.monotonic() - began
        speed = measure_speed(trial, seconds, stop)
        # all ranks take the settings that fit on rank 0; the real run has to be built once more
        left = seconds - (time.monotonic() - command.started) - build_seconds
        return trial, speed, world.on_rank_0(fit_to_time, train, given, speed, left)

    # with `dropout: auto`, long runs have dropout, which makes steps slower: time a run without it;
    # if the run that fits would have some, time one with it (if that fits fewer epochs than dropout
    # begins with, the run will end early)
    model = command.config.model
    without_dropout = replace(model, dropout=0.0) if model.dropout == "auto" else model
    trial, speed, fitted = time_trial(without_dropout)
    epochs = trial.batches.epochs(fitted.max_iters * train.gradient_accumulation_steps)
    if resolve_auto(model, epochs).dropout_p > without_dropout.dropout_p:
        _, speed, fitted = time_trial(model)

    # to repeat the run: --max_iters, and the intervals that it alone would scale to other values
    scaled = scaled_to(train, given | {"max_iters": fitted.max_iters})
    to_repeat = {"max_iters": fitted.max_iters} | changed_lengths(scaled, fitted)
    words = " ".join(f"--{name}={value}" for name, value in to_repeat.items())
    info(
        f"--minutes={command.minutes:g}: {fitted.max_iters:,} steps of {speed.step:.3f} s, and "
        f"evaluations of {speed.evaluation:.1f} s; to repeat this run:",
        f"  {words}",
    )
    return fitted


def build_run(
    command: Command,
    saved: Checkpoint | None,
    parent: Checkpoint | None,
    runtime: Runtime,
    world: World,
    notify: Callable[[str], None],
) -> tuple[Run, list[str]]:
    """Restore the run in `saved`, or build a new one, with the weights of `parent` if there is one.

    Also return a line for each difference between the saved run and this one.
    """
    # the checkpoint, if there is one, must fit the model
    config, base = command.config, saved or parent
    if saved:
        checkpoints.check_has_optimizer_state(saved)
        checkpoints.check_fixed_settings(saved, config)
    if base:
        checkpoints.check_same_model(base, config)

    # the text: that of the checkpoint, unless the user allows another one
    same_text = saved.data if saved and not command.allow_data_change else checkpoints.TextInfo()
    corpus = load_corpus(
        config.data,
        sha256s=(same_text.sha256, same_text.val_sha256),
        vocabulary=base.vocabulary if base else None,
        add_characters=command.new_characters == "add",
    )
    check_sizes(corpus, config.model.block_size)

    # `dropout: auto` and `logit_scale: auto` depend on how often this run will read the text
    batches = config.train.max_iters * config.train.gradient_accumulation_steps
    epochs = training_batches(config, corpus).epochs(batches)
    config = replace(config, model=resolve_auto(config.model, epochs))

    # a new run
    if not saved:
        model = initial_model(config, parent, corpus.tokenizer.vocabulary, notify)
        if parent and checkpoints.was_trained_on(parent, config, corpus):
            notify(f"{parent.path}: {TRAINED_ON_VALIDATION}")
        if parent and (options := lower_learning_rates(config.train, parent.config.train)):
            notify(f"note: on two texts, lower learning rates were best for fine-tuning: {options}")
        return Run(model, config, corpus, runtime, world), []

    # a resumed run has the weights, optimizers and progress of the checkpoint; what differs?
    run = checkpoints.restore(saved, config, corpus, runtime, world)
    changes = [
        *checkpoints.config_changes(saved.config, config).values(),
        *checkpoints.learning_rate_changes(saved, config),
        *checkpoints.environment_changes(saved, run),
    ]
    if not checkpoints.best_loss_is_comparable(saved, config, corpus):
        run.progress.forget_best()
        changes.append("validation text or logit_scale differ, so the best loss is reset")
    if checkpoints.was_trained_on(saved, config, corpus):
        changes.append(TRAINED_ON_VALIDATION)
    return run, changes


def lower_learning_rates(train: TrainConfig, parent: TrainConfig) -> str:
    """Return options that lower the learning rates, or "" if they are not those of the parent."""
    names = LEARNING_RATES[train.optimizer]
    if any(getattr(train, name) != getattr(parent, name) for name in names):
        return ""
    return " ".join(f"--{name}={FINE_TUNING * getattr(train, name):g}" for name in names)


def initial_model(
    config: Config, parent: Checkpoint | None, vocabulary: str, notify: Callable[[str], None]
) -> GPT:
    """Build the model of a new run, with the weights of `parent` if there is one (--init_from)."""
    if parent is None:
        return GPT(config.model, len(vocabulary), config.seed)
    new_characters = [c for c in vocabulary if c not in parent.vocabulary]
    if new_characters:
        notify(
            f"adding {len(new_characters):,} characters to the vocabulary of "
            f"{len(parent.vocabulary):,}: {first_few(map(describe, new_characters))}"
        )
        parent = checkpoints.add_characters(parent, vocabulary, config.seed)
    return checkpoints.build_model(parent, config.model)


def prepare_folder(folder: Path, saved: Checkpoint | None, run: Run) -> None:
    """Remove what an earlier run left in the folder, unless this run resumes it; write config.yaml.

    Up to here nothing in the folder has been changed.
    """
    source = saved.path if saved else None
    if note := run_dir.prepare_run_dir(folder, source, run.config):
        info(note)
    # steps after the checkpoint will be repeated: cut the log back to it (Logger does metrics.csv)
    if run_dir.is_in(source, folder):
        truncate_events(folder, saved.events)


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
