"""sample.py from the command line: errors, samples, stop strings, chat and scores."""

import io
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from common.console import escape
from common.errors import UserError
from configs.fields import unescape
from configs.schema import Config, DataConfig, ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from run import load_model
from tests.commands import exit_code, sample_main
from tests.runs import Output, start
from tests.variants import save_model
from training import device
from training.evaluate import exact_loss

ROWS = [  # arguments, exit code, words of the line on standard error
    (["--prompt=caf\xe9"], 2, "not in the vocabulary: '\xe9' (U+00E9) at position 3",
     "remove or replace that character; --unknown=skip"),
    (["--prompt=caf\xe9", "--unknown=skip"], 0, "skipped 1 character not"),
    (["--prompt=\xe9", "--unknown=skip"], 0, "skipped"),  # which leaves an empty prompt
    (["--prompt=-"], 2, "standard input: not UTF-8 at byte 1"),
    ([f"--prompt={'a' * 200}"], 0,
     "the prompt has 200 characters; the model sees at most the last 64"),
    (["--temperature=0"], 0),
    (["--temperature=1e-40"], 0),
    (["--temperature=-1"], 2, "temperature must be auto or a number"),
    (["--top-k=1000000"], 0),
    (["--top-k=1", "--top-p=1e-9", "--min-p=0.999"], 0),
    (["--ckpt=nowhere"], 4, "nowhere: no checkpoint; "),
    (["--score=no/such/file"], 3, "no/such/file: "),
    (["--novel=text.txt"], 2, "--novel is for models of a list"),
]  # fmt: skip


HEADING = re.compile(r"-+ sample \d -+\n")


class Input:
    """Standard input: a pipe, or a terminal."""

    def __init__(self, content: bytes, terminal: bool = False):
        self.buffer, self.isatty = io.BytesIO(content), lambda: terminal


def run_sample(ckpt, *words, stdin: bytes = b"", terminal: bool = False) -> tuple[str, str]:
    """Run sample.py in this process; return its standard output and standard error."""
    stdout, stderr = Output(), Output()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "stdin", Input(stdin, terminal))
        assert sample_main([f"--ckpt={ckpt}", *words]) == 0
    return stdout.getvalue(), stderr.getvalue()


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
    monkeypatch.setattr(sys, "stdin", Input(b"a\xff\n"))
    if "--ckpt" not in arguments[0]:
        arguments = [f"--ckpt={smoke}", *arguments]
    assert exit_code(sample_main, [*arguments, "--max-new-tokens=5"]) == code
    message = capsys.readouterr().err
    assert len(message.splitlines()) == bool(fragments) and escape(message, keep="\n") == message
    for fragment in fragments:
        assert fragment in message


# ------------------------------------------------------------------------------------------ samples


def test_a_sample_is_the_prompt_and_max_new_tokens_characters(sample_output):
    assert sample_output("--prompt=ROMEO:", "--max-new-tokens=0") == "ROMEO:\n"
    text = sample_output("--prompt=ROMEO:", "--max-new-tokens=100")
    assert text.startswith("ROMEO:") and len(text) == len("ROMEO:") + 100 + 1
    assert text == sample_output("--prompt", "ROMEO:", "--max-new-tokens=100")


def test_a_sample_depends_on_its_number_and_the_seed_alone(sample_output, monkeypatch):
    options = ["--prompt=So ", "--max-new-tokens=60"]
    together = sample_output(*options, "--num-samples=3")
    numbers, texts = HEADING.findall(together), HEADING.split(together)[1:]
    assert numbers == [f"---------- sample {i} ----------\n" for i in (1, 2, 3)]
    assert [sample_output(*options, f"--sample={number}") for number in (1, 2, 3)] == texts
    assert len({*texts, sample_output(*options, "--seed=8")}) == 4
    monkeypatch.setattr(sample, "BATCH_SIZE", 2)
    assert sample_output(*options, "--num-samples=3") == together


@pytest.mark.parametrize(
    "prompt, content",
    [
        ("Now\\ngo", b"\xef\xbb\xbfNow\r\ngo\r\n"),  # as Windows writes UTF-8
        ("Now\\n", b"Now\n\n"),  # only the last newline is dropped
        ("", b"\n"),
    ],
)
def test_a_prompt_from_a_file_or_a_pipe_loses_one_final_newline(
    prompt, content, sample_output, tmp_path
):
    text = sample_output(f"--prompt={prompt}", "--max-new-tokens=50")
    (tmp_path / "prompt.txt").write_bytes(content)
    for source in (f"FILE:{tmp_path / 'prompt.txt'}", "-"):
        again = sample_output(f"--prompt={source}", "--max-new-tokens=50", stdin=content)
        assert again == text


def test_the_final_newline_of_a_file_is_kept_if_it_ends_the_question(tmp_path):
    data = DataConfig(separator="\\n\\n", answer_after="\\n")
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 4)
    saved = save_model(tmp_path / "a.safetensors", model, "\n?ab", Config(data, model.config))
    (tmp_path / "question.txt").write_text("ab?\n")
    output, _ = run_sample(saved, f"--prompt=FILE:{tmp_path / 'question.txt'}")
    assert output.startswith("ab?\n")


