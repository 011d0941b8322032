"""Running the page's code outside a browser, by the Node that the package playwright brings."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import playwright

from page import export

DRIVER = Path(playwright.__file__).parent / "driver"
NODE = next(path for path in (DRIVER / "node", DRIVER / "node.exe") if path.exists())
MODEL_OF = """
const modelOf = ({ config, weights, shapes }) =>
  new GPT(config, decodeWeights(weights, shapes));
"""


def run_node(code: str, given: object) -> object:
    """Run JavaScript with the page's functions and `given`; return what `code` returns.

    `modelOf(page)` is the model of a page.
    """
    scripts = export.read("model.js") + export.read("app.js") + MODEL_OF
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("main.js", "given.json", "found.json")]
        main = (
            f"{scripts}\nconst files = require('fs');"
            "const given = JSON.parse(files.readFileSync(process.argv[2]));"
            f"const found = (() => {{ {code} }})();"
            "files.writeFileSync(process.argv[3], JSON.stringify(found));"
        )
        files[0].write_text(main, encoding="utf-8")
        files[1].write_text(json.dumps(given), encoding="utf-8")
        done = subprocess.run([NODE, *files], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(files[2].read_text(encoding="utf-8"))


def parts_of(page: str) -> dict[str, str]:
    """The scripts of a page by id: data, weights, model-code, app-code."""
    return dict(re.findall(r'<script [^>]*id="([\w-]+)">(.*?)</script>', page, re.DOTALL))
