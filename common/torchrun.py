"""The ranks of a run, as torchrun describes them to each process; read before torch is imported."""

import os
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
        """Read VARIABLES, if torchrun has started this process."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return cls()
        values = [int(environment[name]) for name in VARIABLES]
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
