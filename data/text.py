"""Texts: find their files, or download one, and read them into memory.

A source is an entry of `data.sources`: a file, a folder, a pattern, or an address with the SHA-256
of its bytes. A missing source is skipped. One that exists but cannot be read is an error, because
the run would otherwise train on a text that the user did not mean.
"""

import codecs
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from common.errors import CheckpointError, DataError, did_you_mean, first_few
from common.files import ROOT
from configs.fields import universal_newlines
from configs.schema import ADDRESS, DataConfig

TIMEOUT = 10.0  # seconds without a byte of a download
MARKS = {  # UTF-32 first, because its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
NAME_THE_ENCODING = (
    "name the encoding: --data.encoding=cp1252 (Western), cp1251 (Cyrillic), gb18030 (Chinese), "
    "shift-jis (Japanese), euc-kr (Korean) or any other that Python has"
)


class Unavailable(Exception):
    """A source that cannot be had; the message says why."""


@dataclass(frozen=True)
class Text:
    """One or more files, as characters.

    name   for messages: `tinyshakespeare`, `plays`, `book.txt`
    path   the file, folder or pattern that they come from
    files  the characters of each file, in the order of the files' names
    notes  on the sources before it, which are not available
    """

    name: str
    path: Path
    files: Sequence[str]
    notes: Sequence[str] = ()

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of a single file; of several, that of their concatenated SHA-256s.

        It is of characters: line ends, encoding and the files' names play no part.
        """
        digests = [hashlib.sha256(file.encode()) for file in self.files]
        # of several files, the borders count too: they decide what validates
        if len(digests) > 1:
            return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
        return digests[0].hexdigest()

    def files_to_join(self) -> list[str]:
        """Return the files; of several, each that does not end with a newline gets one."""
        if len(self.files) == 1:
            return list(self.files)
        # so the last line of a file and the first of the next one stay two lines
        return [file + "\n" * (file[-1:] not in ("", "\n")) for file in self.files]


# ---------------------------------------------------------------------------------- find and choose


def find_text(
    data: DataConfig, setting: str, wanted: str | None = None, name_unused: bool = False
) -> Text:
    """Read the first available source in a setting, "sources" or "val_sources".

    With `wanted` (a resumed run), read the one with that SHA-256, wherever it is in the list. With
    `name_unused`, a note names the others that are there.
    Raises DataError if no source is available, CheckpointError if none has the wanted SHA-256.
    """
    sources, unavailable = getattr(data, setting), []
    for source in sources:
        # is it there, and is it the right one?
        try:
            text = read_source(source, data.encoding)
            if wanted not in (None, text.sha256):
                raise Unavailable(f"{text.path} is a different text, SHA-256 {text.sha256}")
        except Unavailable as reason:
            unavailable.append(f"{source.partition('#sha256=')[0]} ({reason})")
            continue

        # found: what should the user know about the others?
        notes, first = [], name_of(path_of(sources[0]))
        if text.name != first:
            notes.append(f"losses on {text.name} and {first} are not comparable")
        if unavailable:
            notes.append(f"not available: {', '.join(unavailable)}")
        unused = [s for s in sources if name_unused and s != source and place_of(s)]
        if unused:
            notes.append(
                f"not used: {first_few(unused)}; of several sources, the first that is available "
                "is the text; to train on all, name their folder, or a pattern such as '*.txt'"
            )
        return replace(text, notes=notes)

    # no source is available
    reasons = ", ".join(unavailable)
    if wanted:
        raise CheckpointError(
            f"data.{setting}: the text has changed since the checkpoint, which was trained on "
            f"SHA-256 {wanted}; found instead: {reasons}; restore that text, start a new run, or "
            "continue with --allow_data_change"
        )
    hint = nearest_name(path_of(sources[-1]))
    raise DataError(f"data.{setting}: no text is available: {reasons}; {hint}")


def read_source(source: str, encoding: str) -> Text:
    """Read a source: a relative path under the current folder, or else beside the code.

    An address is downloaded, unless its text is there. Raises Unavailable if there is no text,
    DataError if there is one that cannot be read.
    """
    path = path_of(source)
    try:
        # on this machine, or else on the network
        place = place_of(source) or download(source)
        files = [decode(file.read_bytes(), file, encoding) for file in files_at(place)]
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read: {error.strerror}; "
            "fix that, or name another source"
        ) from error
    return Text(name_of(path), place, files)


def path_of(source: str) -> Path:
    """Return the path of a source. That of an address is data/NAME/input.txt.

    NAME is the name of its file without the suffix, or of its folder if the file is an input.txt.
    """
    if not (match := ADDRESS.fullmatch(source)):
        return Path(source)
    # .../tinyshakespeare/input.txt is named after its folder, .../novel.txt is a novel
    _, folder, file, _ = match.groups()
    stem = Path(file).stem
    return Path("data", folder if stem == "input" else stem, "input.txt")


def place_of(source: str) -> Path | None:
    """Return where a source is: under the current folder, else beside the code, else nowhere."""
    path = path_of(source)
    return next((place for place in (path, ROOT / path) if files_at(place)), None)


def name_of(path: Path) -> str:
    """Return a name for messages: the folder of an `input.txt`, a pattern, or the file's own."""
    if is_pattern(path):
        return str(path)
    path = path.absolute()
    return path.parent.name if path.name == "input.txt" else path.name


def is_pattern(path: Path) -> bool:
    # a file may have such characters in its name
    return re.search(r"[*?]|\[.+\]", str(path)) is not None and not os.path.lexists(path)


def files_at(path: Path) -> list[Path]:
    """Return the files of a file, folder or pattern; none if nothing is there.

    They are in the order of their names, which is the same on every system. A file that is reached
    twice, by a link or by `**/**`, counts once.
    """
    if is_pattern(path):
        # every file that matches, whatever its suffix
        matches = map(Path, glob.iglob(str(path), recursive=True))
        files = [match for match in matches if not match.is_dir()]
    elif path.is_dir():
        # its text files, without those of the folders in it
        visible = [file for file in path.iterdir() if not file.name.startswith(".")]
        files = [file for file in visible if file.suffix.lower() == ".txt"]
        if not files:
            raise DataError(
                f"{path}: contains no text; the texts of a folder are its *.txt files; "
                "add one, or give a pattern such as 'FOLDER/*.md'"
            )
    else:
        # a broken link counts as a file: reading it raises the error
        files = [path] if os.path.lexists(path) else []

    # one order on every system, and each file once
    once = {}
    for file in sorted(files, key=lambda file: file.parts):
        once.setdefault(file.resolve(), file)
    return list(once.values())


def nearest_name(path: Path) -> str:
    """Return "did you mean X?" for the nearest name in the folder of a path."""
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    names = {entry.name: str(entry) for entry in entries}
    return did_you_mean(path.name, names, "name an existing file, folder or address")


# -------------------------------------------------------------------------------- read and download


def read_text(path: Path, encoding: str) -> str:
    """Read a text for a trained model, in the encoding of its training text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; name a text file") from error

    # sample.py has no setting for another encoding, so the file is converted
    convert = f"iconv -f ENCODING -t {encoding.upper()} OLD > NEW"
    remedy = f"the training text was {encoding.upper()}; convert it: {convert}"
    return decode(content, path, encoding, remedy)


def decode(content: bytes, path: Path, encoding: str, remedy: str = NAME_THE_ENCODING) -> str:
    """Return the characters of a file; all line ends become a newline.

    A byte order mark determines the encoding, and is removed; without one it is `encoding`. Raises
    DataError for bytes that are not text.
    """
    # a byte order mark overrides the setting
    mark = next(filter(content.startswith, MARKS), b"")
    encoding = MARKS.get(mark, encoding)
    try:
        return universal_newlines(content.decode(encoding))
    except UnicodeDecodeError as error:
        # where, and how much of it: damage is little, a wrong encoding is much
        start = len(content) - len(error.object) + error.start  # its object may lack the mark
        line = universal_newlines(content[:start].decode(encoding, "ignore")).count("\n") + 1

        # what comes back after decoding and encoding was right; the rest is wrong
        intact = content.decode(encoding, "ignore").encode(encoding)
        wrong, name = len(content) - len(intact), encoding.removesuffix("-sig").upper()
        raise DataError(
            f"{path}: not {name} at byte {start:,} (line {line:,}); {wrong:,} of {len(content):,} "
            f"bytes cannot be decoded; {remedy}; if they are few, the file is damaged: "
            f"iconv -c -f {name} OLD > NEW leaves them out"
        ) from error


def download(address: str) -> Path:
    """Download the text of an address into data/; return its path.

    The file appears once its content is complete and has the right SHA-256. Raises Unavailable.
    """
    path = path_of(address)
    # not an address: a path where nothing exists
    if not (match := ADDRESS.fullmatch(address)):
        missing = "nothing matches" if is_pattern(path) else "no such file or folder"
        raise Unavailable(missing)
    url, _, _, sha256 = match.groups()

    # download it, and check that it is the text that the recipe was measured on
    try:
        with urlopen(url, timeout=TIMEOUT) as response:  # noqa: S310 - an ADDRESS begins with https
            content = response.read()
    except (OSError, HTTPException) as error:
        # a URLError only wraps what went wrong
        reason = error.reason if type(error) is URLError else error
        raise Unavailable(str(reason)[:200] or type(error).__name__) from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256.lower():
        raise Unavailable(f"wrong SHA-256: {len(content):,} bytes with {found}, not {sha256}")

    # beside the code, where every command finds it, or else under the current folder
    target = ROOT / path if os.access(ROOT / "data", os.W_OK) else path

    # under another name until it is complete: a kill leaves no half a text
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, target)
    except OSError as error:
        raise Unavailable(f"cannot be stored at {target}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target
