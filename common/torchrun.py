"""The ranks of a run, as torchrun describes them to each process; read before torch is imported."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from common.console import program
from common.errors import ConfigError
from common.signals import exit_at_once, handle_signals

# environment variables that torchrun sets
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
TORCHRUN = "environment: TORCHELASTIC_RUN_ID is set, which torchrun does"
REMEDY = "start the program with torchrun, or unset TORCHELASTIC_RUN_ID"
GRACE_SECONDS = 10.0  # for torchrun to end this process after another one has reported an error


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, one per rank, and which of them this one is.

    A process that torchrun did not start is the only one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes on this machine
    local_size: int = 1
    n_nodes: int = 1
    launched: bool = False  # by torchrun

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read VARIABLES; raise ConfigError if torchrun cannot have set them to these values."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return cls()
        values = []
        for name in VARIABLES:
            text = environment.get(name, "")
            if not re.fullmatch("[0-9]{1,9}", text, re.ASCII):
                given = f"is '{text[:80]}'" if name in environment else "is missing"
                raise ConfigError(f"{TORCHRUN}, but {name} {given}; {REMEDY}")
            values.append(int(text))
        rank, size, local_rank, local_size, n_nodes = values
        if not (rank < size and local_rank < local_size <= size and 0 < n_nodes <= size):
            pairs = zip(VARIABLES, values, strict=True)
            given = ", ".join(f"{name}={value}" for name, value in pairs)
            raise ConfigError(f"{TORCHRUN}, but {given} contradict each other; {REMEDY}")
        return cls(*values, launched=True)

    @property
    def launcher(self) -> list[str]:
        """The words of the command before train.py."""
        if not self.launched:
            return [program("python")]
        nodes = [f"--nnodes={self.n_nodes}"] if self.n_nodes > 1 else []
        return [program("torchrun"), *nodes, f"--nproc_per_node={self.local_size}"]

    def batch_slice(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch; raise ConfigError unless `size` divides it."""
        rows, rest = divmod(batch_size, self.size)
        if rest:
            raise ConfigError(
                f"batch_size {batch_size} is the global batch and must be divisible by the "
                f"{self.size} processes; nearest above: {(rows + 1) * self.size}"
            )
        return slice(self.rank * rows, (self.rank + 1) * rows)


NOT_LAUNCHED = Ranks()


def silence() -> None:
    """Redirect standard output to the null device: only rank 0 prints."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def let_another_rank_report() -> None:
    """Wait, with an error that another rank has too, until torchrun ends this process.

    torchrun does so as soon as the other rank has reported the error and ended. If only this rank
    has the error, return after GRACE_SECONDS.
    """
    handle_signals(exit_at_once)
    time.sleep(GRACE_SECONDS)
