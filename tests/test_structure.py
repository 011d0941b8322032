"""The structure of the project: what may import what."""

import ast
import graphlib

import pytest

from tests.conftest import ROOT

# each package may import those in the rows above it
LEVELS = [
    {"common"},
    {"configs"},
    {"model", "data"},
    {"training"},
    {"storage"},
    {"page"},
    {"train", "sample", "convert"},
]
PACKAGES = sorted(set.union(*LEVELS[:-1]))
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
FILES += [ROOT / f"{name}.py" for name in sorted(LEVELS[-1])]


def imports_of(path):
    """Return the modules that a file imports, and what it imports from them, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def level(module):
    return next(i for i, names in enumerate(LEVELS) if module.partition(".")[0] in names)


def test_every_package_is_in_the_order_of_imports():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "benchmarks", "docs"} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path):
    package = module_of(path).partition(".")[0]
    for imported in imports_of(path):
        top = imported.partition(".")[0]
        if top in {*PACKAGES, *LEVELS[-1]} - {package}:
            assert level(top) < level(package), f"{path} imports {imported}"


def test_there_are_no_import_cycles():
    modules = {module_of(path): imports_of(path) for path in FILES}
    graphlib.TopologicalSorter({name: modules[name] & modules.keys() for name in modules}).prepare()


def test_hornbook_imports_nothing_of_ours_and_only_its_test_and_the_exercises_import_it():
    ours = {path.stem for path in ROOT.iterdir()}  # all files and folders
    assert not {name.partition(".")[0] for name in imports_of(ROOT / "hornbook.py")} & ours
    readers = {ROOT / "tests" / "test_hornbook.py", ROOT / "tests" / "slow" / "test_exercises.py"}
    others = [*FILES, *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/**/*.py")]
    assert {path for path in others if "hornbook" in imports_of(path)} == readers
