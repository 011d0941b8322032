"""Differences between a checkpoint and the run that continues from it, and what each one means.

The names are those of the settings, "model.n_layer"; the text's digests, "data.sha256"; and the
facts of the environment, "threads".
"""

from collections.abc import Mapping

from common.console import shorten
from common.errors import CheckpointError
from configs.fields import settings_of
from configs.schema import Config, flat_settings
from run.checkpoint import Checkpoint, text_info
from training.device import environment_of
from training.resolve import resolve
from training.state import Run

# What a difference means. A name in none of these is said in a line.
CHANGEABLE = {
    f"model.{key}" for key in ("attention", "kernel", "dropout", "attention_dropout", "logit_scale")
}
ARCHITECTURE = {name for name in settings_of(Config) if name.startswith("model.")} - CHANGEABLE
FIXED_IN_A_RUN = {
    "train.optimizer",  # the state of one does not fit another
    "data.min_count",  # the vocabulary was made with it
    "data.val_fraction",  # these decide what is trained on
    "data.separator",
    "data.answer_after",
}
NOT_SAID = {
    f"train.{key}" for key in ("log", "log_interval", "save_interval", "sample_chars", "patience")
}
SEEN_BEFORE = (
    "if the model has been trained on some of this validation text, the validation loss is too low"
)
FORGET_BEST = {"model.logit_scale", "data.encoding", "data.sha256", "data.val_sha256"}


def differences(
    then: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the values then and now by name, where they differ."""
    return {name: (then.get(name), now[name]) for name in now if then.get(name) != now[name]}


def check_settings(saved: Checkpoint, asked: Config, resume: bool) -> None:
    """Raise CheckpointError if a run with these settings cannot continue from a checkpoint.

    With --init_from only the architecture must be the same.
    """
    found = differences(flat_settings(saved.config), flat_settings(asked))
    fixed = ARCHITECTURE | FIXED_IN_A_RUN if resume else ARCHITECTURE
    if wrong := [_line(name, *found[name]) for name in found if name in fixed]:
        raise CheckpointError(
            f"{saved.path}: the checkpoint has other settings ({'; '.join(wrong)}), which cannot "
            f"change; set them back, or start a new run without {'--resume' if resume else 'it'}"
        )


def file_differences(saved: Checkpoint, file: Config, config_file: str) -> list[str]:
    """Return a line for each setting that a config file has otherwise than the run; at most five.

    Raises CheckpointError if the file describes another architecture, unless options chose that of
    the run: the folder is not that of the file.
    """
    found = differences(flat_settings(saved.config), flat_settings(file))
    other_model = [
        _line(name, *found[name]) for name in found if name in ARCHITECTURE - saved.options
    ]
    if other_model:
        raise CheckpointError(
            f"{saved.path}: the run has another model than {config_file} "
            f"({'; '.join(other_model)}); give the folder of the run as --out_dir"
        )
    # the length first: it is what --minutes has chosen, and what one wants to change
    names = [name for name in found if name not in ARCHITECTURE | NOT_SAID]
    names.sort(key=lambda name: (name != "train.max_iters", name in FIXED_IN_A_RUN))
    lines = []
    for name in names[:5]:
        then, now = found[name]
        key = name.rpartition(".")[2]
        remedy = "" if name in FIXED_IN_A_RUN else f": --{key}={now}"
        lines.append(f"{key} {now} in the file, {then} in the run{remedy}")
    return lines


def run_differences(saved: Checkpoint, run: Run) -> dict[str, tuple[object, object]]:
    """Return what may change the result of a resumed run: settings, text and environment."""
    then = flat_settings(resolve(saved.config, run.runtime, saved.data.epochs))
    now = flat_settings(run.config)
    for facts, text, environment in (
        (then, saved.data, saved.environment),
        (now, text_info(run), environment_of(run.runtime, run.world.size)),
    ):
        facts |= {"data.sha256": text.sha256, "data.val_sha256": text.val_sha256}
        facts |= environment
    return differences(then, now)


def may_have_seen_validation(parent: Checkpoint, run: Run) -> bool:
    """Return whether a new run validates on another part of the text that its parent had."""
    if parent.data.sha256 not in (run.corpus.sha256, run.corpus.val_sha256):
        return False
    then, now = parent.config.data, run.asked.data
    same_split = (then.val_fraction, then.separator) == (now.val_fraction, now.separator)
    return not same_split or parent.data.val_sha256 != run.corpus.val_sha256


def said(found: Mapping[str, tuple[object, object]]) -> list[str]:
    """Return a line for each difference that is worth one, and for what follows from them."""
    lines = [_line(name, *found[name]) for name in found if name not in NOT_SAID]
    if found.keys() & FORGET_BEST:
        lines.append("earlier validation losses are not comparable: the best loss is reset")
    if found.keys() & {"data.sha256", "data.val_sha256"}:
        lines.append(SEEN_BEFORE)
    return lines


def _line(name: str, then: object, now: object) -> str:
    return f"{name} {shorten(str(then), 200)} -> {shorten(str(now), 200)}"
