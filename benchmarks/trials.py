"""Compare settings: python -m benchmarks.trials CONFIG --learning_rate="0.01,0.02" --seeds=3

Every option but --seeds and --name goes to train.py. Where its value has commas, it varies: each
combination of values is a trial, and each trial is trained with the seeds 1, 2, ...

Prints a table of the validation losses at the last step, with what counts as a difference, and
draws out/trials/NAME/losses.svg. The same command again, with more seeds or values if you like,
resumes an interrupted run and does not repeat a finished one.

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
from importlib.util import find_spec
from pathlib import Path

from benchmarks.runs import LossCurve, read_loss_curve
from common.console import shell_command

RECORD = "trial.json"  # in the folder of a run: the words of its command, and whether it has ended
OUTPUT = "output.txt"  # in the folder of a run: what train.py prints
SEED_GAIN, MEAN_GAIN = 0.01, 0.008  # nats: see RULE
RULE = (
    f"A difference counts if each of at least two seeds gains {SEED_GAIN}, or if the means of\n"
    f"three seeds against three differ by {MEAN_GAIN}. Three seeds alone span 0.01; those of\n"
    "fast.yaml up to 0.04."
)

Curves = dict[str, dict[int, LossCurve]]  # by trial and seed


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


def parse_trials(argv: list[str] | None = None) -> tuple[Path, list[TrialRun]]:
    """Parse the arguments; return the folder of the campaign, and all runs.

    All trials have a run with the first seed before any has one with the second.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trials",
        usage="%(prog)s CONFIG [--seeds=N] [--name=NAME] --key=VALUE,VALUE ... [--key=VALUE ...]",
        description="Train every combination of settings, and compare the losses.",
        epilog="Every other option is one of train.py; one whose value has commas varies.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="config file for train.py")
    parser.add_argument("--seeds", type=int, default=1, help="train each trial with seeds 1 to N")
    parser.add_argument("--name", help="folder in out/trials; default: the name of the config file")
    options, others = parser.parse_known_args(argv)

    folder = Path("out/trials", options.name or Path(options.config).stem)
    fixed = [word for word in others if "," not in word]
    varied = []  # for each option that varies, an option for each value
    for word in others:
        if "," in word:
            option, _, values = word.partition("=")
            if not (option.startswith("--") and values):
                parser.error(f"{word}: write --key=VALUE,VALUE")
            varied.append([f"{option}={value}" for value in values.split(",")])

    runs = []
    for seed in range(1, options.seeds + 1):
        for combination in itertools.product(*varied):
            trial = ",".join(option.removeprefix("--") for option in combination)
            name = ",".join(filter(None, (trial, f"seed={seed}"))).replace("/", "_")
            words = [options.config, *fixed, *combination, f"--seed={seed}"]
            words += [f"--out_dir={folder / name}", "--resume"]  # or start, if there is no run
            runs.append(TrialRun(trial, seed, folder / name, words))
    return folder, runs


# ----------------------------------------------------------------------------------------- the runs


def check(runs: list[TrialRun]) -> None:
    """Let train.py check the words of all runs before it trains one; exit at a mistake."""
    for run in runs:
        done = subprocess.run([*train_command(run), "--print_config"], stdout=subprocess.DEVNULL)
        if done.returncode:  # train.py has said why
            raise SystemExit(done.returncode)


def train_command(run: TrialRun) -> list[str]:
    """Return the command of a run."""
    return [sys.executable, "train.py", *run.words]


