"""Every benchmark is imported, and runs in its shortest form.

benchmarks/trials.py, which compares settings for users, has tests of its own.
"""

import importlib
import re

import pytest

from configs.schema import KERNELS, LAYOUTS
from tests.conftest import ROOT

BENCHMARKS = sorted(path.stem for path in ROOT.glob("benchmarks/[!_]*.py"))
IMPORTED = ("charts", "ngrams", "runs", "timing", "trials")  # no command, or tests of its own
IMPORTED += ("curves", "tour")  # no options: they take half a minute or more
SHORTEST = {  # arguments, with a finished run and its text; parts of the output
    "attention": (
        ["--sizes", "toy", "--repeats", "1"],
        [
            rf"^\| {layout} \| {kernel} \|( \d+\.\d\d \|){{3}}"
            for layout in LAYOUTS
            for kernel in KERNELS
        ],
    ),
    "baselines": (
        ["RUN", "--text=TEXT"],
        [
            r"^\| fixed models \|",
            *(rf"^\| modified Kneser-Ney, order {n} \| \d\.\d{{4}} \|$" for n in range(1, 9)),
            r"^\| overlapping windows \|",
            r"^\| .*run \| \d\.\d{4} \|$",
            r"^\| .*run, dynamic evaluation \| \d\.\d{4} \|$",
        ],
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_in_its_shortest_form(name, train_run, tmp_path, monkeypatch, capsys):
    """Where that takes more than about 5 seconds, it prints its help."""
    if name == "page":
        pytest.importorskip("playwright")
    benchmark = importlib.import_module(f"benchmarks.{name}")
    if name in IMPORTED:
        return
    words, expected = SHORTEST.get(name, (["--help"], [rf"^usage: {name} "]))
    if "RUN" in words:
        assert train_run()[0] == 0
    paths = {"RUN": f"{tmp_path}/run", "--text=TEXT": f"--text={tmp_path}/text.txt"}
    monkeypatch.setattr("sys.argv", [name, *(paths.get(word, word) for word in words)])
    capsys.readouterr()
    try:
        benchmark.main()
    except SystemExit as end:  # after --help
        assert end.code == 0
    printed = capsys.readouterr().out
    for part in expected:
        assert re.search(part, printed, re.MULTILINE), f"{part}\n{printed}"
