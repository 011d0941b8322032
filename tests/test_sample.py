"""sample.py from the command line: errors, samples, stop strings, chat, scores, terminals and
pipes.
"""

import io
import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from checkpointing import checkpoint
from common import user_text
from common.console import escape
from common.errors import UserError
from common.files import write_atomic
from common.user_text import read_prompt, unescape
from configs.schema import Config, ModelConfig
from data.batches import Split, evaluation_windows
from data.tokenizer import CharTokenizer
from model import runtime
from model.gpt import GPT
from model.kv_cache import KVCache
from tests.commands import sample_main
from tests.conftest import ROOT, printed
from tests.variants import concatenated
from training.evaluate import exact_loss

LONG = "a" * 200

ROWS = [  # row of faults.md, arguments, stdin, exit code, fragments of stderr
    (
        "D1",
        ["--prompt=caf\xe9"],
        None,
        2,
        [
            "not in the vocabulary: '\xe9' (U+00E9) at position 3",
            "remove or replace that character; --unknown=skip",
        ],
    ),
    ("D1", ["--prompt=caf\xe9", "--unknown=skip"], None, 0, ["skipped 1 characters"]),
    ("D2", ["--prompt="], None, 0, []),
    ("D2", ["--prompt=\xe9", "--unknown=skip"], None, 0, ["skipped"]),
    (
        "D3",
        [f"--prompt={LONG}"],
        None,
        0,
        ["the prompt has 200 characters; the model sees at most the last 64"],
    ),
    ("D4", ["--temperature=0"], None, 0, []),
    ("D5", ["--temperature=-1"], None, 2, ["[0, 1e6], but is -1.0"]),
    ("D6", ["--temperature=nan"], None, 2, ["not finite"]),
    ("D6", ["--temperature=inf"], None, 2, ["not finite"]),
    ("D6", ["--temperature=1e-40"], None, 0, []),
    ("D7", ["--top-k=-1"], None, 2, ["but is -1"]),
    ("D8", ["--top-k=1000000"], None, 0, []),
    ("D9", ["--top-p=0"], None, 2, ["(0, 1], but is 0.0"]),
    ("D9", ["--top-p=1"], None, 0, []),
    ("D9", ["--top-p=1.1"], None, 2, ["(0, 1], but is 1.1"]),
    ("D9", ["--top-p=nan"], None, 2, ["not finite"]),
    ("D10", ["--top-k=1", "--top-p=1e-9", "--min-p=0.999"], None, 0, []),
    ("D11", ["--top-k=3"], None, 0, []),  # ties: tests/test_generation.py
    ("D12", ["--max-new-tokens=0"], None, 0, []),
    ("D12", ["--max-new-tokens=-1"], None, 2, ["but is -1"]),
    ("D12", ["--max-new-tokens=1000000000001"], None, 2, ["[0, 1e12]"]),
    ("D12", ["--max-new-tokens=1_0"], None, 2, ["not a plain number"]),
    ("D12", ["--max-new-tokens=\uff16"], None, 2, ["not a plain number"]),
    ("D13", ["--num-samples=0"], None, 2, ["but is 0"]),
    ("D13", ["--num-samples=3"], None, 0, []),
    ("D14", ["--seed=-1"], None, 2, ["but is -1"]),
    ("D14", ["--seed=18446744073709551617"], None, 2, ["4294967295"]),
    ("D15", ["--temp=1"], None, 2, ["unknown option '--temp'"]),
    ("D20", ["--prompt=-"], b"a\xff", 2, ["standard input: not UTF-8 at byte 1"]),
    ("D20", [b"--prompt=a\xff"], None, 2, ["not UTF-8"]),
    ("D20", ["--interactive"], b"\xff\n", 2, ["standard input: not UTF-8 at byte 0"]),
    ("-", ["--prompt=FILE:no/such/file"], None, 2, ["no/such/file: No such file"]),
    ("-", ["--prompt=FILE:tests"], None, 2, ["tests: not a regular file"]),
    ("-", ["--score=no/such/file"], None, 3, ["no/such/file: No such file"]),
    ("-", ["--interactive", "--num-samples=2"], None, 2, ["contradict"]),
    ("-", ["--stop="], None, 2, ["stop has no value"]),
    ("-", ["--stop=caf\xe9"], None, 2, ["--stop 'caf\xe9' can never appear", "'\xe9' (U+00E9)"]),
    ("-", ["--sample=3", "--num-samples=2"], None, 2, ["--sample 3 is not one of --num_samples 2"]),
    ("-", ["--sample=0"], None, 2, ["but is 0"]),
]


