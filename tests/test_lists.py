"""Lists in training and sampling: steps and evaluations of questions, and what sample.py does."""

import re
from pathlib import Path

import pytest

from common.console import ConfigError, DataError
from data.corpus import load_corpus
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import run_sample, scalars, train
from tests.texts import NAMES, documents_of

SUMS = [f"{a}+{b}={a + b}" for a in range(12) for b in range(12)]
SMALL = [
    "configs/smoke.yaml", "--dtype=float32", "--n_layer=1", "--n_embd=32", "--n_head=2",
    "--block_size=8", "--batch_size=16", "--warmup_ratio=0", "--separator=\\n",
]  # fmt: skip


def trained(folder: Path, items: list[str], *options: str) -> Path:
    """Train on a list, which is written to `folder`; return the run folder in it."""
    text, run = folder / "list.txt", folder / "run"
    text.write_text("\n".join(items))
    assert train(*SMALL, f"--sources={text}", f"--out_dir={run}", *options)[0] == 0
    return run


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The folder of a run on names."""
    return trained(tmp_path_factory.mktemp("names"), NAMES, "--max_iters=30")


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """The folder of a run on sums, until some answers are right."""
    options = "--answer_after==", "--max_iters=150", "--learning_rate=0.04", "--val_fraction=0.4"
    return trained(tmp_path_factory.mktemp("sums"), SUMS, *options)


def test_list_logs_wrong_answers(sums):
    logged, rows = scalars(sums), (sums / "metrics.csv").read_text().splitlines()
    accuracy = float(rows[-1].split(",")[-1])
    assert rows[0].endswith(",val/exact_match") and 0 < accuracy < 1
    assert logged["val/exact_match"][-1][1] == pytest.approx(accuracy, abs=1e-6)
    shown = str(logged["samples/wrong_answers/text_summary"][-1][1])
    answers = re.findall(r"(\d+)\+(\d+)=(\d*) +\(right: (\d+)\)", shown)
    assert len(answers) == 3
    for a, b, answer, right in answers:
        assert answer != right == str(int(a) + int(b))


def test_list_prints_item_after_item(names):
    """Each as it is drawn alone."""
    lines = run_sample(names, "--num_samples=70")[0].splitlines(keepends=True)
    assert len(lines) == 70 and run_sample(names, "--sample=7")[0] == lines[6]
    assert run_sample(names, "--num_samples=30", "--stop=e")[0].count("\n") == 30


def test_novel_items(names):
    """They are whole, new and distinct, and the first of the seed."""
    novel = f"--novel={names.parent}/*.txt"
    short = [names, "--prompt=b", "--max_new_tokens=2", "--temperature=2"]  # many twice, many cut
    drawn = run_sample(*short, "--num_samples=300")[0].splitlines()
    whole = [item for item in drawn if len(item) < 3 and item not in NAMES]
    new = list(dict.fromkeys(whole))
    assert len(new) < len(whole) < len(drawn)
    shown, counts = run_sample(*short, novel, "--num_samples=5")
    assert shown.splitlines() == new[:5]
    assert counts.startswith(f"5 new items of {drawn.index(new[4]) + 1} drawn; ")
    _, note = run_sample(names, novel, "--num_samples=2", "--temperature=0")
    assert note.startswith("0 new items of 200 drawn; ")  # 100 for each
    with pytest.raises(ConfigError, match="sample: --novel of a list draws"):
        run_sample(names, novel, "--sample=2")


def test_answers_stay_beside_questions(sums):
    """Of a pipe, behind a wrong one too."""
    answers, errors = run_sample(sums, "--interactive", stdin=b"3+4=\nsix\n1+1=\n", code=2)
    alone = [run_sample(sums, f"--prompt={prompt}")[0][4:] for prompt in ("3+4=", "1+1=")]
    assert answers == f"{alone[0]}\n{alone[1]}" and errors.count("error: ") == 1


def test_answers_are_greedy(sums):
    """Unless a temperature is given."""
    question = [sums, "--prompt=3+4="]
    (alone,) = {run_sample(*question, f"--seed={seed}")[0] for seed in range(4)}
    assert alone.startswith("3+4=") and alone.count("\n") == 1
    drawn, _ = run_sample(*question, "--num_samples=50", "--temperature=9")
    assert len(set(drawn.splitlines())) > 1


def test_score_of_a_list(sums, tmp_path):
    """The loss of the evaluation, per character and per item."""
    corpus = load_corpus(load_checkpoint(sums / LAST).settings.data)
    held = tmp_path / "held.txt"
    held.write_text("".join(item[1:] for item in documents_of(corpus.val, of=corpus)))
    score, _ = run_sample(sums / LAST, f"--score={tmp_path}/*.txt")
    *_, loss, _, accuracy = (sums / "metrics.csv").read_text().splitlines()[-1].split(",")
    items, predictions = len(corpus.val.documents), int(score.split("over ")[1].split()[0])
    per_item = float(loss) * predictions / items
    ending = f"{per_item:.4f} nats per item, over {items} items; {float(accuracy):.2%} exact match"
    assert score.startswith(f"{float(loss):.4f} nats") and score.endswith(f"; {ending}\n")
    held.write_text("\n\n")
    with pytest.raises(DataError, match="nothing to predict"):
        run_sample(sums, f"--score={held}")


@pytest.mark.parametrize("option", ["--seed=1", "--html=no.html"])
def test_prompt_that_is_no_question(option, sums):
    """Or contains the separator."""
    question = load_checkpoint(sums / LAST).text["question"]
    for prompt, words in {
        "3+4": f"answers questions that end in '='; ask one, such as '{question}'",
        "3+4=7\\n1+1=": "'\\n' ends an item; give the start of one",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            run_sample(sums, f"--prompt={prompt}", option)
