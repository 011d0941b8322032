"""Checks before torch is imported: the packages, and enough address space."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from common.console import shell_command
from common.errors import ResourceError

# package -> module, where the names differ
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "protobuf": "google.protobuf"}
FROM_TENSORBOARD = ("pillow", "protobuf")  # its requirements, which the dashboard imports too
MIN_ADDRESS_SPACE = 700 * 2**20  # bytes; with less, importing torch aborts the process


def check_packages() -> None:
    """Raise ResourceError if a package of requirements.txt is missing or too old.

    No package is imported, because torch takes seconds.
    """
    root = Path(__file__).parents[1]
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    for requirement in (*requirements, *FROM_TENSORBOARD):
        name, _, oldest = requirement.partition(">=")
        version = _installed_version(name)
        if version is None:
            fault = f"has no {name}"
        elif version and _numbers(version) < _numbers(oldest):
            fault = f"has {name} {version}"
        else:
            continue
        environments = (root / ".venv/bin/python", root / ".venv/Scripts/python.exe")
        ready = [path for path in environments if path.exists() and str(path) != sys.executable]
        use = f"use {ready[0]}, or " if ready else ""
        install = shell_command([sys.executable, "-m", "pip", "install", "-r", "requirements.txt"])
        raise ResourceError(
            f"{sys.executable} {fault}; {requirement} is needed; {use}install it: {install}"
        )


def _installed_version(package: str) -> str | None:
    """Return the version of a package, "" if it is unknown, None if it is not installed."""
    try:
        spec = find_spec(MODULES.get(package, package))
    except ModuleNotFoundError:  # not even `google` of google.protobuf
        spec = None
    if spec is None or not spec.origin:
        return None
    pattern = re.compile(rf"{package}-([0-9.]+).*\.dist-info", re.IGNORECASE)
    found = map(pattern.fullmatch, os.listdir(Path(spec.origin).parents[1]))
    return next((match[1] for match in found if match), "")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def check_address_space() -> None:
    """Raise ResourceError if the memory limit is so low that importing torch aborts."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit not in (-1, resource.RLIM_INFINITY) and limit < MIN_ADDRESS_SPACE:
        raise ResourceError(
            f"out of memory: this process may use {limit / 1e6:,.0f} MB (ulimit -v), and torch "
            f"alone takes {MIN_ADDRESS_SPACE / 1e6:,.0f} MB; raise the limit"
        )
