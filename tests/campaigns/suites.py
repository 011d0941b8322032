"""Public suites of hostile inputs, from the user's own checkouts; nothing of them is stored here.

    python -m tests.campaigns.suites --yaml yaml-test-suite
    python -m tests.campaigns.suites --strings big-list-of-naughty-strings
    python -m tests.campaigns.suites --pickles picklescan

(https://github.com/yaml/yaml-test-suite, https://github.com/minimaxir/big-list-of-naughty-strings,
https://github.com/mmaitre314/picklescan.) Every case is answered, in one line if it is refused, and
nothing in it is executed. The tests run the same checks on a few cases of our own.
"""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import yaml

from common.console import escape, path_word, shell_command
from common.errors import CheckpointError, DataError
from configs.schema import DataConfig
from configs.strict_yaml import MAX_FAULTS
from convert import nanogpt
from data.corpus import load_corpus
from tests.campaigns.fuzzing import Tally, call
from tests.commands import sample_main, train_main
from tests.conftest import printed

MARKS = {  # of yaml-test-suite, for characters that an editor does not show
    "␣": " ", "↵": "", "←": "\r", "⇔": "\ufeff", "∎\n": "", "∎": "",
}  # fmt: skip
EXECUTES = re.compile(r"os\.(system|exec|posix_spawn|spawn|fork)|subprocess\.Popen|socket\.connect")
OUR_YAML = [
    ": a\n: b\n", "- - - x\n", "&a [*a]\n", "!!python/name:os.system x\n", "a: |1\n  b\n",
    "? {a: b}\n: c\n", "%YAML 1.3\n---\nseed: 1\n", "seed: 1\n...\nseed: 2\n", "seed: 7\n",
    "'\\0'\n", "<<: {seed: 1}\n", "model: {n_layer: !!int '3'}\n",
]  # fmt: skip
OUR_STRINGS = [
    "", "undefined", "1/0", "0x0", "-", "--", "$HOME", "`id`", "$(touch x)", "'; DROP TABLE", "\\",
    "../../etc/passwd", "%s%s%n", "{0}", "\u202etest", "Z̮̞̠͙͔ͅ",
    "👩‍👩‍👧‍👦", "ﷺ", "\ufeff", "\x7f\x80", "𝕋",
    "a\nb",
    "CON", "<script>alert(1)</script>", "\ud800", "null", "[1, 2]", "~", "*", "auto", "a\0b",
]  # fmt: skip


def yaml_texts(folder: Path) -> list[str]:
    """Return the YAML of every test of a checkout of yaml-test-suite."""
    texts = []
    for path in sorted(folder.glob("src/*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8")):
            text = re.sub("—*»", "\t", case.get("yaml", ""))
            for mark, meaning in MARKS.items():
                text = text.replace(mark, meaning)
            texts.append(text)
    return texts


def check_yaml(texts: Iterable[str]) -> Tally:
    """Read each text as a config, alone and as a section of one; torch is never needed."""
    tally = Tally("YAML as configs", allowed={0, 2}, max_errors=MAX_FAULTS)
    with tempfile.TemporaryDirectory() as folder, patch.dict(sys.modules, {"torch": None}):
        file = Path(folder, "config.yaml")
        for number, text in enumerate(texts):
            indented = "".join(f"  {line}" for line in text.splitlines(keepends=True))
            for kind, content in (("alone", text), ("a section", f"model:\n{indented}")):
                file.write_text(content, encoding="utf-8", errors="surrogatepass", newline="")
                tally.add(kind, number, content, call(train_main, str(file), "--print-config"))
    return tally


def check_strings(strings: Iterable[str]) -> Tally:
    """Use each string as a setting, a key, an option, a prompt, a text and a printed name."""
    tally = Tally("strings", allowed={0, 2, 4})
    config, strings = "configs/smoke.yaml", list(strings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, string in enumerate(strings):
            (folder / "config.yaml").write_bytes(
                f"seed: 1\n{json.dumps(string)}: 2\n".encode(errors="surrogatepass")
            )
            for kind, main, words in (
                ("setting", train_main, [config, f"--out_dir={string}", "--print-config"]),
                ("option", train_main, [config, f"--{string}=1", "--print-config"]),
                ("key", train_main, [str(folder / "config.yaml"), "--print-config"]),
                ("prompt", sample_main, [f"--ckpt={folder / 'none'}", f"--prompt={string}"]),
            ):
                tally.add(kind, number, string, found := call(main, *words))
                if kind == "setting" and found.code == 0:
                    assert yaml.safe_load(found.out)["out_dir"] == string
            _check_text(folder, string)
    _check_words([string for string in strings if escape(string) == string])
    return tally


def _check_text(folder: Path, string: str) -> None:
    """A text of this string is read exactly, or refused in one line."""
    text = (string + "ab") * 20
    path = folder / "text.txt"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        corpus = load_corpus(DataConfig(sources=[str(path)]))
    except DataError as error:
        assert len(printed(error)) < 1000
        return
    assert corpus.tokenizer.decode(corpus.train.ids) == text.removeprefix("\ufeff")


def _check_words(strings: list[str]) -> None:
    """Check that a shell reads each string of a printed command unchanged."""
    commands = [shell_command(["printf", r"%s\0", path_word(string)]) for string in strings]
    done = subprocess.run(["sh", "-c", "\n".join(commands)], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [path_word(string) for string in strings]


def our_pickles(folder: Path) -> Path:
    """Write a few harmful and harmless files, as picklescan has many, and return their folder."""

    class Harmful:
        def __reduce__(self):
            return os.system, ("touch pwned",)

    for protocol in range(6):
        content = pickle.dumps(Harmful(), protocol)
        (folder / f"harmful{protocol}.pkl").write_bytes(content)
        (folder / f"late{protocol}.pt").write_bytes(pickle.dumps([1, 2], protocol) + content)
    (folder / "old.bin").write_bytes(pickle.dumps(Harmful()) + b"\x80\x02}q\x00.")
    (folder / "harmless.pkl").write_bytes(pickle.dumps({"a": [1, "b"]}))
    (folder / "none.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    return folder


def check_pickles(folder: Path) -> Tally:
    """Load every file as a checkpoint, ours and nanoGPT's; watch what Python does meanwhile."""
    tally = Tally("pickles and archives", allowed={4})
    executed, watching = [], True

    def watch(event: str, arguments: tuple) -> None:
        if watching and EXECUTES.match(event):
            executed.append(f"{event} {arguments}")

    sys.addaudithook(watch)
    try:
        for number, path in enumerate(path for path in sorted(folder.rglob("*")) if path.is_file()):
            tally.add("as ours", number, path, call(sample_main, f"--ckpt={path}"))
            try:
                nanogpt.read_checkpoint(path)
            except CheckpointError as error:
                assert len(printed(error)) < 1000
                tally.counts["as nanoGPT's, refused", 4] += 1
            else:
                tally.counts["as nanoGPT's, read as plain data", 0] += 1
            assert not executed, f"{path}: {executed}"
    finally:
        watching = False
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("yaml", "strings", "pickles"):
        parser.add_argument(f"--{name}", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    if options.yaml:
        print(check_yaml(yaml_texts(options.yaml)))
    if options.strings:
        print(check_strings(json.loads((options.strings / "blns.json").read_text("utf-8"))))
    if options.pickles:
        print(check_pickles(options.pickles / "tests"))


if __name__ == "__main__":
    main()
