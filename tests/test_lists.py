"""Lists in training and sampling: steps and evaluations of questions, and what sample.py does."""

import re
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from configs.schema import Config, DataConfig, ModelConfig
from data.corpus import load_corpus
from data.tokenizer import UNK
from model.gpt import GPT
from storage.checkpoint import LAST, load_checkpoint
from tests.commands import train_main
from tests.conftest import printed
from tests.runs import run_sample, scalars
from tests.texts import segments_of
from tests.variants import save_model

NAMES = ["ada", "bo", "cyd", "bo", "eve-marie", "fo", "gil", "hedy", "ivo", "jo", "kim", "lea"]
SUMS = [f"{a}+{b}={a + b}" for a in range(12) for b in range(12)]
SMALL = [
    "configs/smoke.yaml", "--dtype=float32", "--n_layer=1", "--n_embd=32", "--n_head=2",
    "--block_size=8", "--batch_size=16", "--log_interval=1",
    "--warmup_ratio=0", "--separator=\\n",
]  # fmt: skip


def trained(folder: Path, items: list[str], *options: str) -> tuple[Path, Path]:
    """Train on a list; return its file and the run folder."""
    text, run = folder / "list.txt", folder / "run"
    text.write_text("\n".join(items))
    assert train_main([*SMALL, f"--sources={text}", f"--out_dir={run}", *options]) == 0
    return text, run


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A run on names."""
    return trained(tmp_path_factory.mktemp("names"), NAMES, "--max_iters=60")


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A run on sums, until some answers are right."""
    options = "--answer_after==", "--max_iters=250", "--val_fraction=0.4"
    return trained(tmp_path_factory.mktemp("sums"), SUMS, *options)


def save_tiny_model(folder: Path, data: DataConfig) -> Path:
    """Save a model that knows the letter a, and that others are rare; return its file."""
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 3)
    return save_model(folder / "a.safetensors", model, f"\na{UNK}", Config(data, model.config))


def test_an_evaluation_reports_the_accuracy_and_shows_wrong_answers(sums):
    _, run = sums
    logged, rows = scalars(run), (run / "metrics.csv").read_text().splitlines()
    accuracy = float(rows[-1].split(",")[-1])
    assert rows[0].endswith(",exact_match") and 0 < accuracy < 1
    assert logged["val/exact_match"][-1][1] == pytest.approx(accuracy, abs=1e-6)
    shown = str(logged["samples/wrong_answers/text_summary"][-1][1])
    answers = re.findall(r"(\d+)\+(\d+)=(\d*) +\(right: (\d+)\)", shown)
    assert len(answers) == 3
    for a, b, answer, right in answers:
        assert answer != right == str(int(a) + int(b))


def test_items_are_printed_one_after_the_other_each_as_it_is_drawn_alone(names):
    lines = run_sample(names[1], "--num_samples=70")[0].splitlines(keepends=True)
    assert len(lines) == 70 and run_sample(names[1], "--sample=7")[0] == lines[6]
    stopped, _ = run_sample(names[1], "--num_samples=30", "--stop=e", "--stop=o")
    assert not set("eo") & set(stopped) and stopped.count("\n") == 30


def test_novel_items_are_whole_new_and_distinct_and_the_first_of_the_seed(names):
    text, run = names
    short = [run, "--prompt=b", "--max_new_tokens=2", "--temperature=2"]  # many twice, many cut
    drawn = run_sample(*short, "--num_samples=300")[0].splitlines()
    whole = [item for item in drawn if len(item) < 3 and item not in NAMES]
    new = list(dict.fromkeys(whole))
    assert len(new) < len(whole) < len(drawn)
    shown, counts = run_sample(*short, f"--novel={text}", "--num_samples=5")
    assert shown.splitlines() == new[:5]
    before = drawn[: drawn.index(new[4])]  # the last one
    known, cut = (sum(map(test, before)) for test in (NAMES.__contains__, lambda x: len(x) == 3))
    twice = len(before) - known - cut - 4
    assert counts == (
        f"5 items; left out: {known} that are in {text}, {twice} drawn twice, {cut} cut\n"
    )
    hot = [run, "--temperature=2", "--max_new_tokens=99"]
    drawn = run_sample(*hot, "--num_samples=300")[0].splitlines()
    stopped, _ = run_sample(*hot, f"--novel={text}", "--num_samples=3", "--stop=e", "--stop=a")
    assert stopped and set(stopped.splitlines()) <= set(drawn)  # none is cut by --stop
    _, note = run_sample(run, f"--novel={text}", "--num_samples=2", "--temperature=0")
    assert note.startswith(f"0 items; left out: 200 that are in {text}, ")  # 100 for each
    assert note.endswith("; raise --temperature for more\n")


def test_an_item_that_the_length_has_cut_ends_in_a_line_and_one_that_stop_has_ended_does_not(names):
    line = "cut at 2 characters; --max_new_tokens\n"
    options = [names[1], "--max_new_tokens=2"]
    notes = run_sample(*options, "--num_samples=30")[1]
    alone = [run_sample(*options, f"--sample={i}")[1] for i in range(1, 31)]
    assert notes == "".join(alone) and 0 < alone.count(line) < 30
    assert set(alone) == {"", line}
    assert line in run_sample(*options, "--interactive", stdin=b"a\n" * 30)[1]
    every = [f"--stop={c}" for c in sorted({*"".join(NAMES)})]
    assert run_sample(*options, "--num_samples=30", *every) == ("\n" * 30, "")


