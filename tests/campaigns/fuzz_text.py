"""Campaign: random texts. Each is read exactly or rejected in one line.

The rules are implemented a second time here.

All are read with the functions of train.py in this process, and every hundredth by train.py in a
subprocess.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from configs.schema import DataConfig
from data.corpus import Corpus, check_sizes, load_corpus
from tests.campaigns.fuzzing import (
    Result,
    Tally,
    call,
    call_in_subprocess,
    check_with_hypothesis,
    main,
    rng_of,
)

SCRIPTS = [
    "the quick brown fox\n", "naïve café, Straße\r\n", "Съешь ещё этих булок\n",
    "Ξεσκεπάζω την ψυχοφθόρα\n", "天地玄黄，宇宙洪荒。\n", "いろはにほへと\n",
    "키스의 고유조건은\n", "שלום, מה נשמע?\n", "🙂👨‍👩‍👧 a\u0301\n", "\t{}[]\\\n",
]  # fmt: skip
ENCODINGS = [
    "utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le",
    "utf-7", "ascii", "latin-1",
    *(f"iso8859-{i}" for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16)), "cp437", "cp850",
    "cp866", "cp1006", "cp1125", "mac-roman", "koi8-r", "koi8-u", "tis-620", "ptcp154", "cp037",
    "cp500", "cp1140", *(f"cp{i}" for i in range(1250, 1259)), "kz1048", "hp-roman8", "big5",
    "big5hkscs", "gb2312", "gbk", "gb18030", "hz", "cp932", "cp949", "cp950", "johab", "euc-kr",
    "shift-jis", "shift-jisx0213", "euc-jp", "iso2022-jp", "iso2022-jp-3", "iso2022-kr",
]  # fmt: skip
INVISIBLE = [
    *range(32), *range(0x7F, 0xA0), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F),
    *range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0x10000), 0xE0001, 0xE0041, 0xF0000, 0x10FFFF,
]  # fmt: skip
DAMAGE = [b"", b"\0", b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfe", b"\r\n", b"\xf4\x90\x80\x80"]
MARKS = {  # byte order marks, the longer ones first
    b"\xff\xfe\0\0": "utf-32-le",
    b"\0\0\xfe\xff": "utf-32-be",
    b"\xef\xbb\xbf": "utf-8",
    b"\xff\xfe": "utf-16-le",
    b"\xfe\xff": "utf-16-be",
}


def random_text(rng: random.Random, length: int) -> str:
    """Return `length` characters in one or several scripts."""
    lines = rng.sample(SCRIPTS, rng.choice([1, 1, 2, 4]))
    return "".join(rng.choice(lines) for _ in range(length // 8 + 1))[:length]


def random_bytes(rng: random.Random) -> bytes:
    """Return bytes with all or only a few different values."""
    values = rng.choice(
        [range(256), range(128), range(32), b"ab\n", b"\0a", b"\xe2\x82\xac\n", b"\xf0\x9f\x99\x82"]
    )
    return bytes(rng.choices(values, k=rng.choice([0, 1, 2, 3, 4, 10, 100, 1000, 5000])))


def encoded(rng: random.Random) -> bytes:
    """Return a text in any encoding."""
    text = rng.choice(["", "", "\ufeff"]) + random_text(rng, rng.choice([50, 1000]))
    return text.encode(rng.choice([*ENCODINGS, "utf-8", "utf-16", "utf-32"]), errors="replace")


def around_block_size(rng: random.Random) -> bytes:
    """Return a text of about the minimum length for the block sizes of this campaign."""
    return random_text(rng, rng.choice([1, 2, 8, 64]) * 10 + rng.randint(-12, 25)).encode()


def controls(rng: random.Random) -> bytes:
    """Return a text with invisible characters."""
    text = list(random_text(rng, 900))
    for _ in range(rng.choice([1, 10, 500])):
        text[rng.randrange(len(text))] = chr(rng.choice(INVISIBLE))
    return "".join(text).encode(rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"]))


def damaged(rng: random.Random) -> bytes:
    """Return an encoded text with bytes changed, removed or inserted, or truncated anywhere."""
    content = bytearray(
        random_text(rng, 1000).encode(rng.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
    )
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(content) + 1)
        content[at : at + rng.choice([0, 1, 2])] = rng.choice([*DAMAGE, rng.randbytes(1)])
    return bytes(content[: rng.choice([len(content), rng.randint(0, len(content))])])


def extreme(rng: random.Random) -> bytes:
    """Return one repeated character, line ends of all kinds, or more than 65,536 characters."""
    return rng.choice(
        [
            lambda: random_text(rng, 1).encode() * rng.choice([1, 10, 100_000]),
            lambda: (
                rng.choice([b"\n", b"\r\n", b"\r", b"\n\r", b"a\n", b" "]) * rng.choice([9, 300])
            ),
            lambda: "".join(
                map(chr, range(0x10000, 0x10000 + rng.choice([65_535, 65_537, 70_000])))
            ).encode(),
            lambda: b"".join(rng.choice(list(MARKS)) for _ in range(rng.randint(1, 300))),
            lambda: random_text(rng, 500).encode("utf-16-le"),
            lambda: (random_text(rng, 500) + "\ud800").encode("utf-8", "surrogatepass"),
        ]
    )()


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "random bytes": random_bytes,
    "every encoding": encoded,
    "around block_size": around_block_size,
    "control characters": controls,
    "damaged": damaged,
    "extreme": extreme,
}


def decoded(content: bytes) -> str | None:
    """Decode the bytes; return None if that is impossible."""
    mark = next(filter(content.startswith, MARKS), b"")
    try:
        return content[len(mark) :].decode(MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError:
        return None


def expected_exit_code(contents: list[bytes], block_size: int) -> int:
    """Return the exit code that these files must give."""
    texts = [decoded(content) for content in contents]
    if None in texts or len(set("".join(texts))) < 2:
        return 3
    # the validation split is the shorter one
    longest = max(len(text) - len(text) * 9 // 10 for text in texts)
    return 0 if longest > block_size else 3


def load(folder: str, block_size: int) -> Corpus:
    """Load a corpus as train.py does before the first step."""
    corpus = load_corpus(DataConfig(sources=[folder]))
    check_sizes(corpus, block_size)
    return corpus


def run(cases: int) -> Tally:
    """Try `cases` corpora of one to three files, equally many of each kind."""
    tally = Tally("texts", allowed={0, 3})
    each = cases // (len(KINDS) + 1)
    with tempfile.TemporaryDirectory() as root, patch.dict(sys.modules, {"torch": None}):
        folder = Path(root, "texts")

        def check(kind: str, number: int, contents: list[bytes], block_size: int) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for i, content in enumerate(contents):
                (folder / f"{i}.txt").write_bytes(content)
            corpora = []
            result = call(lambda argv: corpora.append(load(str(folder), block_size)) or 0)
            tally.add(kind, number, (contents, block_size), result)
            assert result.code == expected_exit_code(contents, block_size) or _mistaken_for_utf16(
                contents, result
            ), (contents, result)
            if corpora:
                ids = corpora[0].train.ids
                assert corpora[0].tokenizer.decode(ids) == "".join(map(decoded, contents))
            if tally.is_sampled:
                tally.add(
                    "python train.py",
                    number,
                    contents,
                    check_in_subprocess(folder, block_size, result),
                )

        for kind, make in KINDS.items():
            for number in range(each):
                rng = rng_of(kind, number)
                contents = [make(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
                check(kind, number, contents, rng.choice([1, 2, 8, 64]))
        files = st.lists(
            st.binary() | st.text(min_size=20).map(lambda text: text.encode(errors="replace")),
            min_size=1,
        )
        numbers = iter(range(1, cases + 1))
        remaining = cases - each * len(KINDS)
        check_with_hypothesis(
            files, remaining, lambda contents: check("hypothesis", next(numbers), contents, 1)
        )
    return tally


def _mistaken_for_utf16(contents: list[bytes], result: Result) -> bool:
    """Return whether UTF-8 with many NULs was reported as UTF-16, which is allowed."""
    return "looks like UTF-16" in result.err and any(
        b"\0" in content[:4096] for content in contents
    )


def check_in_subprocess(folder: Path, block_size: int, result: Result) -> Result:
    """Train for one step with train.py in a subprocess, which must give the same exit code."""
    options = [
        f"--data.sources={folder}",
        f"--block_size={block_size}",
        f"--out_dir={folder.parent / 'out'}",
    ]
    options += [
        "--overwrite",
        "--max_iters=1",
        "--warmup_iters=0",
        "--sample_chars=9",
        "--dtype=float32",
    ]
    in_subprocess = call_in_subprocess("train.py", "configs/smoke.yaml", *options, torch=True)
    assert in_subprocess.code == result.code and (
        result.code == 0 or in_subprocess.err == result.err
    ), in_subprocess
    return in_subprocess


if __name__ == "__main__":
    main(run, cases=2_000)
