"""sample.py from the command line: errors, samples, stop strings, copied passages and scores."""

import re
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from common.errors import UserError
from common.words import escape_controls, quoted
from configs.schema import Config, ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from storage import load_model
from tests.commands import exit_code, sample_main
from tests.runs import Pipe, run_sample
from tests.variants import save_model
from training import device
from training.evaluate import exact_loss

ROWS = [  # arguments, exit code, words of the line on standard error
    (["--prompt=caf\xe9"], 2, "'\xe9' (U+00E9) at position 3; ", "; --unknown=skip leaves"),
    (["--prompt=-"], 3, "standard input: not UTF-8 at byte 1"),
    (["--score=-"], 3, "standard input: not UTF-8 at byte 1"),
    (["--temperature=1e-40", "--top-k=1000000"], 0),
    (["--top-k=1", "--top-p=1e-9", "--min-p=0.999"], 0),
    (["--temperature=-1"], 2, "temperature must be auto or a number"),
    (["--ckpt=nowhere"], 4, "nowhere: no checkpoint; "),
    (["--score=no/such/file"], 3, "no/such/file: "),
    (["--sample=9", "--num-samples=3"], 2, "--sample and --num_samples contradict each other"),
    (["--prompt=-", "--score=-"], 2, "--score and --prompt contradict each other; give one"),
    (["--score=text.txt", "--prompt=a"], 2, "--score and --prompt contradict each other"),
]  # fmt: skip
HEADING = re.compile(r"-+ sample \d -+\n")


@pytest.fixture
def sample_output(smoke):
    """A function that samples from the trained model: `sample_output("--prompt=a")`."""
    return lambda *words, **options: run_sample(smoke, *words, **options)[0]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row[0][0][:30]))
def test_a_wrong_prompt_option_or_checkpoint_is_one_line_with_its_exit_code(
    smoke, capsys, monkeypatch, row
):
    arguments, code, *fragments = row
    monkeypatch.setattr(sys, "stdin", Pipe(b"a\xff\n"))
    if "--ckpt" not in arguments[0]:
        arguments = [f"--ckpt={smoke}", *arguments]
    assert exit_code(sample_main, [*arguments, "--max-new-tokens=5"]) == code
    message = capsys.readouterr().err
    assert len(message.splitlines()) == bool(fragments)
    assert escape_controls(message, keep="\n") == message
    assert all(fragment in message for fragment in fragments)


# ------------------------------------------------------------------------------------------ samples


def test_a_sample_is_the_prompt_and_max_new_tokens_characters(sample_output):
    assert sample_output("--prompt=ROMEO:", "--max-new-tokens=0") == "ROMEO:\n"
    text = sample_output("--prompt=ROMEO:", "--max-new-tokens=100")
    assert text.startswith("ROMEO:") and len(text) == len("ROMEO:") + 100 + 1


def test_a_sample_depends_on_its_number_and_the_seed_alone(sample_output, monkeypatch):
    options = ["--prompt=So ", "--max-new-tokens=60"]
    together = sample_output(*options, "--num-samples=3")
    numbers, texts = HEADING.findall(together), HEADING.split(together)[1:]
    assert numbers == [f"---------- sample {i} ----------\n" for i in (1, 2, 3)]
    assert [sample_output(*options, f"--sample={number}") for number in (1, 2, 3)] == texts
    assert len({*texts, sample_output(*options, "--seed=8")}) == 4
    monkeypatch.setattr(sample, "BATCH_SIZE", 2)
    assert sample_output(*options, "--num-samples=3") == together


def test_a_prompt_from_a_file_or_a_pipe_loses_one_final_newline(sample_output, tmp_path):
    content = "Now\r\ngo\r\n\r\n".encode("utf-16")  # as PowerShell writes it
    (tmp_path / "prompt.txt").write_bytes(content)
    for source in (f"FILE:{tmp_path / 'prompt.txt'}", "-"):
        text = sample_output(f"--prompt={source}", "--max-new-tokens=50", stdin=content)
        assert text == sample_output("--prompt=Now\\ngo\\n", "--max-new-tokens=50")


