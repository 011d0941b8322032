"""Train a character-level GPT on a text: python train.py configs/shakespeare.yaml

Read it top to bottom: it is the story of a run. Settings are checked before torch is imported, which takes seconds.
"""

import math
import sys
import time
from pathlib import Path

from configs.errors import NonFiniteError, answer, printable
from configs.load import Command, load, train_help
from configs.strict_yaml import to_yaml


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(train_help())
        return 0
    command = load(argv)
    if command.print_config:
        print(to_yaml(command.config), end="")
        return 0
    train(command)
    return 0


def train(command: Command) -> None:
    """One run, from a checked command to its last checkpoint."""
    import torch

    from data.batches import Batches, evaluation_windows
    from data.corpus import check_sizes, load_corpus
    from model.gpt import GPT
    from training import checkpoint as checkpoints
    from training import folder, runtime
    from training.evaluation import BITS, cross_entropy, exact_loss
    from training.monitor import Monitor
    from training.optimizers import set_rate
    from training.run import Run, check_same_model, differences, environment_changes
    from training.schedule import rate

    # ------------------------------------------------------------------ what there is
    config, out = command.config, Path(command.out_dir)
    where = runtime.choose(config.device, config.dtype)
    source, note = folder.open_folder(out, command.resume, command.overwrite)
    if note:
        print(note)
    saved = checkpoints.load(source) if source else None
    parent = checkpoints.load(checkpoints.resolve(Path(command.init_from), "best")[0]) if command.init_from else None
    for origin in (each for each in (saved, parent) if each):
        check_same_model(source or command.init_from, origin.config, config)
    corpus = load_corpus(
        config.data.sources,
        say=print,
        wanted_sha256=saved.data["sha256"] if saved else None,
        vocabulary=next((origin.vocabulary for origin in (saved, parent) if origin), None),
    )
    check_sizes(corpus, config.model.block_size)

    # ---------------------------------------------------- a new run, or one that goes on
    if saved:
        run = Run.resume(saved, config, corpus, where)
    elif parent:
        weights = checkpoints.build_model(parent, ema=parent.ema is not None)
        run = Run(weights.with_attention(config.model.attention, config.model.kernel), config, corpus, where)
    else:
        run = Run(GPT(config.model, len(corpus.tokenizer), config.seed), config, corpus, where)
    model, progress = run.model, run.progress
    (out / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    introduce(run)
    if saved:
        changes = [*differences(saved.config, config).values(), *environment_changes(saved, where)]
        print(f"going on from {printable(source)} at step {progress.step:,}", *changes, sep="; ")
    forward = runtime.compiled(model, print) if config.compile else model

    settings = config.train
    batches = Batches(corpus.train, config.model.block_size, settings.batch_size, config.seed)
    known_text = corpus.train.stretch(len(corpus.val) // 10)
    accumulation = settings.gradient_accumulation_steps
    save_interval = settings.eval_interval if settings.save_interval == "auto" else settings.save_interval
    monitor = Monitor(out, progress.step, settings.max_iters)
    characters, seconds = 0, 0.0  # trained on since the last line of the log

    # --------------------------------------------------------------------- the loop
    while progress.step < settings.max_iters and not run.out_of_patience:
        began = time.perf_counter()
        torch.manual_seed(runtime.step_seed(config.seed, progress.step))  # dropout is a function of the step
        set_rate(run.optimizers, rate(progress.step, settings))
        model.train()
        loss = 0.0
        for part in range(accumulation):
            x, y = (torch.from_numpy(ids).to(where.device) for ids in batches(progress.step * accumulation + part))
            with where.autocast():
                logits = forward(x)
            part_loss = cross_entropy(logits, y) / accumulation
            run.scaler.scale(part_loss).backward()
            loss += part_loss.item()
        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip or math.inf).item()
        if not math.isfinite(loss) or not (math.isfinite(norm) or run.scaler.is_enabled()):
            monitor.close()
            raise NonFiniteError(
                f"step {progress.step + 1}: loss {loss}, gradient norm {norm} at {rate(progress.step, settings):.3g} of "
                f"the peak rate; both must be finite; nothing was saved since, so lower the learning rate and --resume"
            )
        for optimizer in run.optimizers:
            run.scaler.step(optimizer)
            optimizer.zero_grad()
        run.scaler.update()
        progress.step += 1
        if run.average is not None:
            run.update_average()

        # -------------------------------------------------- what is said about it
        step, last = progress.step, progress.step == settings.max_iters
        characters += x.numel() * accumulation
        seconds += time.perf_counter() - began
        if step % settings.log_interval == 0 or step == 1 or last:
            speed = characters / seconds
            monitor.progress(step, loss, speed)
            lr = run.optimizers[0].param_groups[0]["lr"]
            monitor.scalars(
                step,
                {"train/loss": loss, "train/lr": lr, "train/grad_norm": norm, "train/tokens_per_sec": speed},
            )
            characters, seconds = 0, 0.0
        if step % settings.eval_interval == 0 or last:
            windows = (evaluation_windows(split, config.model.block_size, 64) for split in (corpus.val, known_text))
            val_loss, known_loss = (exact_loss(run.best_model, each, where) for each in windows)
            monitor.scalars(step, {"val/loss": val_loss, "val/bpc": val_loss * BITS, "val/train_loss": known_loss})
            better = val_loss < progress.best_loss
            monitor.say(
                f"step {step:,}: train {known_loss:.4f}, validation {val_loss:.4f} "
                f"({val_loss * BITS:.4f} bits per character){', the best so far' if better else ''}"
            )
            if settings.sample_chars:
                monitor.sample(step, sample(run, settings.sample_chars))
            progress.stale = 0 if better else progress.stale + 1
            if better:
                progress.best_loss, progress.best_step = val_loss, step
                checkpoints.save(out / "best.pt", run.checkpoint())
            elif progress.stale == 3 and known_loss < val_loss and not progress.told_overfitting:
                progress.told_overfitting = True
                monitor.say(
                    f"validation has not improved since step {progress.best_step:,} while the training text has: the "
                    "model learns its text by heart; try more dropout, more text or train.patience"
                )
        if step % save_interval == 0 or last or run.out_of_patience:
            checkpoints.save_last(out, run.checkpoint())
            monitor.flush()
    monitor.close()
    print(f"best validation loss {progress.best_loss:.4f} at step {progress.best_step:,}; now try:")
    print(f"  python sample.py --ckpt {printable(out)}")
    print(f"  tensorboard --logdir {printable(out.parent)}")


def introduce(run: "Run") -> None:
    """What a person wants to know before the first step."""
    model, corpus, vocabulary = run.model, run.corpus, len(run.corpus.tokenizer)
    device, dtype = run.runtime.device.type, str(run.runtime.dtype).removeprefix("torch.")
    parameters = model.parameter_count()
    print(f"text        {len(corpus.train):,} characters to train on, {len(corpus.val):,} to validate on")
    print(f"vocabulary  {vocabulary} characters: {printable(corpus.tokenizer.vocabulary[:100])}")
    print(
        f"model       {parameters:,} parameters, {parameters / len(corpus.train):.1f} for each character of text; "
        f"{model.flops_per_token() / 1e6:.1f} million operations to train on one"
    )
    print(f"device      {device}, {dtype} ({run.runtime.reason})")
    print(f"first loss  should be near ln({vocabulary}) = {math.log(vocabulary):.3f}: every character equally likely")


def sample(run: "Run", length: int) -> str:
    """What the model writes now, from a fixed seed: one can watch it improve."""
    import torch

    from model.generate import Sampler, generate

    tokenizer = run.corpus.tokenizer
    start = torch.from_numpy(tokenizer.encode(tokenizer.start).astype("int64"))[None].to(run.runtime.device)
    ids = torch.cat(list(generate(run.best_model, start, Sampler(run.config.seed, temperature=0.8), length)))
    return tokenizer.decode(ids.cpu().numpy())


if __name__ == "__main__":
    sys.exit(answer(main))
