"""The page of a model: weights, initial settings and code, in one HTML file.

After a change to the code: python -m page.export docs/plays.html
"""

import base64
import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.files import write_atomic
from configs.schema import ModelConfig, SampleConfig
from data.items import ItemFormat
from data.tokenizer import UNK
from model.generate import last_logits, window_start
from model.gpt import GPT
from model.parameters import load_tensors, named_tensors, parameter_count

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint

FOLDER = Path(__file__).parent
MAX_LENGTH = 10_000  # characters; template.html has the same limit
MAX_CHECKED = 1024  # characters of context in which the page checks itself
# inline scripts that the Content-Security-Policy must allow
SCRIPTS = ("model.js", "text.js", "app.js", "old_browser.js")
PAGE_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens")


def write_page(
    path: Path, checkpoint: "Checkpoint", model: GPT, options: SampleConfig, prompt: str
) -> int:
    """Write the page of a model atomically; return its size in bytes.

    `options` and `prompt` are the initial values in the page. Raises ResourceError if the file
    cannot be written. A model that model.js computes wrongly is not refused here: the page compares
    its logits with `expected_logits` and says so.
    """
    # everything but the weights, as JSON
    shapes, weights = pack_weights(model)
    item_format = ItemFormat.from_settings(checkpoint.settings.data)
    data = {
        "config": asdict(model.config),
        "vocabulary": checkpoint.vocabulary,
        "items": item_format and asdict(item_format),  # None if the text is not a list
        # replaces unknown characters of a scored text
        "unknown": UNK if UNK in checkpoint.vocabulary else None,
        "shapes": shapes,
        "check": expected_logits(model),
        "prompt": prompt or checkpoint.text.question,
        "settings": {name: getattr(options, name) for name in PAGE_SETTINGS}
        | {"max_new_tokens": min(max(1, options.max_new_tokens), MAX_LENGTH)},
        "about": model_summary(checkpoint, model),
    }

    page = fill_template(data, weights)
    write_atomic(path, page)
    return len(page)


def pack_weights(model: GPT) -> tuple[list[tuple[str, list[int]]], bytes]:
    """Return the names and shapes of the parameters, and their values as bytes in the same order.

    The values are float32, little-endian.
    """
    # these names and shapes are the same for every attention layout, so model.js has only one
    arrays = {name: tensor.cpu().float().numpy() for name, tensor in named_tensors(model).items()}

    # concatenated; the shapes say where each array ends
    shapes = [(name, list(array.shape)) for name, array in arrays.items()]
    return shapes, b"".join(array.astype("<f4").tobytes() for array in arrays.values())


def unpack_weights(shapes: list[tuple[str, list[int]]], weights: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of `pack_weights` by name."""
    numbers = np.frombuffer(weights, "<f4").astype(np.float32)
    ends = np.cumsum([np.prod(shape, dtype=int) for _, shape in shapes])
    arrays = np.split(numbers, ends[:-1])
    return {
        name: torch.from_numpy(array.reshape(shape))
        for (name, shape), array in zip(shapes, arrays, strict=True)
    }


def expected_logits(model: GPT) -> dict[str, list]:
    """Return ids, and the logits after some of them, so that a page can check itself.

    The logits are [n, logits after the first n ids]: after one id, after a whole context, and where
    the window has moved. With a context above MAX_CHECKED it does not move.
    """
    # any ids will do: random ones, the same every time
    block_size = model.config.block_size
    length = min(block_size, MAX_CHECKED) + 1
    ids = np.random.default_rng(0).integers(model.vocab_size, size=length)

    # rounded, because the page compares with a tolerance
    logits = []
    for n in sorted({1, length - 1, length}):
        window = ids[window_start(n, block_size) : n]
        logits.append([n, last_logits(model.eval(), window[None])[0].round(5).tolist()])
    return {"ids": ids.tolist(), "logits": logits}


def model_summary(checkpoint: "Checkpoint", model: GPT) -> dict[str, object]:
    """Return what the page shows about the model, without any path."""
    progress = checkpoint.progress
    return {
        "parameters": parameter_count(model),
        "text": re.split(r"[/\\]", checkpoint.text.name)[-1],
        "steps": progress.step,
        "loss": progress.best_loss,
        "loss_step": progress.best_step,
    }


def fill_template(data: dict, weights: bytes) -> bytes:
    """Return the page: the template, filled with the code, its hashes, the data and the weights."""
    parts = {name: read(name) for name in ("style.css", "worker.js", *SCRIPTS)}
    parts["csp"] = content_security_policy(parts)
    # escape `<`, so that HTML finds no tags; JSON decodes it
    parts["data"] = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts["weights"] = base64.b64encode(weights).decode()

    template = read("template.html")
    return re.sub(r"\{\{(.*?)\}\}", lambda slot: parts[slot[1]], template).encode()


def refresh(page: str) -> bytes:
    """Return an exported page with its data and weights, the current code and its logits."""
    parts = dict(re.findall(r'<script type="[^"]*" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    data, weights = json.loads(parts["data"]), base64.b64decode(parts["weights"])

    model = GPT(ModelConfig(**data["config"]), len(data["vocabulary"]))
    load_tensors(model, unpack_weights(data["shapes"], weights))

    data |= {"config": asdict(model.config), "check": expected_logits(model)}
    return fill_template(data, weights)


def content_security_policy(parts: dict[str, str]) -> str:
    """Return a policy that allows only the page's own code and a worker made from it."""
    # a script smuggled in through a text has another hash, so the browser does not run it
    scripts = " ".join(source_hash(parts[name]) for name in SCRIPTS)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {source_hash(parts['style.css'])}; "
        "worker-src blob:; child-src blob:; img-src data:; base-uri 'none'; form-action 'none'"
    )


def source_hash(source: str) -> str:
    """Return the hash of an inline script or style, as a Content-Security-Policy expects it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_atomic(target, refresh(target.read_text(encoding="utf-8")))
