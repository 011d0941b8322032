"""Stop requests: a run finishes its step, saves, prints the resume command, and loses nothing."""

import os
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest

from common.console import program
from common.signals import Interrupted, Stop
from tests.runs import (
    CODES,
    PHASES,
    STEPS,
    at_step,
    contents,
    count_checkpoints,
    resume_if_saved,
    same_runs,
    send_at,
    small_run_args,
    start,
    step_of,
    train,
)
from training import evaluate

SIGNALS = [name for name in CODES if hasattr(signal, name)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(*small_run_args(folder), f"--out_dir={folder / 'run'}")[0] == 0
    return folder / "run"


# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_sets_a_flag_and_prints_one_line_at_once(name, capfd):
    with Stop() as stop:
        stop.defer_signals()
        assert not stop.requested and stop.exit_code == 0
        signal.raise_signal(getattr(signal, name))
        assert stop.requested and stop.exit_code == CODES[name]
        hint = "; press Ctrl-C again to exit at once" if name == "SIGINT" else ""
        expected = f"\nstopping: finishing this step and saving{hint}\n"
        assert capfd.readouterr().err == expected


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_before_training_and_a_second_ctrl_c_end_the_process_at_once(name):
    with Stop(), pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        signal.raise_signal(getattr(signal, name))
    assert getattr(caught.value, "code", 130) == CODES[name]
    with Stop() as stop:
        stop.defer_signals()
        signal.raise_signal(getattr(signal, name))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signal_handlers_are_restored():
    before = [signal.getsignal(getattr(signal, name)) for name in SIGNALS]
    with Stop():
        assert [signal.getsignal(getattr(signal, name)) for name in SIGNALS] != before
    assert [signal.getsignal(getattr(signal, name)) for name in SIGNALS] == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no such signal")
def test_a_signal_that_nohup_ignores_stays_ignored(options, tmp_path, monkeypatch, uninterrupted):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGHUP))
        assert train(*options, f"--out_dir={tmp_path / 'run'}")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert same_runs(uninterrupted, tmp_path / "run")


@pytest.mark.parametrize("kind", [kind for kind in CODES if kind.split()[0] in SIGNALS])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_stops_the_run_and_resuming_is_bit_exact(
    phase, kind, train_run, options, tmp_path, uninterrupted
):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        send_at(phase, kind, {"load": 1, "save": 6}.get(phase, 2), patch.setattr)
        code, output = train_run()
    assert code == CODES[kind]
    saved, loadable_count = count_checkpoints(run)
    assert saved == loadable_count and not list(run.glob("*.tmp*"))
    if phase != "load" and not kind.endswith("twice"):
        command = shlex.split(
            re.search(r"stopped and saved at step \d+; .*:\n  \S*python (.*)\n", output)[1]
        )
        assert command[1:] == [*options, f"--out_dir={run}", "--resume"]
        assert train(*command[1:])[0] == 0
    else:
        assert train_run(*resume_if_saved(run))[0] == 0
    assert same_runs(uninterrupted, run)


def test_an_interrupted_evaluation_is_repeated_on_resume(
    train_run, tmp_path, monkeypatch, uninterrupted
):
    run, loss = tmp_path / "run", evaluate.loss_sums_by_position

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "loss_sums_by_position", interrupted)
        code, output = train_run()
    assert code == 143 and "validation loss" not in output
    saved = contents(run / "last.safetensors")["progress"]
    assert (saved["step"], saved["last_eval_step"]) == (6, 0)
    assert not (run / "best.safetensors").exists()
    assert train_run("--resume")[0] == 0
    assert same_runs(uninterrupted, run)


def test_a_run_stopped_at_every_step_ends_bit_identical(
    train_run, tmp_path, monkeypatch, uninterrupted
):
    run = tmp_path / "run"
    for step in range(STEPS):
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
            assert train_run(*resume_if_saved(run))[0] == 130
        assert step_of(run) == step + 1
    assert train_run("--resume")[0] == 0
    assert same_runs(uninterrupted, run)


def test_interruptible_iteration_ends_at_a_stop_request():
    with Stop() as stop:
        stop.defer_signals()
        items = []
        with suppress(Interrupted):
            for item in stop.interruptible(range(5)):
                items.append(item)
                if item == 2:
                    signal.raise_signal(signal.SIGTERM)
        assert items == [0, 1, 2]


# --------------------------------------------------------------------------------------- time limit


def test_at_the_time_limit_the_run_saves_and_exits_with_0(
    train_run, tmp_path, monkeypatch, uninterrupted
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: time.sleep(2.1))
        code, output = train_run("--time_limit=0.035")
    assert code == 0 and step_of(run) <= 6
    command = re.escape(f"{shlex.quote(program('python'))} train.py ")
    assert re.search(
        rf"stopped and saved at step \d; to resume:\n  {command}.* --time_limit=0\.035 --resume\n",
        output,
    )
    assert train_run("--resume")[0] == 0
    assert same_runs(uninterrupted, run)


def test_the_time_limit_does_not_depend_on_the_system_clock(monkeypatch):
    stop = Stop(deadline=time.monotonic() + 60)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not stop.requested
    start_time = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: start_time + 61)
    assert stop.requested and stop.exit_code == 0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no such signal")
def test_a_suspended_process_continues_bit_identical(options, tmp_path, uninterrupted):
    process = start("train.py", *options, f"--out_dir={tmp_path / 'run'}")
    next(line for line in process.stdout if line.startswith("device "))
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0 and same_runs(uninterrupted, tmp_path / "run")
