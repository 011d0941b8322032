"""Campaign: remove or change each field of a checkpoint.

    python -m tests.campaigns.fields [--full]

The resume test must detect each change: by an error, by a line about a difference or about another
checkpoint that is used instead, or because the resumed run ends differently.
"""

import copy
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from checkpointing.checkpoint import SECTIONS
from tests.campaigns.common import (
    STEPS,
    contents,
    run_campaign,
    same_runs,
    small_run_args,
    train,
    train_and_copy,
    write_checkpoint,
)

# the learning rate rises too far: the second evaluation is the best, the last two are worse
DIVERGING = [
    "--schedule=constant", f"--warmup_iters={STEPS}", "--learning_rate=1", "--muon_learning_rate=1",
    f"--save_interval={STEPS * 3 // 4}",
]  # fmt: skip
MAY_CHANGE = {  # the paths of the run and its text, and the size of an event file after a kill
    ("events", "size"),
    ("config", "out_dir"),
    ("config", "data"),
    ("config", "data", "sources"),
    ("config", "data", "val_sources"),
}


def campaign(full: bool) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uninterrupted, other = folder / "uninterrupted", folder / "other"
        options = [*small_run_args(folder), *DIVERGING]
        at_step_18 = train_and_copy(uninterrupted, 18, *options)
        payload = contents(at_step_18 / "last.safetensors")
        names = ("step", "last_eval_step", "evals_since_best")
        assert [payload["progress"][name] for name in names] == [18, 18, 1]
        assert contents(uninterrupted / "last.safetensors")["progress"]["evals_since_best"] == 2

        def detected(payload: dict) -> bool:
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(uninterrupted, other)
            write_checkpoint(other / "last.safetensors", payload)
            code, output = train(*options, f"--out_dir={other}", "--resume")
            said = "not be bit-identical" in output or "; using " in output
            return code != 0 or said or not same_runs(uninterrupted, other)

        assert not detected(payload), "detected although nothing was changed"
        changes = [(path, remove) for path in paths(payload) for remove in (True, False)]
        changes = [(path, remove) for path, remove in changes if path not in MAY_CHANGE]
        # what is missing takes its default, so its absence shows only if it had another value
        changes = [
            (path, remove)
            for path, remove in changes
            if not (remove and ((path[:-1] and path[0] == "config") or is_default(payload, path)))
        ]
        if not full:
            changes = random.Random(0).sample(changes, 12)
        undetected = [
            (path, remove)
            for path, remove in changes
            if not detected(with_change(payload, path, remove))
        ]
        assert not undetected, f"not detected: {undetected}"
    removed = sum(remove for _, remove in changes)
    return (
        f"{removed} fields removed, {len(changes) - removed} changed: the resume test detected "
        f"{len(changes)} of {len(changes)}; not tried, because allowed: missing settings, missing "
        "fields that have their default, and other paths of the run and its text"
    )


def is_default(payload: dict, path: tuple) -> bool:
    """Return whether a field has the value that it also takes if it is missing."""
    if path[0] not in SECTIONS:
        return False
    found, default = payload, {path[0]: json.loads(json.dumps(asdict(SECTIONS[path[0]]())))}
    for key in path:
        found, default = found[key], default[key]
    return found == default


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every section and field of a checkpoint; a list of numbers is one field."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, str)):
        for i in range(len(value)):
            yield from paths(value[i], (*path, i))


def with_change(payload: dict, path: tuple, remove: bool) -> dict:
    """Return a copy with one field removed or changed, together with tensors that share memory."""
    payload = copy.deepcopy(payload)
    section = payload
    for key in path[:-1]:
        section = section[key]
    if remove:
        del section[path[-1]]
    else:
        section[path[-1]] = changed(section[path[-1]])
    return payload


def changed(value: object) -> object:
    if isinstance(value, Tensor):
        return value.add_(1)
    if type(value) in (int, float):
        return value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:-1] + ("a" if value[-1:] != "a" else "b")
    if isinstance(value, dict):
        return {key: changed(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(changed, value)) or [1]
    return 1


if __name__ == "__main__":
    run_campaign(campaign)
