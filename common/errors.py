"""The errors that a user can fix, with their exit codes.

A message may contain control characters, for example from a file name. console.py escapes them when
it prints.
"""


class UserError(ValueError):
    """An error that the user can fix: `WHERE: what is wrong; what is allowed; what to do`.

    Each argument is a line: several only for a config file with several wrong settings.
    """

    exit_code = 2

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or PyTorch, on a CPU or a GPU, has failed to allocate memory."""
    words = ("out of memory", "DefaultCPUAllocator")
    is_torchs = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_torchs or isinstance(error, MemoryError)
