"""User errors and their exit codes; formatting of messages and commands; running a command."""

import difflib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from common.signals import handle_signals, unwind

MODULES = {"pyyaml": "yaml"}  # package -> module, where the names differ
MAX_MESSAGE = 4000  # characters; the middle of a longer message is left out
MIN_ADDRESS_SPACE = 700 * 2**20  # bytes; with less, importing torch aborts the process
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",  # while a library is loaded
    "bad_alloc",
)


class UserError(ValueError):
    """An error that the user can fix: `WHERE: what is wrong; what is allowed; what to do`."""

    exit_code = 2


class ConfigError(UserError):
    """An invalid argument, setting or config file."""


class DataError(UserError):
    """A text that cannot be read, or is too small to train on."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, from another program, or does not fit."""

    exit_code = 4


class ResourceError(UserError):
    """Too little disk space or memory, or a device that does not exist."""

    exit_code = 5


class NonFiniteError(UserError):
    """A loss, gradient or weight that is infinite or NaN."""

    exit_code = 6


class RunInUseError(UserError):
    """A run folder that another process is using."""

    exit_code = 7


def escape(text: object, keep: str = "") -> str:
    """Escape control, bidirectional, surrogate and unassigned characters, for example to `\\x1b`.

    Everything from outside passes through here before it is printed: config keys, file names,
    checkpoint contents, generated text. Characters in `keep` are not escaped, and neither are
    the joiners that emoji and Indic scripts need.
    """
    keep += "\u200c\u200d"
    return "".join(c if c in keep or _is_harmless(c) else _escape_character(c) for c in str(text))


def _is_harmless(c: str) -> bool:
    return unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029"


def _escape_character(c: str) -> str:
    return c.encode("unicode_escape").decode()


def shell_command(words: Iterable[object]) -> str:
    """Return the shell command to print for these words, with quotes where a shell needs them.

    If a word contains a control character, no command is printed: the reason is returned instead.
    """
    words = list(map(str, words))
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    if escape(command) != command:
        return "(no command is printed: a name in it contains control characters)"
    return command


def path_word(path: object) -> str:
    """Return a path as a word of a command that cannot be mistaken for an option, `auto` or `~`."""
    text = str(path)
    return f"./{text}" if text == "auto" or text[:1] in ("-", "~") else text


def program(name: str) -> str:
    """Return the word that starts a program of this Python environment, such as tensorboard.

    It is the bare name if a shell finds this program by it, else a path: `.venv/bin/python`.
    """
    found, folder = shutil.which(name), Path(sys.executable).parent
    if not sys.executable or (found and Path(found).parent == folder):
        return name
    with suppress(ValueError):
        return str((folder / name).relative_to(Path.cwd()))
    return str(folder / name)


def script(name: str) -> str:
    """Return the path of a script of the project from the working directory: `train.py`."""
    path = Path(__file__).parents[1] / name
    with suppress(OSError):
        if path.samefile(name):
            return name
    return str(path)


def first_few(items: Iterable[str], separator: str = ", ") -> str:
    """Join the first five items, followed by the number of the others."""
    items = list(items)
    more = f" and {len(items) - 5:,} more" if len(items) > 5 else ""
    return separator.join(items[:5]) + more


def did_you_mean(given: str, known: dict[str, str], otherwise: str) -> str:
    """Return `did you mean X?` for the known name nearest to `given`, or `otherwise`.

    `known` maps names to what is printed for them. A known name after a wrong section
    (`train.n_layer`) is matched too.
    """
    key = given.rpartition(".")[2]
    near = [key] if key in known else difflib.get_close_matches(given[:99], known, n=1)
    near = near or [name for name in known if given and name.startswith(given)]
    return f"did you mean {known[near[0]]}?" if near else otherwise


def check_packages() -> None:
    """Raise ResourceError if a package of requirements.txt is missing or too old.

    No package is imported, because torch takes seconds.
    """
    root = Path(__file__).parents[1]
    for requirement in (root / "requirements.txt").read_text(encoding="utf-8").split():
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
        use = f"use {escape(ready[0])}, or " if ready else ""
        install = shell_command([sys.executable, "-m", "pip", "install", "-r", "requirements.txt"])
        raise ResourceError(
            f"{escape(sys.executable)} {fault}; {requirement} is needed; {use}install it: {install}"
        )


def _installed_version(package: str) -> str | None:
    """Return the version of a package, "" if it is unknown, None if it is not installed."""
    spec = PathFinder.find_spec(MODULES.get(package, package))
    if spec is None or not spec.origin:
        return None
    pattern = re.compile(rf"{package}-([0-9.]+).*\.dist-info", re.IGNORECASE)
    found = map(pattern.fullmatch, os.listdir(Path(spec.origin).parents[1]))
    return next((match[1] for match in found if match), "")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def shorten(text: str, limit: int = MAX_MESSAGE) -> str:
    """Leave out the middle of a text of more than `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def output(text: str) -> None:
    """Write to standard output at once; raise ResourceError if that fails.

    BrokenPipeError is left to `run_command`: it is not an error if the reader stops reading.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ResourceError(
            f"standard output: cannot be written ({error.strerror}); redirect it elsewhere"
        ) from error


def notify(line: str) -> None:
    """Print a line on standard error, if that is possible."""
    with suppress(OSError):
        print(shorten(line), file=sys.stderr, flush=True)


def run_script(main: Callable[[list[str]], int]) -> int:
    """Run the command of this process with `run_command`, without a traceback on a signal."""
    try:
        handle_signals(unwind)
        code = run_command(main)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = leaving.code
    handle_signals(signal.SIG_IGN)  # a signal during the shutdown must not change the code
    return code


def run_command(main: Callable[[list[str]], int]) -> int:
    """Run a command with the arguments of this process; return its exit code.

    A UserError becomes one line on standard error. So does running out of memory, even during the
    imports.
    """
    _open_closed_streams()
    try:
        code = main(sys.argv[1:])
        output("")
    except KeyboardInterrupt:
        code = 130
        with suppress(OSError):
            print(flush=True)
    except UserError as error:
        notify(f"error: {error}")
        code = error.exit_code
    except BrokenPipeError:  # the reader has exited (`| head`)
        code = 141
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        notify(
            f"error: out of memory ({type(error).__name__}): this machine, or a limit such as "
            "ulimit -v, leaves too little; free some memory or raise the limit"
        )
        code = ResourceError.exit_code
    _redirect_failed_streams()
    return code


def _open_closed_streams() -> None:
    """Open the null device for each closed stream; else the next file would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for terminals that lack a character


def stdout_is_closed() -> bool:
    """Return whether this process was started without a standard output."""
    return getattr(sys.stdout, "name", "") == os.devnull


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


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in OUT_OF_MEMORY
    )


def _redirect_failed_streams() -> None:
    """If a stream cannot be flushed, redirect it to the null device: Python's exit would fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
