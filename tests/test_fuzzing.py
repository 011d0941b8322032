"""Random and hostile configs and command lines: each is accepted, or refused in one line."""

import io
import re
import sys
from contextlib import chdir
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sample
import train
from common.console import escape
from configs.command import MAX_FAULTS, CommandLineOptions
from configs.fields import settings_of
from configs.schema import Config, SampleConfig
from tests.commands import exit_code, sample_main, train_main
from tests.conftest import ROOT

fuzzed = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
AWKWARD = [
    "", " ", "-1", "010", "1:30", "on", "null", "~", ".nan", "1e400", "0x10", "1_000", "６",
    "9" * 5000, "[a, b]", "[", "{a: 1}", "*a", "&a x", "!!int 1", "'", '"', "a=b", "=", "--", "-",
    "#", ": ", ":", "%", "@", "|", ">", "?", ",", "\\", "\t", "\n", "\r", "\0", "\x1b[2J", "\x9b",
    "\u2028", "\u202e", "\ufeff", "\ufffe", "é", "e\u0301", "👨‍👩‍👧", '"\\UFFFFFFFF"', "\ud800",
    "\udcff", "2024-13-45", "..", "/", "/dev/null", "/dev/zero", "~root", "$HOME", "`id`", "%s%n",
    "{0}", "'; DROP TABLE", "../../etc/passwd", "x" * 300, "0.1", "1", "6.0", "1e-3", "true",
    "auto", "configs", "README.md", "-h", "—resume",
]  # fmt: skip
KNOWN = [*settings_of(Config), *settings_of(CommandLineOptions), *settings_of(SampleConfig)]
SHIPPED = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("configs/*.yaml"))]
HOSTILE_YAML = [
    ": a\n: b\n", "- - - x\n", "&a [*a]\n", "!!python/name:os.system x\n", "a: |1\n  b\n",
    "? {a: b}\n: c\n", "seed: 1\n...\nseed: 2\n", "'\\0'\n",
    "<<: {seed: 1}\n", "model: {n_layer: !!int '3'}\n", "- \n" * 3000, "[" * 3000, "{a: " * 3000,
    "%YAML " + "9" * 5000 + ".1\n---\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzing")


def answer(command, *argv):
    """Run a command as a process does, without torch; return its exit code and standard output.

    Nothing that it prints contains a control character. An error is one line, and that of a config
    file has at most five.
    """
    stdin, out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(3)
    )
    without_torch = patch.dict(sys.modules, {"torch": None})
    with without_torch, patch.multiple(sys, stdin=stdin, stdout=out, stderr=err):
        code = exit_code(command, list(argv))
    out.flush(), err.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert escape(out + err, keep="\n\t") == out + err and len(err) < 1500
    assert code in (0, 2, 3, 4, 5)
    if code:
        assert re.fullmatch("(error: [^\n]+\n)+", err)
        assert err.count("\n") <= (MAX_FAULTS if ".yaml" in argv[0] else 1)
    assert code != 2 or not out
    return code, out


# ------------------------------------------------------------------------------------------ configs


def splice(text, at, piece, cut):
    """Insert a piece into a text, at a fraction of its length, in place of `cut` characters."""
    at = int(at * len(text))
    return text[:at] + piece + text[at + cut :]


SCALARS = st.none() | st.integers() | st.floats() | st.text() | st.sampled_from([*KNOWN, *AWKWARD])
KEYS = st.sampled_from([*KNOWN, "model", "train", "data"])
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))
SPLICED = st.builds(
    splice,
    st.sampled_from([*SHIPPED, *HOSTILE_YAML]),
    st.floats(0, 1),
    st.sampled_from([*AWKWARD, *HOSTILE_YAML]) | st.text(),
    st.integers(0, 50),
)
CONFIGS = SPLICED | st.builds(yaml.safe_dump, TREES) | st.sampled_from(HOSTILE_YAML)
ENCODINGS = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])


def encode(text, encoding):
    return text.encode(encoding, errors="surrogatepass")


@given(st.builds(encode, CONFIGS, ENCODINGS) | st.binary())
@fuzzed
def test_any_config_is_printed_completely_or_rejected_in_a_line_for_each_fault(folder, content):
    file = folder / "config.yaml"
    file.write_bytes(content)
    code, out = answer(train_main, str(file), "--print-config")
    if code == 0:
        file.write_text(out, encoding="utf-8", newline="")
        assert answer(train_main, str(file), "--print-config") == (0, out)


# ------------------------------------------------------------------------------------ command lines


NAMES = st.sampled_from([f"--{name}" for name in KNOWN])
WORDS = st.sampled_from(AWKWARD) | st.text()
OPTIONS = NAMES | WORDS | st.builds("{}={}".format, NAMES | WORDS, WORDS)


@pytest.mark.parametrize(
    ("command", "first"), [(train_main, "configs/smoke.yaml"), (sample_main, "--ckpt=nowhere")]
)
@given(st.lists(OPTIONS, max_size=6))
@fuzzed
def test_any_command_line_is_accepted_or_rejected_in_one_line(command, first, words):
    with (
        chdir(ROOT),
        patch.multiple(train, main=lambda _: 0),
        patch.multiple(sample, main=lambda _: 0),
    ):
        answer(command, first, *words)
