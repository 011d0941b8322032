"""Fuzzed texts: each is read exactly, or refused in one line, by rules that are written a second
time here.

In one process through what `train.py` reads a text with, and every hundredth through `python
train.py` itself.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from common.errors import escape
from data.corpus import Corpus, check_sizes, load_corpus
from tests.campaigns.fuzzing import Answer, Tally, call, chance, main, of_hypothesis, real

SCRIPTS = [
    "the quick brown fox\n",
    "naïve café, Straße\r\n",
    "Съешь ещё этих булок\n",
    "Ξεσκεπάζω την ψυχοφθόρα\n",
]
SCRIPTS += ["天地玄黄，宇宙洪荒。\n", "いろはにほへと\n", "키스의 고유조건은\n", "שלום, מה נשמע?\n"]
SCRIPTS += ["🙂👨‍👩‍👧 a\u0301\n", "\t{}[]\\\n"]
ENCODINGS = [
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-be",
    "utf-16-le",
    "utf-32",
    "utf-32-be",
    "utf-32-le",
    "utf-7",
]
ENCODINGS += [
    "ascii",
    "latin-1",
    *(f"iso8859-{i}" for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16)),
]
ENCODINGS += [
    "cp437",
    "cp850",
    "cp866",
    "cp1006",
    "cp1125",
    "mac-roman",
    "koi8-r",
    "koi8-u",
    "tis-620",
    "ptcp154",
]
ENCODINGS += [
    "cp037",
    "cp500",
    "cp1140",
    *(f"cp{i}" for i in range(1250, 1259)),
    "kz1048",
    "hp-roman8",
]
ENCODINGS += [
    "big5",
    "big5hkscs",
    "gb2312",
    "gbk",
    "gb18030",
    "hz",
    "cp932",
    "cp949",
    "cp950",
    "johab",
    "euc-kr",
]
ENCODINGS += ["shift-jis", "shift-jisx0213", "euc-jp", "iso2022-jp", "iso2022-jp-3", "iso2022-kr"]
UNSEEN = [
    *range(32),
    *range(0x7F, 0xA0),
    0xAD,
    0x61C,
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
]
UNSEEN += [
    *range(0x2060, 0x2070),
    0xFEFF,
    *range(0xFFF9, 0x10000),
    0xE0001,
    0xE0041,
    0xF0000,
    0x10FFFF,
]
DAMAGE = [b"", b"\0", b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfe", b"\r\n", b"\xf4\x90\x80\x80"]
MARKS = {  # the longer first
    b"\xff\xfe\0\0": "utf-32-le",
    b"\0\0\xfe\xff": "utf-32-be",
    b"\xef\xbb\xbf": "utf-8",
    b"\xff\xfe": "utf-16-le",
    b"\xfe\xff": "utf-16-be",
}


def text_of(rng: random.Random, length: int) -> str:
    """`length` characters in one script or several."""
    lines = rng.sample(SCRIPTS, rng.choice([1, 1, 2, 4]))
    return "".join(rng.choice(lines) for _ in range(length // 8 + 1))[:length]


def random_bytes(rng: random.Random) -> bytes:
    """Bytes of all values, or of few."""
    values = rng.choice(
        [range(256), range(128), range(32), b"ab\n", b"\0a", b"\xe2\x82\xac\n", b"\xf0\x9f\x99\x82"]
    )
    return bytes(rng.choices(values, k=rng.choice([0, 1, 2, 3, 4, 10, 100, 1000, 5000])))


def encoded(rng: random.Random) -> bytes:
    """A text in any encoding that is in use, or was."""
    text = rng.choice(["", "", "\ufeff"]) + text_of(rng, rng.choice([50, 1000]))
    return text.encode(rng.choice([*ENCODINGS, "utf-8", "utf-16", "utf-32"]), errors="replace")


def around_block_size(rng: random.Random) -> bytes:
    """A text of about the least length that the block sizes of this campaign need."""
    return text_of(rng, rng.choice([1, 2, 8, 64]) * 10 + rng.randint(-12, 25)).encode()


def controls(rng: random.Random) -> bytes:
    """A text sown with characters that nobody sees."""
    text = list(text_of(rng, 900))
    for _ in range(rng.choice([1, 10, 500])):
        text[rng.randrange(len(text))] = chr(rng.choice(UNSEEN))
    return "".join(text).encode(rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"]))


def damaged(rng: random.Random) -> bytes:
    """An encoded text with bytes changed, lost or put in, or cut in the middle of a character."""
    content = bytearray(
        text_of(rng, 1000).encode(rng.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
    )
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(content) + 1)
        content[at : at + rng.choice([0, 1, 2])] = rng.choice([*DAMAGE, rng.randbytes(1)])
    return bytes(content[: rng.choice([len(content), rng.randint(0, len(content))])])


def extreme(rng: random.Random) -> bytes:
    """One character over and over, lines of every kind, or more characters than two bytes can tell
    apart.
    """
    return rng.choice(
        [
            lambda: text_of(rng, 1).encode() * rng.choice([1, 10, 100_000]),
            lambda: (
                rng.choice([b"\n", b"\r\n", b"\r", b"\n\r", b"a\n", b" "]) * rng.choice([9, 300])
            ),
            lambda: "".join(
                map(chr, range(0x10000, 0x10000 + rng.choice([65_535, 65_537, 70_000])))
            ).encode(),
            lambda: b"".join(rng.choice(list(MARKS)) for _ in range(rng.randint(1, 300))),
            lambda: text_of(rng, 500).encode("utf-16-le"),
            lambda: (text_of(rng, 500) + "\ud800").encode("utf-8", "surrogatepass"),
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
    """The text that the bytes are; None for bytes that are none."""
    mark = next(filter(content.startswith, MARKS), b"")
    try:
        return content[len(mark) :].decode(MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError:
        return None


def expected(contents: list[bytes], block_size: int) -> int:
    """The exit code that these files deserve."""
    texts = [decoded(content) for content in contents]
    if None in texts or len(set("".join(texts))) < 2:
        return 3
    longest = max(
        len(text) - len(text) * 9 // 10 for text in texts
    )  # of validation text, of which there is less
    return 0 if longest > block_size else 3


def read(folder: str, block_size: int) -> Corpus:
    """What train.py does with a text before the first step."""
    said = []
    corpus = load_corpus([folder], notify=said.append)
    check_sizes(corpus, block_size)
    assert all(escape(line) == line for line in said)
    return corpus


def run(cases: int) -> Tally:
    """Try `cases` corpora of one to three files, as many of each kind."""
    tally = Tally("texts", allowed={0, 3})
    each = cases // (len(KINDS) + 1)
    with tempfile.TemporaryDirectory() as place, patch.dict(sys.modules, {"torch": None}):
        folder = Path(place, "texts")

        def check(kind: str, number: int, contents: list[bytes], block_size: int) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for i, content in enumerate(contents):
                (folder / f"{i}.txt").write_bytes(content)
            corpora = []
            found = call(lambda argv: corpora.append(read(str(folder), block_size)) or 0)
            tally.add(kind, number, (contents, block_size), found)
            assert found.code == expected(contents, block_size) or _taken_for_utf16(
                contents, found
            ), (contents, found)
            if corpora:
                ids = corpora[0].train.ids
                assert corpora[0].tokenizer.decode(ids) == "".join(map(decoded, contents))
            if tally.is_sampled:
                tally.add("python train.py", number, contents, really(folder, block_size, found))

        for kind, make in KINDS.items():
            for number in range(each):
                rng = chance(kind, number)
                contents = [make(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
                check(kind, number, contents, rng.choice([1, 2, 8, 64]))
        files = st.lists(
            st.binary() | st.text(min_size=20).map(lambda text: text.encode(errors="replace")),
            min_size=1,
        )
        numbers = iter(range(1, cases + 1))
        left = cases - each * len(KINDS)
        of_hypothesis(files, left, lambda contents: check("hypothesis", next(numbers), contents, 1))
    return tally


def _taken_for_utf16(contents: list[bytes], found: Answer) -> bool:
    """UTF-8 may hold NULs in every other byte, but that is not what it is then."""
    return "looks like UTF-16" in found.err and any(b"\0" in content[:4096] for content in contents)


def really(folder: Path, block_size: int, found: Answer) -> Answer:
    """What `python train.py` answers, on a run of one step; the same, if it refuses."""
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
    again = real("train.py", "configs/smoke.yaml", *options, torch=True)
    assert again.code == found.code and (found.code == 0 or again.err == found.err), again
    return again


if __name__ == "__main__":
    main(run, cases=2_000)
