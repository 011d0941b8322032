"""A layout of one's own: the class of docs/attention.md, added to a copy of the project by editing
two files, passes the tests that loop over the layouts.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

NAMES = ("sheaf", "gpt2_rows", "z9")  # the first, in the middle, and the last of the table
TESTS = {
    "with its name": [
        "-k", NAMES[0], "tests/test_attention.py", "tests/test_layouts.py", "tests/test_golden.py",
    ],
    "of all names": [
        "tests/test_attention.py::test_the_settings_allow_exactly_the_layouts_and_kernels_of_the_tables",
        "tests/test_docs.py::test_the_code_of_a_tour_runs_from_beginning_to_end[attention]",
        "tests/test_golden.py::test_every_run_has_a_record_of_its_length",
        "tests/test_command.py::test_an_invalid_option_is_rejected_in_one_line",
        "tests/test_command.py::test_a_wrong_config_file_is_one_line_with_the_file_and_the_line",
    ],
}  # fmt: skip


def insert(path, *pairs):
    """Insert a text after the only match of each regular expression."""
    text = path.read_text(encoding="utf-8")
    for pattern, new in pairs:
        (found,) = re.finditer(pattern, text, re.DOTALL)
        text = text[: found.end()] + new + text[found.end() :]
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """A copy of the project with the layout under all names."""
    folder, hidden = tmp_path / "copy", shutil.ignore_patterns(".*", "__pycache__", "out")
    shutil.copytree(ROOT, folder, ignore=hidden)
    tour = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    (layout,) = re.findall(r"^(class \w+\(QKVProjection\):\n.*?)\n\n\n", tour, re.DOTALL | re.M)
    first, middle, last = NAMES  # wherever somebody else's layout may already be
    insert(
        folder / "model/attention.py",
        (r"\n\n\n(?=def add_biases\()", f"{layout}\n\n\n"),
        (r"\nLAYOUTS: [^\n]+ = {\n", f'    "{first}": GPT2,\n'),
        (r'\n    "heads": Heads,\n', f'    "{middle}": GPT2,\n'),
        (r"\nLAYOUTS: [^}]+\n(?=})", f'    "{last}": GPT2,\n'),
    )
    insert(
        folder / "configs/schema.py",
        (r"\nLAYOUTS = \(", f'"{first}", '),
        (r'\nLAYOUTS = [^)]*"heads", ', f'"{middle}", '),
        (r"\nLAYOUTS = [^)]+(?=\))", f', "{last}"'),
    )
    return folder


@pytest.mark.parametrize("tests", TESTS)
def test_a_layout_of_any_name_takes_two_files(tests, copy):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *TESTS[tests]]
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