class Input:
    """Standard input that is not a terminal."""

    def __init__(self, content: bytes = b""):
        self.buffer = io.BytesIO(content)

    def isatty(self):
        return False


@pytest.fixture
def sample_output(smoke, capsys, monkeypatch):
    """Return a function that runs sample.py in this process: `sample_output("--prompt=a")`."""

    def run(*arguments, stdin: bytes = b"") -> str:
        monkeypatch.setattr(sys, "stdin", Input(stdin))
        assert sample_main([f"--ckpt={smoke}", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def uniform_checkpoint(tmp_path_factory):
    """Write a checkpoint whose model always predicts all characters with equal probability, some of
    them control characters.
    """
    out = tmp_path_factory.mktemp("loud") / "last.safetensors"
    vocabulary = "\x07\t\n\r\x1b ab\u202e\u3042"
    config = Config(model=ModelConfig(n_layer=1, n_head=1, n_embd=4, block_size=8))
    model = GPT(config.model, len(vocabulary))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tensors = {f"model.{name}": each for name, each in concatenated(model.named_slices()).items()}
    write_atomic(out, checkpoint.to_bytes(checkpoint.Checkpoint(config, vocabulary, tensors)))
    return out


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "row, arguments, stdin, code, fragments", ROWS, ids=[f"{row[0]}-{row[1][0]}" for row in ROWS]
)
def test_every_row_has_its_exit_code_and_one_line_on_stderr(
    smoke, capsys, monkeypatch, row, arguments, stdin, code, fragments
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "stdin", Input(stdin or b""))
    arguments = [each if isinstance(each, str) else os.fsdecode(each) for each in arguments]
    if not any(each.startswith("--max-new-tokens") for each in arguments):
        arguments.append("--max-new-tokens=5")
    try:
        exit_code, message = sample_main([f"--ckpt={smoke}", *arguments]), ""
    except UserError as error:
        exit_code, message = error.exit_code, printed(error)
    message += capsys.readouterr().err
    assert exit_code == code, message
    assert (
        len(message.splitlines()) == (code != 0 or fragments != [])
        and escape(message, keep="\n") == message
    )
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    "arguments, code", [(["--help"], 0), (["--temp=1"], 2), (["--ckpt=x", "--prompt=FILE:x"], 2)]
)
def test_help_and_errors_need_neither_torch_nor_numpy(run, arguments, code):
    probe = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path('sample.py', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert run("-c", probe, "sample.py", *arguments, check=code).stdout.endswith("[]\n")


# ------------------------------------------------------------------------------------------ samples


def test_a_sample_is_the_prompt_and_max_new_tokens_characters(sample_output):
    assert sample_output("--prompt=ROMEO:", "--max-new-tokens=0") == "ROMEO:\n"
    text = sample_output("--prompt=ROMEO:", "--max-new-tokens=100")
    assert text.startswith("ROMEO:") and len(text) == len("ROMEO:") + 100 + 1
    assert (
        text
        == sample_output("--start", "ROMEO:", "--max-new-tokens=100")
        != sample_output("--prompt=ROMEO:", "--seed=8")
    )


def test_a_prompt_is_an_argument_a_file_or_standard_input(sample_output, tmp_path):
    text = sample_output("--prompt=Now\ngo")
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfNow\ngo")
    assert (
        sample_output(f"--prompt=FILE:{tmp_path / 'prompt.txt'}")
        == text
        == sample_output("--prompt=-", stdin=b"Now\ngo")
    )


def test_an_empty_prompt_gives_the_same_text_as_a_newline(sample_output):
    assert "\n" + sample_output("--max-new-tokens=50") == sample_output(
        "--prompt=\n", "--max-new-tokens=50"
    )


def test_cache_layout_and_kernel_do_not_change_the_text(sample_output):
    texts = {
        sample_output("--prompt=So ", "--max-new-tokens=150", "--temperature=0", *others)
        for others in ([], ["--no-cache"], ["--attention=unrolled", "--kernel=loop"])
    }
    assert len(texts) == 1


def test_the_exact_window_differs_only_beyond_block_size(sample_output):
    rules = ("--window=stepped", "--window=exact")
    stepped, exact = (sample_output("--prompt=So ", "--max-new-tokens=200", rule) for rule in rules)
    assert stepped[:64] == exact[:64] and stepped != exact


def test_no_cache_creates_no_kv_cache(sample_output, monkeypatch):
    created = []
    init = KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, capacity: created.append(capacity) or init(self, capacity)
    )
    sample_output("--prompt=Now", "--max-new-tokens=5", "--no-cache")
    assert not created
    sample_output("--prompt=Now", "--max-new-tokens=5")
    assert created


