"""What each modern part brings: python -m benchmarks.ladder [--seeds N]

From the classic recipe to configs/fast.yaml, one change a row and each on top of those before, at
the same number of steps of the same batches. The exact validation loss is the mean over the seeds,
the time that of the steps alone.
"""

import argparse
import statistics

from benchmarks.time_to_loss import ours

RUNGS = {  # the last one is fast.yaml as it is
    "classic: nanoGPT's block, AdamW, float32": {
        "dtype": "float32",
        "kernel": "sdpa",
        "positions": "learned",
        "token_shifts": 0,
        "mlp": "gelu",
        "qk_norm": "false",
        "residual_init": "scaled",
        "tied": "true",
        "logit_softcap": 0,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "muon_learning_rate": 0.02,
        "muon_momentum": 0.95,
        "schedule": "cosine",
        "min_lr_ratio": 0.1,
        "grad_clip": 1,
    },
    "bfloat16 products, batched kernel": ("dtype", "kernel"),
    "rotary positions": ("positions",),
    "token shifts": ("token_shifts",),
    "ReLU^2": ("mlp",),
    "QK-norm": ("qk_norm",),
    "residual branches begin at 0": ("residual_init",),
    "output matrix of its own": ("tied",),
    "logit soft-cap": ("logit_softcap",),
    "Muon": ("optimizer",),
    "rate falls to 0, over most of the run": ("schedule", "min_lr_ratio"),
    "rate of the embeddings 0.001 -> 0.03": ("learning_rate",),
    "Muon's rate 0.02 -> 0.04": ("muon_learning_rate",),
    "Muon's momentum 0.95 -> 0.8": ("muon_momentum",),
    "no clipping": ("grad_clip",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    classic, *_ = RUNGS.values()
    left = dict(classic)
    print("| change | loss | seconds of steps |\n| --- | ---: | ---: |")
    for name, changes in RUNGS.items():
        if changes is not classic:
            for setting in changes:
                del left[setting]
        options = [f"--{setting}={value}" for setting, value in left.items()]
        runs = [ours("configs/fast.yaml", *options, f"--seed={seed}") for seed in range(seeds)]
        loss, seconds = (statistics.mean(run[place] for run in runs) for place in (2, 1))
        print(f"| {name} | {loss:.4f} | {seconds:.1f} |", flush=True)
    assert not left, "the last rung is fast.yaml as it is"


if __name__ == "__main__":
    main()