def test_a_path_may_begin_with_the_home_folder(smoke, tmp_path, monkeypatch):
    for name in ("HOME", "USERPROFILE"):  # POSIX, Windows
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "run").symlink_to(smoke)
    (tmp_path / "text.txt").write_text("Now go.\n")
    options = ["--prompt=FILE:~/text.txt", "--max-new-tokens=0"]
    assert run_sample("~/run", *options)[0] == "Now go.\n"
    assert "over 7 predictions" in run_sample("~/run", "--score=~/text.txt")[0]


def test_a_prompt_in_the_other_unicode_form_is_read_in_that_of_the_vocabulary(tmp_path):
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 6)
    for form, other in (("NFC", "NFD"), ("NFD", "NFC")):
        vocabulary = "".join(dict.fromkeys(unicodedata.normalize(form, "\ncaf\xe9")))
        vocabulary += "xyz"[: 6 - len(vocabulary)]
        saved = save_model(tmp_path / form, model, vocabulary, Config(model=model.config))
        text = unicodedata.normalize(form, "caf\xe9") + "\n"
        prompt = unicodedata.normalize(other, "caf\xe9")
        assert run_sample(saved, f"--prompt={prompt}", "--max-new-tokens=0") == (text, "")
        with pytest.raises(UserError, match="not in the vocabulary: 'Q'"):  # no accent
            run_sample(saved, f"--prompt={prompt}Q")


def test_an_empty_prompt_gives_the_same_text_as_a_newline(sample_output):
    text = sample_output("--prompt=", "--max-new-tokens=50")
    assert "\n" + text == sample_output("--prompt=\n", "--max-new-tokens=50")


def test_of_a_prompt_longer_than_the_context_the_end_counts_and_a_note_says_so(smoke):
    prompt, options = "So it is, so be it.\xe9 " * 10, ["--max-new-tokens=20", "--temperature=0"]
    text, notes = run_sample(smoke, f"--prompt={prompt}", *options, "--unknown=skip")
    read = prompt.replace("\xe9", "")
    typed, _ = run_sample(smoke, f"--prompt={prompt}", "--unknown=skip", "--interactive")
    assert text.startswith(read) and typed == f"{read}\n"
    assert text[160:] == run_sample(smoke, f"--prompt={read[160:]}", *options)[0]
    assert notes == (
        "skipped 10 characters not in the vocabulary\n"
        "prompt: the model sees the last 64 of 200 characters\n"
    )


def test_the_cache_the_layout_and_the_kernel_do_not_change_the_text(sample_output, monkeypatch):
    options = ["--prompt=So", "--max-new-tokens=100", "--device=cpu", "--dtype=float32"]
    text, used, original = sample_output(*options), [], sample.Texts

    def recorded(model, sampler, cache):
        used.append((model.config.layout, model.config.kernel, cache))
        return original(model, sampler, cache=cache)

    monkeypatch.setattr(sample, "Texts", recorded)
    assert sample_output(*options, "--layout=heads", "--kernel=loop", "--cache=false") == text
    assert used == [("heads", "loop", False)]


# ------------------------------------------------------------------------------------- stop strings


