"""What an environment lacks is one line: an older Python, a missing package."""

import re

import pytest


@pytest.mark.parametrize("module", ["torch", "yaml"])
def test_a_missing_package_is_one_line_that_names_the_requirements(module, run, tmp_path):
    missing = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    (tmp_path / f"{module}.py").write_text(missing)
    words = ["train.py", "configs/smoke.yaml", f"--out_dir={tmp_path / 'run'}"]
    done = run(*words, check=5, PYTHONPATH=str(tmp_path))
    assert not done.stdout and not (tmp_path / "run").exists()
    line = rf"error: No module named '{module}'; `make train` .* \.venv/bin/python -m pip .*\n"
    assert re.fullmatch(line, done.stderr)


def test_an_older_python_is_one_line_that_names_both_versions(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.version_info = (3, 10, 12, 'final', 0)\n"
    )
    for script in ("train.py", "sample.py", "convert.py"):
        done = run(script, "--help", check=5, PYTHONPATH=str(tmp_path))
        line = r"error: Hornbook needs Python 3\.11 or newer, but \S+ is Python 3\.10\.12; .*\n"
        assert done.stdout == "" and re.fullmatch(line, done.stderr)
