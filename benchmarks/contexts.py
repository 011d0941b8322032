"""Loss of the same weights in shorter contexts: python -m benchmarks.contexts CKPT TEXT

A longer context leaves fewer characters with little text in view, so two losses are comparable only
in the same context. TEXT is scored as `sample.py --score` does, in windows that do not overlap.
"""

import argparse
from pathlib import Path

from checkpointing import load_model
from data.batches import Split, evaluation_windows
from model.runtime import select_runtime
from training.evaluate import batch_size_for, exact_loss


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("ckpt", metavar="CKPT", help="checkpoint or run folder")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text to score")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)

    model, tokenizer = load_model(options.ckpt)
    runtime = select_runtime("cpu", options.dtype)
    ids = tokenizer.encode(options.text.read_bytes().decode("utf-8"))
    split = Split(ids, ((0, len(ids)),))
    print("| context | loss | predictions |\n| ---: | ---: | ---: |")
    for context in options.contexts:
        if context > model.config.block_size:
            parser.error(f"--contexts: {context} is longer than the model's block_size")
        windows = evaluation_windows(split, context, batch_size_for(context, len(tokenizer)))
        loss = exact_loss(model, windows, runtime)
        print(f"| {context} | {loss:.4f} | {len(ids) - 1:,} |", flush=True)


if __name__ == "__main__":
    main()
