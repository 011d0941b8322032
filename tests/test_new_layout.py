"""A layout of one's own: the class of docs/attention.md, added to a copy of the project by editing
two files, passes the tests that loop over the layouts.
"""

import os
import re
import shutil
import subprocess
import sys

from tests.conftest import ROOT

NAME = "sheaf"
TESTS = [
    "-k", f"{NAME} or exactly_the_layouts or every_run_has or (tour and attention)",
    *(f"tests/test_{module}.py" for module in ("attention", "layouts", "golden", "docs")),
]  # fmt: skip


def insert(path, *pairs):
    """Insert a text after the only match of each regular expression."""
    text = path.read_text(encoding="utf-8")
    for pattern, new in pairs:
        (found,) = re.finditer(pattern, text, re.DOTALL)
        text = text[: found.end()] + new + text[found.end() :]
    path.write_text(text, encoding="utf-8")


def test_a_layout_takes_two_files(tmp_path):
    folder, hidden = tmp_path / "copy", shutil.ignore_patterns(".*", "__pycache__", "out")
    shutil.copytree(ROOT, folder, ignore=hidden)
    tour = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    (layout,) = re.findall(r"^(class \w+\(QKVProjection\):\n.*?)\n\n\n", tour, re.DOTALL | re.M)
    insert(
        folder / "model/attention.py",
        (r"\n\n\n(?=def add_biases\()", f"{layout}\n\n\n"),
        (r"\nLAYOUTS: [^\n]+ = {\n", f'    "{NAME}": GPT2,\n'),
    )
    insert(folder / "configs/schema.py", (r"\nLAYOUTS = \(", f'"{NAME}", '))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *TESTS]
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
