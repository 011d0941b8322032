"""Error messages for runs that cannot continue: the reason, the last checkpoint and a remedy."""

from pathlib import Path

from checkpointing.checkpoint import LAST, load
from checkpointing.run_dir import holds_run
from common.errors import CheckpointError, NonFiniteError, ResourceError, is_out_of_memory
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
    if isinstance(error, NonFiniteError):
        changes = _half_learning_rate(command)
        raise NonFiniteError(
            f"{error}; {_last_checkpoint(command, with_step=True)}; "
            f"try: {command.again(world.launcher, resume=resume, changes=changes)}"
        ) from error
    if is_out_of_memory(error):
        changes = _smaller_batch(command)
        raise ResourceError(
            f"device {command.config.device}: out of memory; "
            f"batch_size {command.config.train.batch_size} windows of block_size "
            f"{command.config.model.block_size} do not fit at once; {_last_checkpoint(command)}; "
            f"try: {command.again(world.launcher, resume=resume, changes=changes)}"
        ) from error
    if world.is_connection_error(error):
        raise ResourceError(
            f"another process of this run has ended; torchrun reports which one; "
            f"{_last_checkpoint(command)}; try: {command.again(world.launcher, resume=resume)}"
        ) from error


def _last_checkpoint(command: Command, with_step: bool = False) -> str:
    path = Path(command.out_dir) / LAST
    if not path.exists():
        return "there is no checkpoint yet"
    step = ""
    if with_step:
        try:
            step = f" of step {load(path).progress.step:,}"
        except CheckpointError as error:
            return str(error)
    return f"the last checkpoint is {path}{step}"


def _half_learning_rate(command: Command) -> dict[str, float]:
    train = command.config.train
    name = "muon_learning_rate" if train.optimizer == "muon" else "learning_rate"
    return {name: f"{getattr(train, name) / 2:g}"}


def _smaller_batch(command: Command) -> dict[str, int]:
    """Return settings that split the batch into more micro-batches, or else shrink the model."""
    train = command.config.train
    size, steps = train.batch_size, train.gradient_accumulation_steps
    divisor = next((n for n in range(2, size + 1) if size % n == 0), None)
    if divisor is None:
        return {"model.n_layer": 1}
    return {
        "batch_size": size // divisor,
        "gradient_accumulation_steps": steps * divisor,
    }
