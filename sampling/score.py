"""--score: the loss of a model on a text."""

from common.console import DataError, say
from common.messages import counted
from data.batches import Split, evaluation_windows
from sampling.inputs import read_source
from training.evaluate import BITS_PER_NAT, evaluation_batch_size, position_losses


def score(loaded) -> None:
    """Print the mean loss over every character of a text; a list is scored item by item."""
    item_format, tokenizer = loaded.item_format, loaded.tokenizer
    name, files = read_source(loaded, loaded.options.score)
    texts = item_format.items_of(name, files) if item_format else ["".join(files)]
    # each character is predicted once, except the first of a text
    if not texts or (not item_format and len(texts[0]) < 2):
        raise DataError(f"{name}: nothing to predict; at least 2 known characters are needed")
    encode = tokenizer.encode
    split = item_format.encode_items(texts, encode) if item_format else Split(encode(texts[0]))
    block_size = loaded.model.config.block_size
    windows = evaluation_windows(
        split, block_size, evaluation_batch_size(block_size, len(tokenizer))
    )
    losses = position_losses(loaded.model, windows, loaded.runtime)

    # in nats, and in bits, which other reports use
    line = (
        f"{losses.mean:.4f} nats, {losses.mean * BITS_PER_NAT:.4f} bits per character, over "
        f"{counted(int(losses.counts.sum()), 'prediction')}"
    )
    if item_format:
        per_item = losses.sums.sum() / len(texts)
        line += f"; {per_item:.4f} nats per item, over {counted(len(texts), 'item')}"
    if loaded.answer_after:
        line += f"; {1 - len(losses.wrong_documents) / len(texts):.2%} exact match"
    say(line)
