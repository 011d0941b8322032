"""The parts that every package may import: they need neither settings nor torch."""

import sys

# here, because every command imports this package before what an older Python cannot import
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: Hornbook needs Python 3.11 or newer, not {sys.version.split()[0]}")
