"""Differences between a checkpoint and the run that continues from it, and what they mean.

Compared are settings ("model.n_layer"), the digests of the text ("data.sha256") and the environment
("threads"), all by these names.
"""

from collections.abc import Mapping

from common.console import shorten
from common.errors import CheckpointError
from configs.fields import settings_of
from configs.schema import Config, flat_settings
from run.checkpoint import Checkpoint, TextInfo, text_info
from training.device import environment_of
from training.resolve import resolve
from training.state import Run

# What a difference means. For a name in none of these sets, it is printed and nothing else.
CHANGEABLE = {
    f"model.{key}" for key in ("attention", "kernel", "dropout", "attention_dropout", "logit_scale")
}
# refused: the weights would not fit, or mean something else
ARCHITECTURE = {name for name in settings_of(Config) if name.startswith("model.")} - CHANGEABLE
# refused at a resume; a new run may have others
FIXED_IN_A_RUN = {
    "train.optimizer",  # the state of one does not fit another
    "data.min_count",  # the vocabulary was made with it
    "data.val_fraction",  # these decide what is trained on
    "data.separator",
    "data.answer_after",
}
# not mentioned: they do not change the weights
NOT_SAID = {
    f"train.{key}" for key in ("log", "log_interval", "save_interval", "sample_chars", "patience")
}
# the best loss so far cannot be compared with later ones
FORGET_BEST = {"model.logit_scale", "data.encoding", "data.sha256", "data.val_sha256"}
SEEN_BEFORE = (
    "if the model has been trained on some of this validation text, the validation loss is too low"
)


def compare(
    then: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the values then and now by name, where they differ."""
    return {name: (then.get(name), now[name]) for name in now if then.get(name) != now[name]}


def check_settings(saved: Checkpoint, settings: Config, resume: bool) -> None:
    """Raise CheckpointError if a run with these settings cannot continue from a checkpoint.

    Without `resume`, which is --init_from, only the architecture must be the same.
    """
    # --init_from needs the architecture; a resumed run must also train as before
    found = compare(flat_settings(saved.settings), flat_settings(settings))
    fixed, option = ARCHITECTURE, "--init_from"
    if resume:
        fixed, option = ARCHITECTURE | FIXED_IN_A_RUN, "--resume"
    if wrong := [_line(name, *found[name]) for name in found if name in fixed]:
        raise CheckpointError(
            f"{saved.path}: the checkpoint has other settings ({'; '.join(wrong)}), which cannot "
            f"change; set them back, or start a new run without {option}"
        )


def file_differences(saved: Checkpoint, file: Config, config_file: str) -> list[str]:
    """Say where a config file differs from the settings of a run, in at most five lines.

    Raises CheckpointError if the folder holds the run of another file: one with another
    architecture, which no option has chosen.
    """
    # is it another run altogether?
    found = compare(flat_settings(saved.settings), flat_settings(file))
    other_model = [
        _line(name, *found[name]) for name in found if name in ARCHITECTURE - saved.option_names
    ]
    if other_model:
        raise CheckpointError(
            f"{saved.path}: the run has another model than {config_file} "
            f"({'; '.join(other_model)}); give the folder of the run as --out_dir"
        )

    # a line each, with the option that sets the value of the file; the length first: it is what
    # --minutes has chosen, and what one wants to change
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
    # what an `auto` amounts to counts, not the word
    then = flat_settings(resolve(saved.settings, run.runtime, saved.data.epochs))
    now = flat_settings(run.config)
    environment = environment_of(run.runtime, run.world.size)

    # a text is the same if its characters are, wherever it lies
    return compare(
        then | _digests(saved.data) | saved.environment,
        now | _digests(text_info(run)) | environment,
    )


def _digests(text: TextInfo) -> dict[str, str | None]:
    return {"data.sha256": text.sha256, "data.val_sha256": text.val_sha256}


def may_have_seen_validation(parent: Checkpoint, run: Run) -> bool:
    """Return whether a new run may validate on text that its parent was trained on."""
    # not if the parent had another text, or has left out the same part of this one
    if parent.data.sha256 not in (run.corpus.sha256, run.corpus.val_sha256):
        return False
    then, now = parent.settings.data, run.settings.data
    same_split = (then.val_fraction, then.separator) == (now.val_fraction, now.separator)
    return not same_split or parent.data.val_sha256 != run.corpus.val_sha256


def messages(found: Mapping[str, tuple[object, object]]) -> list[str]:
    """Say what differs, and what follows from it, a line each."""
    lines = [_line(name, *found[name]) for name in found if name not in NOT_SAID]

    # some have consequences
    if found.keys() & FORGET_BEST:
        lines.append("earlier validation losses are not comparable: the best loss is reset")
    if found.keys() & {"data.sha256", "data.val_sha256"}:
        lines.append(SEEN_BEFORE)
    return lines


def _line(name: str, then: object, now: object) -> str:
    return f"{name} {shorten(str(then), 200)} -> {shorten(str(now), 200)}"
