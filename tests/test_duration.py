"""The length of a run: settings that scale with max_iters, and --minutes."""

import re
from dataclasses import replace

import pytest

from checkpointing.checkpoint import load
from common.errors import ConfigError
from configs.cli import parse_train
from configs.scaling import changed_lengths, resolve_auto, scaled_to
from configs.schema import ModelConfig, TrainConfig
from tests.conftest import ROOT
from tests.runs import same_runs, send_at, small_run_args, step_of, train
from training.duration import EVALUATION_FRACTION, TARGET, Speed, fit_to_time

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_can_be_shortened_to_one_iteration(path):
    settings = parse_train([str(path), "--max_iters=1"]).config.train
    assert (settings.max_iters, settings.eval_interval) == (1, 1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_without_another_max_iters_nothing_is_scaled(path):
    command = parse_train([str(path)])
    same_length = parse_train([str(path), f"--max_iters={command.config.train.max_iters}"])
    assert command.scaling_note is same_length.scaling_note is None
    assert command.config == same_length.config


def test_lengths_scale_with_max_iters_and_one_line_lists_them():
    command = parse_train([str(ROOT / "configs/shakespeare.yaml"), "--max_iters=350"])
    train = command.config.train
    assert (train.warmup_iters, train.cooldown_iters, train.eval_interval) == (5, 300, 70)
    assert command.scaling_note == (
        "max_iters is 350; scaled with it: warmup_iters 5, cooldown_iters 300, eval_interval 70"
    )


@pytest.mark.parametrize(
    ("recipe", "max_iters", "interval"),
    [
        ("shakespeare", 1, 1),
        ("shakespeare", 5, 5),
        ("shakespeare", 20, 10),
        ("shakespeare", 55, 11),
        ("smoke", 12, 10),  # 4 in proportion
    ],
)
def test_an_evaluation_interval_is_not_scaled_below_ten_steps(recipe, max_iters, interval):
    command = parse_train([str(ROOT / f"configs/{recipe}.yaml"), f"--max_iters={max_iters}"])
    assert command.config.train.eval_interval == interval


@pytest.mark.parametrize("max_iters", [898, 1399, 1984, 100_001])
def test_a_scaled_run_has_as_many_evaluations_as_the_file(max_iters):
    arguments = [str(ROOT / "configs/shakespeare.yaml"), f"--max_iters={max_iters}"]
    assert parse_train(arguments).config.train.n_evaluations == 5


@pytest.mark.parametrize(
    ("epochs", "dropout"), [(0.1, 0), (5.99, 0), (6, 0.1), (8, 0.2), (16, 0.3), (1000, 0.3)]
)
def test_dropout_auto_rises_with_the_number_of_epochs(epochs, dropout):
    assert resolve_auto(ModelConfig(dropout="auto"), epochs).dropout == dropout
    assert resolve_auto(ModelConfig(dropout=0.25), epochs).dropout == 0.25


@pytest.mark.parametrize(
    ("epochs", "scale"), [(0.1, 1), (1, 0.97), (2.9, 0.91), (7, 0.8), (99, 0.8)]
)
def test_logit_scale_auto_falls_with_the_number_of_epochs(epochs, scale):
    assert resolve_auto(ModelConfig(logit_scale="auto"), epochs).logit_scale == scale
    assert resolve_auto(ModelConfig(logit_scale=0.7), epochs).logit_scale == 0.7


def test_a_run_has_the_dropout_and_logit_scale_of_its_epochs_and_resumes_with_them(
    options, tmp_path
):
    folder, saved = tmp_path / "run", []
    auto = ["--dropout=auto", "--logit_scale=auto", f"--out_dir={folder}"]
    for arguments in (["--max_iters=2"], ["--resume", "--max_iters=400"]):
        code, output = train(*options, *auto, *arguments)
        assert code == 0
        model = load(folder / "last.safetensors").config.model
        saved.append((model.dropout, model.logit_scale))
        assert f" epochs, dropout {model.dropout:g}, logit_scale {model.logit_scale:g}\n" in output
    assert saved == [(0, 1), (0.2, 0.8)] and "model.dropout 0.0 -> 0.2" in output


def test_lengths_that_are_given_are_not_scaled():
    options = ["--max_iters=700", "--warmup_iters=7", "--eval_interval=100"]
    command = parse_train([str(ROOT / "configs/shakespeare.yaml"), *options])
    train = command.config.train
    assert (train.warmup_iters, train.cooldown_iters, train.eval_interval) == (7, 600, 100)
    assert command.scaling_note == "max_iters is 700; scaled with it: cooldown_iters 600"


def test_the_command_that_trains_longer_fits_no_time():
    command = parse_train(
        [str(ROOT / "configs/smoke.yaml"), "--minutes=5", "--seed", "3", "--resume"]
    )
    longer = command.repeat_command(resume=True, changes={"max_iters": 120})
    assert longer.endswith("configs/smoke.yaml --seed=3 --resume --max_iters=120")


@pytest.mark.parametrize("other", ["--time_limit=2", "--max_iters=5"])
def test_minutes_and_another_limit_are_refused_together(other):
    with pytest.raises(ConfigError, match="contradict"):
        parse_train([str(ROOT / "configs/smoke.yaml"), "--minutes=1", other])


LENGTHS = TrainConfig(max_iters=1400, warmup_iters=20, cooldown_iters=1200, eval_interval=280)


@pytest.mark.parametrize("seconds", [0.01, 1, 60, 600, 36000])
@pytest.mark.parametrize("evaluation", [0, 0.5, 20])
def test_the_run_that_is_fitted_fills_the_time_but_does_not_exceed_it(seconds, evaluation):
    speed, limit = Speed(step=0.2, evaluation=evaluation), TARGET * seconds
    fitted = fit_to_time(LENGTHS, {}, speed, seconds)
    assert fitted.max_iters == 1 or speed.seconds(fitted) <= limit
    evaluations = max(1, int(EVALUATION_FRACTION * seconds / max(evaluation, 1e-9)))
    longer = scaled_to(LENGTHS, {"max_iters": fitted.max_iters + 1}, evaluations)
    assert speed.seconds(longer) > limit - 2 * evaluation
    assert fitted.n_evaluations <= evaluations
    assert fitted == scaled_to(LENGTHS, {"max_iters": fitted.max_iters}, evaluations)


@pytest.mark.parametrize(
    ("max_iters", "max_evaluations", "interval", "save_interval"),
    [
        (350, 1, 350, 70),
        (350, 2, 175, 70),
        (350, 3, 117, "auto"),  # less than twice the interval without the limit
        (350, 100, 70, "auto"),  # in proportion: 5 evaluations
        (1400, 2, 700, 280),  # max_iters is that of the file
        (1400, 5, 280, "auto"),
    ],
)
def test_evaluations_are_limited_but_saves_are_not(
    max_iters, max_evaluations, interval, save_interval
):
    train = scaled_to(LENGTHS, {"max_iters": max_iters}, max_evaluations)
    assert (train.max_iters, train.eval_interval) == (max_iters, interval)
    assert train.save_interval == save_interval
    assert (train.warmup_iters, train.cooldown_iters) == (max_iters // 70, max_iters * 6 // 7)
    assert bool(changed_lengths(LENGTHS, train)) == (max_iters != 1400 or interval != 280)


@pytest.mark.parametrize("name", ["eval_interval", "save_interval"])
def test_a_given_interval_is_not_limited(name):
    before = replace(LENGTHS, **{name: 20})
    train = scaled_to(before, {name: 20, "max_iters": 350}, 3)
    assert getattr(train, name) == 20 and name not in changed_lengths(before, train)


@pytest.fixture
def options(tmp_path):
    """The small run, without its lengths."""
    return [
        each
        for each in small_run_args(tmp_path)
        if "max_iters" not in each and "warmup" not in each
    ]


def chosen(output):
    """Return the options that repeat a run with --minutes, from its output."""
    (options,) = re.findall(r"to repeat this run:\n  (.*)\n", output)
    return options.split()


def test_a_run_of_so_many_minutes_is_that_of_the_max_iters_it_prints(options, tmp_path):
    timed, repeated = tmp_path / "timed", tmp_path / "repeated"
    code, output = train(*options, "--minutes=0.02", f"--out_dir={timed}")
    assert code == 0
    assert train(*options, *chosen(output), f"--out_dir={repeated}")[0] == 0
    assert same_runs(timed, repeated)
    assert chosen(output) == [f"--max_iters={step_of(timed)}"]  # eval_interval is in the options


def test_with_minutes_each_note_about_the_text_is_printed_once(options, tmp_path):
    run, text = tmp_path / "run", tmp_path / "more.txt"
    assert train(*options, "--max_iters=2", "--warmup_iters=0", f"--out_dir={run}")[0] == 0
    text.write_text((tmp_path / "text.txt").read_text() + "\u03b1\u03b2\u03b3")
    more = [each for each in options if "sources" not in each] + [f"--data.sources={text}"]
    start = [f"--init_from={run}", "--new_characters=add", f"--out_dir={tmp_path / 'new'}"]
    code, output = train(*more, *start, "--minutes=0.02")
    assert code == 0 and output.count("adding 3 characters to the vocabulary") == 1
    assert (
        output.count(
            "lower learning rates were best for fine-tuning: --learning_rate=0.0003 --muon"
        )
        == 1
    )


@pytest.mark.parametrize(("minutes", "steps", "trials"), [(0.2, 115, 1), (0.7, 201, 2)])
def test_minutes_are_planned_with_the_dropout_that_the_run_has(
    options, tmp_path, monkeypatch, minutes, steps, trials
):
    speeds = []

    def measure_speed(run, seconds, stop):
        speeds.append(Speed(step=0.2 if run.config.model.dropout_p else 0.1, evaluation=0))
        return speeds[-1]

    monkeypatch.setattr("train.measure_speed", measure_speed)
    auto = ["--dropout=auto", f"--out_dir={tmp_path / 'run'}", f"--minutes={minutes}"]
    code, output = train(*options, *auto)
    # 254 steps are 6 epochs: from there on there is dropout
    planned = int(chosen(output)[0].removeprefix("--max_iters="))
    assert code == 0 and 0.8 * steps < planned <= steps
    assert len(speeds) == trials


def test_a_resumed_run_keeps_the_lengths_that_fitted_the_time(options, tmp_path, monkeypatch):
    stopped, uninterrupted = tmp_path / "stopped", tmp_path / "uninterrupted"
    options = [each for each in options if "_interval" not in each or "log" in each]
    monkeypatch.setattr("train.measure_speed", lambda *_: Speed(step=0.1, evaluation=0.6))
    with monkeypatch.context() as patch:
        send_at("step", "SIGTERM", 20, patch.setattr)
        code, output = train(*options, "--minutes=0.2", f"--out_dir={stopped}")
    assert code == 143
    lengths = [int(each.partition("=")[2]) for each in chosen(output)]
    max_iters, eval_interval, save_interval = lengths
    assert save_interval < max_iters == eval_interval > 100  # evaluations are slow: there is one
    code, output_of_resume = train(*options, "--minutes=9", f"--out_dir={stopped}", "--resume")
    assert code == 0 and f"chosen when it began: {max_iters}\n" in output_of_resume
    assert train(*options, *chosen(output), f"--out_dir={uninterrupted}")[0] == 0
    assert same_runs(stopped, uninterrupted)