def is_finished(run: TrialRun) -> bool:
    """Return whether a run is finished; exit if its folder has a run of another command."""
    path = run.folder / RECORD
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    if record["words"] != run.words:
        other = shell_command(record["words"])
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
        process = subprocess.Popen(train_command(run), stdout=output, stderr=subprocess.STDOUT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches train.py too, which saves and ends
        process.wait()
        print("stopped; the same command continues")
        raise SystemExit(130) from None
    if code == 0:
        write_record(run, finished=True)
    return code


def train_all(runs: list[TrialRun]) -> tuple[Curves, list[str]]:
    """Train what is not finished; return the loss curves, and a line for each run that failed."""
    curves, failures = {run.trial: {} for run in runs}, []
    finished = [is_finished(run) for run in runs]  # checks all folders before it trains
    for number, (run, done) in enumerate(zip(runs, finished, strict=True), 1):
        note = " (finished earlier)" if done else ""
        print(f"run {number} of {len(runs)}: {run.folder.name}{note}", flush=True)
        code = 0 if done else train(run)
        if code:
            last_line = (run.folder / OUTPUT).read_text(errors="replace").strip().split("\n")[-1]
            failures.append(f"{run.folder.name}: exit code {code}: {last_line}")
            print(f"  exit code {code}: {last_line}")
        else:
            curve = read_loss_curve(run.folder)
            curves[run.trial][run.seed] = curve
            print(f"  loss {curve.val_loss[-1]:.4f}, {curve.minutes[-1]:.1f} min")
    return {trial: by_seed for trial, by_seed in curves.items() if by_seed}, failures


# --------------------------------------------------------------------------------------- the report


def is_difference(a: dict[int, float], b: dict[int, float]) -> bool:
    """Return whether the losses of two trials, by seed, differ by more than chance: see RULE."""
    gains = [round(a[seed] - b[seed], 6) for seed in a.keys() & b.keys()]
    agree = len(gains) >= 2 and (min(gains) >= SEED_GAIN or max(gains) <= -SEED_GAIN)
    means = round(abs(statistics.mean(a.values()) - statistics.mean(b.values())), 6)
    return agree or (min(len(a), len(b)) >= 3 and means >= MEAN_GAIN)


def print_table(curves: Curves) -> None:
    """Print the losses of each trial, and how far its mean is above the lowest one."""
    losses = {
        trial: {seed: curve.val_loss[-1] for seed, curve in runs.items()}
        for trial, runs in curves.items()
    }
    means = {trial: statistics.mean(by_seed.values()) for trial, by_seed in losses.items()}
    best = min(means, key=means.get)
    print("\n| trial | seeds | mean loss | range | above the lowest | steps | minutes |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for trial, by_seed in losses.items():
        above = "lowest"
        if trial != best:
            counts = "counts" if is_difference(by_seed, losses[best]) else "does not count"
            above = f"{means[trial] - means[best]:.4f}: {counts}"
        spread = f"{min(by_seed.values()):.4f} to {max(by_seed.values()):.4f}"
        steps = statistics.mean(curve.steps[-1] for curve in curves[trial].values())
        minutes = statistics.mean(curve.minutes[-1] for curve in curves[trial].values())
        print(
            f"| {trial or 'all runs'} | {len(by_seed)} | {means[trial]:.4f} | {spread} | {above} "
            f"| {steps:,.0f} | {minutes:.1f} |"
        )
    print(f"\n{RULE}")


def draw(curves: Curves, path: Path, by_minutes: bool) -> None:
    """Draw all losses over minutes or steps, and below them those at the last step."""
    from benchmarks import charts  # here, because the table needs no matplotlib

    last_height = 0.7 + 0.22 * len(curves)  # inches
    legend_height = 0.22 * len(curves)
    heights = {"height_ratios": [3, last_height]}
    height = 3 + last_height + legend_height
    with charts.picture(path, height, rows=2, gridspec_kw=heights) as (over_time, last):
        for row, (trial, runs) in enumerate(curves.items()):
            color = charts.color_of(row, len(curves))
            for seed, curve in runs.items():
                x = curve.minutes if by_minutes else curve.steps
                label = (trial or "all runs") if seed == min(runs) else None
                over_time.plot(x, curve.val_loss, ".-", color=color, linewidth=1, label=label)
            losses = [curve.val_loss[-1] for curve in runs.values()]
            last.plot(losses, [row] * len(losses), "o", color=color, alpha=0.6)
            last.plot(statistics.mean(losses), row, "|", color=color, markersize=16)
        over_time.set_xlim(left=0)  # also if all runs have one evaluation, at the same step
        over_time.set_xlabel("minutes" if by_minutes else "steps")
        over_time.set_title("Validation loss, nats per character")
        over_time.figure.legend(loc="outside lower center")
        last.set_ylim(len(curves) - 0.5, -0.5)
        last.set_yticks([])
        last.set_title("At the last step: each seed (circle), and the mean (line)")


def main(argv: list[str] | None = None) -> None:
    folder, runs = parse_trials(argv)
    check(runs)
    if not find_spec("matplotlib"):
        print(  # now, because the training may take hours
            "note: no picture without matplotlib: pip install matplotlib, now or later; then the "
            "same command draws it, and repeats no finished run"
        )
    curves, failures = train_all(runs)
    if curves:
        print_table(curves)
        by_minutes = any(word.startswith("--minutes") for word in runs[0].words)
        if find_spec("matplotlib"):
            draw(curves, folder / "losses.svg", by_minutes)
            print(f"picture: {folder / 'losses.svg'}")
        tensorboard = [sys.orig_argv[0], "-m", "tensorboard.main", "--logdir", folder]
        print(f"curves: {shell_command(tensorboard)}")
    if failures:
        raise SystemExit("\n".join(f"failed: {line}" for line in failures))


if __name__ == "__main__":
    main()
