"""Every benchmark is imported and runs in its shortest form; its ways to score a text are right.

benchmarks/trials.py, which compares settings for users, and the campaign of benchmarks/minutes.py
have tests of their own.
"""

import importlib
import math
import re
import zlib

import numpy as np
import pytest
import torch

from benchmarks import baselines
from configs.schema import KERNELS, LAYOUTS, ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from model.ngram_model import NgramModel
from model.runtime import select_runtime
from tests.conftest import ROOT
from training.evaluate import exact_loss

V = 7
BENCHMARKS = sorted(path.stem for path in ROOT.glob("benchmarks/[!_]*.py"))
IMPORTED = ("charts", "runs", "timing", "trials")  # no command, or tests of its own
IMPORTED += ("curves", "scale", "startup", "tour")  # no options: they take half a minute or more
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
        ["RUN", "--mixture", "RUN", "RUN", "--text=TEXT"],
        [
            r"^\| fixed models \|",
            *(rf"^\| modified Kneser-Ney, order {n} \| \d\.\d{{4}} \|$" for n in range(1, 9)),
            r"^\| overlapping windows \|",
            r"^\| mixture of .*run, .*run, with n-grams \| \d\.\d{4} \|$",
            r"^\| .*run, dynamic evaluation \| \d\.\d{4} \|$",
        ],
    ),
    "overhead": (
        ["RUN"],
        [r"TensorBoard: \S+% of the time", r"saved in \S+ s, loaded in \S+ s; at most 8 saves: "],
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


# -------------------------------------------------------------------------------------- baselines


def random_ids(length):
    return np.random.default_rng(length).integers(0, V, length).astype(np.uint8)


def random_model(block_size=8):
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=block_size), V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    return model.eval()


@pytest.mark.parametrize("length, block_size", [(2, 8), (9, 8), (10, 8), (40, 8), (40, 7), (9, 1)])
@torch.no_grad()
def test_overlapping_windows_predict_each_character_once_from_at_least_half_a_window(
    length, block_size
):
    model, ids, nats = random_model(block_size), random_ids(length), 0.0
    hop = max(1, block_size // 2)
    for target in range(1, length):
        # the first window that ends with the target or later
        start = max(0, math.ceil((target - block_size) / hop) * hop)
        assert start == 0 or target - start >= block_size / 2
        context = torch.from_numpy(ids[start:target].astype(np.int64))
        nats -= model(context[None])[0, -1].log_softmax(-1)[ids[target]].item()
    found = baselines.overlapping_loss(model, ids)
    assert found == pytest.approx(nats / (length - 1), abs=1e-5)


def test_dynamic_evaluation_scores_each_window_before_it_learns_from_it():
    ids = np.tile(random_ids(9), 12)
    windows = list(evaluation_windows(Split(ids, ((0, len(ids)),)), 8, 1))
    fixed = exact_loss(random_model(), windows, select_runtime("cpu", "float32"))
    assert baselines.dynamic_loss(random_model(), ids, 0.0) == pytest.approx(fixed, abs=1e-5)
    assert baselines.dynamic_loss(random_model(), ids, 0.1) < fixed - 0.1
    first = ids[:9]  # one window: nothing is learned before it
    alone = baselines.dynamic_loss(random_model(), first, 0.0)
    assert baselines.dynamic_loss(random_model(), first, 0.1) == pytest.approx(alone, abs=1e-6)


def test_ngram_loss_is_that_of_the_whole_text_at_once(monkeypatch):
    model, ids = NgramModel(random_ids(300), 4, V), random_ids(90)
    probs = model.probs(ids[None, :-1], 89)[0]
    expected = -np.log(probs[np.arange(89), ids[1:]]).mean()
    for piece in (1, 2, 13, 1000):
        monkeypatch.setattr(baselines, "CHUNK", piece)
        assert baselines.ngram_loss(model, ids) == pytest.approx(expected, abs=1e-6)


def test_compressed_loss_is_what_the_second_text_adds():
    train_text, val_text = b"to be or not to be " * 50, "größe ".encode() * 20
    nats = baselines.compressed_loss(lambda text: len(zlib.compress(text)), train_text, val_text)
    added = len(zlib.compress(train_text + val_text)) - len(zlib.compress(train_text))
    assert nats == pytest.approx(added * 8 * math.log(2) / 120) and 0 < nats < 1


def test_a_checkpoint_that_was_trained_on_another_text_is_refused(smoke, tmp_path):
    (tmp_path / "text.txt").write_text("Another text, which it has not read.\n" * 40)
    with pytest.raises(SystemExit, match="was not trained on the first nine tenths"):
        baselines.main([str(smoke), f"--text={tmp_path / 'text.txt'}"])
