"""Settings that cannot change in a run, and changes since its checkpoint that nobody asked for."""

from collections.abc import Mapping

from common.console import shorten
from common.errors import ConfigError
from configs.command import Command
from configs.fields import settings_of
from configs.schema import Config, flat_settings
from run.checkpoint import Checkpoint, TextInfo, text_info
from training.device import environment_of
from training.resolve import resolve
from training.state import Run

FIXED = {name for name, field in settings_of(Config).items() if field.metadata["fixed"]}


def resumed_settings(command: Command, saved: Checkpoint) -> Config:
    """Return the settings of a resumed run: those of its checkpoint, then the options.

    Raises ConfigError if an option would change what cannot change in a run.
    """
    settings = command.resumed_settings(saved.settings)
    refuse_changes(flat_settings(saved.settings), flat_settings(settings), saved)
    return settings


def fine_tuning_settings(command: Command, parent: Checkpoint) -> tuple[Config, list[str]]:
    """Return the settings of a run that starts from another model, and those that it replaced.

    The architecture is that of the parent, whatever the config file says. An option that
    contradicts it raises ConfigError, except for two that leave the weights as they are:
    residual_init, and block_size with RoPE.
    """
    free = {"model.residual_init"}
    if parent.settings.model.positions == "rope":
        free.add("model.block_size")
    architecture = {
        name: value
        for name, value in flat_settings(parent.settings).items()
        if name in FIXED and name.startswith("model.") and name not in free & command.options.keys()
    }
    refuse_changes(architecture, command.options, parent)

    replaced = [
        f"{name.removeprefix('model.')} {value}"
        for name, value in architecture.items()
        if command.settings_in_file.get(name, value) != value
    ]
    return command.new_settings(architecture), replaced


def refuse_changes(
    then: Mapping[str, object], now: Mapping[str, object], saved: Checkpoint
) -> None:
    """Raise ConfigError if a fixed setting that is in both has another value now."""
    wrong = [
        f"--{name.rpartition('.')[2]}={now[name]} (it has {then[name]})"
        for name in then.keys() & now.keys() & FIXED
        if now[name] != then[name]
    ]
    if wrong:
        raise ConfigError(
            f"{saved.path}: this cannot change: {', '.join(sorted(wrong))}; omit the option, or "
            "train a new model"
        )


def unasked_changes(saved: Checkpoint, run: Run, options: Mapping[str, object]) -> list[str]:
    """Return a line for all that has changed since a checkpoint without an option.

    It compares the values of `auto`, the texts by their characters, and the environment.
    """
    text = saved.text
    then = flat_settings(resolve(saved.settings, run.runtime, text.epochs, text.characters))
    then |= _digests(text) | saved.environment
    now = flat_settings(run.config) | _digests(text_info(run))
    now |= environment_of(run.runtime, run.world.size)
    return [
        f"{name} {shorten(str(then.get(name)), 200)} -> {shorten(str(now[name]), 200)}"
        for name in now
        if now[name] != then.get(name) and name not in options
    ]


def _digests(text: TextInfo) -> dict[str, str | None]:
    return {"data.sha256": text.sha256, "data.val_sha256": text.val_sha256}
