"""The first 100 losses of configs/smoke.yaml, as they were: what changes them changes every run.

After a change that is meant to: python -m tests.test_golden
"""

import json
import tempfile
from pathlib import Path

from tests.campaigns.common import scalars, train
from training import runtime

GOLDEN = Path(__file__).with_name("golden_losses.json")
ELSEWHERE = 1e-4  # in another environment


def losses(folder: Path) -> list[float]:
    options = ["--dtype=float32", "--device=cpu", "--max_iters=100", "--log_interval=1", "--eval_interval=100"]
    assert train("configs/smoke.yaml", *options, "--sample_chars=0", f"--out_dir={folder}")[0] == 0
    return [value for _, value in scalars(folder)["train/loss"]]


def test_the_first_hundred_losses_are_those_recorded(tmp_path):
    golden, found = json.loads(GOLDEN.read_text()), losses(tmp_path)
    assert len(found) == len(golden["losses"]) == 100
    if golden["environment"] == runtime.choose("cpu", "float32").environment():
        assert found == golden["losses"]
    assert max(abs(a - b) for a, b in zip(found, golden["losses"], strict=True)) < ELSEWHERE


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = losses(Path(name) / "run")
    record = {"environment": runtime.choose("cpu", "float32").environment(), "losses": found}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