def test_more_input_than_the_limit_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"a" * 101)
    monkeypatch.setattr(user_text, "MAX_BYTES", 101)
    assert read_prompt(f"FILE:{path}") == "a" * 101
    for read in (lambda: read_prompt("-"), user_text.read_line):
        monkeypatch.setattr(sys, "stdin", Input(b"a" * 101))
        assert read() == "a" * 101
    monkeypatch.setattr(user_text, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="101 bytes; at most 100 are read"):
        read_prompt(f"FILE:{path}")
    for read in (lambda: read_prompt("-"), user_text.read_line):
        monkeypatch.setattr(sys, "stdin", Input(b"a" * 101))
        with pytest.raises(UserError, match=r"standard input: .* at most 100 are read"):
            read()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
@pytest.mark.parametrize("option", ["--prompt=-", "--interactive"])
def test_an_endless_input_is_refused(option, smoke):
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(
            [sys.executable, "sample.py", f"--ckpt={smoke}", option],
            cwd=ROOT, stdin=endless, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard input: more than 268,435,456 bytes; at most 268,435,456 are read; give a "
        "shorter text\n"
    )


def test_samples_have_separators_and_do_not_depend_on_the_batch_size(sample_output, monkeypatch):
    expected = sample_output("--prompt=So ", "--num-samples=5", "--max-new-tokens=30")
    parts = re.split(r"---------- sample (\d) ----------\n", expected)
    assert parts[1::2] == list("12345") and all(part.startswith("So ") for part in parts[2::2])
    assert parts[2] == sample_output("--prompt=So ", "--max-new-tokens=30")
    monkeypatch.setattr(sample, "MAX_BATCH", 2)
    assert sample_output("--prompt=So ", "--num-samples=5", "--max-new-tokens=30") == expected
    monkeypatch.setattr(sample, "MAX_BUFFERED", 30)  # one at a time
    assert sample_output("--prompt=So ", "--num-samples=5", "--max-new-tokens=30") == expected


def test_stats_prints_characters_per_second(sample_output, smoke, capsys):
    sample_main([f"--ckpt={smoke}", "--stats", "--max-new-tokens=20", "--num-samples=2"])
    assert re.fullmatch(r"40 characters, [\d,]+ per second\n", capsys.readouterr().err)


# ------------------------------------------------------------------------------------- stop strings


