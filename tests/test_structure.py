"""The structure of the project: what may import what, what may print."""

import ast
import graphlib
from pathlib import Path

import pytest

from tests.conftest import ROOT

# each package may import those in the rows above it
LEVELS = [
    {"common"},
    {"configs"},
    {"model", "data"},
    {"training"},
    {"run"},
    {"page"},
    {"train", "sample", "convert"},
]
PACKAGES = sorted(set.union(*LEVELS[:-1]))
FILES = [
    *(path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))),
    ROOT / "train.py",
    ROOT / "sample.py",
    ROOT / "convert.py",
]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path):
    """Return the modules of the project that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in submodules if name in MODULES}
            found |= modules or {node.module}
    return {name for name in found if name in MODULES}


MODULES = {module_of(path) for path in FILES}
IMPORTS = {module_of(path): imports_of(path) for path in FILES}


def level(module):
    return next(i for i, names in enumerate(LEVELS) if module.partition(".")[0] in names)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    package = module.partition(".")[0]
    for imported in IMPORTS[module]:
        same_package = imported.partition(".")[0] == package
        assert same_package or level(imported) < level(module), f"{module} imports {imported}"


def test_there_are_no_import_cycles():
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_hornbook_imports_nothing_of_ours():
    ours = {path.stem for path in ROOT.iterdir()}  # all files and folders
    assert not names_imported(ROOT / "hornbook.py") & ours


def test_nothing_but_its_test_and_the_exercises_imports_hornbook():
    importing = {
        path.relative_to(ROOT)
        for folder in (*PACKAGES, "benchmarks", "docs", "tests", ".")
        for path in (ROOT / folder).glob("*.py" if folder == "." else "**/*.py")
        if "hornbook" in names_imported(path)
    }
    allowed = {Path("tests/test_hornbook.py"), Path("tests/test_exercises.py")}
    assert {path for path in importing if path.parent != Path("docs/exercises")} == allowed


def names_imported(path):
    """Return the first part of the name of each module that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_runs_no_code(package):
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert all(isinstance(node, (ast.ImportFrom, ast.Assign)) for node in tree.body[1:])


@pytest.mark.parametrize("package", ["model", "data", "training"])
def test_libraries_do_not_print(package):
    for path in (ROOT / package).glob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"print", "sys.stdout.write", "sys.stderr.write"}, path
