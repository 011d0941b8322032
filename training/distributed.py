"""A run in several processes (ranks), one per device, that torchrun starts.

As in nanoGPT, every rank holds the whole model and computes its rows of each batch, and DDP
averages the gradients, so that all ranks make the same update. Only rank 0 prints, logs, samples
and saves. A process that torchrun did not start is a world of size 1, in which nothing is sent.

Methods that communicate are collectives: all ranks must call them, in the same order.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Self, TypeVar

import torch

# DDP imports this. Import it before init_process_group: otherwise its default arguments capture the
# process group, and gloo's threads can crash Python at exit.
import torch.distributed.nn
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from common.console import discard_output
from common.errors import ConfigError, counted

T = TypeVar("T")


class World:
    """The processes (ranks) of a run, and what they exchange.

    Use it as a context manager: `with World.from_environment() as world:`.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, machines: int = 1):
        self.rank, self.size, self.local_rank, self.machines = rank, size, local_rank, machines
        self.is_main = rank == 0
        self.device: torch.device | None = None  # set by `connect`

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variables of torchrun; only rank 0 keeps its standard output."""
        # without a rank this is the only process, whatever else a job has left in the environment
        if "RANK" not in os.environ:
            return cls()
        rank, size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
        # another launcher than torchrun may leave these out
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        world = cls(rank, size, local_rank, machines)
        # the other ranks run the same code: what they print goes nowhere
        if not world.is_main:
            discard_output()
        return world

    def __str__(self) -> str:
        if self.size == 1:
            return ""
        return f"{self.size} processes on {counted(self.machines, 'machine')}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if self.device and error is None:  # after an error, the others may wait in a collective
            distributed.destroy_process_group()

    # ------------------------------------------------------------------------------ before training

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks, each with a GPU of its own if `device` is cuda."""
        if self.size == 1:
            return

        if device.type == "cuda":
            torch.cuda.set_device(self.local_rank)

        if self.machines == 1:  # listen on the loopback interface: nothing from outside connects
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name.startswith("lo")), "")
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)

        backend = "nccl" if device.type == "cuda" else "gloo"
        hook = sys.excepthook
        # an hour: rank 0 may download a text, or sample, while the others wait
        distributed.init_process_group(backend, timeout=timedelta(hours=1))
        sys.excepthook = hook  # restore ours: the output of torch's is lost
        self.device = device

    @contextmanager
    def one_rank_first(self) -> Iterator[None]:
        """Let one rank of each machine run the block, which may download a text, then the rest."""
        # the others wait here until the first one is through
        if self.size > 1 and self.local_rank > 0:
            distributed.barrier()
        yield
        if self.size > 1 and self.local_rank == 0:
            distributed.barrier()

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Raise ConfigError on every rank unless all have the same values."""
        if self.size == 1:
            return
        # every rank gets the values of all ranks, so that all of them raise and none waits
        everywhere = [values] * self.size
        distributed.all_gather_object(everywhere, values)
        for name in values:
            different = {str(theirs[name]) for theirs in everywhere}
            if len(different) > 1:
                raise ConfigError(
                    f"{name}: the processes have {' and '.join(sorted(different))}; all must be "
                    "equal; run the same command, with the same files, on every machine"
                )

    def broadcast(self, value: T) -> T:
        """Return the value that rank 0 has."""
        # in a list, because torch writes what it receives into it
        values = [value]
        if self.size > 1:
            distributed.broadcast_object_list(values)
        return values[0]

    def wrap_ddp(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model so that backward passes average the gradients over all ranks."""
        if self.size == 1:
            return model
        ddp_model = DistributedDataParallel(model)
        # DDP sums gradients in buckets, whose order it fixes in the first backward pass. Run one
        # here, so that a resumed run sums in the same order.
        ddp_model(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).sum().backward()
        model.zero_grad()
        return ddp_model

    # ------------------------------------------------------------------------------ during training

    def rows(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch; raise ConfigError unless `size` divides it."""
        # the same number on each rank, so that none waits for the others
        rows, rest = divmod(batch_size, self.size)
        if rest:
            raise ConfigError(
                f"batch_size {batch_size} is the global batch and must be divisible by the "
                f"{self.size} processes; nearest above: {(rows + 1) * self.size}"
            )
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def grad_sync(self, ddp_model: torch.nn.Module, enabled: bool) -> AbstractContextManager:
        """Return the context for a forward and backward pass that averages gradients if `enabled`.

        In a step, only the last pass averages; the earlier ones accumulate this rank's gradients.
        """
        return nullcontext() if enabled or self.size == 1 else ddp_model.no_sync()

    def all_max(self, *values: int) -> list[int]:
        """Return the elementwise maximum of the ranks' values."""
        return [int(value) for value in self._all_reduce(values, distributed.ReduceOp.MAX)]

    def all_mean(self, value: float) -> float:
        """Return the mean of the ranks' values."""
        return self._all_reduce([value], distributed.ReduceOp.SUM)[0] / self.size

    def _all_reduce(
        self, values: Sequence[float], operation: distributed.ReduceOp
    ) -> Sequence[float]:
        if self.size == 1:
            return values
        # where the ranks can exchange it: nccl only sends what is on a GPU
        result = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(result, operation)
        return result.tolist()


SINGLE_PROCESS = World()
