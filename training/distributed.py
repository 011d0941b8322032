"""A run in several processes (ranks), one per device, that torchrun starts.

As in nanoGPT, every rank holds the whole model and computes its rows of each batch. The ranks add
up their gradients, so that all make the same update. Only rank 0 prints, logs, samples and saves. A
process that torchrun did not start is a world of size 1, in which nothing is sent.

`connect`, `check_same_start`, `all_sum_` and `all_max` are collectives: all ranks must call them,
in the same order.
"""

import os
from collections.abc import Sequence

import torch

# torch.compile imports this. Import it before init_process_group: otherwise its default arguments
# capture the process group, and gloo's threads can crash Python at exit.
import torch.distributed.nn
from torch import Tensor, distributed

from common.console import ConfigError, ResourceError, discard_output, prepare_console

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip


class World:
    """The processes (ranks) of a run, from the variables of torchrun, and what they exchange."""

    def __init__(self):
        self.rank, self.size = 0, 1
        # if only some are set, another job has left them
        if all(name in os.environ for name in TORCHRUN_VARIABLES):
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_main = self.rank == 0
        # the other ranks run the same code: what they print goes nowhere
        if not self.is_main:
            discard_output()

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks, each with a GPU of its own if `device` is cuda.

        Raises ResourceError for more ranks than devices.
        """
        self.device = device
        if self.size == 1:
            return
        backend = "gloo"
        # errors come before anything connects: every rank raises by itself and none waits
        if device.type == "mps":
            raise ResourceError("device: mps is one GPU, for one process; --device=cpu for several")
        if device.type == "cuda":
            processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
            if processes > gpus:
                raise ResourceError(
                    f"{processes} processes, but {gpus} GPUs; --nproc_per_node={gpus}, or "
                    "--device=cpu"
                )
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "nccl"
        # after a restart by torchrun, its store still has the addresses of the earlier attempts
        store, rank, size = next(distributed.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(attempt, store)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
        prepare_console()  # torch has replaced our handler of exceptions by one that hides them

    def close(self) -> None:
        """Disconnect; not after an error, when the others may wait in a collective."""
        if self.size > 1:
            distributed.destroy_process_group()

    def check_same_start(self, mode: str, step: int, *sha256s: str) -> None:
        """Raise ConfigError unless all ranks begin in the same mode and step, with the same texts.

        Ranks on different machines read different files.
        """
        # 12 of 64 digits: float64 holds integers of 53 bits
        values = [step, mode == "resumed", *(int(sha256[:12], 16) for sha256 in sha256s)]
        # the largest and the smallest of all are one's own
        both = [*values, *(-value for value in values)]
        if self.all_max(*both) != both:
            raise ConfigError(
                f"this process begins at step {step:,} of text {sha256s[0][:8]} (SHA-256), another "
                "at another step or text; give every machine the same run folder and texts"
            )

    def rows(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch; raise ConfigError unless `size` divides it."""
        rows, rest = divmod(batch_size, self.size)
        if rest:
            raise ConfigError(
                f"batch_size {batch_size} is the global batch; it must be a multiple of the "
                f"{self.size} processes"
            )
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def all_sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, all of them in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat, distributed.ReduceOp.SUM)
        sums = flat.split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.view_as(tensor))

    def all_max(self, *values: float) -> list[float]:
        """Return the elementwise maximum of the ranks' values."""
        if self.size == 1:
            return list(values)
        # on the device, because nccl only sends what is on a GPU
        maxima = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX)
        return maxima.tolist()
