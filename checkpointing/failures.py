"""Error messages for runs that cannot continue: the reason, the last checkpoint and a remedy."""

from collections.abc import Mapping
from pathlib import Path

from checkpointing.checkpoint import FALLBACK
from checkpointing.run_dir import holds_run
from common.errors import NonFiniteError, ResourceError, is_out_of_memory
from configs.cli import Command
from training.distributed import World


def raise_if_user_error(
    error: Exception, command: Command, world: World, training_began: bool
) -> None:
    """Raise a UserError in place of an error that the user can act on; return for any other error.

    A NonFiniteError (exit 6) is raised again with a longer message; out of memory and a lost
    process become ResourceError (exit 5). The message also names the last checkpoint and the
    command to try next, which resumes the run if `training_began` and it has a checkpoint.
    """
    resume = training_began and holds_run(Path(command.out_dir))

    def try_again(changes: Mapping[str, object]) -> str:
        command_line = command.repeat_command(resume=resume, changes=changes)
        return f"try: {command_line}"

    if isinstance(error, NonFiniteError):
        raise NonFiniteError(
            f"{error}; {_last_checkpoint(command)}; {try_again(_half_learning_rate(command))}"
        ) from error
    if is_out_of_memory(error):
        changes = _smaller_batch(command, world.size)
        remedy = try_again(changes) if changes else "use a smaller model"
        raise ResourceError(
            f"device {command.config.device}: out of memory; "
            f"batch_size {command.config.train.batch_size} windows of block_size "
            f"{command.config.model.block_size} do not fit at once; {_last_checkpoint(command)}; "
            f"{remedy}"
        ) from error
    if world.is_connection_error(error):
        raise ResourceError(
            f"another process of this run has ended; torchrun reports which one; "
            f"{_last_checkpoint(command)}; {try_again({})}"
        ) from error


def _last_checkpoint(command: Command) -> str:
    paths = [Path(command.out_dir) / name for name in FALLBACK["last"]]
    path = next(filter(Path.exists, paths), None)
    return f"the last checkpoint is {path}" if path else "there is no checkpoint yet"


def _half_learning_rate(command: Command) -> dict[str, str]:
    train = command.config.train
    name = "muon_learning_rate" if train.optimizer == "muon" else "learning_rate"
    return {name: f"{getattr(train, name) / 2:g}"}


def _smaller_batch(command: Command, processes: int) -> dict[str, int]:
    """Return settings that split the batch into more micro-batches, {} if that is impossible."""
    train = command.config.train
    size, steps = train.batch_size, train.gradient_accumulation_steps
    rows = size // processes
    divisor = next((n for n in range(2, rows + 1) if rows % n == 0), None)
    if divisor is None:
        return {}
    return {
        "batch_size": size // divisor,
        "gradient_accumulation_steps": steps * divisor,
    }
