"""A run in several processes (ranks), one per device, that torchrun starts.

Every rank holds the whole model and computes its slice of each batch; gradients are averaged, so
that all ranks make the same update. Only rank 0 writes files and prints. A process that torchrun
did not start is a world of size 1, in which nothing is communicated.

Methods that communicate are collectives: all ranks must call them, in the same order.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import Self, TypeVar

import torch

# DDP imports this module. If that happened after the process group exists, default arguments of its
# functions would hold the group. Then gloo's threads would outlive destroy_process_group, and could
# crash Python at exit.
import torch.distributed.nn
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from common.errors import ConfigError, UserError
from common.signals import Interrupted, Stop
from common.torchrun import NOT_LAUNCHED, Ranks, let_another_rank_report

T = TypeVar("T")
TIMEOUT = timedelta(hours=1)  # for a collective to wait for a slow rank


class World:
    """The processes of a run: `with World(ranks, stop) as world:`.

    If all ranks leave the block with a UserError, only rank 0 reports it (before
    `init_process_group`: local rank 0 of each machine), and torchrun ends the others.
    """

    def __init__(self, ranks: Ranks, stop: Stop):
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.launched, self.is_main, self.stop = ranks.launched, ranks.rank == 0, stop
        self.device: torch.device | None = None  # set by init_process_group

    def __str__(self) -> str:
        processes = f", {self.size} processes on {self.ranks.n_nodes} machine(s)"
        return processes if self.launched else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if isinstance(error, UserError) and (self.rank if self.device else self.ranks.local_rank):
            if self.stop.signal:  # from torchrun: rank 0 has reported the error
                raise SystemExit(error.exit_code)
            let_another_rank_report()
        elif error is None and self.device:
            distributed.destroy_process_group()

    # ------------------------------------------------------------------------------ before training

    def init_process_group(self, device: torch.device) -> None:
        """Connect to the other ranks: over the loopback interface in a run on one machine."""
        if not self.launched:
            return
        if self.ranks.n_nodes == 1:
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name.startswith("lo")), "")
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        backend = "nccl" if device.type == "cuda" else "gloo"
        hook = sys.excepthook
        distributed.init_process_group(backend, timeout=TIMEOUT)
        sys.excepthook = hook  # torch has put its own around it, which loses what ours prints
        self.device, self.stop.global_request = device, 0

    def check_same(self, values: dict[str, object]) -> None:
        """Raise ConfigError on every rank, with the difference, unless all values are equal."""
        first, *others = self.all_gather(values)
        for rank, theirs in enumerate(others, start=1):
            other = [
                f"{key} {first[key]} -> {theirs[key]}"
                for key in values
                if first[key] != theirs[key]
            ]
            if other:
                raise ConfigError(
                    f"the settings or the text of process {rank} differ from those of process 0 "
                    f"({'; '.join(other)}); all must be equal; run the same command on "
                    "every machine"
                )

    def local_rank_0_first(self, function: Callable[..., T], *arguments) -> T:
        """Call a function on local rank 0, then on the others, which reuse what it downloaded."""
        local_rank = self.ranks.local_rank
        with self.raise_on_all():
            result = None if local_rank else function(*arguments)
        with self.raise_on_all():
            return function(*arguments) if local_rank else result

    def wrap_ddp(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model so that backward passes average the gradients over all ranks."""
        if not self.launched:
            return model
        network = DistributedDataParallel(model)
        # DDP sums gradients in buckets, whose order it fixes in the first backward pass. Run one
        # here, so that a resumed run sums in the same order.
        network(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).sum().backward()
        model.zero_grad()
        return network

    # ------------------------------------------------------------------------------ during training

    def grad_sync(self, network: torch.nn.Module, enabled: bool) -> AbstractContextManager:
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
        values = torch.zeros(self.size, 2, dtype=torch.float64, device=self.device)
        values[self.rank] = torch.tensor([loss, self.stop.local_request], dtype=values.dtype)
        distributed.all_reduce(values)
        losses, requests = values.T
        self.stop.global_request = int(requests.max())
        return losses.mean().item()

    def is_connection_error(self, error: Exception) -> bool:
        """Return whether an error means that another rank cannot be reached any more."""
        lost = isinstance(error, distributed.DistError) or "gloo" in str(error)
        return self.launched and lost

    def shard(self, items: Iterable[T]) -> Iterator[T]:
        """Yield this rank's share of the items: every `size`-th one."""
        return islice(items, self.rank, None, self.size)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank."""
        if not self.launched:
            return [value]
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


SINGLE_PROCESS = World(NOT_LAUNCHED, Stop())
