"""Campaign: random config files. Each is printed or rejected, a line for each fault, without torch.

All run through `train.py FILE --print-config` in this process, and every hundredth also in a
subprocess.
"""

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import yaml
from hypothesis import strategies as st

from configs.fields import settings_of
from configs.schema import Config
from configs.strict_yaml import MAX_FAULTS
from tests.campaigns.fuzzing import (
    AWKWARD,
    PLAUSIBLE,
    Tally,
    call,
    call_in_subprocess,
    check_with_hypothesis,
    likely_value,
    main,
    rng_of,
)
from tests.commands import train_main
from tests.conftest import ROOT

SHIPPED = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
KNOWN = settings_of(Config)
PIECES = [
    b"", b"\t", b"\0", b": ", b"- ", b"? ", b"[", b"]", b"{", b"}", b",", b"&a ", b"*a",
    b"!!int ", b"!", b"'", b'"', b"|\n", b">-\n", b"\n", b"\n\n", b"\r", b"\n---\n", b"\n...\n",
    b"%YAML 9\n", b"%TAG ! x\n", b"#", b" ", b"    ", b"<<: ", b"1e400", b".nan", b"010",
    b"\x1b[2J", b"\xff", b"\xef\xbb\xbf", b"\xc2\x85", b"\\",
    b"%YAML " + b"9" * 5000 + b".1\n---\n",
]  # fmt: skip
ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "utf-7", "cp500"]


def mutated(rng: random.Random) -> bytes:
    """Return a shipped config with a few bytes or lines changed, repeated, moved or removed."""
    content = rng.choice(SHIPPED)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, cut = rng.randint(0, len(content)), rng.choice([0, 0, 1, 5, 50])
        piece = rng.choice([*PIECES, rng.randbytes(rng.randint(1, 8))]) * rng.choice(
            [1, 1, 1, 1, 30, 3000]
        )
        content = content[:at] + piece + content[at + cut :]
        if rng.random() < 0.4:
            lines = content.splitlines(keepends=True)
            lines.insert(rng.randint(0, len(lines)), rng.choice(lines or [b""]))
            content = b"".join(lines)
    return content


def random_settings(rng: random.Random) -> bytes:
    """Return existing settings with random values."""
    sections = {"": [], "data": [], "model": [], "train": []}
    for name in rng.sample(list(KNOWN), rng.randint(1, 9)):
        value = likely_value(rng, KNOWN[name])
        section, _, key = name.rpartition(".")
        sections[section].append(f"{key}: {value}")
    lines = [line for section, inner in sections.items() for line in _block(rng, section, inner)]
    return "\n".join(lines).encode(errors="surrogatepass")


def _block(rng: random.Random, section: str, inner: list[str]) -> list[str]:
    if not section or not inner:
        return inner
    if rng.random() < 0.3:
        return [f"{section}: {{{', '.join(inner)}}}"]
    return [f"{section}:", *(f"  {line}" for line in inner)]


def random_yaml(rng: random.Random) -> bytes:
    """Return YAML of any shape, with anchors, tags, quotes, comments and several documents."""
    documents = ("\n".join(_node(rng, 0)) for _ in range(rng.choice([1, 1, 1, 2])))
    return "\n---\n".join(documents).encode(errors="surrogatepass")


def _node(rng: random.Random, depth: int) -> list[str]:
    shape = rng.choice(["scalar", "mapping", "sequence"]) if depth < 12 else "scalar"
    if shape == "scalar":
        style = rng.choice(
            ["{}", "{}", "'{}'", '"{}"', "|\n  {}", ">\n  {}", "&a {}", "!!str {}", "{} # x"]
        )
        return [style.format(rng.choice([*AWKWARD, *PLAUSIBLE, *KNOWN]))]
    lines = []
    for _ in range(rng.choice([1, 2, 3])):
        first, *rest = _node(rng, depth + 1)
        key = rng.choice(["model", "train", "data", *KNOWN, *AWKWARD]).rpartition(".")[2]
        lines.append(
            (f"{key}:" if shape == "mapping" else "-") + rng.choice([" ", "\n  ", "", "\t"]) + first
        )
        lines += [f"  {line}" for line in rest]
    return lines


def foreign(rng: random.Random) -> bytes:
    """Return bytes that are no config, or a config in another encoding or truncated."""
    kind = rng.choice(["bytes", "text", "encoded", "cut", "large"])
    if kind == "bytes":
        return rng.randbytes(rng.choice([1, 10, 100, 10_000]))
    if kind == "text":
        return "".join(
            chr(rng.choice([rng.randrange(0xD800), 0x1F600])) for _ in range(rng.randint(0, 200))
        ).encode()
    if kind == "encoded":
        return rng.choice(SHIPPED).decode().encode(rng.choice(ENCODINGS), errors="replace")
    if kind == "cut":
        content = rng.choice(SHIPPED)
        return content[: rng.randint(0, len(content))]
    return rng.choice([b"a: ", b"[", b"- ", b"x", b"#", b"\n", b"{a: ", b"'", b" "]) * rng.choice(
        [100, 10_000]
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([*KNOWN, *PLAUSIBLE])
)
KEYS = st.sampled_from([*KNOWN, "model", "train"])
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))
YAML = st.builds(
    lambda tree, flow: yaml.safe_dump(tree, default_flow_style=flow).encode(), TREES, st.booleans()
)
KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "shipped ones mutated": mutated,
    "settings and values": random_settings,
    "random YAML": random_yaml,
    "no YAML": foreign,
}


def run(cases: int) -> Tally:
    """Try `cases` files, equally many of each kind."""
    tally = Tally("config files", allowed={0, 2}, max_errors=MAX_FAULTS)
    each = cases // (len(KINDS) + 1)
    with tempfile.TemporaryDirectory() as folder, patch.dict(sys.modules, {"torch": None}):
        file = Path(folder, "config.yaml")

        def check(kind: str, number: int, content: bytes) -> None:
            file.write_bytes(content)
            result = call(train_main, str(file), "--print-config")
            tally.add(kind, number, content, result)
            if tally.is_sampled:
                in_subprocess = call_in_subprocess("train.py", str(file), "--print-config")
                assert (in_subprocess.code, in_subprocess.out, in_subprocess.err) == (
                    result.code,
                    result.out,
                    result.err,
                ), in_subprocess
                tally.add("in a process of its own", number, content, in_subprocess)
            if result.code == 0:
                _check_printed(file, result.out)

        for kind, make in KINDS.items():
            for number in range(each):
                check(kind, number, make(rng_of(kind, number)))
        check_with_hypothesis(
            YAML | st.binary(),
            cases - each * len(KINDS),
            lambda content: check("hypothesis", 1, content),
        )
    return tally


def _check_printed(file: Path, printed: str) -> None:
    """Check that a printed config, when loaded, prints itself."""
    file.write_text(printed, encoding="utf-8", newline="")
    assert call(train_main, str(file), "--print-config").out == printed


if __name__ == "__main__":
    main(run, cases=10_000)
