"""Compare settings: python -m benchmarks.trials CONFIG --learning_rate=0.01,0.02 --seeds=3

Several values of an option of train.py, separated by commas, are trials; with several such options,
each combination of their values is one. Every trial is trained with the seeds 1, 2, ... The other
options go to all runs, and so does one that takes a list (--sources), whose commas stay.

Prints a table of the validation losses at the last step, with what counts as a difference, and
draws out/trials/NAME/losses.svg. The same command again, with more seeds or values if you like,
resumes an interrupted run and does not repeat a finished one.

With --minutes, each run measures its speed and gets the steps that fit: it compares trials at equal
time. If other programs use the machine meanwhile, the steps of one trial differ from seed to seed:
compare at equal steps then, with --max_iters.

To keep the validation text unseen, choose settings on a part of the training text (--sources,
--val_sources).
"""

import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.runs import LossCurve, read_loss_curve
from common.console import prepare_console, print_result, print_text, program, script, shell_command
from common.errors import ConfigError, ResourceError, UserError
from common.files import write_atomic
from common.stop import EXIT_CODES
from configs.command import Command, CommandLineOptions, parse_train
from configs.fields import Checked, setting, settings_of, value_type
from configs.options import command_help, options_of, parse_arguments
from configs.schema import Config, flat_settings, from_dict
from run.folder import holds_run

try:
    from benchmarks import charts
except ImportError:  # matplotlib is not among the packages that a user needs
    charts = None

USAGE = """\
usage: python -m benchmarks.trials CONFIG [--key=VALUE,VALUE ...] [--key=value ...]

  python -m benchmarks.trials configs/fast.yaml --learning_rate=0.01,0.02 --seeds=3 --minutes=1
  python -m benchmarks.trials configs/fast.yaml --n_layer=2,3 --dropout=0,0.1 --max_iters=500

Every other option is one of train.py; see python train.py --help.
"""
CHOSEN_HERE = ("out_dir", "seed", "resume", "overwrite", "print_config")
RECORD = "trial.json"  # in the folder of a run: its settings, and whether it is finished
OUTPUT = "output.txt"  # in the folder of a run: what train.py prints
EACH, MEANS = 0.01, 0.008  # nats: see RULE
RULE = (
    f"A difference counts if each of at least two seeds gains {EACH}, or if the means of",
    f"three seeds against three differ by {MEANS}. Seeds alone differ by about 0.005.",
)


@dataclass(frozen=True)
class TrialOptions(Checked):
    """The options of this command alone."""

    seeds: int = setting(1, "train each trial with the seeds 1 to N", "[1, 1000]")
    name: str = setting("auto", "folder in out/trials; auto: the name of the config file")


@dataclass(frozen=True, eq=False)
class TrialRun:
    """A run of train.py: a trial with one seed."""

    trial: str  # its settings, as in "learning_rate=0.01"; empty if nothing varies
    seed: int
    arguments: list[str]
    command: Command

    @property
    def folder(self) -> Path:
        return Path(self.command.out_dir)

    @property
    def settings(self) -> dict[str, object]:
        """All settings but the folder, as JSON has them."""
        command, config = self.command, self.command.new_settings()
        paths = {"data.sources": config.data.sources, "data.val_sources": config.data.val_sources}
        names = ("minutes", "init_from", "new_characters")
        options = {name: getattr(command, name) for name in names}
        return json.loads(json.dumps(flat_settings(config) | paths | options))


@dataclass(frozen=True)
class Failure:
    """A run that failed: its exit code, and how it ended in a line."""

    run: TrialRun
    code: int
    line: str


Curves = dict[str, dict[int, LossCurve]]  # by trial and seed

# --------------------------------------------------------------------------------- the command line


def parse_trials(argv: list[str]) -> tuple[TrialOptions, list[TrialRun]]:
    """Parse the arguments; return the options of this command, and all runs, checked by train.py.

    All trials have a run with the first seed before any has one with the second.
    """
    own, shared, varied = split_arguments(argv)
    _, values = parse_arguments(own, TrialOptions)
    options = from_dict(values, TrialOptions)
    if options.name == "auto":
        options = replace(options, name=Path(parse_train(shared).config_file).stem)
    runs = [
        plan_run(options.name, combination, seed, shared)
        for seed in range(1, options.seeds + 1)
        for combination in itertools.product(*varied)
    ]
    for run, count in Counter(run.folder.name for run in runs).items():
        if count > 1:
            raise ConfigError(f"{run}: given twice; each trial is trained once; remove one of them")
    return options, runs


