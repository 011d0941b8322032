"""The file that `sample.py --html` writes a page to, checked before torch is imported."""

import os
import sys
from pathlib import Path

from common.errors import ConfigError
from common.files import read_regular

TITLE, HEAD = b"<title>Hornbook</title>", 2**12  # every page has this title in its first bytes


def check_page_file(path: Path, overwrite: bool) -> None:
    """Raise ConfigError if a page must not be written to `path`."""
    is_file = os.path.isfile(path)
    if os.path.exists(path) and not (overwrite and is_file):
        remedy = "name another file, or give --overwrite" if is_file else "name a file"
        raise ConfigError(f"{path}: exists already; {remedy}")
    if is_file and TITLE not in read_regular(path, sys.maxsize, only_first=HEAD):
        raise ConfigError(
            f"{path}: --overwrite replaces only pages, and this is not a page of this "
            "program; name another file"
        )
