"""A run in several processes (ranks), one per device, that torchrun starts.

Every rank holds the whole model and computes its slice of each batch; gradients are averaged, so
that all ranks make the same update. Only rank 0 writes files and prints. A process that torchrun
did not start is a world of size 1, in which nothing is communicated.

Methods that communicate are collectives: all ranks must call them, in the same order.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from common.console import program
from common.errors import ConfigError, UserError
from common.signals import Interrupted, Stop

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# environment variables that torchrun sets
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
TORCHRUN = "environment: TORCHELASTIC_RUN_ID is set, which torchrun does"
REMEDY = "start the program with torchrun, or unset TORCHELASTIC_RUN_ID"
TIMEOUT = timedelta(hours=1)  # for a collective to wait for a slow rank
GRACE_SECONDS = 10.0  # for the other ranks to wait while rank 0 reports an error


class World:
    """The processes of a run: `with World(stop, os.environ) as world:`.

    If all ranks leave the block with a UserError, only rank 0 reports it (before
    `init_process_group`: local rank 0 of each node), and torchrun ends the others. If only another
    rank has an error, torchrun does not end it, and it reports the error after GRACE_SECONDS.
    """

    def __init__(self, stop: Stop, environment: Mapping[str, str]):
        self.launched = "TORCHELASTIC_RUN_ID" in environment  # by torchrun
        values = _variables(environment) if self.launched else [0, 1, 0, 1, 1]
        self.rank, self.size, self.local_rank, self.local_size, self.n_nodes = values
        self.is_main, self.stop = self.rank == 0, stop
        self.device: torch.device | None = None  # set by init_process_group

    def __enter__(self) -> "World":
        if not self.is_main:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if isinstance(error, UserError) and (self.rank if self.device else self.local_rank):
            deadline = time.monotonic() + GRACE_SECONDS
            with suppress(SystemExit):  # raised by a signal when there is nothing to save
                while self.stop.signal is None and time.monotonic() < deadline:
                    time.sleep(0.05)
            if self.stop.signal is not None:
                raise SystemExit(error.exit_code)
        elif error is None and self.device:
            from torch import distributed

            distributed.destroy_process_group()

    @property
    def launcher(self) -> list[str]:
        """The words of the command before train.py."""
        if not self.launched:
            return [program("python")]
        nodes = [f"--nnodes={self.n_nodes}"] if self.n_nodes > 1 else []
        return [program("torchrun"), *nodes, f"--nproc_per_node={self.local_size}"]

    # ------------------------------------------------------------------------------ before training

    def batch_slice(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch; raise ConfigError unless `size` divides it."""
        rows, rest = divmod(batch_size, self.size)
        if rest:
            raise ConfigError(
                f"batch_size {batch_size} is the global batch and must be divisible by the "
                f"{self.size} processes; nearest above: {(rows + 1) * self.size}"
            )
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def init_process_group(self, device: "torch.device") -> None:
        """Connect to the other ranks: over the loopback interface in a run on one machine."""
        if not self.launched:
            return
        # DDP imports this module. If that happened after the process group exists, default
        # arguments of its functions would hold the group. Then gloo's threads would outlive
        # destroy_process_group, and could crash Python at exit.
        import torch.distributed.nn  # noqa: F401
        from torch import distributed

        if self.n_nodes == 1:
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name.startswith("lo")), "")
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(backend, timeout=TIMEOUT)
        except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing or wrong
            raise ConfigError(f"{TORCHRUN}, but {error}; {REMEDY}") from error
        self.device, self.stop.global_request = device, 0

    def check_same(self, facts: dict[str, object]) -> None:
        """Raise ConfigError on every rank, with the difference, unless all facts are equal."""
        first, *others = self.all_gather(facts)
        for rank, theirs in enumerate(others, start=1):
            other = [
                f"{key} {first[key]} -> {theirs[key]}" for key in facts if first[key] != theirs[key]
            ]
            if other:
                raise ConfigError(
                    f"the settings or the text of process {rank} differ from those of process 0 "
                    f"({'; '.join(other)}); all must be equal; run the same command on "
                    "every machine"
                )

    def local_rank_0_first(self, function: Callable[..., T], *arguments) -> T:
        """Call a function on local rank 0, then on the others, which reuse what it downloaded."""
        with self.raise_on_all():
            result = None if self.local_rank else function(*arguments)
        with self.raise_on_all():
            return function(*arguments) if self.local_rank else result

    def wrap_ddp(self, model: "torch.nn.Module") -> "torch.nn.Module":
        """Wrap the model so that backward passes average the gradients over all ranks."""
        if not self.launched:
            return model
        import torch
        from torch.nn.parallel import DistributedDataParallel

        network = DistributedDataParallel(model)
        # DDP sums gradients in buckets, whose order it fixes in the first backward pass. Run one
        # here, so that a resumed run sums in the same order.
        network(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).sum().backward()
        model.zero_grad()
        return network

    # ------------------------------------------------------------------------------ during training

    def grad_sync(self, network: "torch.nn.Module", enabled: bool) -> AbstractContextManager:
        """Return the context for a forward and backward pass that averages gradients if `enabled`.

        In a step, only the last pass averages; the earlier ones accumulate this rank's gradients.
        """
        return nullcontext() if enabled or not self.launched else network.no_sync()

    def all_reduce_loss_and_stop_request(self, loss: float) -> float:
        """Return the mean loss of all ranks, and pass one rank's stop request on to all.

        A single all-reduce does both.
        """
        if not self.launched:
            return loss
        import torch
        from torch import distributed

        values = torch.zeros(self.size, 2, dtype=torch.float64, device=self.device)
        values[self.rank] = torch.tensor([loss, self.stop.local_request], dtype=values.dtype)
        distributed.all_reduce(values)
        losses, requests = values.T
        self.stop.global_request = int(requests.max())
        return losses.mean().item()

    def is_connection_error(self, error: Exception) -> bool:
        """Return whether an error means that another rank cannot be reached any more."""
        if not self.launched:
            return False
        from torch.distributed import DistError

        return isinstance(error, DistError) or "gloo" in str(error)

    def shard(self, items: Iterable[T]) -> Iterator[T]:
        """Yield this rank's share of the items: every `size`-th one."""
        return islice(items, self.rank, None, self.size)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank."""
        if not self.launched:
            return [value]
        from torch import distributed

        values = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise one rank's UserError or Interrupted on all ranks; call no collectives inside."""
        if not self.launched:
            yield
            return
        error = None
        try:
            yield
        except (UserError, Interrupted) as caught:
            error = caught
        errors = [each for each in self.all_gather(error) if each is not None]
        if errors and isinstance(errors[0], Interrupted):
            (self.stop.global_request,) = errors[0].args
        if errors:
            raise errors[0]

    def on_rank_0(self, function: Callable[..., T], *arguments, **options) -> T:
        """Call a function on rank 0 alone and return its result on all ranks."""
        with self.raise_on_all():
            result = function(*arguments, **options) if self.is_main else None
        return self.all_gather(result)[0]


def _variables(environment: Mapping[str, str]) -> list[int]:
    """Return the values of VARIABLES; raise ConfigError if torchrun cannot have set them."""
    values = []
    for name in VARIABLES:
        text = environment.get(name, "")
        if not re.fullmatch("[0-9]{1,9}", text, re.ASCII):
            given = f"is '{text[:80]}'" if name in environment else "is missing"
            raise ConfigError(f"{TORCHRUN}, but {name} {given}; {REMEDY}")
        values.append(int(text))
    rank, size, local_rank, local_size, n_nodes = values
    if not (rank < size and local_rank < local_size <= size and 0 < n_nodes <= size):
        found = ", ".join(f"{name}={value}" for name, value in zip(VARIABLES, values, strict=True))
        raise ConfigError(f"{TORCHRUN}, but {found} contradict each other; {REMEDY}")
    return values


SINGLE_PROCESS = World(Stop(), {})