def test_an_item_with_rare_characters_is_known_as_the_model_has_read_it(tmp_path):
    saved = save_tiny_model(tmp_path, DataConfig(separator="\\n", min_count=2))
    (tmp_path / "names.txt").write_text("a\xe9\n\xf1\n")
    short, known = [saved, "--max_new_tokens=3"], {UNK, f"a{UNK}"}
    assert known < set(run_sample(*short, "--num_samples=50")[0].splitlines())
    new, _ = run_sample(*short, f"--novel={tmp_path / 'names.txt'}", "--num_samples=3")
    assert len(new.splitlines()) == 3 and not known & set(new.splitlines())


def test_a_typed_line_begins_an_item_and_the_reply_ends_it(names):
    replies, _ = run_sample(names[1], "--interactive", stdin=b"b\n\nh\n")
    expected = [
        run_sample(names[1], f"--sample={i}", f"--prompt={line}")[0].removeprefix(line)
        for i, line in ((1, "b"), (2, ""), (3, "h"))
    ]
    assert replies == "".join(expected)


def test_answers_to_a_pipe_of_questions_stay_beside_them_also_behind_a_wrong_one(sums):
    answers, errors = run_sample(sums[1], "--interactive", stdin=b"3+4=\nsix\n1+1=\n", code=2)
    alone = [run_sample(sums[1], f"--prompt={prompt}")[0][4:] for prompt in ("3+4=", "1+1=")]
    assert answers == f"{alone[0]}\n{alone[1]}" and errors.count("error: ") == 1


def test_score_is_the_loss_of_the_evaluation_per_character_and_per_item(sums, tmp_path):
    _, run = sums
    corpus = load_corpus(load_checkpoint(run / LAST).settings.data)
    held = tmp_path / "held.txt"
    held.write_text("".join(item[1:] for item in segments_of(corpus.val, of=corpus)))
    score, _ = run_sample(run / LAST, f"--score={held}")
    *_, loss, _, accuracy = (run / "metrics.csv").read_text().splitlines()[-1].split(",")
    items, predictions = len(corpus.val.segments), int(score.split("over ")[1].split()[0])
    per_item = float(loss) * predictions / items
    assert score.startswith(f"{float(loss):.4f} nats")
    assert f"{per_item:.4f} nats per item, over {items} items" in score
    assert f"{float(accuracy):.2%} exact match" in score
    held.write_text("\n\n")
    with pytest.raises(DataError, match="nothing to predict"):
        run_sample(run, f"--score={held}")


@pytest.mark.parametrize("option", ["--score", "--novel"])
def test_score_and_novel_take_standard_input_and_all_that_sources_takes(option, names, tmp_path):
    text, run = names
    for number, items in enumerate((NAMES[:5], NAMES[5:])):
        (tmp_path / f"{number}.txt").write_text(" \n".join(items), encoding="utf-8")
    (tmp_path / "c.md").write_text("zoe\n")
    content = text.read_text().replace("\n", "\r\n").encode("utf-16")  # with its mark
    whole = run_sample(run, f"{option}={text}")[0]
    for source in (tmp_path, f"{tmp_path}/*.txt", "-"):
        assert run_sample(run, f"{option}={source}", stdin=content)[0] == whole
    with pytest.raises(DataError, match="no such file or folder; did you mean"):
        run_sample(run, f"{option}={tmp_path / '2.txt'}")


def test_unknown_characters_of_a_prompt_are_mapped_if_the_vocabulary_has_a_character_for_them(
    tmp_path,
):
    saved = save_tiny_model(tmp_path, DataConfig())
    text, line = run_sample(saved, "--prompt=a\xe9\xf1\xe9", "--max_new_tokens=0")
    assert text == f"a{UNK * 3}\n" and line.startswith("mapped to '\ufffd' (U+FFFD): ")
    assert line.endswith("'\xe9' (U+00E9), '\xf1' (U+00F1)\n")
    assert run_sample(saved, "--prompt=a", "--max_new_tokens=0")[1] == ""


def test_answers_are_greedy_unless_a_temperature_is_given(sums):
    question = [sums[1], "--prompt=3+4="]
    (alone,) = {run_sample(*question, f"--seed={seed}")[0] for seed in range(4)}
    assert alone.startswith("3+4=") and alone.count("\n") == 1
    drawn, _ = run_sample(*question, "--num_samples=50", "--temperature=9")
    assert len(set(drawn.splitlines())) > 1


@pytest.mark.parametrize("option", ["--seed=1", "--html=no.html"])
def test_a_prompt_that_is_no_question_or_contains_the_separator_is_refused(option, sums):
    question = load_checkpoint(sums[1] / LAST).text.question
    for prompt, words in {
        "3+4": f"answers questions that end in '='; ask one, such as '{question}'",
        "3+4=7\\n1+1=": "'\\n' ends an item; give the start of one",
    }.items():
        with pytest.raises(ConfigError) as caught:
            run_sample(sums[1], f"--prompt={prompt}", option)
        assert words in printed(caught.value)
