"""Differences between a checkpoint and the run that continues from it, and their consequences.

They are looked up by name: settings ("model.n_layer"), the digests of the text ("data.sha256"), the
environment ("threads").
"""

from collections.abc import Mapping

from common.console import shorten
from common.errors import CheckpointError
from configs.command import Command
from configs.fields import settings_of
from configs.schema import Config, flat_settings
from run.checkpoint import Checkpoint, TextInfo, text_info
from training.device import environment_of
from training.resolve import resolve
from training.state import Run

# The consequences of a difference. If a name is in none of these sets, it is only printed.
CHANGEABLE = {
    f"model.{key}" for key in ("attention", "kernel", "dropout", "attention_dropout", "logit_scale")
}
# refused: with another architecture the weights do not fit, or mean something else
ARCHITECTURE = {name for name in settings_of(Config) if name.startswith("model.")} - CHANGEABLE
# refused with --resume; a new run with --init_from may change these
FIXED_IN_A_RUN = {
    "train.optimizer",  # the optimizer state would not fit
    "data.min_count",  # it determined the vocabulary
    # these determined the training text
    "data.val_fraction",
    "data.separator",
    "data.answer_after",
}
# not printed: they do not change the weights
IGNORED_SETTINGS = {
    f"train.{key}" for key in ("log", "log_interval", "save_interval", "sample_chars", "patience")
} | {"data.encoding"}  # texts are compared by their characters


def compare(
    then: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return name -> (value then, value now) for all that differ."""
    return {name: (then.get(name), now[name]) for name in now if then.get(name) != now[name]}


def check_settings(saved: Checkpoint, settings: Config, resume: bool) -> None:
    """Raise CheckpointError if a run with these settings cannot continue from a checkpoint.

    Without `resume`, which means --init_from, only the architecture must be the same.
    """
    found = compare(flat_settings(saved.settings), flat_settings(settings))
    fixed, option = ARCHITECTURE, "--init_from"
    if resume:
        fixed, option = ARCHITECTURE | FIXED_IN_A_RUN, "--resume"
    if wrong := [name for name in found if name in fixed]:
        values = (f"{name} (checkpoint {found[name][0]}, now {found[name][1]})" for name in wrong)
        raise CheckpointError(
            f"{saved.path}: the settings differ from the checkpoint in {', '.join(values)}, which "
            f"cannot change; set them back, or start a new run without {option}"
        )


def file_differences(saved: Checkpoint, file: Config, command: Command) -> list[str]:
    """Say where a config file differs from the settings of a run, in at most five lines.

    Raises CheckpointError if the architectures differ: the folder then holds the run of another
    file. Differences made by the run's own command-line options do not count.
    """
    found = compare(flat_settings(saved.settings), flat_settings(file))
    if wrong := [name for name in found if name in ARCHITECTURE - saved.option_names]:
        values = (f"{name} (run {found[name][0]}, file {found[name][1]})" for name in wrong)
        raise CheckpointError(
            f"{saved.path}: the model of this run differs from {command.config_file} in "
            f"{', '.join(values)}; give the folder of the run as --out_dir"
        )

    # a line for each, with the option that applies the file's value; max_iters first: --minutes
    # chooses it, and it is changed most often; then what no option of the run has set
    unreported = ARCHITECTURE | IGNORED_SETTINGS | command.options.keys()
    names = [name for name in found if name not in unreported]
    names.sort(key=lambda name: (name != "train.max_iters", name in saved.option_names))
    lines = []
    for name in names[:5]:
        then, now = found[name]
        key = name.rpartition(".")[2]
        remedy = "" if name in FIXED_IN_A_RUN else f"; to use {now}: --{key}={now}"
        lines.append(f"{key} {now} in the file, {then} in the run{remedy}")
    return lines


def run_differences(saved: Checkpoint, run: Run) -> dict[str, tuple[object, object]]:
    """Return the differences in settings, text and environment that may change a run's result."""
    # compare the values that `auto` stands for
    then = flat_settings(resolve(saved.settings, run.runtime, saved.data.epochs))
    now = flat_settings(run.config)
    environment = environment_of(run.runtime, run.world.size)

    # compare texts by their characters, not by their paths
    return compare(
        then | _digests(saved.data) | saved.environment,
        now | _digests(text_info(run)) | environment,
    )


def _digests(text: TextInfo) -> dict[str, str | None]:
    return {"data.sha256": text.sha256, "data.val_sha256": text.val_sha256}


def messages(found: Mapping[str, tuple[object, object]]) -> list[str]:
    """Say what differs, a line each."""
    return [
        f"{name} {shorten(str(then), 200)} -> {shorten(str(now), 200)}"
        for name, (then, now) in found.items()
        if name not in IGNORED_SETTINGS
    ]
