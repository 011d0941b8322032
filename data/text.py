"""The text of a run, in memory: its files are found, or one is downloaded.

A source is a file, a folder, a pattern, or a URL with the SHA-256 of its bytes. All sources of a
text are read, in their order, as one.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from common.errors import DataError
from common.files import ROOT
from common.words import did_you_mean, first_few, plural
from configs.schema import TEXT_URL
from data.encodings import read_files

TIMEOUT = 10.0  # seconds that a download may stall


class TextNotFound(DataError):
    """A source that is not where it should be."""


class DownloadError(TextNotFound):
    """A text that cannot be downloaded: `URL: REASON`."""


@dataclass(frozen=True)
class Text:
    """The content of one or more files.

    name     for messages: `tinyshakespeare`, `plays`, `book.txt, and 2 more`
    path     where it was read: the first file, folder or pattern, and how many more
    files    the characters of each file, in the order of the sources and of the files' names
    notes    for the user, such as what was not read
    sources  what was read: the settings' sources, or their fallback
    """

    name: str
    path: str
    files: Sequence[str]
    notes: list[str]
    sources: tuple[str, ...]

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of a single file; for several files, of their concatenated SHA-256s.

        It depends on the characters alone, not on line ends, encoding or the files' names.
        """
        digests = [hashlib.sha256(content.encode()) for content in self.files]
        # file boundaries matter: the end of each file is held out
        if len(digests) > 1:
            return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
        return digests[0].hexdigest()


# ---------------------------------------------------------------------------------- find and choose


def find_text(
    sources: tuple[str, ...], encoding: str, fallback: str = "", option: str = ""
) -> Text:
    """Read all of some sources as one text; if a download fails, read the `fallback` instead.

    `option` names these sources on the command line; without it, messages suggest no options.
    Raises DataError for a text that is missing or cannot be read.
    """
    try:
        return read_sources(sources, encoding, option)
    except DownloadError as error:
        if not fallback:
            error.args = (f"{error}; download it by other means; name its file",)
            raise
        text = read_sources((fallback,), encoding, option)
        end = f"training on {fallback}, losses on it are not comparable"
        text.notes.insert(0, f"{error}; {end}")
        return text


def read_sources(sources: tuple[str, ...], encoding: str, option: str) -> Text:
    """Read all of some sources as one text; download a URL unless its file is there.

    Raises DownloadError if a download fails, DataError for a source that is missing or unreadable.
    """
    locations, files = [], {}
    try:
        for source in sources:
            location, source_files = find_source(source)
            locations.append(location)
            # a file that two sources reach counts once, at its first place
            for file in source_files:
                files.setdefault(os.path.realpath(file), file)

        contents = ((file, file.read_bytes()) for file in files.values())
        contents, notes = read_files(contents, encoding, option and "--encoding")
        for folder in filter(Path.is_dir, locations):
            unread, pattern = list_unread(folder, files)
            if unread:
                advice = f'; add {option}="{pattern}"' if option and pattern else ""
                notes.append(f"not read: {unread}{advice}")
    except OSError as error:
        raise DataError(
            f"{error.filename or sources[0]}: cannot be read: {error.strerror}; "
            "fix that, or name another source"
        ) from error

    path = local_path(sources[0]).absolute()
    name = path.parent.name if path.name == "input.txt" else path.name
    more = f", and {len(sources) - 1} more" if len(sources) > 1 else ""
    return Text(name + more, f"{locations[0]}{more}", contents, notes, sources)


def find_source(source: str) -> tuple[Path, list[Path]]:
    """Return where a source is, and its files.

    A path is relative to the current folder, or else to the folder of the code. A URL is downloaded
    if its file is in neither.
    """
    path, url = local_path(source), TEXT_URL.fullmatch(source)
    for location in (path, ROOT / path):
        if files := find_files(location):
            if url:
                check_download(location, url)
            return location, files
    if url:
        location = download(path, url)
        return location, [location]

    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = {entry.name: str(entry) for entry in beside}
    hint = did_you_mean(path.name, names, "name an existing file or folder, or a URL")
    if "," in path.name:
        hint = "to read several, give the option several times"
    missing = "nothing matches" if split_pattern(path)[1] else "no such file or folder"
    raise TextNotFound(f"{source}: {missing}; {hint}")


def local_path(source: str) -> Path:
    """Return the path of a source; the text of a URL is stored at data/NAME/input.txt.

    NAME is the name of the file in the URL without its suffix, or of its folder for an input.txt.
    """
    if not (url := TEXT_URL.fullmatch(source)):
        return Path(os.path.expanduser(source))
    # .../tinyshakespeare/input.txt is named after its folder, .../novel.txt is a novel
    _, folder, file, _ = url.groups()
    stem = Path(file).stem
    return Path("data", folder if stem == "input" else stem, "input.txt")


