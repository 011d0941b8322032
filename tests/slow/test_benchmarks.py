"""Every benchmark runs, here in its shortest form; what it lacks is named in one line.

benchmarks/trials.py, which compares settings for users, has tests of its own.
"""

import importlib
import re
from dataclasses import replace

import pytest

from benchmarks import attention, baselines, curves, lists, runs, sizes, time_to_loss, tour
from configs.schema import LAYOUTS, DataConfig
from data.corpus import load_corpus
from data.tokenizer import CharTokenizer
from tests.conftest import ROOT
from tests.runs import small_run_args, train

LOSS = r"\d\.\d{4}"
SHORTEST = {  # arguments, and what is printed
    "attention": (
        ["--sizes=toy", "--repeats=1"],
        [rf"^\| {layout} \| sdpa \|( \d+\.\d\d \|){{3}}" for layout in LAYOUTS],
    ),
    "baselines": (
        ["RUN", "--text=TEXT"],
        [rf"^\| modified Kneser-Ney, order 8 \| {LOSS} \|$", rf"^\| .*run \| {LOSS} \|$"],
    ),
    "curves": ([], [r"^Good: best .* at step 2, last ", r"^Too little text: best "]),
    "decode": (
        ["--shapes=small", "--repeats=1"],
        [r"logits of Hugging Face and GPT.forward: differences up to (0.0e.00|\S+e-0[67])$",
         r"inside the window: Hugging Face, threads: 1 +[\d,]+ characters/s  ours is [\d.]+ times"],
    ),
    "lists": (
        ["NAMES", "--seeds", "1", "2"],
        [rf"^\| names, makemore's split \| {LOSS} \| {LOSS} to {LOSS} \| \d\.\d \| about 1.92",
         r"^\| sums of 2 digits, plain \| \d\.\d\d% "],
    ),
    "minutes": (
        ["RESULTS", "--configs"], [rf"^\| shakespeare.yaml \| 5 \| \d+\.\d\d \| {LOSS} \|$"],
    ),
    "sizes": (
        ["SIZES", "--minutes=1", "--sizes=2x64"],
        [rf"^\| 2x64 \| [\d,]+ \| 1 \| 2 \| \d\.\de\+\d\d \| {LOSS} \|$"],
    ),
    "throughput": (["--steps=1", "--shapes=small"], [r"^small  ours +[\d,]+ characters/s"]),
    "time_to_loss": (["--nanogpt=NANOGPT", "--repeats=1"], [r"^mean losses: nanoGPT 1.88.*\d$"]),
    "tour": ([], [rf"^--sources.*: best {LOSS} \(train {LOSS}\) at step 2, last"]),
}  # fmt: skip


@pytest.fixture
def paths(uninterrupted, tmp_path, monkeypatch):
    """What the words of SHORTEST stand for.

    Every training takes two steps, in this process; pictures and models go to another folder.
    """

    def train_two_steps(folder, config, *options):
        lengths = ["--max_iters=2", "--warmup_ratio=0", "--cooldown_ratio=0.5", "--log_interval=1"]
        small = ["--n_layer=1", "--n_embd=16", "--batch_size=2", "--eval_interval=1"]
        small.append("--kernel=auto")  # as in the recipes
        options = [option for option in options if not option.startswith("--minutes")]
        code, output = train(config, *options, *lengths, *small, f"--out_dir={folder}")
        assert code == 0, output

    for module in (runs, curves, lists, sizes, time_to_loss, tour):
        monkeypatch.setattr(module, "train", train_two_steps)
    result = time_to_loss.TrainingResult(100.0, 90.0, 1.88)
    monkeypatch.setattr(time_to_loss, "run_nanogpt_training", lambda folder: result)
    monkeypatch.setattr(curves, "PICTURE", tmp_path / "curves.svg")
    monkeypatch.setattr(tour, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(sizes, "CONFIG", "configs/smoke.yaml")
    monkeypatch.setattr(sizes, "HIGHEST_LOSS", 9.0)
    monkeypatch.setattr(lists, "SUMS", {(100, False): "-"})
    monkeypatch.setattr(attention, "MIN_SECONDS", 1e-9)  # a single call

    data = tmp_path / "nanogpt" / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for name in ("input.txt", "train.bin", "val.bin"):
        (data / name).write_text(f"The {name} of this test.\n" * 100)
    (tmp_path / "nanogpt" / "train.py").touch()
    names = [f"{first}{second}" for first in "abcdefgh" * 20 for second in "aeiouxyz"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    (tmp_path / "results").write_text((ROOT / "docs" / "minutes_amx.jsonl").read_text())
    return {
        "RUN": f"{uninterrupted}",
        "TEXT": f"{uninterrupted.parent}/text.txt",
        "NAMES": f"{tmp_path}/names.txt",
        "RESULTS": f"{tmp_path}/results",
        "SIZES": f"{tmp_path}/sizes",
        "NANOGPT": f"{tmp_path}/nanogpt",
    }


@pytest.mark.parametrize("name", SHORTEST)
def test_every_benchmark_runs_in_its_shortest_form(name, paths, monkeypatch, capsys):
    benchmark = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    words, expected = SHORTEST[name]
    words = [re.sub("[A-Z]{3,}", lambda found: paths[found[0]], word) for word in words]
    benchmark.main(words)
    printed = capsys.readouterr().out
    for part in expected:
        assert re.search(part, printed, re.MULTILINE), f"{part}\n{printed}"


def test_a_file_that_a_benchmark_lacks_is_named_in_one_line(tmp_path):
    for missing, what_to_do in (("train.py", "git clone"), ("train.bin", r"python \S+prepare.py")):
        message = rf"^error: {re.escape(str(tmp_path))}\S+{missing} is missing; {what_to_do}"
        with pytest.raises(SystemExit, match=message):
            time_to_loss.main([f"--nanogpt={tmp_path}"])
        (tmp_path / missing).touch()


def test_the_baselines_of_a_recipe_are_those_of_a_run_on_the_same_text_and_vocabulary(tmp_path):
    words = [*small_run_args(tmp_path), "--fallback=data/plays", "--max_iters=1"]
    assert train(*words, "--warmup_ratio=0", f"--out_dir={tmp_path / 'run'}")[0] == 0
    corpus = load_corpus(DataConfig(sources=(f"{tmp_path}/text.txt",)))
    assert baselines.load_gpt(f"{tmp_path}/run", corpus).vocab_size == len(corpus.tokenizer)
    other = replace(corpus, tokenizer=CharTokenizer(corpus.tokenizer.vocabulary[::-1]))
    with pytest.raises(SystemExit, match="was not trained on the first nine tenths"):
        baselines.load_gpt(f"{tmp_path}/run", other)
