"""The training of a character-level GPT on a text: python train.py configs/shakespeare.yaml

From the whole to its parts: `main` trains a run in its folder. `build_run` makes the run, new or
from a checkpoint, `training_loop` goes from step to step, and `train_step` is one step.

On the same machine, a resumed run ends bit-identical to an uninterrupted one. A checkpoint has the
settings and all that accumulates: weights, optimizer state and progress. Everything else is a
function of the seed and the step: batches, dropout and learning rate.
"""

import ctypes
import os
from contextlib import closing, nullcontext, suppress

from configs.command import TrainCommand, parse_train
from storage.checks import check_paths, locked

if __name__ == "__main__":
    # before importing torch, which takes seconds
    COMMAND = parse_train()
    check_paths(COMMAND)
    # idle OpenMP threads soon sleep, so that other programs get the cores; read by torch's import
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # glibc gives large blocks back to the system, which fills them with zeros before the next step
    # gets them again. A process that keeps them takes 0.94 of the time.
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_THRESHOLD, of which glibc up to 2.34 refuses more than 32 MiB; M_TRIM_THRESHOLD
        for option, value in ((-3, 2**25), (-3, 2**30), (-1, 2**31 - 1)):
            mallopt(option, value)

import math
import time
from dataclasses import replace

import numpy as np
import torch

from common.console import say
from configs.schema import Config, TrainConfig
from data.batches import IGNORE_INDEX
from data.corpus import Corpus, load_corpus
from model.gpt import cross_entropy
from storage.checkpoint import load_for_resume, load_for_sampling, restore, restore_weights
from storage.folder import Saver
from storage.log import Log, say_origin
from training.device import Runtime, select_runtime
from training.distributed import World
from training.duration import Timing, settings_for_minutes
from training.evaluate import TOKENS_PER_BATCH, evaluate
from training.samples import sample_texts
from training.state import Run, StepResult, resolve_auto
from training.stop import Stop


def main(command: TrainCommand) -> int:
    """Train the run of a command in its folder; return the exit code."""
    world = World()
    # locked before anything is read: until then, another process may still go on with the run
    with locked(command.folder) if world.is_main else nullcontext():
        run = build_run(command, world)
        # from here on, a signal such as Ctrl-C only sets a flag: the loop saves, then stops
        with Stop(world.is_main) as stop:
            saver = Saver(command, run) if world.is_main else None
            if saver:
                saver.start()  # the first change in the folder
            with closing(Log(command, run)) as log:
                log.start()
                exit_code = training_loop(run, stop, log, saver)
            log.end(exit_code)
    world.close()
    return exit_code


def build_run(command: TrainCommand, world: World) -> Run:
    """Build the run of a command: a new one, or one in the state of its checkpoint."""
    # what it starts from: its own checkpoint, that of another model, or nothing
    checkpoint = None
    if command.mode == "resumed":
        checkpoint = load_for_resume(command.folder)
    elif command.mode == "fine-tuned":
        checkpoint = load_for_sampling(command.init_from)

    # its settings, then what they name: the device and the text
    settings = command.build_settings(checkpoint.settings) if checkpoint else command.config
    runtime = select_runtime(settings.device, settings.dtype)
    world.connect(runtime.device)
    corpus = load_corpus(settings.data, checkpoint.vocabulary if checkpoint else "")
    # ranks on several machines have read their own files
    first_step = checkpoint.progress.step if command.mode == "resumed" else 0
    world.check_same_start(command.mode, first_step, corpus.text.sha256, corpus.val_sha256 or "0")

    # its length, and the numbers that `auto` means for this text and length
    if command.minutes and command.mode != "resumed":
        timing = measure_timing(command, settings, corpus, runtime, world)
        settings = settings_for_minutes(command.minutes, settings, timing, len(corpus.val))
    settings = resolve_auto(settings, corpus)

    # the model, with initial or saved weights, its optimizers and batches
    run = Run(settings, corpus, runtime, world)
    if command.mode == "resumed":
        restore(checkpoint, run)
    elif checkpoint:
        restore_weights(checkpoint, run.model)

    say_origin(command, checkpoint, run)
    return run


def training_loop(run: Run, stop: Stop, log: Log, saver: Saver | None) -> int:
    """Train until the last step, or until the run is asked to stop; return the exit code.

    Only rank 0 has a `saver`; it also logs evaluations.
    """
    world, max_iters = run.world, run.settings.train.max_iters
    while True:
        # once in a while, and at the end: evaluate
        evaluated = run.evaluation_due and not stop.exit_code
        if evaluated:
            result = evaluate(run)
            run.progress.record_evaluation(result.val_loss)
            if world.is_main:
                log.evaluation(result)

        # if one process is asked to stop, or out of patience, all of them stop at this step
        exit_code, out_of_patience = map(int, world.all_max(stop.exit_code, run.out_of_patience))
        done = exit_code > 0 or out_of_patience > 0 or run.progress.step >= max_iters

        # save all that a resume needs, also when a minute has passed
        if saver and (evaluated or done or saver.is_due):
            saver.save(final=done)
        if done:
            return exit_code

        # one optimization step; raises NonFiniteError, before the update, if the run has diverged
        result = train_step(run)
        if result.n_predictions:  # in a tiny batch, all windows can be parts of questions
            log.step(result)


