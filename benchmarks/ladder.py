"""Contribution of each part of configs/fast.yaml: python -m benchmarks.ladder [--seeds N]

The first row is the classic recipe, the last fast.yaml; each row adds one change to the row above.
All train for the same number of steps on the same batches. The loss is the exact validation loss,
the time is the time of the training steps, both means over the seeds.
"""

import argparse
import statistics

from benchmarks.time_to_loss import run_training

CLASSIC = {  # settings of the classic recipe that differ from fast.yaml
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
}
CHANGES = {  # name: settings that take the value in fast.yaml from this row on
    "classic: nanoGPT's block, AdamW, float32": (),
    "bfloat16 matmuls, batched kernel": ("dtype", "kernel"),
    "RoPE": ("positions",),
    "token shifts": ("token_shifts",),
    "ReLU^2": ("mlp",),
    "QK-norm": ("qk_norm",),
    "zero-initialized residual branches": ("residual_init",),
    "untied lm_head": ("tied",),
    "logit soft-cap": ("logit_softcap",),
    "Muon": ("optimizer",),
    "learning rate decays to 0, over most of the run": ("schedule", "min_lr_ratio"),
    "learning rate of the embeddings 0.001 -> 0.03": ("learning_rate",),
    "Muon learning rate 0.02 -> 0.04": ("muon_learning_rate",),
    "Muon momentum 0.95 -> 0.8": ("muon_momentum",),
    "no gradient clipping": ("grad_clip",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    overrides = dict(CLASSIC)
    print("| change | loss | seconds of steps |\n| --- | ---: | ---: |")
    for name, settings in CHANGES.items():
        for setting in settings:
            del overrides[setting]
        options = [f"--{setting}={value}" for setting, value in overrides.items()]
        runs = [
            run_training("configs/fast.yaml", *options, f"--seed={seed}") for seed in range(seeds)
        ]
        loss = statistics.mean(run.loss for run in runs)
        seconds = statistics.mean(run.step_seconds for run in runs)
        print(f"| {name} | {loss:.4f} | {seconds:.1f} |", flush=True)
    assert not overrides, "the last row is fast.yaml without overrides"


if __name__ == "__main__":
    main()
