"""What an environment lacks is one line: an older Python, a missing package."""

import re

from tests.conftest import run_command


def test_python_is_older(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 12)\n")
    done = run_command("train.py", check=1, PYTHONPATH=str(tmp_path))
    assert re.fullmatch(r"error: Hornbook needs Python 3\.11 or newer, not .*\n", done.stderr)


def test_package_is_missing(tmp_path):
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError('No yaml', name='yaml')")
    done = run_command("train.py", "configs/smoke.yaml", check=2, PYTHONPATH=str(tmp_path))
    assert re.fullmatch("error: No yaml; `make train` .* pip install .*\n", done.stderr)
