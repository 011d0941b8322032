"""Texts: find their files, or download one, and read them into memory.

A source is an entry of `data.sources`: a file, a folder, a pattern, or a URL with the SHA-256 of
its bytes. A missing source is skipped. A source that exists but cannot be read is an error, because
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
from configs.schema import TEXT_URL, DataConfig

TIMEOUT = 10.0  # seconds in which not a byte of a download arrives
# byte order mark -> encoding; UTF-32 comes first, because FF FE 00 00 begins with UTF-16's FF FE
ENCODING_OF_BOM = {
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
    """A source that is missing; the message says why."""


@dataclass(frozen=True)
class Text:
    """The content of one or more files.

    name      for messages: `tinyshakespeare`, `plays`, `book.txt`
    path      the file, folder or pattern that was read
    contents  the characters of each file, in the order of the files' names
    notes     for the user, on the other sources
    """

    name: str
    path: Path
    contents: Sequence[str]
    notes: Sequence[str] = ()

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of a single file; for several files, of their concatenated SHA-256s.

        It depends on the characters alone, not on line ends, encoding or the files' names.
        """
        digests = [hashlib.sha256(content.encode()) for content in self.contents]
        # file boundaries matter: the end of each file is held out
        if len(digests) > 1:
            return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
        return digests[0].hexdigest()

    def contents_to_join(self) -> list[str]:
        """Return the contents; if there are several, each ends with a newline."""
        if len(self.contents) == 1:
            return list(self.contents)
        # the last line of a file must not run into the first line of the next
        return [content + "\n" * (content[-1:] not in ("", "\n")) for content in self.contents]


# ---------------------------------------------------------------------------------- find and choose


def find_text(
    data: DataConfig, setting: str, expected_sha256: str | None = None, list_unused: bool = False
) -> Text:
    """Read the first available source in a setting, "sources" or "val_sources".

    A resumed run passes the `expected_sha256` of its text: then other texts are skipped. With
    `list_unused`, a note lists the other sources that exist.
    Raises DataError if no source is available, CheckpointError if none has the expected SHA-256.
    """
    sources, unavailable = getattr(data, setting), []
    for source in sources:
        # skip a source that is missing, or not the text of the resumed run
        try:
            text = read_source(source, data.encoding)
            if expected_sha256 not in (None, text.sha256):
                raise Unavailable(f"{text.path} is a different text, SHA-256 {text.sha256}")
        except Unavailable as reason:
            unavailable.append(f"{source.partition('#sha256=')[0]} ({reason})")
            continue

        # found; tell the user about the other sources
        notes, first = [], display_name(local_path(sources[0]))
        if text.name != first and not expected_sha256:
            notes.append(f"losses on {text.name} and {first} are not comparable")
        if unavailable:
            notes.append(f"not available: {', '.join(unavailable)}")
        unused = [s for s in sources if list_unused and s != source and exists(s)]
        if unused:
            notes.append(
                f"not used: {first_few(unused)}; only the first available source is read; to train "
                "on all of them, give their folder or a pattern such as '*.txt'"
            )
        return replace(text, notes=notes)

    # no source is available
    reasons = ", ".join(unavailable)
    if expected_sha256:
        raise CheckpointError(
            f"data.{setting}: the text has changed since the checkpoint, which was trained on "
            f"SHA-256 {expected_sha256}; found instead: {reasons}; restore that text, start a new "
            "run, or continue with --allow_data_change"
        )
    hint = suggest_path(local_path(sources[-1]))
    raise DataError(f"data.{setting}: no text is available: {reasons}; {hint}")


def read_source(source: str, encoding: str) -> Text:
    """Read a source; download a URL unless its text is on this machine already.

    Raises Unavailable if there is no text, DataError if it cannot be read.
    """
    path = local_path(source)
    try:
        location = locate(source) or download(source)
        contents = [decode(file.read_bytes(), file, encoding) for file in find_files(location)]
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read: {error.strerror}; "
            "fix that, or name another source"
        ) from error
    return Text(display_name(path), location, contents)


def local_path(source: str) -> Path:
    """Return the path of a source; the text of a URL is stored at data/NAME/input.txt.

    NAME is the file's name in the URL without its suffix, or its folder's if that is input.txt.
    """
    if not (match := TEXT_URL.fullmatch(source)):
        return Path(source)
    # .../tinyshakespeare/input.txt is named after its folder, .../novel.txt is a novel
    _, folder, file, _ = match.groups()
    stem = Path(file).stem
    return Path("data", folder if stem == "input" else stem, "input.txt")


def locate(source: str) -> Path | None:
    """Return where a source is: in the current folder, or else beside the code; or else None."""
    path = local_path(source)
    return next((location for location in (path, ROOT / path) if find_files(location)), None)


def exists(source: str) -> bool:
    """Return whether a source is on this machine; one that cannot be read counts too."""
    try:
        return locate(source) is not None
    except (DataError, OSError):
        return True


