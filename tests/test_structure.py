"""The structure of the project: what may import what."""

import ast

import pytest

from tests.conftest import ROOT

# each package may import those in the rows above it
LEVELS = [
    {"common"},
    {"configs"},
    {"model", "data"},
    {"training"},
    {"storage"},
    {"page", "sampling"},
    {"train", "sample", "convert"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
SCRIPTS = LEVELS[-1]


def imports_of(path):
    """Return the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def test_packages_are_in_the_order():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "benchmarks", "docs"} == LEVEL_OF.keys() - SCRIPTS


@pytest.mark.parametrize("name", sorted(LEVEL_OF))
def test_imports_point_one_way(name):
    paths = [ROOT / f"{name}.py"] if name in SCRIPTS else (ROOT / name).glob("*.py")
    for path in paths:
        for imported in imports_of(path) & LEVEL_OF.keys() - {name}:
            assert LEVEL_OF[imported] < LEVEL_OF[name], f"{path} imports {imported}"


def test_hornbook_imports_nothing_of_ours():
    ours = {path.stem for path in ROOT.iterdir()}  # all files and folders
    assert not imports_of(ROOT / "hornbook.py") & ours
