"""What an environment lacks is one line: an older Python, a missing package."""

import re

import pytest

from common.files import files_of_run
from tests.conftest import run_command

MISSING = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')"
OLD = "import sys\nsys.version_info = (3, 10, 12)\n"
LINE = "error: No module named '{0}'; `make train` .* pip install .*\n"
OLD_LINE = r"error: Hornbook needs Python 3\.11 or newer, not .*\n"


@pytest.mark.parametrize(
    ("name", "content", "script", "code", "line"),
    [
        ("torch", MISSING.format("torch"), "train.py", 2, LINE.format("torch")),
        ("yaml", MISSING.format("yaml"), "train.py", 2, LINE.format("yaml")),
        *(("sitecustomize", OLD, f"{script}.py", 1, OLD_LINE)
          for script in ("train", "sample", "convert")),
    ],
)  # fmt: skip
def test_requirement_that_is_missing(name, content, script, code, line, tmp_path):
    (tmp_path / f"{name}.py").write_text(content)
    words = ["configs/smoke.yaml", f"--out_dir={tmp_path / 'run'}"] * (script == "train.py")
    done = run_command(script, *words, check=code, PYTHONPATH=str(tmp_path))
    # the folder may be there, which was locked to see if it can be, but no file of a run
    assert not done.stdout and not files_of_run(tmp_path / "run")
    assert re.fullmatch(line, done.stderr)
