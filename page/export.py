"""The page of a model: weights, initial settings and code, in one HTML file."""

import base64
import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.console import ConfigError
from common.files import write_atomic
from configs.schema import SampleConfig
from data.items import ItemFormat
from model.generate import last_logits, window_start
from model.gpt import GPT
from model.parameters import named_tensors, parameter_count

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint

FOLDER = Path(__file__).parent
TENSORS = re.compile(  # those that model.js reads
    r"(token|position)_embedding|previous_embeddings\.\d+|final_norm|lm_head|blocks\.\d+\."
    r"(attn_norm|attention\.(qkv|out_proj)|mlp_norm|mlp\.(up|down))"
)
MARK = b"<title>Hornbook</title>"  # a file that has it near its beginning may be replaced
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
    cannot be written, ConfigError if it exists and is no such page, or if the model has parameters
    that model.js does not read. Where model.js computes other logits than `expected_logits`, the
    page says so.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and MARK not in path.read_bytes()[:4096]:
        raise ConfigError(f"{path}: exists, and is not a Hornbook page; name another file")
    # everything but the weights, as JSON
    shapes, weights = pack_weights(model)
    if unread := [name for name, _ in shapes if not TENSORS.fullmatch(name)]:
        raise ConfigError(
            f"html: a page runs the architectures of the recipes, without {unread[0]}"
        )
    item_format = ItemFormat.from_settings(checkpoint.settings.data)
    data = {
        "config": asdict(model.config),
        "vocabulary": checkpoint.vocabulary,
        "items": item_format and asdict(item_format),  # None if the text is not a list
        "shapes": shapes,
        "check": expected_logits(model),
        "prompt": prompt or checkpoint.text.get("question", ""),
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
        "text": re.split(r"[/\\]", checkpoint.text.get("name", ""))[-1],
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
