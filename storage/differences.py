"""Differences from a checkpoint: settings, some of which cannot change, and the environment."""

from collections.abc import Mapping
from dataclasses import asdict

from common.errors import ConfigError
from configs.command import Command
from configs.fields import settings_of
from configs.schema import Config, flat_settings
from storage.checkpoint import Checkpoint
from training.device import environment
from training.state import Run

FIXED = {name for name, field in settings_of(Config).items() if field.metadata["fixed"]}


def resumed_settings(command: Command, checkpoint: Checkpoint) -> Config:
    """Return the settings of a resumed run: those of its checkpoint, then the options.

    Raises ConfigError if an option would change what cannot change in a run.
    """
    settings = command.resumed_settings(checkpoint.settings)
    refuse_changes(flat_settings(checkpoint.settings), flat_settings(settings), checkpoint)

    # batch i begins at window i * batch_size of the epochs: another size would skip text
    before, now = checkpoint.settings.train, settings.train
    windows = before.batch_size * before.gradient_accumulation_steps
    if now.batch_size * now.gradient_accumulation_steps != windows:
        divisors = [n for n in range(1, windows + 1) if windows % n == 0]
        size = min(divisors, key=lambda n: abs(n - now.batch_size))
        raise ConfigError(
            f"batch_size {now.batch_size} * gradient_accumulation_steps "
            f"{now.gradient_accumulation_steps} must stay {windows}, or the run would skip text; "
            f"use --batch_size={size} --gradient_accumulation_steps={windows // size}"
        )
    return settings


def fine_tuning_settings(command: Command, parent: Checkpoint) -> tuple[Config, list[str]]:
    """Return the settings of a run that starts from another model, and what they replaced.

    The architecture is that of the parent, whatever the config file says. An option that
    contradicts it raises ConfigError, except for two that leave the weights as they are:
    residual_init, and block_size with RoPE.
    """
    free = {"residual_init"}
    if parent.settings.model.positions == "rope":
        free.add("block_size")
    architecture = {
        name: value
        for name, value in asdict(parent.settings.model).items()
        if name in FIXED and name not in free & command.options.keys()
    }
    refuse_changes(architecture, command.options, parent)

    in_config = flat_settings(Config()) | command.settings_in_file
    replaced = [
        f"{name} {in_config[name]} -> {value}"
        for name, value in architecture.items()
        if in_config[name] != value and name not in command.options
    ]
    return command.new_settings(architecture), replaced


def refuse_changes(
    then: Mapping[str, object], now: Mapping[str, object], checkpoint: Checkpoint
) -> None:
    """Raise ConfigError if a fixed setting that is in both has another value now."""
    wrong = [
        f"--{name}={now[name]} (it has {then[name]})"
        for name in then.keys() & now.keys() & FIXED
        if now[name] != then[name]
    ]
    if wrong:
        raise ConfigError(
            f"{checkpoint.path}: this cannot change: {', '.join(sorted(wrong))}; omit the option, "
            "or train a new model"
        )


def changed_environment(checkpoint: Checkpoint, run: Run) -> str:
    """Return what of a run's environment has changed since a checkpoint, or ""."""
    then, now = checkpoint.environment, environment(run.runtime, run.world.size)
    changes = [f"{n} {then.get(n)} -> {now[n]}" for n in now if now[n] != then.get(n)]
    return ", ".join(changes)
