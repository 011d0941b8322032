"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

`train` sets a run up, `loop` is the training loop. Settings are checked before torch is imported,
because that import takes seconds.
"""

import sys

from common.signals import exit_at_once, handle_signals

if __name__ == "__main__":
    handle_signals(exit_at_once)  # before the imports below, which take a moment

import os
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import (
    NonFiniteError,
    check_address_space,
    check_packages,
    escape,
    first_few,
    output,
    run_script,
)
from common.files import check_name
from common.lock import only_writer
from common.signals import Interrupted, Stop
from configs.cli import Command, load, train_help
from training.distributed import World

TRIAL_ITERS = 10**6  # a max_iters that the trial run of --minutes never reaches

if TYPE_CHECKING:
    from checkpointing.checkpoint import Checkpoint
    from checkpointing.run_dir import CheckpointManager
    from dashboard.report import Report
    from training.runtime import Runtime
    from training.state import Run


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        output(f"{train_help()}\n")
        return 0
    check_packages()
    with Stop() as stop, World(stop, os.environ) as world:
        command = load(argv)
        if command.print_config:
            from configs.strict_yaml import to_yaml

            output(to_yaml(command.config))
            return 0
        world.batch_slice(
            command.config.train.batch_size
        )  # refuse a wrong size before the slow imports
        check_address_space()
        for path in (command.init_from, command.resume):
            if path and path != "auto":
                check_name(path)
        stop.set_time_limit(command.time_limit)
        with only_writer(Path(command.out_dir)) if world.is_main else nullcontext():
            try:
                train(command, stop, world)
            except (NonFiniteError, RuntimeError, MemoryError) as error:
                from checkpointing.failures import raise_user_error

                raise_user_error(error, command, world, began=stop.deferred)
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
    from training import runtime

    # the device, and the other processes
    config, folder = command.config, Path(command.out_dir)
    runtime.keep_freed_memory()
    selected = runtime.select_runtime(config.device, config.dtype, world)
    world.init_process_group(selected.device)
    world.check_same(flat_settings(config))

    # the run: a new one, or the one in a checkpoint
    source, note = world.on_rank_0(run_dir.check_run_dir, command)
    command = resolve(command, source, selected, stop)
    config = command.config
    for line in filter(None, (note, command.note)):
        info(line)
    run, saved, changes = world.local_rank_0_first(build_run, command, source, selected)
    facts = {"data.sha256": run.corpus.sha256, "data.val_sha256": run.corpus.val_sha256}
    world.check_same(facts | {"dtype": selected.dtype, "step": run.progress.step})
    in_place = run_dir.is_in(source, folder)
    with world.raise_on_all():
        if world.is_main:
            run_dir.check_space(folder, run.checkpoint_bytes)
            run_dir.prepare_run_dir(folder, source, config)
            if in_place:
                truncate_events(folder, saved.events)
    if source:
        inexact = ["so it is not the same run to the last bit"] if changes else []
        line = f"resuming from {escape(source)} at step {run.progress.step:,}"
        info("; ".join([line, *changes, *inexact]))

    # training
    stop.defer(verbose=world.is_main)
    log_folder = folder if world.is_main else None
    with closing(Logger(log_folder, run.progress.step, config.train.max_iters)) as logger:
        report = Report(run, logger)
        described = in_place and not changes and (folder / DESCRIPTION).exists()
        report.log_start(describe=not described)
        saved_progress = run.progress if source == folder / run_dir.LAST else None
        manager = run_dir.CheckpointManager(folder, info, logger.position, saved_progress)
        loop(run, stop, report, manager)
    if stop.requested:
        command_line = run_dir.resume_command(folder, world)
        info(f"stopped and saved at step {run.progress.step:,}; to resume:\n  {command_line}")
    else:
        report.log_end(folder, time.monotonic() - stop.started)


def resolve(command: Command, source: Path | None, selected: "Runtime", stop: Stop) -> Command:
    """Replace `kernel: auto` with a kernel, and --minutes with the max_iters that fits the time.

    A run that is resumed from `source` has its max_iters already.
    """
    from checkpointing import checkpoint as checkpoints
    from dashboard.logger import info
    from training.duration import fit_max_iters, measure_speed
    from training.runtime import resolve_kernel

    def with_kernel(command: Command) -> Command:
        model = resolve_kernel(command.config.model, selected)
        return replace(command, config=replace(command.config, model=model))

    def with_max_iters(max_iters: int) -> Command:
        return with_kernel(load(command.arguments, max_iters))

    if not command.minutes:
        return with_kernel(command)
    if source:
        return with_max_iters(checkpoints.load(source).config.train.max_iters)
    began, seconds = time.monotonic(), 60 * command.minutes
    trial, _, _ = build_run(with_max_iters(TRIAL_ITERS), None, selected)
    building = time.monotonic() - began
    speed = measure_speed(trial, seconds, stop)
    left = seconds - (time.monotonic() - stop.started) - building
    max_iters = selected.world.on_rank_0(
        fit_max_iters, speed, left, lambda n: with_max_iters(n).config.train
    )
    info(
        f"--minutes={command.minutes:g}: {speed.step:.3f} s per step, {speed.evaluation:.1f} s per "
        f"evaluation; training with --max_iters={max_iters}, which would repeat this run exactly"
    )
    return with_max_iters(max_iters)


def build_run(
    command: Command, source: Path | None, selected: "Runtime"
) -> tuple["Run", "Checkpoint | None", list[str]]:
    """Start a run, or restore it from `source`; also return its checkpoint and what has changed."""
    from checkpointing import checkpoint as checkpoints
    from dashboard.logger import info
    from data.corpus import check_sizes, load_corpus
    from data.tokenizer import describe
    from model.gpt import GPT
    from training.state import Run

    config = command.config
    saved = checkpoints.load(source) if source else None
    if saved:
        checkpoints.check_resumable(saved)
    parent = None
    if command.init_from:
        parent = checkpoints.load(checkpoints.resolve(Path(command.init_from), "best")[0])
    origin = saved or parent
    if origin:
        checkpoints.check_same_model(source or command.init_from, origin.config, config)
    wanted = saved.data if saved and not command.allow_data_change else {}
    corpus = load_corpus(
        **vars(config.data),
        notify=info,
        wanted_sha256=wanted.get("sha256"),
        wanted_val_sha256=wanted.get("val_sha256"),
        vocabulary=origin.vocabulary if origin else None,
        add_characters=command.new_characters == "add",
    )
    check_sizes(corpus, config.model.block_size)
    if saved:
        changes = [
            *checkpoints.config_changes(saved.config, config).values(),
            *checkpoints.environment_changes(saved, corpus, selected),
        ]
        run = checkpoints.restore(saved, config, corpus, selected)
        if checkpoints.has_other_validation_text(saved, config, corpus):
            run.progress.forget_best()
            changes.append("another validation text, so the best loss is tracked from scratch")
        return run, saved, changes
    if parent:
        vocabulary, known = corpus.tokenizer.vocabulary, len(parent.vocabulary)
        if len(vocabulary) > known:
            added = first_few(describe(c) for c in vocabulary if c not in parent.vocabulary)
            info(
                f"adding {len(vocabulary) - known:,} characters to the vocabulary of {known:,}: "
                f"{added}"
            )
            parent = checkpoints.add_characters(parent, vocabulary, config.seed)
        model = checkpoints.build_model(parent, config.model)
    else:
        model = GPT(config.model, len(corpus.tokenizer), config.seed)
    return Run(model, config, corpus, selected), None, []


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
            world.on_rank_0(manager.save, run, best=improved, last=last, final=done)
        if done and not stop.requested:
            world.on_rank_0(manager.remove_prev)
        if done:
            return

        # one optimization step
        report.log_step(step())


if __name__ == "__main__":
    sys.exit(run_script(main))
