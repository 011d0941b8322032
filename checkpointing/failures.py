"""Error messages for runs that cannot continue: the reason, the last checkpoint and a remedy."""

from pathlib import Path

from checkpointing.checkpoint import LAST, load
from checkpointing.run_dir import holds_run, train_command
from common.console import path_word
from common.errors import CheckpointError, NonFiniteError, ResourceError, is_out_of_memory
from configs.cli import Command
from training.distributed import World


def raise_if_user_error(
    error: Exception, command: Command, world: World, training_began: bool
) -> None:
    """Raise a UserError in place of an error that the user can act on; return for any other error.

    A NonFiniteError (exit 6) is raised again with a longer message; out of memory and a lost
    process become ResourceError (exit 5). The message also names the last checkpoint and the
    command to try next.
    """
    if isinstance(error, NonFiniteError):
        raise NonFiniteError(
            f"{error}; {_last_checkpoint(command, with_step=True)}; "
            f"{_retry_hint(command, world, training_began, _half_learning_rate(command))}"
        ) from error
    if is_out_of_memory(error):
        raise ResourceError(
            f"device {command.config.device}: out of memory; "
            f"batch_size {command.config.train.batch_size} windows of block_size "
            f"{command.config.model.block_size} do not fit at once; {_last_checkpoint(command)}; "
            f"{_retry_hint(command, world, training_began, *_smaller_batch(command))}"
        ) from error
    if world.is_connection_error(error):
        raise ResourceError(
            f"another process of this run has ended; torchrun reports which one; "
            f"{_last_checkpoint(command)}; {_retry_hint(command, world, training_began)}"
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


def _half_learning_rate(command: Command) -> str:
    train = command.config.train
    name = "muon_learning_rate" if train.optimizer == "muon" else "learning_rate"
    return f"--{name}={getattr(train, name) / 2:g}"


def _smaller_batch(command: Command) -> list[str]:
    """Return options that split the batch into more micro-batches, or else shrink the model."""
    train = command.config.train
    size, steps = train.batch_size, train.gradient_accumulation_steps
    divisor = next((n for n in range(2, size + 1) if size % n == 0), None)
    if divisor is None:
        return ["--model.n_layer=1"]
    return [
        f"--batch_size={size // divisor}",
        f"--gradient_accumulation_steps={steps * divisor}",
    ]


def _retry_hint(command: Command, world: World, training_began: bool, *options: str) -> str:
    """Return the command to try, or only its options if the run has not saved its settings."""
    if not training_began:
        return f"try again with {' '.join(options)}" if options else "try again"
    folder = Path(command.out_dir)
    origin = ["--resume"] if holds_run(folder) else _origin_options(command)
    return f"try: {train_command(folder, world, *origin, *options)}"


def _origin_options(command: Command) -> list[str]:
    """Return the options that name the checkpoint a run started from, and what goes with them."""
    options = []
    if command.resume and command.resume != "auto":
        options = [f"--resume={path_word(command.resume)}"]
    if command.init_from:
        options = [f"--init_from={path_word(command.init_from)}"]
    if command.allow_data_change:
        options.append("--allow_data_change")
    if command.new_characters == "add":
        options.append("--new_characters=add")
    return options
