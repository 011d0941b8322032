"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

Read it top to bottom: it is the story of a run. Settings are checked before torch is imported,
which takes seconds.
"""

import math
import os
import sys
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import answer, printable
from common.lock import only_writer
from common.signals import Interrupted, Stop
from configs.cli import Command, load, train_help
from configs.strict_yaml import to_yaml
from training.distributed import Ranks

if TYPE_CHECKING:
    from checkpointing.run_dir import Keeper
    from dashboard.logger import Monitor
    from training.runtime import Runtime
    from training.state import Run

MOST_SKIPPED = 10  # steps in a row that are not finite: more do not pass by themselves


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(train_help())
        return 0
    with Stop() as stop, Ranks(stop, os.environ) as ranks:
        command = load(argv)
        if command.print_config:
            print(to_yaml(command.config), end="")
            return 0
        ranks.rows(command.config.train.batch_size)  # refused now rather than after the start
        stop.within(command.time_limit)
        with only_writer(Path(command.out_dir)) if ranks.first else nullcontext():
            try:
                train(command, stop, ranks)
            except (RuntimeError, MemoryError) as error:
                from checkpointing.failures import explain

                explain(error, command, ranks)
                raise
        return stop.exit_code


def train(command: Command, stop: Stop, ranks: Ranks) -> None:
    """One run, from a checked command to its last checkpoint."""
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "10000"
    )  # on a busy machine threads wait asleep; read as torch loads

    from checkpointing import file_format, run_dir
    from checkpointing.run_dir import Keeper
    from dashboard import event_file
    from dashboard.logger import Monitor, Silence, say
    from dashboard.report import introduce
    from training import runtime
    from training.state import settings

    # ---------------------------------------------------------------- before the first step
    config, out = command.config, Path(command.out_dir)
    runtime.keep_memory()
    where = runtime.choose(config.device, config.dtype, ranks)
    ranks.meet(where.device)
    ranks.check_same(settings(config))
    source, note = ranks.of_first(run_dir.open_folder, out, command.resume, command.overwrite)
    if note:
        say(note)
    run, changes = ranks.in_turn(begin, command, source, where)
    texts = {"data.sha256": run.corpus.sha256, "data.val_sha256": run.corpus.val_sha256}
    ranks.check_same(texts | {"dtype": where.dtype, "step": run.progress.step})
    with ranks.together():
        if ranks.first:
            run_dir.check_space(out, run.bytes)
            file_format.write(out / "config.yaml", to_yaml(config).encode())
            if source:
                event_file.cut_back(out, run.progress.step, run.progress.evaluated)
    if source:
        so = ["so it is not the same run to the last bit"] if changes else []
        say(
            "; ".join(
                [f"going on from {printable(source)} at step {run.progress.step:,}", *changes, *so]
            )
        )

    # ---------------------------------------------------------------- from step to step
    keeper = Keeper(out, say, run.progress if source == out / "last.pt" else None)
    stop.gently(aloud=ranks.first)
    with closing(
        Monitor(out, run.progress.step, config.train.max_iters) if ranks.first else Silence()
    ) as monitor:
        introduce(run, monitor)
        learn(run, stop, monitor, keeper)
    if stop.wanted:
        say(
            f"stopped and saved at step {run.progress.step:,}; this goes on with it:\n  "
            f"{run_dir.going_on(out, ranks)}"
        )
        return
    say(
        f"best validation loss {run.progress.best_loss:.4f} at step {run.progress.best_step:,}; "
        f"now try:"
    )
    say(
        f"  python sample.py --ckpt {printable(out)}\n  tensorboard --logdir "
        f"{printable(out.parent)}"
    )


def begin(command: Command, source: Path | None, where: "Runtime") -> tuple["Run", list[str]]:
    """A new run, or the one that `source` keeps; and what is not as it was then."""
    from checkpointing import checkpoint as checkpoints
    from dashboard.logger import say
    from data.corpus import check_sizes, load_corpus
    from model.gpt import GPT
    from training.state import Run, check_same_model, differences, environment_changes

    config = command.config
    saved = checkpoints.load(source) if source else None
    parent = (
        checkpoints.load(checkpoints.resolve(Path(command.init_from), "best")[0])
        if command.init_from
        else None
    )
    for origin in (each for each in (saved, parent) if each):
        check_same_model(source or command.init_from, origin.config, config)
    wanted = saved.data if saved and not command.allow_data_change else {}
    corpus = load_corpus(
        **vars(config.data),
        say=say,
        wanted_sha256=wanted.get("sha256"),
        wanted_val_sha256=wanted.get("val_sha256"),
        vocabulary=next((origin.vocabulary for origin in (saved, parent) if origin), None),
    )
    check_sizes(corpus, config.model.block_size)
    if saved:
        changes = [
            *differences(saved.config, config).values(),
            *environment_changes(saved, corpus, where),
        ]
        return Run.resume(saved, config, corpus, where), changes
    if parent:
        weights = checkpoints.build_model(parent, ema=parent.ema is not None)
        return Run(
            weights.with_attention(config.model.attention, config.model.kernel),
            config,
            corpus,
            where,
        ), []
    return Run(GPT(config.model, len(corpus.tokenizer), config.seed), config, corpus, where), []


def learn(run: "Run", stop: Stop, monitor: "Monitor", keeper: "Keeper") -> None:
    """The loop: look, keep, learn, tell; until the last step, or until the run is to stop."""
    import torch

    from checkpointing.failures import not_finite
    from dashboard.logger import say
    from dashboard.report import check_step, log, look
    from data.batches import Batches
    from training import runtime
    from training.evaluate import cross_entropy
    from training.health import WINDOW, is_spike
    from training.optimizers import set_rate
    from training.schedule import rate

    config, settings, model, progress = run.config, run.config.train, run.model, run.progress
    device, ranks, accumulation = (
        run.runtime.device,
        run.runtime.ranks,
        settings.gradient_accumulation_steps,
    )
    batches = Batches(run.corpus.train, config.model.block_size, settings.batch_size, config.seed)
    rows, network = ranks.rows(settings.batch_size), ranks.spread(model)
    forward = runtime.compiled(network, say) if config.compile else network
    characters, seconds = 0, 0.0  # trained on since the last line of the log

    while True:
        # ----------------------------------------------------- look: what has it learnt?
        better = False
        if run.evaluation_due and not stop.wanted:
            with suppress(Interrupted):  # left undone, it is made when the run goes on
                better = look(run, stop, monitor)

        # --------------------------------------------------------------- keep: a checkpoint
        done = stop.wanted or run.out_of_patience or progress.step >= settings.max_iters
        if better or done or run.save_due:
            if not run.is_finite:
                raise not_finite(run, keeper, "the weights are no longer finite")
            ranks.of_first(keeper.keep, run, best=better, last=done or run.save_due, final=done)
        if done:
            return

        # ------------------------------------------------------------------ learn: one step
        began = time.perf_counter()
        torch.manual_seed(runtime.step_seed(config.seed, progress.step, ranks.rank))  # of dropout
        set_rate(run.optimizers, rate(progress.step, settings))
        model.train()
        loss = 0.0
        for part in range(accumulation):
            x, y = (
                torch.from_numpy(ids).to(device)
                for ids in batches(progress.step * accumulation + part, rows)
            )
            with ranks.averaging(network, now=part == accumulation - 1):
                with run.runtime.autocast():
                    logits = forward(x)
                part_loss = cross_entropy(logits, y) / accumulation
                run.scaler.scale(part_loss).backward()
            loss += part_loss.item()
        loss = ranks.agree(loss)
        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), settings.grad_clip or math.inf
        ).item()

        finite = math.isfinite(loss) and math.isfinite(norm)
        for optimizer in run.optimizers:
            if finite:
                run.scaler.step(optimizer)
            optimizer.zero_grad()
        overflow_is_answered = run.update_scale()
        fault = not finite and not (overflow_is_answered and math.isfinite(loss))
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if fault else 0
        if progress.skipped_in_a_row > (MOST_SKIPPED if settings.on_nonfinite == "skip" else 0):
            raise not_finite(run, keeper, f"loss {loss}, gradient norm {norm}; both must be finite")
        progress.step += 1
        if finite and run.average is not None:
            run.update_average()

        # -------------------------------------------------------- tell: the log, and what is odd
        step = progress.step
        characters += x.numel() * accumulation * ranks.size
        seconds += time.perf_counter() - began
        if fault:
            progress.skipped += 1
            say(
                f"step {step:,}: loss {loss}, gradient norm {norm}: left out, as "
                f"{progress.skipped:,} in all"
            )
        else:
            if is_spike(loss, progress.losses):
                progress.spikes += 1
                say(
                    f"step {step:,}: loss {loss:.3f} is far above the last {WINDOW}: spike "
                    f"{progress.spikes:,}"
                )
            progress.losses = [*progress.losses[1 - WINDOW :], loss]
            check_step(run, monitor, loss, norm)
        if step % settings.log_interval == 0 or step in (1, settings.max_iters):
            speed = characters / seconds
            characters, seconds = 0, 0.0
            monitor.progress(step, loss, speed)
            log(run, monitor, loss, norm, speed)


if __name__ == "__main__":
    sys.exit(answer(main))