def split_pattern(path: Path) -> tuple[Path, str]:
    """Split a pattern into the folder that it begins with and the rest; "" without wildcards.

    A part that exists as it is written is a name: in `[Group] Show/*.srt`, only `*` is a wildcard.
    """
    beginnings = (path, *path.parents)
    existing = next(filter(os.path.lexists, beginnings), beginnings[-1])
    rest = str(path.relative_to(existing))
    return (existing, rest) if re.search(r"[*?]|\[.+\]", rest) else (path, "")


def find_files(path: Path) -> list[Path]:
    """Return the files that a file name, folder or pattern stands for; [] if there are none.

    They are sorted by name, the same on every system. Raises DataError for a folder without texts.
    """
    folder, pattern = split_pattern(path)
    if pattern:
        # every file that matches, whatever its suffix
        files = match(folder, pattern)
    elif path.is_dir():
        files = [file for file in path.iterdir() if is_text_of_folder(file)]
        if not files:
            unread, pattern = list_unread(path, ())
            advice = f'name "{pattern}"' if pattern else "add one"
            raise DataError(
                f"{path}: contains no text; the texts of a folder are its .txt files"
                f"{unread and f'; not read: {unread}'}; {advice}"
            )
    else:
        # lexists: a broken link is not missing; reading it raises an error
        files = [path] if os.path.lexists(path) else []
    return sorted(files, key=lambda file: file.parts)


def match(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, except hidden ones.

    `**` follows no links, because two of them may form a circle.
    """
    parts = Path(pattern).parts
    if parts[-1] == "**":
        parts += ("*",)  # alone it would mean folders
    # before Python 3.13, `**.md` is an error
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts]
    return [
        path
        for path in folder.glob(os.path.join(*parts))
        if not path.is_dir() and "/." not in f"/{path.relative_to(folder).as_posix()}"
    ]


def is_text_of_folder(path: Path) -> bool:
    """Return whether a file in a folder is one of its texts: a .txt file that is not hidden."""
    return path.suffix.lower() == ".txt" and not path.name.startswith(".") and not path.is_dir()


def list_unread(folder: Path, read: Collection[str]) -> tuple[str, str]:
    """Return what of a folder is not read, such as `30 .md, 1 folder`, and a pattern to read it.

    `read` has the real paths of the files that are read. Returns "" twice if there are no folders,
    and no more other files than .txt files: those are not worth a note.
    """
    texts, others, folders = 0, Counter(), 0
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            folders += 1
        elif is_text_of_folder(path):
            texts += 1
        elif os.path.realpath(path) not in read:
            others[path.suffix] += 1

    # if another source reads files below it, the user knows what is there
    inside = os.path.join(os.path.realpath(folder), "")
    if sum(file.startswith(inside) for file in read) > texts:
        folders = 0
    mostly_others = others.total() > texts
    if not mostly_others and not folders:
        return "", ""

    unread = [f"{count:,} {suffix or 'other'}" for suffix, count in others.most_common()]
    if folders:
        unread.append(plural(folders, "folder"))
    suffixes = [suffix for suffix in others if suffix] if mostly_others else []
    suffix = max(suffixes, key=others.get, default=".txt" if folders else "")
    return first_few(unread), f"{folder}/**/*{suffix}" if suffix else ""


# ----------------------------------------------------------------------------------------- download


def check_download(path: Path, url: re.Match) -> None:
    """Raise DataError if a file is another one than the URL names, by its SHA-256."""
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256 != url[4].lower():
        raise DataError(
            f"{path}: has SHA-256 {sha256}, but {url[1]} has {url[4]}; delete the file to download "
            "it again, or name it itself"
        )


def download(path: Path, url: re.Match) -> Path:
    """Download a text to `path`, beside the code or in the current folder; return where it is.

    The file appears once its content is complete and has the right SHA-256. Raises DownloadError if
    the download fails.
    """
    try:
        with urlopen(url[1], timeout=TIMEOUT) as response:  # noqa: S310 - a TEXT_URL begins with https
            content = response.read()
    except (OSError, HTTPException, ValueError) as error:  # ValueError: of a proxy's address
        # a URLError only wraps the reason
        reason = error.reason if type(error) is URLError else error
        raise DownloadError(f"{url[1]}: {str(reason)[:200] or type(error).__name__}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != url[4].lower():
        raise DownloadError(
            f"{url[1]}: wrong SHA-256: {len(content):,} bytes with {sha256}, not {url[4]}"
        )

    # beside the code, every command finds the file
    target = ROOT / path if os.access(ROOT / "data", os.W_OK) else path
    # rename the file when it is complete, so that a kill leaves no truncated text
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, target)
    except OSError as error:
        raise DownloadError(f"{url[1]}: cannot be stored at {target}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target
