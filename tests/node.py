"""Running the page's code outside a browser, by the Node that the package playwright brings."""

import json
import re
import subprocess
from pathlib import Path

import playwright

from page import export

NODE = next((Path(playwright.__file__).parent / "driver").glob("node*"))
MODEL_OF = (
    "const modelOf = (page) => new GPT(page.config, decodeWeights(page.weights, page.shapes));"
)


def run_node(code: str, given: object) -> object:
    """Run JavaScript with the page's functions and `given`; return what `code` returns.

    `modelOf(page)` is the model of a page.
    """
    source = export.read("model.js") + export.read("text.js") + MODEL_OF
    source += f"const given = {json.dumps(given)};"
    source += f"console.log(JSON.stringify((() => {{ {code} }})()));"
    done = subprocess.run([NODE, "-"], input=source, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def parts_of(page: str) -> dict[str, str]:
    """The scripts of a page by id: data, weights, worker-code, model-code."""
    return dict(re.findall(r'<script [^>]*id="([\w-]+)">(.*?)</script>', page, re.DOTALL))
