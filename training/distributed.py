"""A run in several processes (ranks), one per device, that torchrun starts.

As in nanoGPT, every rank holds the whole model and computes its rows of each batch, and DDP
averages the gradients, so that all ranks make the same update. Only rank 0 prints, logs, samples
and saves. A process that torchrun did not start is a world of size 1, in which nothing is sent.

`connect`, `wrap`, `require_equal`, `max` and `mean` are collectives: all ranks must call them, in
the same order.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch

# DDP imports this. Import it before init_process_group: otherwise its default arguments capture the
# process group, and gloo's threads can crash Python at exit.
import torch.distributed.nn
from torch import distributed, nn

from common.console import discard_output
from common.errors import ConfigError, ResourceError
from common.words import plural, quoted

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that it always sets


class World:
    """The processes (ranks) of a run, from the variables of torchrun, and what they exchange.

    Raises ConfigError for variables that are no numbers, or contradict each other.
    """

    def __init__(self):
        # with only some of the variables, left over from a job, this is the only process
        in_torchrun = all(name in os.environ for name in TORCHRUN)
        self.rank = _number("RANK") if in_torchrun else 0
        self.size = _number("WORLD_SIZE") if in_torchrun else 1
        if self.rank >= self.size:
            raise ConfigError(f"RANK is {self.rank}; it must be below WORLD_SIZE, {self.size}")
        self.is_main = self.rank == 0
        # the other ranks run the same code: what they print goes nowhere
        if not self.is_main:
            discard_output()

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks, each with a GPU of its own if `device` is cuda.

        Raises ResourceError for more ranks than GPUs.
        """
        self.device = device
        if self.size == 1:
            return
        if device.type == "cuda":
            # before anything connects, so that every rank raises by itself and none waits
            processes, gpus = _number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
            if processes > gpus:
                raise ResourceError(
                    f"{processes} processes, but {plural(gpus, 'GPU')}; "
                    f"--nproc_per_node={gpus}, or --device=cpu"
                )
            torch.cuda.set_device(_number("LOCAL_RANK"))
        if _number("GROUP_WORLD_SIZE", 1) == 1:
            # one machine: listen on the loopback interface, which nothing outside can reach
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name.startswith("lo")), "")
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        hook, backend = sys.excepthook, "nccl" if device.type == "cuda" else "gloo"
        # an hour: rank 0 may sample while the others wait
        distributed.init_process_group(backend, timeout=timedelta(hours=1))
        sys.excepthook = hook  # restore our hook: what torch's prints is lost

    def close(self) -> None:
        """Disconnect; not after an error, when the others may wait in a collective."""
        if self.size > 1:
            distributed.destroy_process_group()

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Raise ConfigError on every rank unless all have the same values."""
        # every rank gets the values of all ranks, so that all of them raise and none waits
        everywhere = [values] * self.size
        if self.size > 1:
            distributed.all_gather_object(everywhere, values)
        for name in values:
            different = {str(theirs[name]) for theirs in everywhere}
            if len(different) > 1:
                raise ConfigError(
                    f"{name}: the processes have {' and '.join(sorted(different))}; all must be "
                    "equal; run the same command, with the same files, on every machine"
                )

    def rows(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch; raise ConfigError unless `size` divides it."""
        rows, rest = divmod(batch_size, self.size)
        if rest:
            raise ConfigError(
                f"batch_size {batch_size} is the global batch and must be divisible by the "
                f"{self.size} processes; nearest above: {(rows + 1) * self.size}"
            )
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP, whose backward passes average the gradients over all ranks."""
        if self.size == 1:
            return model
        ddp_model = nn.parallel.DistributedDataParallel(model)
        # DDP sums gradients in buckets, whose order it fixes in the first backward pass. Run one
        # here, so that a resumed run sums in the same order.
        ddp_model(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).sum().backward()
        model.zero_grad()
        return ddp_model

    def no_sync(self, ddp_model: nn.Module) -> AbstractContextManager:
        """Return the context of backward passes that only accumulate this rank's gradients."""
        return ddp_model.no_sync() if self.size > 1 else nullcontext()

    def max(self, *values: float) -> list[float]:
        """Return the elementwise maximum of the ranks' values."""
        return self._reduce(values, distributed.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """Return the mean of the ranks' values."""
        return self._reduce([value], distributed.ReduceOp.SUM)[0] / self.size

    def _reduce(self, values: Sequence[float], operation: distributed.ReduceOp) -> list[float]:
        if self.size == 1:
            return list(values)
        # on the device, because nccl only sends what is on a GPU
        result = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(result, operation)
        return result.tolist()


def _number(variable: str, default: int = 0) -> int:
    """Return a variable of torchrun; another launcher may leave it out."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {quoted(text)}; it must be a number, as torchrun sets it")
    return int(text)
