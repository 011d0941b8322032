"""What is said when a run cannot go on: where it was, what it leaves behind, and one thing to try."""

from pathlib import Path

from configs.errors import NonFiniteError, ResourceError, printable
from configs.load import Command
from training.folder import going_on
from training.keeper import Keeper
from training.run import Run


def not_finite(run: Run, keeper: Keeper, what: str) -> NonFiniteError:
    """A step that would spoil the weights, and is not taken; or weights that are spoilt, and are not saved."""
    name = "muon_learning_rate" if run.config.train.optimizer == "muon" else "learning_rate"
    return NonFiniteError(
        f"after step {run.progress.step:,}, at rate {run.rate:.3g}: {what}; {keeper}; "
        f"{_again(keeper.folder)} --{name}={getattr(run.config.train, name) / 2:g}"
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the machine ran out of memory, which torch says in several classes of exception."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    )


def out_of_memory(command: Command) -> ResourceError:
    """A step, or what comes before the first, that does not fit."""
    train, folder = command.config.train, Path(command.out_dir)
    size, parts = train.batch_size, train.gradient_accumulation_steps
    by = next((divisor for divisor in range(2, size + 1) if size % divisor == 0), None)
    smaller = f"--batch_size={size // by} --gradient_accumulation_steps={parts * by}" if by else "--model.n_layer=1"
    last = folder / "last.pt"
    kept = f"the last checkpoint is {printable(last)}" if last.exists() else "there is no checkpoint yet"
    return ResourceError(
        f"device {command.config.device}: out of memory; batch_size {size} windows of block_size "
        f"{command.config.model.block_size} do not fit at once; {kept}; {_again(folder)} {smaller}"
    )


def _again(folder: Path) -> str:
    return f"try: {going_on(folder)}"