def test_escapes_are_for_the_command_line_not_for_files(sample_output, tmp_path):
    assert unescape(r"\t\r\n\r\\n\x\ ") == "\t\n\n\\n\\x\\ "
    options = ["--prompt=So\\n", "--max-new-tokens=200"]
    text = sample_output(*options)
    assert text.startswith("So\n")
    assert sample_output(*options, "--stop=\\n") == sample_output(*options, "--stop=\n") != text
    (tmp_path / "prompt.txt").write_text("So\\n")
    with pytest.raises(UserError, match="not in the vocabulary"):
        sample_output(f"--prompt=FILE:{tmp_path / 'prompt.txt'}")


def test_an_empty_prompt_gives_the_same_text_as_a_newline(sample_output):
    text = sample_output("--prompt=", "--max-new-tokens=50")
    assert "\n" + text == sample_output("--prompt=\n", "--max-new-tokens=50")


def test_of_a_prompt_longer_than_the_context_the_end_counts(sample_output):
    prompt, options = "So it is, so be it. " * 10, ["--max-new-tokens=20", "--temperature=0"]
    text = sample_output(f"--prompt={prompt}", *options)
    assert text[160:] == sample_output(f"--prompt={prompt[160:]}", *options)


def test_cache_layout_and_kernel_do_not_change_the_text(sample_output):
    texts = {
        sample_output("--prompt=So ", "--max-new-tokens=150", "--temperature=0", *others)
        for others in ([], ["--cache=false"], ["--attention=unrolled", "--kernel=loop"])
    }
    assert len(texts) == 1


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
    assert shown + end.pending == expected and end.reached == (expected != text)


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


# --------------------------------------------------------------------------------------------- chat


def test_a_chat_is_one_continuous_text(sample_output):
    output = sample_output("--interactive", "--max-new-tokens=20", stdin=b"ROMEO:\n\n")
    whole = sample_output("--prompt=\nROMEO:", "--max-new-tokens=40")[len("\nROMEO:") :]
    first = whole[:20] if whole[19] == "\n" else whole[:20] + "\n"
    assert output == first + whole[20:40] + ("" if whole[39] == "\n" else "\n")


def test_a_typed_line_begins_on_a_new_line_of_the_chat(sample_output):
    options = ["--prompt=Now go.", "--max-new-tokens=30"]
    output = sample_output("--interactive", *options, stdin=b"Stay\n")
    alone = sample_output("--prompt=Now go.\nStay", "--max-new-tokens=30")
    reply = alone.removeprefix("Now go.\nStay").removesuffix("\n")
    assert output == f"Now go.\n{reply}\n"


def test_a_stop_string_ends_a_turn_and_stays_in_the_context(sample_output):
    options = ["--interactive", "--max-new-tokens=60"]
    plain = sample_output(*options, stdin=b"So\n")
    stop = plain[10:14]
    output = sample_output(*options, f"--stop={stop}", stdin=b"So\n\n")
    first, rest = plain[: plain.index(stop)], plain[plain.index(stop) + 4 : -1]
    assert rest and stop not in rest and output.startswith(f"{first}\n{rest}")


@pytest.mark.parametrize("encoding, named", [("utf-8", "U+00E9"), ("latin-1", "U+DCE9")])
def test_an_unknown_character_does_not_end_a_chat(encoding, named, smoke):
    options = [smoke, "--interactive", "--max-new-tokens=30"]
    out, err = run_sample(*options, stdin="caf\xe9\nStay".encode(encoding))
    assert named in err and err.count("\n") == 1
    assert out == run_sample(*options, stdin=b"Stay\n")[0]


def test_a_chat_on_a_terminal_has_a_prompt(sample_output):
    options = ["--interactive", "--max-new-tokens=20"]
    reply = sample_output(*options, stdin=b"ROMEO:\n")
    assert sample_output(*options, stdin=b"ROMEO:\n", terminal=True) == f"> {reply}> \n"


def test_ctrl_c_ends_sampling_without_a_traceback(smoke):
    process = start("sample.py", f"--ckpt={smoke}", "--max-new-tokens=1000000000")
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate()[0] and process.returncode == 130


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
    (tmp_path / "text.txt").write_text(f"\xe9{text}\xe9", encoding="utf-8")
    arguments = [f"--score={tmp_path / 'text.txt'}", "--unknown=skip", "--device=cpu"]
    assert sample_output(*arguments) == line


def test_a_score_reads_the_text_and_maps_rare_characters_as_training_did(train_run, tmp_path):
    text, words = tmp_path / "text.txt", [tmp_path / "run", f"--score={tmp_path / 'text.txt'}"]
    lines = [f"caf\xe9 {i % 7}\r\n" for i in range(900)]
    text.write_bytes("".join(lines).encode("cp1252"))
    as_training = ["--encoding=cp1252", "--min_count=200"]  # the digits are rare
    assert train_run(*as_training, "--max_iters=2", "--warmup_iters=0")[0] == 0
    assert f"over {900 * 7 - 1:,} predictions" in run_sample(*words)[0]
    text.write_bytes(b"caf\x81")  # no character of cp1252
    with pytest.raises(UserError, match=r"not CP1252 at byte 3 .* -t CP1252 OLD"):
        run_sample(*words)


@pytest.mark.parametrize("content, code", [(b"a", 3), (b"", 3), (b"\xff", 3), (b"\xc3\xa9", 2)])
def test_a_text_that_cannot_be_scored_is_rejected(smoke, tmp_path, content, code):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        run_sample(smoke, f"--score={tmp_path / 'text.txt'}")
    assert caught.value.exit_code == code
