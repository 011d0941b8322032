"""What people's own texts are like: each fault that one of them met, with a text of a few lines."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from configs.schema import DataConfig
from data.batches import IGNORED, Batches
from data.corpus import load_corpus
from tests.commands import train_main
from tests.conftest import ROOT

LINES = [
    f"{number}. A line of a note, with the word {number * 37 % 101}.\n" for number in range(60)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def load(*sources: str, **settings):
    return load_corpus(DataConfig(sources=sources, **settings))


def segments_of(corpus) -> list[str]:
    parts = [
        corpus.tokenizer.decode(split.ids[start:end])
        for split in (corpus.train, corpus.val)
        for start, end in split.segments
    ]
    return sorted(parts)


def test_a_folder_of_notes_that_are_shorter_than_the_context_trains(capsys):
    for number in range(12):
        write(f"notes/{number}.md", "".join(LINES[number * 5 : number * 5 + 5]))
    words = ["--data.sources=notes/**/*.md", "--out_dir=run", "--max_iters=1", "--dtype=float32"]
    assert train_main([str(ROOT / "configs/mytext_small.yaml"), *words]) == 0
    assert "to validate on: the last 10% of each of 12 files\n" in capsys.readouterr().out


def test_an_epoch_reads_a_file_of_three_contexts_as_often_as_a_long_one():
    characters = [chr(0x4E00 + i) for i in range(200)]  # all different, so each can be counted
    write("texts/a.txt", "".join(characters[:30])), write("texts/b.txt", "".join(characters[30:]))
    train = load("texts").train
    batches = Batches(train, block_size=8, batch_size=1, seed=1)
    targets = np.concatenate([batches(i)[1].ravel() for i in range(batches.windows_per_epoch)])
    predicted = np.bincount(targets[targets != IGNORED])
    assert predicted.max() == 1 and predicted.sum() == len(train) - 1


@pytest.mark.parametrize("encoding", ["euc-kr", "shift-jis", "cp1251", "gb18030"])
def test_no_encoding_is_guessed_and_each_family_has_an_example(encoding):
    text = {
        "euc-kr": "안녕하세요",
        "shift-jis": "こんにちは",
        "cp1251": "привет",
        "gb18030": "你好",
    }
    with pytest.raises(DataError) as caught:
        load(write("book.txt", (text[encoding] + "\n").encode(encoding) * 20))
    assert f"{encoding} (" in str(caught.value)


def test_a_text_with_carriage_returns_has_lines():
    corpus = load(write("book.txt", "".join(LINES).replace("\n", "\r")))
    assert "\n" in corpus.tokenizer.vocabulary and "\r" not in corpus.tokenizer.vocabulary


def test_tunes_with_two_blank_lines_between_them_begin_with_a_letter():
    tunes = [f"X:{number}\nK:G\nGABc|" for number in range(9)]
    corpus = load(write("tunes.abc", "\n\n\n".join(tunes) + "\n"), separator="\\n\\n")
    assert segments_of(corpus) == sorted(f"\n{tune}\n\n" for tune in tunes)
    assert any("newlines" in line and "8 items" in line for line in corpus.summary)


@pytest.mark.parametrize("end", ["", "\n"])
def test_stories_with_an_end_marker_on_a_line_of_its_own_are_stories_and_nothing_else(end):
    stories = [f"Once there was a fox.\n\nIt ate {number} hens." for number in range(9)]
    marker = "<|endoftext|>"
    text = f"\n{marker}\n".join(stories) + f"\n{marker}{end}"
    corpus = load(write("stories.txt", text), separator=marker)
    assert segments_of(corpus) == sorted(f">{story}{marker}" for story in stories)


def test_of_two_texts_given_as_options_the_one_that_is_not_used_is_named(capsys):
    for name in "ab":
        write(f"{name}.txt", "".join(LINES))
    words = ["--data.sources=a.txt", "--data.sources=b.txt", "--out_dir=run", "--max_iters=1"]
    assert train_main([str(ROOT / "configs/smoke.yaml"), *words, "--warmup_iters=0"]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "b.txt" in line]
    assert note.startswith("note: ") and "not used" in note
