"""The mark of a page, which sample.py may replace. Checked before torch is imported."""

from pathlib import Path

from common.errors import ConfigError

MARK = b"<title>Hornbook</title>"  # in the first bytes of template.html


def check_page(path: Path) -> None:
    """Raise ConfigError if the file exists and is not a Hornbook page, which may be replaced."""
    if path.exists():
        with path.open("rb") as file:
            if MARK not in file.read(4096):
                raise ConfigError(f"{path}: exists, and is not a Hornbook page; name another file")
