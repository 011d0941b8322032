"""One run in several processes, its ranks, that torchrun starts, one a device: who this one is,
what all do together.

Every rank holds the whole model and learns from its rows of each batch; the gradients are averaged,
so that all take the same step. The first rank alone writes and speaks. A process that torchrun did
not start is alone, and each method gives it what a program without ranks would have in that place.

What communicates must be called by all ranks, in the same order: one that is missing is waited for.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigError, UserError, printable
from common.signals import Interrupted, Stop

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
TOLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
)  # by torchrun, to each process
PATIENCE = timedelta(hours=1)  # with a rank that is late
SILENCE = 10.0  # seconds for which the others leave it to the first to say what is wrong


class Ranks:
    """`with Ranks(stop, os.environ) as ranks:` is this process among those of its run.

    A UserError that leaves the block is said by the first rank (of each machine, as long as they
    have not met), and torchrun then ends the others. One that it does not end has made a mistake of
    its own, and says so in its turn.
    """

    def __init__(self, stop: Stop, environment: Mapping[str, str]):
        self.alone = "TORCHELASTIC_RUN_ID" not in environment
        told = (0, 1, 0, 1, 1) if self.alone else (int(environment[name]) for name in TOLD)
        self.rank, self.size, self.local, self.on_machine, self.machines = told
        self.first, self.stop = self.rank == 0, stop
        self.device: torch.device | None = None  # once they have met

    def __enter__(self) -> "Ranks":
        if not self.first:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if isinstance(error, UserError) and (self.rank if self.device else self.local):
            patience = time.monotonic() + SILENCE
            with suppress(SystemExit):  # the answer to a signal where nothing is to be saved
                while self.stop.signal is None and time.monotonic() < patience:
                    time.sleep(0.05)
            if self.stop.signal is not None:
                raise SystemExit(error.exit_code)
        elif error is None and self.device:
            from torch import distributed

            distributed.destroy_process_group()

    @property
    def launcher(self) -> list[str]:
        """The words of the command before train.py."""
        machines = [f"--nnodes={self.machines}"] if self.machines > 1 else []
        return (
            ["python"]
            if self.alone
            else ["torchrun", *machines, f"--nproc_per_node={self.on_machine}"]
        )

    # ------------------------------------------------------------------------ before the first step

    def rows(self, batch_size: int) -> slice:
        """Which rows of a batch are this rank's; ConfigError (exit 2) where they cannot be divided
        equally.
        """
        each, left = divmod(batch_size, self.size)
        if left:
            raise ConfigError(
                f"batch_size {batch_size} is that of all {self.size} processes together, which it "
                f"cannot be divided "
                f"among; allowed: multiples of {self.size}; nearest above: {(each + 1) * self.size}"
            )
        return slice(self.rank * each, (self.rank + 1) * each)

    def meet(self, device: "torch.device") -> None:
        """Open the connections to the other ranks: in a run on one machine, where no other machine
        reaches them.
        """
        if self.alone:
            return
        from torch import distributed

        if self.machines == 1:
            loopback = next(
                (name for _, name in socket.if_nameindex() if name.startswith("lo")), ""
            )
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE
        )
        self.device, self.stop.agreed = device, 0

    def check_same(self, facts: dict[str, object]) -> None:
        """ConfigError (exit 2) on every rank, with the difference, unless all have the same."""
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, start=1):
            other = [
                f"{name} {first[name]} -> {theirs[name]}"
                for name in facts
                if first[name] != theirs[name]
            ]
            if other:
                raise ConfigError(
                    f"process {rank} of this run has other settings, or another text, than process "
                    f"0 "
                    f"({printable('; '.join(other))}); all must be the same; start every machine "
                    f"with the same command"
                )

    def in_turn(self, make: Callable[..., T], *arguments) -> T:
        """What `make` gives: on the first rank of a machine first, so that the others find what
        that one downloads.
        """
        with self.together():
            made = None if self.local else make(*arguments)
        with self.together():
            return make(*arguments) if self.local else made

    def spread(self, model: "torch.nn.Module") -> "torch.nn.Module":
        """The model, for forward passes whose backward passes average the gradients over
        all ranks.
        """
        if self.alone:
            return model
        import torch
        from torch.nn.parallel import DistributedDataParallel

        network = DistributedDataParallel(model)
        # By the first gradients that come it settles in which order it adds; a resumed run must add
        # in the same one.
        network(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).sum().backward()
        model.zero_grad()
        return network

    # ---------------------------------------------------------------------------- from step to step

    def averaging(self, network: "torch.nn.Module", now: bool) -> AbstractContextManager:
        """For a forward and backward pass, the last of whose step averages: the others add to each
        rank's own sum.
        """
        return nullcontext() if self.alone or now else network.no_sync()

    def agree(self, loss: float) -> float:
        """The mean loss of all ranks; and if one has heard that the run is to stop, all stop here.
        One all-reduce.
        """
        if self.alone:
            return loss
        import torch
        from torch import distributed

        told = torch.zeros(self.size, 2, dtype=torch.float64, device=self.device)
        told[self.rank] = torch.tensor([loss, self.stop.heard], dtype=told.dtype)
        distributed.all_reduce(told)
        losses, heard = told.T
        self.stop.agreed = int(heard.max())
        return losses.mean().item()

    def is_lost(self, error: Exception) -> bool:
        """Whether it says that another rank cannot be reached any more."""
        if self.alone:
            return False
        from torch.distributed import DistError

        return isinstance(error, DistError) or "gloo" in str(error)

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """Every so many-th of the items."""
        return islice(items, self.rank, None, self.size)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        if self.alone:
            return [value]
        from torch import distributed

        values = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """What ends this block on one rank, a UserError or Interrupted, ends it on all; no rank may
        wait inside.
        """
        if self.alone:
            yield
            return
        error = None
        try:
            yield
        except (UserError, Interrupted) as caught:
            error = caught
        errors = [each for each in self.gather(error) if each is not None]
        if errors and isinstance(errors[0], Interrupted):
            (self.stop.agreed,) = errors[0].args
        if errors:
            raise errors[0]

    def of_first(self, ask: Callable[..., T], *arguments, **options) -> T:
        """What `ask` answers on the first rank, where alone it is asked."""
        with self.together():
            answer = ask(*arguments, **options) if self.first else None
        return self.gather(answer)[0]


ALONE = Ranks(Stop(), {})
