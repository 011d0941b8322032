"""Recorded training losses, to be reproduced bit for bit by any change not meant to alter training.

    python -m tests.golden                  compare every run below with its record
    python -m tests.golden NAME ...         compare the named runs
    python -m tests.golden --record NAME    record it again, after a deliberate change of training

In the recorded environment (see golden_losses.json) the losses must be equal; in any other, within
TOLERANCE. So must those of a layout that is not in RECORDED: it may have no record, and is then
compared with `fused`. tests/slow/test_golden.py checks the runs of configs/smoke.yaml; the others
take minutes, and the bfloat16 run only ten steps, for CPUs without bfloat16 instructions.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from configs.schema import LAYOUTS
from tests.runs import scalars, train
from training import device
from training.device import environment

RECORDED = ("heads", "separate", "fused", "interleaved", "stacked", "unrolled")
RECORD = Path(__file__).with_name("golden_losses.json")
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
COMMON = ["--device=cpu", "--log_interval=1", "--sample_chars=0"]
SHAKESPEARE = ["configs/shakespeare.yaml", "--sources=data/plays", "--kernel=batched"]
HUNDRED = ["--max_iters=100", "--eval_interval=100"]
TRAPEZOID = ["--warmup_ratio=0.2", "--cooldown_ratio=0.8"]
TEN = ["--max_iters=10", "--eval_interval=10", "--warmup_ratio=0.2"]

RUNS = {
    "smoke": ["configs/smoke.yaml", "--dtype=float32", "--warmup_ratio=0.1", *HUNDRED],
    **{
        f"smoke {layout}": [
            "configs/smoke.yaml", "--dtype=float32", "--optimizer=muon", f"--layout={layout}",
            *TEN,
        ]
        for layout in LAYOUTS
    },
    "shakespeare float32": [*SHAKESPEARE, "--dtype=float32", *TRAPEZOID, *HUNDRED],
    "shakespeare bfloat16": [*SHAKESPEARE, "--dtype=bfloat16", "--cooldown_ratio=0.8", *TEN],
    **{
        f"shakespeare {layout}": [
            *SHAKESPEARE, "--dtype=float32", "--cooldown_ratio=0.8", f"--layout={layout}", *TEN,
        ]
        for layout in LAYOUTS
    },
}  # fmt: skip


def losses(name: str) -> list[float]:
    """Train the run `name` and return its training losses, one per step."""
    with tempfile.TemporaryDirectory() as folder:
        code, output = train(*RUNS[name], *COMMON, f"--out_dir={folder}/run")
        assert code == 0, output
        return [value for _, value in scalars(Path(folder, "run"))["train/loss"]]


def environment_of(name: str) -> dict[str, str]:
    """Return the environment in which `losses` trains the run `name`."""
    return environment(device.select_runtime("cpu", dtype_of(name)), ranks=1)


def dtype_of(name: str) -> str:
    return "bfloat16" if "--dtype=bfloat16" in RUNS[name] else "float32"


def compare(name: str, measured: list[float]) -> str:
    """Compare `measured` with the recorded losses.

    Returns a line with the result. Raises AssertionError if they differ by more than allowed.
    """
    records, (kind, _, layout) = json.loads(RECORD.read_text()), name.rpartition(" ")
    if layout in LAYOUTS and layout not in RECORDED and name not in records:
        records[name] = records[f"{kind} fused"] | {"environment": {}}
    record = records[name]
    assert len(measured) == len(record["losses"])
    if record["environment"] == environment_of(name):
        assert measured == record["losses"], f"{name}: not the recorded losses"
        return f"{name}: {len(measured)} losses, bit-identical"
    largest = max(abs(a - b) for a, b in zip(measured, record["losses"], strict=True))
    assert largest < TOLERANCE[dtype_of(name)], f"{name}: differs by {largest:.2g}"
    return f"{name}: {len(measured)} losses within {largest:.1g} (recorded in another environment)"


def main(arguments: list[str]) -> None:
    record = "--record" in arguments
    names = [word for word in arguments if word != "--record"] or list(RUNS)
    for name in names:
        began = time.perf_counter()
        measured = losses(name)
        if record:
            records = json.loads(RECORD.read_text())
            records[name] = {"environment": environment_of(name), "losses": measured}
            ordered = {each: records[each] for each in RUNS if each in records}
            RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{compare(name, measured)}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
