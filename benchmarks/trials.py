"""Compare settings: python -m benchmarks.trials CONFIG --learning_rate="0.01,0.02" --seeds=3

Every option but --seeds and --name goes to train.py. Where its value has commas, it varies: each
combination of values is a trial, and each trial is trained with the seeds 1, 2, ...

Prints a table of the validation losses at the last step, with what counts as a difference. The
curves are in TensorBoard: tensorboard --logdir out/trials. The same command again, with more seeds
or values if you like, resumes an interrupted run and does not repeat a finished one.

With --minutes, each run measures its speed and gets the steps that fit: it compares trials at equal
time. If other programs use the machine meanwhile, the steps of one trial differ from seed to seed:
compare at equal steps then, with --max_iters.

To keep the validation text unseen, choose settings on a part of the training text (--sources,
--val_sources).
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import read_curves
from configs.command import parse_train

RECORD = "trial.json"  # in the folder of a run: the words of its command, and whether it has ended
OUTPUT = "output.txt"  # in the folder of a run: what train.py prints
LOSS = "val/loss"  # a column of metrics.csv
SEED_GAIN, MEAN_GAIN = 0.01, 0.008  # nats: see RULE
RULE = (
    f"A difference counts if each of at least two seeds gains {SEED_GAIN}, or if the means of\n"
    f"three seeds against three differ by {MEAN_GAIN}. Three seeds alone span 0.01; those of\n"
    "fast.yaml up to 0.04."
)


@dataclass(frozen=True)
class TrialRun:
    """A run of train.py: a trial with one seed.

    trial   the values that vary, as in "learning_rate=0.01"; empty if nothing varies
    folder  of the run
    words   the arguments of train.py
    """

    trial: str
    seed: int
    folder: Path
    words: list[str]


Result = dict[str, float]  # of a run: its last evaluation, a row of metrics.csv
Results = dict[str, dict[int, Result]]  # by trial and seed


def parse_trials(argv: list[str] | None = None) -> list[TrialRun]:
    """Parse the arguments; return all runs, whose words train.py accepts.

    All trials have a run with the first seed before any has one with the second.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", help="config file for train.py")
    parser.add_argument("--seeds", type=int, default=1, help="train each trial with seeds 1 to N")
    parser.add_argument("--name", help="folder in out/trials; default: the name of the config file")
    options, others = parser.parse_known_args(argv)

    fixed, varied = [], []  # for each option that varies, a list with an option for each value
    for word in others:
        option, _, values = word.partition("=")
        if option.replace("-", "_") in ("__seed", "__out_dir"):
            parser.error(f"{option} differs from run to run; see --seeds and --name")
        if "," in values:
            varied.append([f"{option}={value}" for value in values.split(",")])
        else:
            fixed.append(word)

    campaign, runs = Path("out/trials", options.name or Path(options.config).stem), []
    for seed in range(1, options.seeds + 1):
        for combination in itertools.product(*varied):
            trial = ",".join(option.removeprefix("--") for option in combination)
            name = ",".join(filter(None, (trial, f"seed={seed}")))
            folder = campaign / name.replace("/", "_")
            words = [options.config, *fixed, *combination, f"--seed={seed}"]
            words += [f"--out_dir={folder}", "--resume"]  # or start, if there is no run
            parse_train(words)  # ends at a mistake
            runs.append(TrialRun(trial, seed, folder, words))
    return runs


# ----------------------------------------------------------------------------------------- the runs


def is_finished(run: TrialRun) -> bool:
    """Return whether a run is finished; exit if its folder has a run of another command."""
    path = run.folder / RECORD
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    if record["words"] != run.words:
        other = " ".join(record["words"])
        raise SystemExit(f"error: {run.folder} has the run of {other}; choose another --name")
    return record["finished"]


def write_record(run: TrialRun, *, finished: bool) -> None:
    record = {"words": run.words, "finished": finished}
    (run.folder / RECORD).write_text(json.dumps(record))


def train(run: TrialRun) -> int:
    """Train a run, or resume it; return the exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    write_record(run, finished=False)
    with open(run.folder / OUTPUT, "ab") as output:
        command = [sys.executable, "train.py", *run.words]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches train.py too, which saves and ends
        process.wait()
        print("stopped; the same command continues")
        raise SystemExit(130) from None
    if code == 0:
        write_record(run, finished=True)
    return code


def train_all(runs: list[TrialRun]) -> Results:
    """Train what is not finished; return the results of all runs but the failed ones."""
    results = {}
    finished = [is_finished(run) for run in runs]  # checks all folders before it trains
    for number, (run, done) in enumerate(zip(runs, finished, strict=True), 1):
        print(f"run {number} of {len(runs)}: {run.folder.name}", flush=True)
        code = 0 if done else train(run)
        if code:
            last_line = (run.folder / OUTPUT).read_text(errors="replace").strip().split("\n")[-1]
            print(f"  exit code {code}: {last_line}")
        else:
            result = {name: values[-1] for name, values in read_curves(run.folder).items()}
            results.setdefault(run.trial, {})[run.seed] = result
            print(f"  loss {result[LOSS]:.4f}, {result['minutes']:.1f} min")
    return results


# --------------------------------------------------------------------------------------- the report


def mean(by_seed: dict[int, Result], column: str) -> float:
    """Return the mean of a column of metrics.csv over the seeds of a trial."""
    return statistics.mean(result[column] for result in by_seed.values())


def is_difference(a: dict[int, Result], b: dict[int, Result]) -> bool:
    """Return whether the losses of two trials, by seed, differ by more than chance: see RULE."""
    gains = [round(a[seed][LOSS] - b[seed][LOSS], 6) for seed in a.keys() & b.keys()]
    agree = len(gains) >= 2 and (min(gains) >= SEED_GAIN or max(gains) <= -SEED_GAIN)
    means = round(abs(mean(a, LOSS) - mean(b, LOSS)), 6)
    return agree or (min(len(a), len(b)) >= 3 and means >= MEAN_GAIN)


def print_table(results: Results) -> None:
    """Print the losses of each trial, and how far its mean is above the lowest one."""
    means = {trial: mean(by_seed, LOSS) for trial, by_seed in results.items()}
    best = min(means, key=means.get)
    print("\n| trial | seeds | mean loss | range | above the lowest | steps | minutes |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for trial, by_seed in results.items():
        above = "lowest"
        if trial != best:
            counts = "counts" if is_difference(by_seed, results[best]) else "does not count"
            above = f"{means[trial] - means[best]:.4f}: {counts}"
        losses = [result[LOSS] for result in by_seed.values()]
        print(
            f"| {trial or 'all runs'} | {len(by_seed)} | {means[trial]:.4f} "
            f"| {min(losses):.4f} to {max(losses):.4f} | {above} "
            f"| {mean(by_seed, 'step'):,.0f} | {mean(by_seed, 'minutes'):.1f} |"
        )
    print(f"\n{RULE}")


def main(argv: list[str] | None = None) -> None:
    runs = parse_trials(argv)
    results = train_all(runs)
    if results:
        print_table(results)
    if failed := len(runs) - sum(map(len, results.values())):
        raise SystemExit(f"error: {failed} of {len(runs)} runs failed; the same command goes on")


if __name__ == "__main__":
    main()
