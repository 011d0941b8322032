"""The page of a model: its weights, the initial settings and the code, in one HTML file.

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

from common.errors import ConfigError, ResourceError
from common.files import atomic_file
from configs.schema import SampleConfig

if TYPE_CHECKING:
    from checkpointing.checkpoint import Checkpoint
    from model.gpt import GPT

FOLDER = Path(__file__).parent
MAX_LENGTH = 10_000  # characters; template.html has the same limit
MAX_WEIGHTS = 100_000_000  # bytes
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens")
# Settings of a model that do not change the results of a trained GPT.
IRRELEVANT = (
    "attention",
    "kernel",
    "dropout",
    "attention_dropout",
    "residual_init",
)


def write_page(
    path: Path, saved: "Checkpoint", model: "GPT", options: SampleConfig, prompt: str
) -> int:
    """Write the page of a model atomically; return its size in bytes.

    `options` and `prompt` are the initial values in the page. Raises ConfigError if the weights do
    not fit, ResourceError if the file cannot be written.
    """
    shapes, weights = pack_weights(model, options.html_dtype)
    data = {
        "config": relevant_settings(saved),
        "vocabulary": saved.vocabulary,
        "shapes": shapes,
        "dtype": options.html_dtype,
        "prompt": prompt,
        "settings": {name: getattr(options, name) for name in SETTINGS}
        | {"max_new_tokens": min(max(1, options.max_new_tokens), MAX_LENGTH)},
        "about": facts(saved, model),
    }
    page = fill_template(data, weights)
    try:
        with atomic_file(path) as file:
            file.write(page)
    except OSError as error:
        raise ResourceError(
            f"{path}: not written ({error.strerror}); "
            f"name a file in a folder with {len(page) / 1e6:,.1f} MB of free space"
        ) from error
    return len(page)


def relevant_settings(saved: "Checkpoint") -> dict[str, object]:
    """Return the model settings that affect the model's results."""
    settings = asdict(saved.config.model)
    return {name: value for name, value in settings.items() if name not in IRRELEVANT}


def pack_weights(model: "GPT", dtype: str) -> tuple[list[tuple[str, list[int]]], bytes]:
    """Return the names and shapes of the parameters, and their values as bytes in this order.

    Raises ConfigError for more than MAX_WEIGHTS bytes, or values too large for float16.
    """
    arrays = {
        name: np.concatenate([view.detach().cpu().float().numpy() for view in slices])
        for name, slices in model.named_slices().items()
    }
    size = sum(array.size for array in arrays.values()) * np.dtype(dtype).itemsize
    if size > MAX_WEIGHTS:
        halves = dtype == "float32" and size <= 2 * MAX_WEIGHTS
        remedy = "--html_dtype=float16 halves them" if halves else "train a smaller model"
        raise ConfigError(
            f"--html: the weights are {size / 1e6:,.1f} MB in {dtype}; "
            f"at most {MAX_WEIGHTS / 1e6:,.0f} MB fit into a page; {remedy}"
        )
    largest = max(float(np.abs(array).max()) for array in arrays.values())
    if largest > float(np.finfo(dtype).max):
        raise ConfigError(
            f"--html_dtype=float16: a weight is {largest:,.0f}, beyond float16; use float32"
        )
    numbers = [array.astype(np.dtype(dtype).newbyteorder("<")) for array in arrays.values()]
    shapes = [(name, list(array.shape)) for name, array in arrays.items()]
    return shapes, b"".join(array.tobytes() for array in numbers)


def facts(saved: "Checkpoint", model: "GPT") -> dict[str, object]:
    """Return the facts about the model that the page shows, without any path."""
    progress = saved.progress
    return {
        "parameters": model.parameter_count(),
        "text": re.split(r"[/\\]", saved.data.name)[-1],
        "steps": progress.step,
        "loss": progress.best_loss,
        "loss_step": progress.best_step,
    }


def fill_template(data: dict, weights: bytes) -> bytes:
    """Return the page: the template, filled with the code, its hashes, the data and the weights."""
    parts = {name: read(name) for name in ("style.css", "model.js", "app.js")}
    parts["csp"] = content_security_policy(parts)
    # escape `<`, so that HTML finds no tags; JSON decodes it
    parts["data"] = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts["weights"] = base64.b64encode(weights).decode()
    template = read("template.html")
    return re.sub(r"\{\{(.*?)\}\}", lambda slot: parts[slot[1]], template).encode()


def refresh(page: str) -> bytes:
    """Return an exported page with its data and weights and the current code."""
    parts = dict(re.findall(r'<script type="[^"]*" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    return fill_template(json.loads(parts["data"]), base64.b64decode(parts["weights"]))


def content_security_policy(parts: dict[str, str]) -> str:
    """Return a policy that allows only the page's own code and a worker made from it."""
    scripts = f"{source_hash(parts['model.js'])} {source_hash(parts['app.js'])}"
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
    target.write_bytes(refresh(target.read_text(encoding="utf-8")))
