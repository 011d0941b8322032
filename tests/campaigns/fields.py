"""Each field of a checkpoint left out, or changed: python -m tests.campaigns.fields [--full]

The test of resuming must notice every time: by a refusal, by a line that tells of a difference, or
by another end.
"""

import copy
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tests.campaigns.common import STEPS, command, contents, forge, same, small, train

# a rate that rises too far: the second evaluation has the best loss, and the last two are stale
DIVERGING = [
    "--schedule=constant", f"--warmup_iters={STEPS}", "--learning_rate=1", "--muon_learning_rate=1",
    f"--save_interval={STEPS * 3 // 4}",
]  # fmt: skip
WHERE_IT_LIES = {  # the same run elsewhere, and the end of an event file that a kill has torn
    ("events", "size"),
    ("config", "out_dir"),
    ("config", "data"),
    ("config", "data", "sources"),
    ("config", "data", "val_sources"),
}


def campaign(full: bool) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed, other = folder / "undisturbed", folder / "other"
        options = [*small(folder), *DIVERGING]
        assert train(*options, f"--out_dir={undisturbed}")[0] == 0
        half_way = contents(undisturbed / "prev.safetensors")
        names = ("step", "last_eval_step", "evals_since_best")
        assert [half_way["progress"][name] for name in names] == [18, 18, 1]
        assert contents(undisturbed / "last.safetensors")["progress"]["evals_since_best"] == 2

        def noticed(payload: dict) -> bool:
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(undisturbed, other)
            forge(other / "last.safetensors", payload)
            code, said = train(*options, f"--out_dir={other}", "--resume")
            return code != 0 or "not the same run" in said or not same(undisturbed, other)

        assert not noticed(half_way), "nothing was changed, and yet it is noticed"
        changes = [(path, leave_out) for path in paths(half_way) for leave_out in (True, False)]
        changes = [(path, out) for path, out in changes if path not in WHERE_IT_LIES]
        changes = [
            (path, out)
            for path, out in changes
            if not (out and path[0] == "config" and len(path) > 1)
        ]
        if not full:
            changes = random.Random(0).sample(changes, 12)
        unnoticed = [
            (path, out) for path, out in changes if not noticed(without(half_way, path, out))
        ]
        assert not unnoticed, f"not noticed: {unnoticed}"
    left_out = sum(out for _, out in changes)
    return (
        f"{left_out} fields left out, {len(changes) - left_out} changed: the resume test failed "
        f"{len(changes)} times "
        "of as many; a config that lacks a setting has its default, and may say otherwise where it "
        "and its text lie"
    )


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The way to every part of a checkpoint: sections, and what is in them; a list of numbers is
    one part.
    """
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, str)):
        for i in range(len(value)):
            yield from paths(value[i], (*path, i))


def without(payload: dict, path: tuple, leave_out: bool) -> dict:
    """A copy in which one part is missing, or another; what shares its numbers with that part
    changes too.
    """
    payload = copy.deepcopy(payload)
    inside = payload
    for key in path[:-1]:
        inside = inside[key]
    if leave_out:
        del inside[path[-1]]
    else:
        inside[path[-1]] = other_than(inside[path[-1]])
    return payload


def other_than(value: object) -> object:
    if isinstance(value, Tensor):
        return value.add_(1)
    if type(value) in (int, float):
        return value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:-1] + ("a" if value[-1:] != "a" else "b")
    if isinstance(value, dict):
        return {key: other_than(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(other_than, value)) or [1]
    return 1


if __name__ == "__main__":
    command(campaign)