def train_step(run: Run) -> StepResult:
    """Make one optimization step of a run, and count it in `run.progress`.

    Batches and learning rate depend only on the seed and the step, dropout on the rank too. Raises
    NonFiniteError, with the weights unchanged, if the loss or the gradient is not finite.
    """
    began, device = time.perf_counter(), run.runtime.device
    train, progress = run.settings.train, run.progress

    # every rank makes whole batches, so that all know the number of predictions
    n_micro = train.gradient_accumulation_steps
    micro_batches = [run.batches[progress.step * n_micro + i] for i in range(n_micro)]
    # in a tiny batch, all windows can be empty, or parts of questions: then all gradients are 0
    n_predictions = sum(np.count_nonzero(y != IGNORE_INDEX) for _, y in micro_batches)

    # for dropout, so that no generator is saved; the seeds of neighboring steps are unrelated
    seeds = np.random.SeedSequence((run.settings.seed, progress.step, run.world.rank))
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    multiplier = lr_multiplier(progress.step, train)
    for optimizer in run.optimizers:
        optimizer.lr = multiplier * optimizer.peak_lr

    # forward and backward: each micro-batch adds its share to the mean over all predictions
    run.model.train()  # an evaluation leaves the model in evaluation mode
    loss = torch.zeros((), device=device)
    for batch in micro_batches:
        x, y = (torch.from_numpy(ids[run.rank_rows]).to(device) for ids in batch)  # (B, T)
        with run.runtime.autocast():
            logits = run.compiled_model(x)  # (B, T, V)
        micro_loss = cross_entropy(logits, y, "sum") / max(1, n_predictions)
        micro_loss.backward()
        loss += micro_loss.detach()
    # so far, loss and gradients are those of this rank's rows: add those of the other ranks
    run.world.all_sum_([loss, *(p.grad for p in run.model.parameters())])

    # clip
    max_norm = train.grad_clip or math.inf  # with inf, this only measures the norm
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)

    # check, before the update: after it, every weight would be NaN
    loss, grad_norm = torch.stack([loss, grad_norm]).tolist()  # waits for the device, once
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise run.divergence_error(f"loss {loss}, gradient norm {grad_norm}; both must be finite")

    # update
    for optimizer in run.optimizers:
        optimizer.step()
    run.model.zero_grad()
    progress.step += 1  # now the number of this step, counted from 1
    return StepResult(loss, grad_norm, n_predictions, time.perf_counter() - began)


def lr_multiplier(step: int, train: TrainConfig) -> float:
    """Return the learning rate of step 0, 1, ... max_iters - 1 as a fraction of the peak.

    It rises linearly during warm-up. Then `cosine` falls along half a cosine (Loshchilov and Hutter
    2017, SGDR, without restarts); `wsd` (warmup-stable-decay) stays at 1 and then falls linearly
    (Zhai et al. 2022, section 3.5); `constant` stays at 1. Both falls end at min_lr_ratio, just
    after the last step.
    """
    warmup = ratio_to_steps(train.warmup_ratio, train.max_iters)
    cooldown = min(ratio_to_steps(train.cooldown_ratio, train.max_iters), train.max_iters - warmup)

    # warm-up: the first gradients are large, and the optimizer's running averages still unreliable
    if step < warmup:
        return (step + 1) / (warmup + 1)

    # the schedules differ in when they slow down: all the time, at the end, or never
    low = train.min_lr_ratio
    if train.schedule == "cosine":
        # half a cosine: 1 after the warm-up, `low` at step max_iters
        progress = (step - warmup) / (train.max_iters - warmup)
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    if train.schedule == "wsd":
        # before the cooldown, this is more than 1
        fraction_left = (train.max_iters - step) / max(1, cooldown)
        return min(1.0, low + (1 - low) * fraction_left)
    return 1.0


def ratio_to_steps(ratio: float, max_iters: int) -> int:
    """Return a share of `max_iters` steps in whole steps, rounded down."""
    # without the 1e-6, 0.29 of 100 steps would be 28: the product is 28.999999999999996
    return int(ratio * max_iters + 1e-6)


def measure_timing(
    command: TrainCommand, settings: Config, corpus: Corpus, runtime: Runtime, world: World
) -> Timing:
    """Time the start, steps and an evaluation for `--minutes`, with a run that is thrown away.

    All ranks make the same number of steps, and return the times of the slowest one.
    """
    say(f"--minutes={command.minutes:g}: timing steps and an evaluation")
    # a million steps: `dropout: auto`, which takes time, is as large as it can be
    train = replace(settings.train, max_iters=10**6)
    # one batch of the validation text
    val_chars = min(TOKENS_PER_BATCH, settings.data.max_val_chars or TOKENS_PER_BATCH)
    data = replace(settings.data, max_val_chars=val_chars)
    began = time.monotonic()
    settings = resolve_auto(replace(settings, data=data, train=train), corpus)
    probe = Run(settings, corpus, runtime, world)

    def seconds_per_step(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            train_step(probe)
        return (time.perf_counter() - began) / count

    seconds_per_step(1)  # the first step is slow: it allocates memory, and may compile
    build = time.monotonic() - began

    # steps for a twentieth of the time
    step = seconds_per_step(1)
    n_steps = int(world.all_max(min(3 * command.minutes, 30) / step)[0])
    if n_steps > 1:
        step = seconds_per_step(n_steps)

    # an evaluation, and what the log draws of it
    began = time.perf_counter()
    result = evaluate(probe)
    evaluated = time.perf_counter()
    sample_texts(probe, result)
    samples = time.perf_counter() - evaluated
    character = (evaluated - began) / probe.val_excerpt.lengths.sum()

    # the real run takes as long to build
    start = time.monotonic() - command.began + max(0, build - step)
    return Timing(*world.all_max(start, step, samples, character))


if __name__ == "__main__":
    raise SystemExit(main(COMMAND))
