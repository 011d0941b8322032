"""Continue a prompt from a checkpoint: python sample.py --ckpt out/shakespeare --prompt "ROMEO:" """

import sys
from collections.abc import Iterator
from pathlib import Path

from configs.errors import answer, printable
from configs.load import load_sample, sample_help
from configs.schema import SampleConfig

BATCH = 64  # samples drawn at once


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(sample_help())
        return 0
    options = load_sample(argv)
    speak(options)
    return 0


def speak(options: SampleConfig) -> None:
    """Load the checkpoint, read the prompt, and print the samples: one as it comes, several one after the other."""
    import torch

    from data.tokenizer import CharTokenizer
    from training import checkpoint as checkpoints
    from training import runtime

    where = runtime.choose(options.device, options.dtype)
    path, note = checkpoints.resolve(Path(options.ckpt), "best")
    if note:
        print(note, file=sys.stderr)
    saved = checkpoints.load(path)
    layout, kernel = (None if name == "saved" else name for name in (options.attention, options.kernel))
    model = checkpoints.build_model(saved, ema=saved.ema is not None).with_attention(layout, kernel)
    model = model.to(where.device, where.dtype).eval()
    tokenizer = CharTokenizer(saved.vocabulary)
    prompt = torch.from_numpy(tokenizer.encode(options.prompt or tokenizer.start).astype("int64")).to(where.device)
    if len(prompt) > model.config.block_size:
        print(f"the prompt has {len(prompt):,} characters, of which the model sees the last ones", file=sys.stderr)

    shown = (lambda text: printable(text, keep="\n\t")) if sys.stdout.isatty() else str
    for first in range(0, options.num_samples, BATCH):
        samples = range(first, min(first + BATCH, options.num_samples))
        ids = characters(model, prompt.expand(len(samples), -1), options, samples)
        if options.num_samples == 1:
            print(shown(options.prompt), end="", flush=True)
            for each in ids:
                print(shown(tokenizer.decode(each)), end="", flush=True)
            print()
        else:
            columns = zip(*ids, strict=True) if options.max_new_tokens else [()] * len(samples)
            for i, column in zip(samples, columns, strict=True):
                print(f"---------- sample {i + 1} ----------\n{shown(options.prompt + tokenizer.decode(column))}")


def characters(model, prompt, options: SampleConfig, samples: range) -> Iterator:
    """The ids of each step, one a sample, as numpy arrays."""
    from model.generate import Sampler, generate

    sampler = Sampler(
        options.seed,
        samples,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    )
    for ids in generate(model, prompt, sampler, options.max_new_tokens, cache=options.cache):
        yield ids.cpu().numpy()


if __name__ == "__main__":
    sys.exit(answer(main))