def until_stop(text: str, begin: int, stops) -> str:
    """Return `text` from `begin` up to the first stop string that ends after `begin`."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[begin : max(begin, end - max(map(len, found)))]
    return text[begin:]


@given(
    st.text("ab", max_size=4),
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=1000, deadline=None)
def test_a_sample_ends_at_its_first_stop_string_even_if_that_starts_in_the_prompt(
    before, text, stops
):
    end, shown = sample.StopStrings(stops, before), ""
    for character in text:
        shown += end.feed(character)
        assert (before + text)[len(before) :].startswith(shown)
    assert shown + end.pending == until_stop(before + text, len(before), stops)
    assert end.reached == any(
        s in (before + text)[-len(text) - len(s) + 1 :] for s in stops if text
    )


def test_an_unfinished_stop_string_is_printed_at_the_end(sample_output):
    text = sample_output("--prompt=Now", "--max-new-tokens=30")
    assert (
        sample_output("--prompt=Now", "--max-new-tokens=30", f"--stop={text[-4:-1]}\n and more")
        == text
    )


def test_each_sample_of_a_batch_ends_at_its_own_stop_string(sample_output):
    plain, stopped = (
        re.split(
            r"-+ sample \d -+\n",
            sample_output("--prompt=So ", "--num-samples=4", "--max-new-tokens=60", *stops),
        )[1:]
        for stops in ([], ["--stop=e", "--stop=th"])
    )
    assert [text[:-1] for text in stopped] == [
        "So " + until_stop(text[:-1], 3, ["e", "th"]) for text in plain
    ]
    assert plain != stopped


def test_the_newline_before_an_empty_prompt_does_not_count_for_a_stop_string(sample_output):
    text = sample_output("--max-new-tokens=200", "--num-samples=1")
    for stop in ("\n\n", "\n" + text[0]):
        assert sample_output("--max-new-tokens=200", f"--stop={stop}")[:-1] == until_stop(
            text[:-1], 0, [stop]
        )
    assert sample.StopStrings(["\n\n"], "").feed("\n") == ""  # may still become one


def test_a_stop_string_does_not_match_text_that_an_earlier_turn_hid(sample_output):
    plain = sample_output("--interactive", "--max-new-tokens=60", stdin=b"So\n")
    stop = plain[10:12]
    first = sample_output("--interactive", "--max-new-tokens=60", f"--stop={stop}", stdin=b"So\n")
    assert first == plain[: plain.index(stop)] + "\n"
    both = sample_output("--interactive", "--max-new-tokens=60", f"--stop={stop}", stdin=b"So\n\n")
    rest = plain[plain.index(stop) + 2 : -1]
    assert rest and stop not in rest and both.startswith(first + rest)


@pytest.mark.parametrize(
    "written, read", [(r"\n", "\n"), (r"\t\r\\n", "\t\r\\n"), (r"\x\ ", r"\x\ ")]
)
def test_escapes_in_prompt_and_stop_stand_for_their_characters(written, read):
    assert unescape(written) == read


def test_escapes_work_in_the_commands_but_not_in_files(sample_output, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("So\n")
    escaped = sample_output("--prompt=So\\n", "--max-new-tokens=20")
    assert escaped == sample_output(f"--prompt=FILE:{prompt}", "--max-new-tokens=20")
    options = ["--prompt=So", "--max-new-tokens=200"]
    assert (
        sample_output(*options, "--stop=\\n")
        == sample_output(*options, "--stop=\n")
        != sample_output(*options)
    )
    prompt.write_text("So\\n")
    with pytest.raises(UserError, match="not in the vocabulary"):
        sample_output(f"--prompt=FILE:{prompt}")


def test_a_sample_alone_is_the_sample_of_its_number_among_others(sample_output):
    options = ["--prompt=So ", "--max-new-tokens=60"]
    _, *texts = re.split(r"-+ sample \d -+\n", sample_output(*options, "--num-samples=3"))
    assert [sample_output(*options, f"--sample={number}") for number in (1, 2, 3)] == texts
    heading = "---------- sample 2 ----------\n"
    assert sample_output(*options, "--num-samples=3", "--sample=2") == heading + texts[1]


# --------------------------------------------------------------------------------------------- chat


def test_a_chat_is_one_continuous_text(sample_output):
    output = sample_output("--interactive", "--max-new-tokens=20", stdin=b"ROMEO:\n\n")
    whole = sample_output("--prompt=ROMEO:", "--max-new-tokens=40")[len("ROMEO:") :]
    first = whole[:20] if whole[19] == "\n" else whole[:20] + "\n"
    assert output == first + whole[20:40] + ("" if whole[39] == "\n" else "\n")


def test_user_input_starts_on_a_new_line_of_the_chat(sample_output):
    prompt = "Now go."
    output = sample_output(
        "--interactive", f"--prompt={prompt}", "--max-new-tokens=30", stdin=b"Stay\n"
    )
    alone = sample_output(f"--prompt={prompt}\nStay", "--max-new-tokens=30")
    assert output == prompt + "\n" + alone.removeprefix(f"{prompt}\nStay").removesuffix("\n") + "\n"


def test_an_unknown_character_does_not_end_a_chat(sample_output, smoke, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input("caf\xe9\nStay".encode()))
    assert sample_main([f"--ckpt={smoke}", "--interactive", "--max-new-tokens=30"]) == 0
    printed = capsys.readouterr()
    assert "U+00E9" in printed.err and printed.err.count("\n") == 1
    assert printed.out == sample_output("--interactive", "--max-new-tokens=30", stdin=b"Stay\n")


# ------------------------------------------------------------------------------------------- scores


def test_a_score_equals_the_exact_loss_of_training(sample_output, smoke, tmp_path):
    text, saved = "So it is, and so it was.\n" * 20, checkpoint.load(smoke / "best.safetensors")
    (tmp_path / "text.txt").write_text(text + "\xe9", encoding="utf-8")
    ids = CharTokenizer(saved.vocabulary).encode(text)
    windows = evaluation_windows(Split(ids, ((0, len(ids)),)), 64, 7)
    model = checkpoint.build_model(saved)
    nats = exact_loss(model, windows, runtime.select_runtime("cpu", "float32"))
    printed = sample_output(f"--score={tmp_path / 'text.txt'}", "--unknown=skip", "--device=cpu")
    assert printed == (
        f"{nats:.4f} nats, {nats / np.log(2):.4f} bits per character, over {len(text) - 1} "
        f"predictions\n"
    )


@pytest.mark.parametrize("content, code", [(b"a", 3), (b"", 3), (b"\xff", 3), (b"\xc3\xa9", 2)])
def test_a_text_that_cannot_be_scored_is_rejected(smoke, tmp_path, content, code):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        sample_main([f"--ckpt={smoke}", f"--score={tmp_path / 'text.txt'}"])
    assert caught.value.exit_code == code


# ------------------------------------------------------------------------------ pipes and terminals


def start(checkpoint_path, *arguments, **options):
    command = [sys.executable, "sample.py", f"--ckpt={checkpoint_path}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def test_a_pipe_gets_the_exact_characters_and_an_ascii_pipe_gets_escapes(uniform_checkpoint):
    raw, ascii_only = (
        start(
            uniform_checkpoint,
            "--max-new-tokens=300",
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )
        for encoding in ("utf-8", "ascii")
    )
    text, escaped = raw.communicate()[0].decode(), ascii_only.communicate()[0].decode("ascii")
    assert set(text) == set("\x07\t\n\r\x1b ab\u202e\u3042") and len(text) == 301
    assert escaped == text.encode("ascii", "backslashreplace").decode()
    assert raw.returncode == ascii_only.returncode == 0


def read_terminal(terminal: int, until: str | None = None) -> str:
    """Return the output of a terminal up to `until`, or to its end."""
    shown = b""
    try:
        while until is None or not shown.endswith(until.encode()):
            shown += os.read(terminal, 4096)
    except OSError:  # a terminal raises it at the end of the output
        pass
    return shown.decode().replace("\r\n", "\n")


def test_a_chat_on_a_terminal_has_a_prompt_and_ends_with_ctrl_d(smoke, sample_output):
    controller, terminal = pty.openpty()
    process = start(smoke, "--interactive", "--max-new-tokens=20", stdin=terminal, stdout=terminal)
    os.close(terminal)
    shown = read_terminal(controller, until="> ")
    for typed in (b"ROMEO:\n", b"\n", b"\x04"):
        os.write(controller, typed)
        shown += read_terminal(controller, until=None if typed == b"\x04" else "\n> ")
    first = sample_output("--interactive", "--max-new-tokens=20", stdin=b"ROMEO:\n")
    both = sample_output("--interactive", "--max-new-tokens=20", stdin=b"ROMEO:\n\n")
    assert shown == f"> ROMEO:\n{first}> \n{both.removeprefix(first)}> \n"
    assert process.wait() == 0 and process.stderr.read() == b""


def test_control_characters_are_escaped_on_a_terminal(uniform_checkpoint):
    controller, terminal = pty.openpty()
    process = start(uniform_checkpoint, "--max-new-tokens=300", stdout=terminal)
    os.close(terminal)
    shown = read_terminal(controller)
    assert process.wait() == 0 and not set(shown) & set("\x07\r\x1b\u202e")
    assert all(
        escape in shown for escape in (r"\x07", r"\r", r"\x1b", r"\u202e", "\t", "\n", "\u3042")
    )


def test_a_closed_pipe_ends_sampling_silently(smoke):
    process = start(smoke, "--max-new-tokens=1000000000", stdout=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_ctrl_c_ends_the_line_and_exits(smoke):
    process = start(smoke, "--max-new-tokens=1000000000", stdout=subprocess.PIPE)
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    text, stderr = process.communicate()
    assert process.returncode == 130 and text.endswith(b"\n") and stderr == b""


def test_a_checkpoint_with_a_too_long_name_is_rejected_in_one_line(run):
    done = run("sample.py", f"--ckpt={'x' * 300}", check=4)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("option, code", [("--prompt=FILE:/dev/zero", 2), ("--score=/dev/zero", 3)])
def test_endless_files_are_rejected(run, smoke, option, code):
    done = run("sample.py", f"--ckpt={smoke}", option, check=code)
    assert "not a regular file" in done.stderr and done.stderr.count("\n") == 1
