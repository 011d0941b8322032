"""What is said when a run cannot go on: where it was, what it leaves behind, and one thing
to try.
"""

from pathlib import Path

from checkpointing.run_dir import Keeper, going_on
from common.errors import NonFiniteError, ResourceError, printable
from configs.cli import Command
from training.distributed import Ranks
from training.state import Run


def not_finite(run: Run, keeper: Keeper, what: str) -> NonFiniteError:
    """A step that would spoil the weights, and is not taken; or weights that are spoilt, and are
    not saved.
    """
    name = "muon_learning_rate" if run.config.train.optimizer == "muon" else "learning_rate"
    return NonFiniteError(
        f"after step {run.progress.step:,}, at rate {run.rate:.3g}: {what}; {keeper}; "
        f"{_again(keeper.folder, run.runtime.ranks)} "
        f"--{name}={getattr(run.config.train, name) / 2:g}"
    )


def explain(error: Exception, command: Command, ranks: Ranks) -> None:
    """Raise ResourceError (exit 5) where an error of torch says that memory, or another process of
    the run, is gone.
    """
    if isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    ):
        raise out_of_memory(command, ranks) from error
    if ranks.is_lost(error):
        raise ResourceError(
            f"another process of this run has ended, torchrun says which; {_kept(command)}; "
            f"{_again(Path(command.out_dir), ranks)}"
        ) from error


def out_of_memory(command: Command, ranks: Ranks) -> ResourceError:
    """A step, or what comes before the first, that does not fit."""
    train, folder = command.config.train, Path(command.out_dir)
    size, parts = train.batch_size, train.gradient_accumulation_steps
    by = next((divisor for divisor in range(2, size + 1) if size % divisor == 0), None)
    smaller = (
        f"--batch_size={size // by} --gradient_accumulation_steps={parts * by}"
        if by
        else "--model.n_layer=1"
    )
    return ResourceError(
        f"device {command.config.device}: out of memory; batch_size {size} windows of block_size "
        f"{command.config.model.block_size} do not fit at once; {_kept(command)}; "
        f"{_again(folder, ranks)} {smaller}"
    )


def _kept(command: Command) -> str:
    last = Path(command.out_dir) / "last.pt"
    return (
        f"the last checkpoint is {printable(last)}"
        if last.exists()
        else "there is no checkpoint yet"
    )


def _again(folder: Path, ranks: Ranks) -> str:
    return f"try: {going_on(folder, ranks)}"
