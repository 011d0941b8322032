"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

`build` makes a run, `loop` trains it. A run owns its settings: a checkpoint has them, as they were
asked, and --resume takes them from there.

A resumed run ends bit-identical to an uninterrupted one. A checkpoint has all that accumulates:
weights, optimizer state and progress. Everything else is a function of the seed and the step:
batches, dropout and learning rate.
"""

import os

from configs.command import Command, parse_train

if __name__ == "__main__":
    COMMAND = parse_train()  # a mistake is answered before torch, whose import takes seconds
    # On a busy machine, waiting OpenMP threads should sleep. OpenMP reads this when torch is
    # imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import time
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, NonFiniteError, first_few
from common.stop import Interrupted, Stop
from configs.schema import Config
from data.corpus import Corpus, load_corpus
from data.tokenizer import describe
from run import checkpoint as checkpoints
from run import differences
from run.checkpoint import Checkpoint
from run.folder import (
    CheckpointManager,
    check_folder,
    holds_run,
    only_writer,
    prepare_folder,
)
from run.log import Log, info
from training.device import Runtime, available_devices, keep_freed_memory, select_runtime
from training.distributed import World
from training.duration import fit_to_time, measure_speed
from training.evaluate import evaluate
from training.state import Run
from training.step import TrainStep

FINE_TUNING = 0.3  # of the learning rates of the first training: the best fraction on two texts


def main(command: Command) -> int:
    """Train the run of a command; return the exit code."""
    keep_freed_memory()
    folder = Path(command.out_dir)
    with (
        World.from_environment() as world,
        # no other command may write to the run folder meanwhile
        only_writer(folder) if world.is_main else nullcontext(),
    ):
        run, saved = build(command, world)

        # From here on a signal such as Ctrl-C only sets a flag: the loop saves, then stops.
        with Stop(verbose=world.is_main) as stop:
            try:
                train(command, run, saved, stop)
            except NonFiniteError as error:
                raise NonFiniteError(f"{error}; {after_divergence(command)}") from None
    return stop.exit_code


def train(command: Command, run: Run, saved: Checkpoint | None, stop: Stop) -> None:
    """Train a run in its folder, and print what to do with the result."""
    folder, is_main = Path(command.out_dir), run.world.is_main
    if is_main:
        # up to here nothing in the folder has been changed
        note = prepare_folder(folder, saved and saved.path, run.asked)
        if note:
            info(note)
    with closing(Log(run, folder if is_main else None)) as log:
        log.start(new_model=not (saved or command.init_from))
        # a run resumed from last.safetensors need not save this state again
        resumed_from_last = saved and saved.path == folder / checkpoints.LAST
        saved_progress = run.progress if resumed_from_last else None
        manager = CheckpointManager(folder, info, saved_progress)
        loop(run, stop, log, manager)

    if stop.requested:
        to_resume = command.resume_command()
        info(f"stopped and saved at step {run.progress.step:,}; to resume:", f"  {to_resume}")
    else:
        log.end(command)


def loop(run: Run, stop: Stop, log: Log, manager: CheckpointManager) -> None:
    """Train until the last step, or until the run is asked to stop."""
    world, max_iters = run.world, run.config.train.max_iters
    train_step = TrainStep(run)
    while True:
        # once in a while, and at the end: evaluate
        improved = False
        if run.evaluation_due and not stop.requested:
            with suppress(Interrupted):  # a stop was requested; the resumed run evaluates again
                result = evaluate(run, stop)
                improved = result.improved
                log.evaluation(result)

        # if one process is asked to stop, all of them stop at this step
        if world.any(stop.requested):
            stop.request()
        done = stop.requested or run.out_of_patience or run.progress.step >= max_iters

        # save all that a resume needs, from step 0 on; the best weights have their own file
        if world.is_main:
            manager.save(run, as_best=improved, final=done)
        if done:
            return

        # one optimization step; raises NonFiniteError, before the update, if the run has diverged
        if result := train_step():
            log.step(result)


# --------------------------------------------------------------------------------- building the run


def build(command: Command, world: World) -> tuple[Run, Checkpoint | None]:
    """Build the run of a command: a new one, or one in the state of a checkpoint, also returned."""
    # where do the weights come from: an earlier state of this run, another model, or the seed?
    saved = find_saved(command)
    parent = None
    if command.init_from and not saved:
        parent = load(command.init_from, "best")
    source = saved or parent

    # the settings, as they were asked; those of the checkpoint come first
    asked = resumed_settings(command, saved) if saved else command.new_settings()
    if source:
        differences.check_settings(source, asked, resume=saved is not None)

    # the device, and the other processes
    runtime = select_runtime(asked.device, asked.dtype)
    world.connect(runtime.device)
    world.rows(asked.train.batch_size)  # raises ConfigError unless it can be divided among them

    # the text, in the vocabulary of the weights
    with world.one_rank_first():
        corpus = read_text(command, asked, saved, source)

    # how long?
    if command.minutes and saved:
        info(f"--minutes: the run keeps its {asked.train.max_iters:,} steps")
    elif command.minutes:
        asked = fit_to_minutes(command, asked, corpus, runtime, world)

    # the run itself; all processes must have the same one
    run = Run(asked, corpus, runtime, world)
    if saved:
        resume(command, run, saved)
    else:
        run.options = frozenset(command.options)
        if parent:
            fine_tune(run, parent)
    world.require_equal(
        {
            "max_iters": asked.train.max_iters,
            "text": (corpus.sha256, corpus.val_sha256),
            "dtype": run.config.dtype,
            "step": run.progress.step,
        }
    )
    return run, saved


def load(path: str | Path, prefer: str) -> Checkpoint:
    """Load a checkpoint, of a run folder the preferred one; print which one if that is damaged."""
    saved, note = checkpoints.find(Path(path), prefer)
    if note:
        info(note)
    return saved


def find_saved(command: Command) -> Checkpoint | None:
    """Return the checkpoint to resume from; None for a new run, which must not replace another."""
    folder, saved = Path(command.out_dir), None
    if command.resume and command.resume != "auto":
        saved = load(command.resume, "last")
    elif command.resume and holds_run(folder):
        saved = load(folder, "last")
    elif command.resume:
        beside = [f"{path}" for path in sorted(folder.parent.glob("*")) if holds_run(path)]
        runs = f"; runs beside it: {first_few(beside)}" if beside else ""
        info(f"{folder} has no run to resume: starting one{runs}")
    check_folder(folder, saved and saved.path, command.overwrite)
    return saved


def resumed_settings(command: Command, saved: Checkpoint) -> Config:
    """Return the settings of a resumed run; print where the config file differs from them."""
    try:
        file = command.file_settings()
    except ConfigError as error:
        info(f"note: {error}; the run keeps its own settings")
    else:
        if lines := differences.file_differences(saved, file, command.config_file):
            info(*lines)

    asked = command.resumed_settings(saved.config)
    if asked.device not in ("auto", *available_devices()) and "device" not in command.options:
        info(f"device: no {asked.device.upper()} device on this machine: the run goes on without")
        asked = replace(asked, device="auto")
    return asked


def read_text(
    command: Command, asked: Config, saved: Checkpoint | None, source: Checkpoint | None
) -> Corpus:
    """Read the text; that of a resumed run is where it was, or where the config file says."""
    data, digests = asked.data, (None, None)
    for name in ("sources", "val_sources"):
        if saved and f"data.{name}" not in command.options:
            places = getattr(data, name) + tuple(command.file.get(f"data.{name}", ()))
            data = replace(data, **{name: tuple(dict.fromkeys(places))})
    if saved and not command.allow_data_change:
        digests = (saved.data.sha256, saved.data.val_sha256)
    return load_corpus(
        data,
        sha256s=digests,
        vocabulary=source.vocabulary if source else None,
        add_characters=command.new_characters == "add",
        name_unused="data.sources" in command.options,
    )


def fit_to_minutes(
    command: Command, asked: Config, corpus: Corpus, runtime: Runtime, world: World
) -> Config:
    """Time a few steps of a trial run; return the settings of the longest run in --minutes."""
    # Dropout slows a step, and only long runs have it: time with it. A million steps: the trial
    # never comes to the end of its schedule.
    model = replace(asked.model, dropout=0.1) if asked.model.dropout == "auto" else asked.model
    train = replace(asked.train, max_iters=10**6)
    began, seconds = time.monotonic(), 60 * command.minutes
    trial = Run(replace(asked, model=model, train=train), corpus, runtime, world)
    build_seconds = time.monotonic() - began  # the real run has to be built too
    speed = measure_speed(trial, seconds)
    del trial  # frees its memory
    left = seconds - (time.monotonic() - command.started) - build_seconds
    fitted = world.broadcast(fit_to_time(asked.train, speed, left))
    info(
        f"--minutes={command.minutes:g}: {fitted.max_iters:,} steps of {speed.step:.3f} s, and "
        f"evaluations of {speed.evaluation:.1f} s"
    )
    return replace(asked, train=fitted)


def resume(command: Command, run: Run, saved: Checkpoint) -> None:
    """Put the run into the state of a checkpoint, and print what has changed since."""
    checkpoints.restore(saved, run)
    saved.tensors.clear()  # they have been copied: frees their memory
    run.options = saved.options | command.options.keys()
    info(f"resuming from {saved.path} at step {run.progress.step:,}")
    found = differences.run_differences(saved, run)
    lines = differences.said(found)
    if found.keys() & differences.FORGET_BEST:
        run.progress.forget_best()
        lines.append("earlier validation losses are not comparable: the best loss is reset")
    if found.keys() & {"data.sha256", "data.val_sha256"}:
        lines.append(differences.SEEN_BEFORE)
    if lines:
        info(*lines, "the result will not be bit-identical to that of an uninterrupted run")


def fine_tune(run: Run, parent: Checkpoint) -> None:
    """Give a new run the weights of another model (--init_from)."""
    checkpoints.load_weights(parent, run.model)
    corpus, train = run.corpus, run.asked.train
    if new := corpus.tokenizer.vocabulary[len(parent.vocabulary) :]:
        info(f"{len(new):,} characters are new: {first_few(map(describe, new))}")
    if differences.may_have_seen_validation(parent, run):
        info(differences.SEEN_BEFORE)
    rates = ["learning_rate", *["muon_learning_rate"] * (train.optimizer == "muon")]
    if all(getattr(train, name) == getattr(parent.config.train, name) for name in rates):
        lower = " ".join(f"--{name}={FINE_TUNING * getattr(train, name):g}" for name in rates)
        info(f"note: on two texts, lower learning rates were best for fine-tuning: {lower}")


def after_divergence(command: Command) -> str:
    """Return which checkpoint is left, and what to do."""
    paths = [Path(command.out_dir) / name for name in checkpoints.FALLBACK["last"]]
    if path := next(filter(Path.exists, paths), None):
        return f"the last checkpoint is {path}; resume it with a lower learning rate"
    return "there is no checkpoint yet; lower the learning rate"


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