def split_arguments(argv: list[str]) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the options of this command, the arguments of all runs, and the options that vary.

    An option that varies is a list of options, one for each value.
    """
    options = options_of(TrialOptions, CommandLineOptions, Config)
    own, shared, varied = [], [], []
    words = iter(argv)
    for word in words:
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or key not in options:
            shared.append(word)  # the config, or a mistake that train.py reports
            continue
        name, field, bare_value = options[key]
        if not equals and not bare_value:
            text = next(words, "")
            word = f"{option}={text}"
        if name in CHOSEN_HERE:
            raise ConfigError(
                f"{option}: benchmarks.trials chooses it for each run; allowed here are --seeds=N "
                "and --name=NAME; leave it out"
            )
        if name in settings_of(TrialOptions):
            own.append(word)
        elif "," in text and value_type(field) is not tuple:
            varied.append([f"{option}={value}" for value in text.split(",")])
        else:
            shared.append(word)
    return own, shared, varied


def plan_run(name: str, combination: Sequence[str], seed: int, shared: list[str]) -> TrialRun:
    """Return the run of a combination of options with one seed, after checking its settings."""
    trial = ",".join(option.removeprefix("--") for option in combination)
    folder = f"{trial},seed={seed}" if trial else f"seed={seed}"
    folder = Path("out/trials", name, folder.replace("/", "_"))
    arguments = [*shared, *combination, f"--seed={seed}", f"--out_dir={folder}"]
    return TrialRun(trial, seed, arguments, parse_train(arguments))


# ----------------------------------------------------------------------------------------- the runs


def is_finished(run: TrialRun) -> bool:
    """Return whether a run is finished; raise ConfigError if its folder has another one."""
    try:
        record = json.loads((run.folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    saved, settings = record["settings"], run.settings
    changed = [key for key in settings if settings[key] != saved.get(key)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{run.folder}: holds a run with other settings ({key} {saved.get(key)}, not "
            f"{settings[key]}); a run is only resumed as it began; give another --name"
        )
    return record["finished"]


def train(run: TrialRun) -> int:
    """Train a run, or resume it; return the exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    write_record(run, finished=False)
    resume = ["--resume"] if holds_run(run.folder) else []
    command = [sys.executable, script("train.py"), *run.arguments, *resume]
    with open(run.folder / OUTPUT, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches train.py too, which saves and ends
        code = process.wait()
    if code == 0:
        write_record(run, finished=True)
    return code


def write_record(run: TrialRun, *, finished: bool) -> None:
    record = {"settings": run.settings, "finished": finished}
    write_atomic(run.folder / RECORD, json.dumps(record, indent=1).encode())


def last_line(run: TrialRun, code: int) -> str:
    """Return how a run failed: its exit code or signal, and the last line that it printed."""
    lines = (run.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
    end = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
    return f"{end}: {next((line for line in reversed(lines) if line.strip()), 'no output')}"


def train_all(runs: list[TrialRun]) -> tuple[Curves, list[Failure]]:
    """Train what is not finished; return the loss curves, and the runs that failed.

    Raises SystemExit with the exit code of a signal that ended a run.
    """
    curves, failures, minutes = {run.trial: {} for run in runs}, [], []
    waiting = [run for run in runs if not is_finished(run)]  # checks all folders before it trains
    for i, run in enumerate(runs, 1):
        # say which run it is, and how long all will take
        note = "finished earlier"
        if run in waiting:
            typical = run.command.minutes or (statistics.mean(minutes) if minutes else 0)
            left = math.ceil(typical * len(waiting[waiting.index(run) :]))
            note = f"about {left} min left" if left else "starting"
        print_result(f"run {i} of {len(runs)}: {run.folder.name} ({note})")

        # train it
        code = train(run) if run in waiting else 0
        if code in EXIT_CODES.values():
            print_result("stopped; the same command continues")
            raise SystemExit(code)
        if code:
            failures.append(Failure(run, code, last_line(run, code)))
            print_result(f"  {failures[-1].line}")
            continue

        # read its losses
        curve = read_loss_curve(run.folder)
        loss = curve.val_loss[-1]
        print_result(f"  loss {loss:.4f}, {curve.minutes[-1]:.1f} min")
        if math.isfinite(loss):
            curves[run.trial][run.seed] = curve
            minutes.append(curve.minutes[-1])
        else:
            failures.append(Failure(run, 6, f"the last validation loss is {loss}"))
    return {trial: found for trial, found in curves.items() if found}, failures


# --------------------------------------------------------------------------------------- the report


def is_difference(a: dict[int, float], b: dict[int, float]) -> bool:
    """Return whether the losses of two trials, by seed, differ by more than chance: see RULE."""
    gains = [round(a[seed] - b[seed], 6) for seed in a.keys() & b.keys()]
    agree = len(gains) >= 2 and (min(gains) >= EACH or max(gains) <= -EACH)
    means = round(abs(statistics.mean(a.values()) - statistics.mean(b.values())), 6)
    return agree or (min(len(a), len(b)) >= 3 and means >= MEANS)


def print_table(curves: Curves) -> None:
    """Print the losses of each trial, and how far its mean is above the lowest one."""
    losses = {
        trial: {seed: curve.val_loss[-1] for seed, curve in runs.items()}
        for trial, runs in curves.items()
    }
    means = {trial: statistics.mean(found.values()) for trial, found in losses.items()}
    best = min(means, key=means.get)
    print_result(
        "",
        "| trial | seeds | mean loss | range | above the lowest | steps | minutes |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    )
    for trial, found in losses.items():
        above = "lowest"
        if trial != best:
            counts = "counts" if is_difference(found, losses[best]) else "does not count"
            above = f"{means[trial] - means[best]:.4f}: {counts}"
        minutes = statistics.mean(curve.minutes[-1] for curve in curves[trial].values())
        lengths = {int(curve.steps[-1]) for curve in curves[trial].values()}
        steps = " to ".join(f"{steps:,}" for steps in sorted({min(lengths), max(lengths)}))
        spread = f"{min(found.values()):.4f} to {max(found.values()):.4f}"
        print_result(
            f"| {trial or 'all runs'} | {len(found)} | {means[trial]:.4f} | {spread} | {above} "
            f"| {steps} | {minutes:.1f} |"
        )
    print_result("", *RULE)


def draw(curves: Curves, path: Path, by_minutes: bool) -> None:
    """Draw all losses over minutes or steps, and below them those at the last step.

    The axes are scaled to the data; they are logarithmic if a loss is ten times another.
    """
    last_height = 0.7 + 0.22 * len(curves)  # inches
    heights = {"height_ratios": [3, last_height]}
    with charts.picture(path, 3 + last_height, rows=2, gridspec_kw=heights) as (over_time, last):
        for row, runs in enumerate(curves.values()):
            color = charts.color_of(row, len(curves))
            for curve in runs.values():
                x = curve.minutes if by_minutes else curve.steps
                over_time.plot(x, curve.val_loss, ".-", color=color, linewidth=1)
            losses = [curve.val_loss[-1] for curve in runs.values()]
            last.plot(losses, [row] * len(losses), "o", color=color, alpha=0.6)
            last.plot(statistics.mean(losses), row, "|", color=color, markersize=16)
        charts.fit_scale(over_time.yaxis)
        over_time.set_xlabel("minutes" if by_minutes else "steps")
        over_time.set_title("Validation loss, nats per character")
        charts.fit_scale(last.xaxis)
        last.set_ylim(len(curves) - 0.5, -0.5)
        last.set_title("At the last step: each seed, and the mean")
        last.set_yticks(range(len(curves)), [trial or "all runs" for trial in curves])


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if "--help" in argv or "-h" in argv:
        print_text(command_help(USAGE, TrialOptions))
        return 0
    options, runs = parse_trials(argv)
    folder = Path("out/trials", options.name)
    if charts is None:
        print_result("no picture without matplotlib: pip install -r requirements-dev.txt")
    try:
        curves, failures = train_all(runs)
    except OSError as error:
        raise ResourceError(f"{error.filename}: {error.strerror}; choose another --name") from error
    if len(failures) == len(runs):
        error = UserError(
            f"{folder}: all {len(runs)} runs failed, the last with {failures[-1].line}"
        )
        error.exit_code = max(failures[-1].code, 1)
        raise error
    print_table(curves)
    for failure in failures:
        print_result(f"failed: {failure.run.folder.name}, {failure.line}")
    if charts:
        draw(curves, folder / "losses.svg", by_minutes=runs[0].command.minutes is not None)
        print_result(f"picture: {folder / 'losses.svg'}")
    print_result(f"curves: {shell_command([program('tensorboard'), '--logdir', folder])}")
    return 0


if __name__ == "__main__":
    prepare_console()
    raise SystemExit(main(sys.argv[1:]))