def until_stop(prompt: str, text: str, stops) -> str:
    """Return `text`, which follows a prompt, up to the first stop string that ends in it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if (prompt + text[:end]).endswith(stop)]
        if found:
            return text[: max(0, end - max(map(len, found)))]
    return text


@given(
    st.text("ab", max_size=3),
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_a_sample_ends_at_its_first_stop_string_of_which_nothing_is_shown(prompt, text, stops):
    expected = until_stop(prompt, text, stops)
    end, shown = sample.StopStrings(stops, prompt), ""
    for character in text:
        shown += end.feed(character)
        assert expected.startswith(shown)
    assert shown + end.pending == expected and bool(end.ended_by) == (expected != text)


def test_an_unfinished_stop_string_is_printed_at_the_end(sample_output):
    options = ["--prompt=Now", "--max-new-tokens=30"]
    text = sample_output(*options)
    assert sample_output(*options, f"--stop={text[-4:-1]}\n and more") == text


def test_each_sample_of_a_batch_ends_at_its_own_stop_string(sample_output):
    options = ["--prompt=So ", "--num-samples=4", "--max-new-tokens=60"]
    plain, stopped = (
        HEADING.split(sample_output(*options, *stops))[1:]
        for stops in ([], ["--stop=e", "--stop=th"])
    )
    assert stopped == [f"So {until_stop('So ', text[3:-1], ['e', 'th'])}\n" for text in plain]
    assert plain != stopped


# --------------------------------------------------------------------------------- copied passages


@given(st.text("abc", max_size=20), st.text("abc", max_size=30))
@settings(max_examples=500, deadline=None)
def test_the_longest_passage_is_the_first_of_the_longest_that_both_texts_have(text, original):
    passages = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    copied = [passage for passage in passages if passage in original]
    assert sample.longest_passage(text, original) == max(copied, key=len, default="")


def test_novel_names_the_longest_passage_of_what_the_model_wrote_that_is_in_a_text(smoke, tmp_path):
    prompt = "ROMEO: what say you to this, my lord"  # longer than the passage; it does not count
    options = [smoke, f"--prompt={prompt}", "--max-new-tokens=300"]
    plain = run_sample(*options, "--num-samples=2")[0]
    lines = []
    for number, text in enumerate(HEADING.split(plain)[1:]):
        passage, file = text[100:131], tmp_path / f"{number}.txt"
        file.write_text(f"{prompt}\nQQQ{passage}QQQ\n", encoding="utf-8")
        line = f": 31 characters: {escape_controls(quoted(passage))}\n"
        lines.append(f"longest passage that is in {tmp_path}{line}")
        alone = run_sample(*options, f"--novel={file}", f"--sample={number + 1}")[1]
        assert alone == f"longest passage that is in {file}{line}"
    both = run_sample(*options, f"--novel={tmp_path}", "--num-samples=2")
    assert both == (plain, "".join(lines))


# ------------------------------------------------------------------------------------------- scores


def test_a_score_equals_the_exact_loss_of_training(sample_output, smoke, tmp_path):
    text, (model, tokenizer) = "So it is, and so it was.\n" * 20, load_model(smoke)
    (tmp_path / "text.txt").write_text(text)
    windows = evaluation_windows(Split(tokenizer.encode(text)), 64, 7)
    nats = exact_loss(model, windows, device.select_runtime("cpu", "float32"))
    bits, predictions = nats / np.log(2), len(text) - 1
    line = f"{nats:.4f} nats, {bits:.4f} bits per character, over {predictions} predictions\n"
    assert sample_output(f"--score={tmp_path / 'text.txt'}", "--device=cpu") == line
    # characters that the model does not know can be skipped
    skipping = ["--score=-", "--unknown=skip", "--device=cpu"]
    assert sample_output(*skipping, stdin=f"\xe9{text}\xe9".encode()) == line
    # and the licence of a book is left out
    mark = "*** {} OF THE PROJECT GUTENBERG EBOOK SO ***\n"
    book = f"{mark.format('START')}{text}{mark.format('END')}Licence.\n"
    (tmp_path / "text.txt").write_text(book)
    output, note = run_sample(smoke, f"--score={tmp_path / 'text.txt'}", "--device=cpu")
    left_out = len(book) - len(text)
    assert output == line and note.startswith(f"{left_out} characters outside the marks of Project")
    assert sample_output("--score=-", "--device=cpu", stdin=book.encode()) == line


def test_a_score_reads_the_text_and_maps_rare_characters_as_training_did(train_run, tmp_path):
    text, words = tmp_path / "text.txt", [tmp_path / "run", f"--score={tmp_path / 'text.txt'}"]
    lines = [f"caf\xe9 {i % 7}\r\n" for i in range(900)]
    text.write_bytes("".join(lines).encode("cp1252"))
    as_training = ["--encoding=cp1252", "--min_count=200"]  # the digits are rare
    assert train_run(*as_training, "--max_iters=2")[0] == 0
    assert f"over {900 * 7 - 1:,} predictions" in run_sample(*words)[0]
    text.write_bytes(b"caf\x81")  # no character of cp1252
    with pytest.raises(UserError, match="not CP1252 at byte 3 "):
        run_sample(*words)
