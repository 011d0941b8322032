"""sample.py from the command line: samples, prompts, stop strings, copied passages and scores."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from common.console import UserError
from common.messages import printable, quoted
from data.batches import Split, evaluation_windows
from sampling.novel import longest_passage
from storage.checkpoint import load_model
from tests.runs import exit_code, run_sample, sample_main
from tests.variants import random_model, save_model
from training.device import select_runtime
from training.evaluate import exact_loss

ROWS = [  # arguments, exit code, words of the line on standard error
    (["--prompt=caf\xe9"], 0, "left out, never read: '\xe9' (U+00E9)"),
    (["--temperature=1e-40", "--top-k=1000000"], 0, ""),
    (["--top-k=1", "--top-p=1e-9", "--min-p=0.999"], 0, ""),
    (["--ckpt=nowhere"], 2, "nowhere: no checkpoint; "),
    (["--score=no/such/file"], 2, "no/such/file: "),
    (["--stop=a", "--stop=\xe9t\xe9"], 0, "stop: the model can never write '\xe9t\xe9'"),
]
HEADING = re.compile(r"-+ sample \d -+\n")


@pytest.fixture
def sample_output(uninterrupted):
    """A function that samples from the trained model: `sample_output("--prompt=a")`."""
    return lambda *words, **options: run_sample(uninterrupted, *words, **options)[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row[0][0][:30]))
def test_sample_option(uninterrupted, capsys, row):
    """What is unusual or wrong is one line."""
    arguments, code, words = row
    ckpt = [f"--ckpt={uninterrupted}"] if "ckpt" not in arguments[0] else []
    assert exit_code(sample_main, [*ckpt, *arguments, "--max-new-tokens=5"]) == code
    message = capsys.readouterr().err
    assert message.count("\n") == bool(words) and words in message


# ------------------------------------------------------------------------------------------ samples


def test_sample_length(sample_output):
    """It is the prompt and max_new_tokens characters."""
    assert sample_output("--prompt=So it:", "--max-new-tokens=0") == "So it:\n"
    text = sample_output("--prompt=So it:", "--max-new-tokens=100")
    assert text.startswith("So it:") and len(text) == len("So it:") + 100 + 1


def test_sample_3_alone(sample_output, monkeypatch):
    """It depends on its number and the seed alone."""
    options = ["--prompt=So ", "--max-new-tokens=60"]
    together = sample_output(*options, "--num-samples=3")
    numbers, texts = HEADING.findall(together), HEADING.split(together)[1:]
    assert numbers == [f"---------- sample {i} ----------\n" for i in (1, 2, 3)]
    assert [sample_output(*options, f"--sample={number}") for number in (1, 2, 3)] == texts
    assert len({*texts, sample_output(*options, "--seed=8")}) == 4
    monkeypatch.setattr(sample, "SAMPLES_PER_BATCH", 2)
    assert sample_output(*options, "--num-samples=3") == together


def test_sample_without_a_prompt(sample_output):
    """It is the text after a newline."""
    text = sample_output("--prompt=", "--max-new-tokens=50")
    assert "\n" + text == sample_output("--prompt=\n", "--max-new-tokens=50")


def test_prompt_with_an_accent(tmp_path):
    """Of two characters: it is composed, unless the model has read both."""
    for vocabulary, text in {"\ncafe\xe9": "caf\xe9", "\ncafe\u0301": "cafe\u0301"}.items():
        path = tmp_path / f"{len(text)}.safetensors"
        save_model(path, random_model(vocab_size=len(vocabulary)), vocabulary)
        words = ["--prompt=cafe\u0301", "--max-new-tokens=0"]
        assert run_sample(path, *words) == (f"{text}\n", "")


def test_sample_of_a_long_prompt(uninterrupted):
    """The end of it counts."""
    prompt, options = "So it is, so be it.\xe9 " * 10, ["--max-new-tokens=20", "--temperature=0"]
    text, notes = run_sample(uninterrupted, f"--prompt={prompt}", *options)
    read = prompt.replace("\xe9", "")
    typed, _ = run_sample(uninterrupted, f"--prompt={prompt}", "--interactive")
    assert text.startswith(read) and typed == f"{read}\n"
    assert text[176:] == run_sample(uninterrupted, f"--prompt={read[176:]}", *options)[0]
    assert notes == "left out, never read: '\xe9' (U+00E9)\n"


def test_sample_by_layout_kernel_and_cache(sample_output, monkeypatch):
    """The text is the same."""
    options = ["--prompt=So", "--max-new-tokens=100", "--device=cpu", "--dtype=float32"]
    text, used, original = sample_output(*options), [], sample.Generation

    def recorded(model, sampler, cache):
        used.append((model.config.layout, model.config.kernel, cache))
        return original(model, sampler, cache=cache)

    monkeypatch.setattr(sample, "Generation", recorded)
    assert sample_output(*options, "--layout=heads", "--kernel=loop", "--cache=false") == text
    assert used == [("heads", "loop", False)]


# ------------------------------------------------------------------------- stop strings, passages


def until_stop(prompt: str, text: str, stops) -> str:
    """Return `text`, which follows a prompt, up to the first stop string that ends in it."""
    ends = [end for end in range(1, len(text) + 1) if (prompt + text[:end]).endswith(stops)]
    return text[: min(ends, default=len(text))]


def test_stop_string(sample_output):
    """It may begin in the prompt."""
    options = ["--prompt=Now", "--max-new-tokens=30"]
    text = sample_output(*options)
    for stop in (text[2:5], text[10:12], f"{text[-4:-1]}\n and more"):
        ended = "Now" + until_stop("Now", text[3:-1], (stop,))
        assert sample_output(*options, f"--stop={stop}") == ended + "\n" * (ended[-1] != "\n")


def test_stop_string_of_each_sample(sample_output):
    """Of a batch: each ends at its own."""
    options = ["--prompt=So ", "--num-samples=4", "--max-new-tokens=60"]
    plain, stopped = (
        HEADING.split(sample_output(*options, *stops))[1:]
        for stops in ([], ["--stop=e", "--stop=th"])
    )
    ended = [f"So {until_stop('So ', text[3:-1], ('e', 'th'))}" for text in plain]
    assert stopped == [text + "\n" * (text[-1] != "\n") for text in ended] and plain != stopped


@given(st.text("abc", max_size=20), st.text("abc", max_size=30))
@settings(max_examples=500, deadline=None)
def test_longest_passage(text, original):
    """It is the first of the longest that both texts have."""
    passages = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    copied = [passage for passage in passages if passage in original]
    assert longest_passage(text, original) == max(copied, key=len, default="")


def test_novel_names_the_passage(uninterrupted, tmp_path):
    """Of what the model wrote; the prompt, which is in the text too, does not count."""
    prompt = "So what say you to this, my dear sir"
    options = [uninterrupted, f"--prompt={prompt}", "--max-new-tokens=300"]
    plain = run_sample(*options, "--num-samples=2")[0]
    lines = []
    for number, text in enumerate(HEADING.split(plain)[1:]):
        passage, file = text[100:131], tmp_path / f"{number}.txt"
        file.write_text(f"{prompt}\nQQQ{passage}QQQ\n", encoding="utf-8")
        line = f": 31 characters: {printable(quoted(passage))}\n"
        lines.append(f"longest passage that is in {tmp_path}{line}")
        alone = run_sample(*options, f"--novel={file}", f"--sample={number + 1}")[1]
        assert alone == f"longest passage that is in {file}{line}"
    both = run_sample(*options, f"--novel={tmp_path}", "--num-samples=2")
    assert both == (plain, "".join(lines))


# ------------------------------------------------------------------------------------------- scores


def test_score_is_the_exact_loss(uninterrupted, tmp_path, monkeypatch):
    """Without characters that the model does not know, and the licence of a book."""
    monkeypatch.setenv("HOME", str(tmp_path))
    text, (model, tokenizer) = "So it is, and so it was.\n" * 20, load_model(uninterrupted)
    windows = evaluation_windows(Split(tokenizer.encode(text)), 16, 7)
    nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
    bits, predictions = nats / np.log(2), len(text) - 1
    line = f"{nats:.4f} nats, {bits:.4f} bits per character, over {predictions} predictions\n"
    mark = "*** {} OF THE PROJECT GUTENBERG EBOOK SO ***\n"
    book = f"{mark.format('START')}{text}{mark.format('END')}Licence.\n"
    left_out = f"{len(book) - len(text)} characters outside the marks of Project"
    for content, note in {text: "", f"\xe9{text}\xe9": "left out, ", book: left_out}.items():
        (tmp_path / "text.txt").write_text(content, encoding="utf-8")
        output, notes = run_sample(uninterrupted, "--score=~/text.txt", "--device=cpu")
        assert output == line and notes.startswith(note) and bool(notes) == bool(note)


def test_score_has_the_encoding_of_training(train_run, tmp_path):
    text, words = tmp_path / "text.txt", [tmp_path / "run", f"--score={tmp_path / 'text.txt'}"]
    lines = [f"caf\xe9 {i % 7}\r\n" for i in range(900)]
    text.write_bytes("".join(lines).encode("cp1252"))
    assert train_run("--encoding=cp1252", "--max_iters=2")[0] == 0
    assert f"over {900 * 7 - 1:,} predictions" in run_sample(*words)[0]
    text.write_bytes(b"caf\x81")  # no character of cp1252
    with pytest.raises(UserError, match="not CP1252 "):
        run_sample(*words)
