"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

`train` sets up a run, `loop` is the training loop. Settings are checked before torch is imported,
because that import takes seconds.

A resumed run ends bit-identical to an uninterrupted one, because nothing depends on what happened
between two checkpoints: batches and dropout are functions of (seed, step), the learning rate of the
step, evaluation draws from no generator of training, and an interrupted one is not recorded.
"""

import sys

from common.signals import exit_at_once, handle_signals

if __name__ == "__main__":
    handle_signals(exit_at_once)  # before the imports below, which take a moment

import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import print_text, run_script
from common.errors import CheckpointError, NonFiniteError, first_few
from common.files import check_path_spelling
from common.lock import only_writer
from common.packages import check_address_space, check_packages
from common.signals import Interrupted, Stop
from configs.cli import Command, load, train_help
from training.distributed import World

TRAINED_ON = "it was trained on some of the validation text, so the validation loss is too low"
TRIAL_ITERS = 10**6  # a max_iters that the trial run of --minutes never reaches

if TYPE_CHECKING:
    from checkpointing.checkpoint import Checkpoint
    from checkpointing.run_dir import CheckpointManager
    from configs.schema import Config
    from dashboard.report import Report
    from model.gpt import GPT
    from training.runtime import Runtime
    from training.state import Run


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print_text(train_help())
        return 0
    check_packages()
    with Stop() as stop, World(stop, os.environ) as world:
        command = load(argv)
        if command.print_config:
            from configs.strict_yaml import to_yaml

            print_text(to_yaml(command.config))
            return 0
        # before the slow imports, refuse a batch size that the number of processes does not divide
        world.batch_slice(command.config.train.batch_size)
        check_address_space()
        resume = command.resume
        if resume == "auto":
            resume = command.out_dir if command.out_dir_given else None
        for path in filter(None, (command.init_from, resume)):
            check_path_spelling(path)
        stop.set_time_limit(command.time_limit)
        with only_writer(Path(command.out_dir)) if world.is_main else nullcontext():
            try:
                train(command, stop, world)
            except (NonFiniteError, RuntimeError, MemoryError) as error:
                from checkpointing.failures import raise_if_user_error

                raise_if_user_error(error, command, world, training_began=stop.signals_deferred)
                raise
        return stop.exit_code


def train(command: Command, stop: Stop, world: World) -> None:
    """Set up a run, train it, and print what to do with the result."""
    # On a busy machine, waiting OpenMP threads should sleep. OpenMP reads this when torch is
    # imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    from checkpointing import run_dir
    from configs.schema import flat_settings
    from dashboard.event_file import DESCRIPTION, truncate_events
    from dashboard.logger import Logger, info
    from dashboard.report import Report
    from training.runtime import keep_freed_memory, select_runtime

    # the device, and the other processes
    config, folder = command.config, Path(command.out_dir)
    keep_freed_memory()
    runtime = select_runtime(config.device, config.dtype, world)
    world.init_process_group(runtime.device)
    world.check_same(flat_settings(config))

    # the checkpoint that the run starts from, if there is one
    base, base_note = find_base(command, world)
    source = base.path if base and command.resume else None  # to resume from
    with world.raise_on_all():
        if world.is_main:
            run_dir.check_run_dir(folder, source, command.overwrite)

    # the settings that depend on the device, on the time and on that checkpoint
    command = resolve_settings(command, base, runtime, stop)
    config = command.config
    for note in filter(None, (base_note, command.scaling_note)):
        info(note)

    # the run: its text, model and optimizers; all ranks must have the same
    run, changes = world.local_rank_0_first(build_run, command, base, runtime, info)
    facts = {"data.sha256": run.corpus.sha256, "data.val_sha256": run.corpus.val_sha256}
    world.check_same(facts | {"dtype": runtime.dtype, "step": run.progress.step})

    # the folder: nothing in it has been changed so far
    in_place = run_dir.is_in(source, folder)
    with world.raise_on_all():
        if world.is_main:
            run_dir.check_space(folder, run.checkpoint_bytes)
            if note := run_dir.prepare_run_dir(folder, source, config):
                info(note)
            if in_place:
                truncate_events(folder, base.events)
    base = None  # frees its tensors

    if source:
        if changes:
            changes += ["so the result will not be bit-identical to that of an uninterrupted run"]
        line = f"resuming from {source} at step {run.progress.step:,}"
        info("; ".join([line, *changes]))

    # training
    stop.defer_signals(verbose=world.is_main)
    log_folder = folder if world.is_main else None
    with closing(Logger(log_folder, run.progress.step, config.train.max_iters)) as logger:
        report = Report(run, logger)
        # the settings and the summary of the text are logged once, in an event file of their own
        already_logged = in_place and not changes and (folder / DESCRIPTION).exists()
        report.log_start(describe=not already_logged)
        # a run resumed from last.safetensors need not save this state again
        saved_progress = run.progress if source == folder / run_dir.LAST else None
        manager = run_dir.CheckpointManager(folder, info, logger.position, saved_progress)
        loop(run, stop, report, manager)
    if stop.requested:
        to_resume = command.repeat_command(world.launcher, resume=True)
        info(f"stopped and saved at step {run.progress.step:,}; to resume:", f"  {to_resume}")
    else:
        report.log_end(command, time.monotonic() - stop.started)


def find_base(command: Command, world: World) -> tuple["Checkpoint | None", str | None]:
    """Return the checkpoint that --resume or --init_from names; return also a note, if any."""
    from checkpointing.checkpoint import find_on_all
    from checkpointing.run_dir import holds_run

    if command.init_from:
        return find_on_all(world, Path(command.init_from), "best")
    if not command.resume:
        return None, None
    if command.resume != "auto":
        return find_on_all(world, Path(command.resume), "last")
    folder = Path(command.out_dir)
    if world.on_rank_0(holds_run, folder):
        return find_on_all(world, folder, "last")
    if command.out_dir_given:
        raise CheckpointError(
            f"out_dir: {folder} holds no run to resume; without --resume a new one starts there"
        )
    return None, f"nothing to resume in {folder}: starting from the beginning"


def resolve_settings(
    command: Command, base: "Checkpoint | None", runtime: "Runtime", stop: Stop
) -> Command:
    """Replace `kernel: auto` with a kernel, and --minutes with the iterations that fit the time.

    With --minutes, a run resumed from the checkpoint `base` keeps the iterations planned there.
    """
    from dashboard.logger import info
    from training.duration import fit_to_time, measure_speed
    from training.runtime import resolve_kernel

    def with_kernel(command: Command) -> Command:
        model = resolve_kernel(command.config.model, runtime)
        return replace(command, config=replace(command.config, model=model))

    def with_limits(max_iters: int, max_evaluations: int | None = None) -> Command:
        return with_kernel(load(command.arguments, {"train.max_iters": max_iters}, max_evaluations))

    if not command.minutes:
        return with_kernel(command)
    if base and command.resume:
        names = ("max_iters", "eval_interval", "save_interval")
        fitted = {f"train.{name}": getattr(base.config.train, name) for name in names}
        return with_kernel(load(command.arguments, fitted))
    began, seconds = time.monotonic(), 60 * command.minutes
    trial, _ = build_run(with_limits(TRIAL_ITERS), base, runtime, notify=lambda *_: None)
    build_seconds = time.monotonic() - began
    speed = measure_speed(trial, seconds, stop)
    left = seconds - (time.monotonic() - stop.started) - build_seconds
    limits = runtime.world.on_rank_0(
        fit_to_time, speed, left, lambda *limits: with_limits(*limits).config.train
    )
    fitted, unlimited = with_limits(*limits), with_limits(limits[0])
    train, other = vars(fitted.config.train), vars(unlimited.config.train)
    options = [f"--max_iters={limits[0]}"]
    options += [f"--{name}={value}" for name, value in train.items() if value != other[name]]
    info(
        f"--minutes={command.minutes:g}: {speed.step:.3f} s per step, {speed.evaluation:.1f} s per "
        f"evaluation; training {limits[0]} steps (to repeat this run exactly: {' '.join(options)})"
    )
    return fitted


def build_run(
    command: Command,
    base: "Checkpoint | None",
    runtime: "Runtime",
    notify: Callable[[str], None],
) -> tuple["Run", list[str]]:
    """Build a new run, with the weights of `base` after --init_from; or restore the run in `base`.

    Also return a line for each difference between the saved run and this one.
    """
    from checkpointing import checkpoint as checkpoints
    from data.corpus import check_sizes, load_corpus
    from training.state import Run

    config = command.config
    saved = base if command.resume else None
    if saved:
        checkpoints.check_has_optimizer_state(saved)
    if base:
        checkpoints.check_same_model(base, config)
    wanted = saved.data if saved and not command.allow_data_change else checkpoints.TextInfo()
    corpus = load_corpus(
        **vars(config.data),
        notify=notify,
        wanted_sha256=wanted.sha256,
        wanted_val_sha256=wanted.val_sha256,
        vocabulary=base.vocabulary if base else None,
        add_characters=command.new_characters == "add",
    )
    check_sizes(corpus, config.model.block_size)
    if saved:
        changes = [
            *checkpoints.config_changes(saved.config, config).values(),
            *checkpoints.learning_rate_changes(saved, config),
            *checkpoints.environment_changes(saved, corpus, runtime),
        ]
        run = checkpoints.restore(saved, config, corpus, runtime)
        if not checkpoints.best_loss_is_comparable(saved, config, corpus):
            run.progress.forget_best()
            changes.append("the validation text differs, so the best loss is reset")
        if checkpoints.was_trained_on(saved, config, corpus):
            changes.append(TRAINED_ON)
        return run, changes
    if base and checkpoints.was_trained_on(base, config, corpus):
        notify(f"{base.path}: {TRAINED_ON}")
    model = initial_model(config, base, corpus.tokenizer.vocabulary, notify)
    return Run(model, config, corpus, runtime), []


def initial_model(
    config: "Config", parent: "Checkpoint | None", vocabulary: str, notify: Callable[[str], None]
) -> "GPT":
    """Build the model of a new run, with the weights of `parent` if there is one (--init_from)."""
    from checkpointing import checkpoint as checkpoints
    from data.tokenizer import describe
    from model.gpt import GPT

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


def loop(run: "Run", stop: Stop, report: "Report", manager: "CheckpointManager") -> None:
    """Train until the last step, or until the run is asked to stop."""
    from dashboard.logger import info
    from training.evaluate import evaluate
    from training.step import TrainStep

    world, max_iters = run.runtime.world, run.config.train.max_iters
    step = TrainStep(run, notify=info)
    while True:
        # every eval_interval steps: evaluate
        improved = False
        if run.evaluation_due and not stop.requested:
            with suppress(Interrupted):  # an interrupted evaluation is redone on resume
                result = evaluate(run, stop)
                improved = result.improved
                report.log_evaluation(result)

        # every save_interval steps, when improved, and at the end: save
        done = stop.requested or run.out_of_patience or run.progress.step >= max_iters
        if improved or done or run.save_due:
            last = done or run.save_due
            world.on_rank_0(manager.save, run, as_best=improved, as_last=last, final=done)
        if done and not stop.requested:
            world.on_rank_0(manager.remove_prev)
        if done:
            return

        # one optimization step
        report.log_step(step())


if __name__ == "__main__":
    sys.exit(run_script(main))
