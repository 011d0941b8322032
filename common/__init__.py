"""The parts that every package may import: they need neither settings nor torch."""

import sys

# here, because every command imports this package before what an older Python cannot import
if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"error: Hornbook needs Python 3.11 or newer, but {sys.executable} is Python {version}; "
        "with another one: make train PYTHON=python3.12",
        file=sys.stderr,
    )
    sys.exit(5)
