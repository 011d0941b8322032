"""The shape of the project: one subject per package, and imports that point one way."""

import ast
import re

import pytest

from tests.conftest import ROOT

# each package may import those in the rows above it
LEVELS = [
    {"common"},
    {"configs"},
    {"model", "data"},
    {"training"},
    {"checkpointing"},
    {"dashboard", "page"},
    {"train", "sample"},
]
PACKAGES = sorted(set.union(*LEVELS[:-1]))
FILES = [
    *(path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))),
    ROOT / "train.py",
    ROOT / "sample.py",
]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path):
    """The modules of the project that a file imports, anywhere in it."""
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
        same = imported.partition(".")[0] == package
        assert same or level(imported) < level(module), f"{module} imports {imported}"


def test_no_modules_import_each_other_in_a_circle():
    finished, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in finished:
            path.append(module)
            for imported in sorted(IMPORTS[module]):
                visit(imported)
            finished.add(path.pop())

    for module in sorted(MODULES):
        visit(module)
    assert finished == MODULES


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_in_one_sentence_what_belongs_there(package):
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assert re.fullmatch(r"[A-Z][^.]*\.", ast.get_docstring(tree))
    assert len(tree.body) == 1, "no code in __init__.py"


def test_common_holds_four_files_and_no_torch():
    assert sorted(path.stem for path in (ROOT / "common").glob("*.py")) == [
        "__init__", "errors", "files", "lock", "signals",
    ]  # fmt: skip
    for path in (ROOT / "common").glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", ["model", "data", "training"])
def test_libraries_do_not_print(package):
    for path in (ROOT / package).glob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"print", "sys.stdout.write", "sys.stderr.write"}, path


def test_train_and_loop_fit_on_a_screen():
    tree = ast.parse((ROOT / "train.py").read_text(encoding="utf-8"))
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths["train"] < 60 and lengths["loop"] < 45