def display_name(path: Path) -> str:
    """Return a name for messages: a pattern, the folder of an `input.txt`, or the last part."""
    if is_pattern(path):
        return str(path)
    path = path.absolute()
    return path.parent.name if path.name == "input.txt" else path.name


def is_pattern(path: Path) -> bool:
    # the name of an existing file may contain these characters too
    return re.search(r"[*?]|\[.+\]", str(path)) is not None and not os.path.lexists(path)


def find_files(path: Path) -> list[Path]:
    """Return the files that a file name, folder or pattern stands for; [] if there are none.

    They are sorted by name, the same on every system. A file that is reached twice, by a link or by
    `**/**`, is listed once.
    """
    if is_pattern(path):
        # every file that matches, whatever its suffix
        matches = map(Path, glob.iglob(str(path), recursive=True))
        files = [match for match in matches if not match.is_dir()]
    elif path.is_dir():
        # its .txt files; subfolders are not searched
        visible = [file for file in path.iterdir() if not file.name.startswith(".")]
        files = [file for file in visible if file.suffix.lower() == ".txt"]
        if not files:
            raise DataError(
                f"{path}: contains no text; the texts of a folder are its *.txt files; "
                "add one, or give a pattern such as 'FOLDER/*.md'"
            )
    else:
        # lexists: a broken link is not missing; reading it raises an error
        files = [path] if os.path.lexists(path) else []

    # sort, and drop duplicates
    unique = {}
    for file in sorted(files, key=lambda file: file.parts):
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def suggest_path(path: Path) -> str:
    """Return "did you mean X?" for the nearest name in the folder of a path."""
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    names = {entry.name: str(entry) for entry in entries}
    return did_you_mean(path.name, names, "name an existing file or folder, or a URL")


# -------------------------------------------------------------------------------- read and download


def read_text(path: Path, encoding: str) -> str:
    """Read a text for a trained model; `encoding` is the encoding of its training text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; name a text file") from error

    # sample.py has no setting for another encoding, so the user has to convert the file
    command = f"iconv -f ENCODING -t {encoding.removesuffix('-sig').upper()} OLD > NEW"
    hint = f"the training text was {encoding.upper()}; convert it: {command}"
    return decode(content, path, encoding, hint)


def decode(content: bytes, path: Path, encoding: str, hint: str = NAME_THE_ENCODING) -> str:
    """Return the characters of a file; all line ends become a newline.

    A byte order mark overrides `encoding` and is removed. Raises DataError for bytes that are not
    text; `hint` says what to do then.
    """
    bom = next(filter(content.startswith, ENCODING_OF_BOM), b"")
    encoding = ENCODING_OF_BOM.get(bom, encoding)
    try:
        return universal_newlines(content.decode(encoding))
    except UnicodeDecodeError as error:
        # say where, and how many bytes: few if the file is damaged, many if the encoding is wrong
        start = len(content) - len(error.object) + error.start  # error.object may lack the BOM
        line = universal_newlines(content[:start].decode(encoding, "ignore")).count("\n") + 1

        # the bytes that survive decoding and encoding are valid
        intact = content.decode(encoding, "ignore").encode(encoding)
        wrong, name = len(content) - len(intact), encoding.removesuffix("-sig").upper()
        raise DataError(
            f"{path}: not {name} at byte {start:,} (line {line:,}); {wrong:,} of {len(content):,} "
            f"bytes cannot be decoded; {hint}; if they are few, the file is damaged: "
            f"iconv -c -f {name} OLD > NEW leaves them out"
        ) from error


def download(source: str) -> Path:
    """Download a text into data/; return its path.

    The file appears once its content is complete and has the right SHA-256. Raises Unavailable if
    the download fails, or the source is not a URL.
    """
    path = local_path(source)
    # not a URL, but a path where nothing exists
    if not (match := TEXT_URL.fullmatch(source)):
        missing = "nothing matches" if is_pattern(path) else "no such file or folder"
        raise Unavailable(missing)
    url, _, _, expected_sha256 = match.groups()

    # download it, and check that it is the text that the recipe was measured on
    try:
        with urlopen(url, timeout=TIMEOUT) as response:  # noqa: S310 - a TEXT_URL begins with https
            content = response.read()
    except (OSError, HTTPException) as error:
        # a URLError only wraps the reason
        reason = error.reason if type(error) is URLError else error
        raise Unavailable(str(reason)[:200] or type(error).__name__) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != expected_sha256.lower():
        raise Unavailable(
            f"wrong SHA-256: {len(content):,} bytes with {sha256}, not {expected_sha256}"
        )

    # store it beside the code, where every command finds it, or else in the current folder
    target = ROOT / path if os.access(ROOT / "data", os.W_OK) else path

    # rename the file when it is complete, so that a kill leaves no truncated text
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
