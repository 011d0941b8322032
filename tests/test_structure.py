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
PACKAGES = sorted(set.union(*LEVELS[:-1]))
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
FILES += [ROOT / f"{name}.py" for name in sorted(LEVELS[-1])]


def imports_of(path):
    """Return the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def level(module):
    return next(i for i, names in enumerate(LEVELS) if module in names)


def test_packages_are_in_the_order():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "benchmarks", "docs"} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).with_suffix("").parts[0]
    for imported in imports_of(path) & {*PACKAGES, *LEVELS[-1]} - {package}:
        assert level(imported) < level(package), f"{path} imports {imported}"


def test_hornbook_imports_nothing_of_ours():
    ours = {path.stem for path in ROOT.iterdir()}  # all files and folders
    assert not imports_of(ROOT / "hornbook.py") & ours
