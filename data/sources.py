"""Sources of text: which file, folder or pattern is read, and what is downloaded.

A source is an entry of `data.sources`: a file, a folder, a pattern, or an address with the SHA-256
of its content. A missing source is skipped. One that exists but cannot be read is an error, because
the run would otherwise train on a text that the user did not intend.
"""

import glob
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import CheckpointError, DataError
from common.files import ROOT, similar_path
from configs.schema import ADDRESS, DataConfig
from data.download import Unavailable, download
from data.text import Text
from data.text_files import File, data_errors, find_file


def find_text(data: DataConfig, setting: str, wanted: str | None = None) -> Text:
    """Return the text of the first available source in a setting, "sources" or "val_sources".

    With `wanted` (a resumed run), return the one with that SHA-256, wherever it is in the list.
    """
    sources = [Source.parse(entry) for entry in getattr(data, setting)]
    unavailable = []
    # A resumed run searches this machine before it downloads anything.
    for source in sorted(sources, key=lambda s: wanted is not None and s.url is not None):
        try:
            text = source.find(data, wanted)
        except Unavailable as reason:
            unavailable.append(f"{source.label} ({reason})")
            continue
        notes = []
        if source.name != sources[0].name:
            notes.append(f"losses on {source.name} and {sources[0].name} are not comparable")
        if unavailable:
            notes.append(f"not available: {', '.join(unavailable)}")
        return replace(text, notes=notes)
    reasons = ", ".join(unavailable)
    if wanted:
        raise CheckpointError(
            f"data.{setting}: the text has changed since the checkpoint, which was trained on "
            f"SHA-256 {wanted}; found instead: {reasons}; restore that text, start a new run, or "
            "continue with --allow_data_change"
        )
    hint = similar_path(sources[-1].path, "name an existing file, folder or address")
    raise DataError(f"data.{setting}: no text is available: {reasons}; {hint}")


@dataclass(frozen=True)
class Source:
    """A source: the path of its text, and where to download that if it does not exist.

    A relative path is looked for under the current folder, then beside the code.
    """

    label: str
    path: Path
    url: str | None = None
    sha256: str | None = None

    @classmethod
    def parse(cls, entry: str) -> "Source":
        """Parse an entry of data.sources.

        The FILE of an address is stored as data/STEM/input.txt, an input.txt under the name of its
        folder.
        """
        if match := ADDRESS.fullmatch(entry):
            url, folder, file, sha256 = match.groups()
            stem = Path(file).stem
            name = folder if stem == "input" else stem
            return cls(url, Path("data", name, "input.txt"), url, sha256.lower())
        return cls(entry, Path(entry))

    @property
    def name(self) -> str:
        """A name for messages: the folder of an `input.txt`, a pattern, or the file's own name."""
        if _is_pattern(self.path):
            return self.label
        path = self.path.absolute()
        return path.parent.name if path.name == "input.txt" else path.name

    def find(self, data: DataConfig, wanted: str | None) -> Text:
        """Return the text of this source, downloaded if necessary.

        With `wanted`, only a text with that SHA-256. Raises Unavailable if there is none, DataError
        if it exists but cannot be read.
        """
        if wanted and self.sha256 not in (None, wanted):
            raise Unavailable(f"a different text, SHA-256 {self.sha256}")
        for path in self._paths():
            if files := _files_at(path):
                break
        else:
            path = self._downloaded()
            files = _files_at(path)
        text = Text(self.name, path, files, data.encoding, data.newlines)
        if text.sha256 != (self.sha256 or wanted or text.sha256):
            raise Unavailable(f"{path} is a different text, SHA-256 {text.sha256}")
        return text

    def _paths(self) -> list[Path]:
        """Return the paths to try: `data/NAME/input.txt` may also be in $HORNBOOK_CORPORA."""
        paths = [self.path, ROOT / self.path]
        elsewhere = os.environ.get("HORNBOOK_CORPORA")
        match self.path.parts:
            case ("data", name, "input.txt") if elsewhere:
                paths.append(Path(elsewhere, name, "input.txt"))
        return paths

    def _downloaded(self) -> Path:
        """Download the text beside the code, or under the current folder; return its path."""
        if not self.url:
            missing = "nothing matches" if _is_pattern(self.path) else "no such file or folder"
            raise Unavailable(missing)
        path = ROOT / self.path if os.access(ROOT / "data", os.W_OK) else self.path
        download(self.url, self.sha256, path)
        return path


def _files_at(path: Path) -> list[File]:
    """Return the files of the file, folder or pattern at a path; none if nothing is there."""
    with data_errors(path):
        if _is_pattern(path):
            matches = map(Path, glob.iglob(str(path), recursive=True))
            paths = sorted(match for match in matches if not match.is_dir())
        else:
            try:
                path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return []
            paths = _text_files(path) if path.is_dir() else [path]
    return [find_file(path) for path in paths]


def _is_pattern(path: Path) -> bool:
    return re.search(r"[*?]|\[.+\]", str(path)) is not None and not os.path.lexists(path)


def _text_files(folder: Path) -> list[Path]:
    """Return the visible .txt files of a folder, sorted."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() == ".txt" and not path.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{folder}: contains no text; the texts of a folder are its *.txt files; "
            "add one, or give a pattern such as 'FOLDER/*.md'"
        )
    return files
