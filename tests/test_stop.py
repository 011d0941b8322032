"""Stop requests: a run finishes its step, saves, prints the resume command, and loses nothing."""

import re
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.checkpoint import LAST
from tests.runs import STEPS, at_step, contents, count_checkpoints, same_runs, send_at, train

MOMENTS = [  # phase of a run, signal, and which call of the phase's function it interrupts
    ("load", "SIGINT", 1),  # Python's own until the folder is touched
    ("folder", "SIGTERM", 1),
    ("evaluate", "SIGTERM", 1),
    ("draw", "SIGTERM", 2),
    ("save", "SIGTERM", 3),
    ("save", "SIGINT twice", 3),  # leaves at once
    ("step", "SIGINT", 1),
    ("step", "SIGHUP", 1),
    ("step", "SIGUSR1", 1),
    ("step", "SIGUSR2", 1),
    ("step", "SIGXCPU", 1),
]


def test_a_signal_at_any_moment_saves_and_the_printed_command_resumes_bit_exactly(
    train_run, tmp_path, uninterrupted
):
    run = tmp_path / "run"
    for phase, kind, call in MOMENTS:
        if not hasattr(signal, kind.split()[0]):
            continue
        with pytest.MonkeyPatch.context() as patch:
            send_at(phase, kind, call, patch.setattr)
            code, output = train_run("--resume")
        assert code == (130 if "SIGINT" in kind else 143), f"{phase}, {kind}: {output}"
        count_checkpoints(run)  # all are whole
        if phase != "load" and kind != "SIGINT twice":
            printed = r"stopped and saved at step \d+; to resume:\n  \S+ \S*train.py (.*)\n"
            assert shlex.split(re.search(printed, output)[1]) == [str(run)]
        if phase == "evaluate":  # it was abandoned: it is not recorded, and repeated on resume
            assert "validation loss" not in output and not (run / "best.safetensors").exists()
        if phase == "draw":  # what is recorded is logged, and drawn
            assert "\nstep 12: validation loss" in output
            assert contents(run / LAST)["progress"]["last_eval_step"] == 12
    step = contents(run / LAST)["progress"]["step"]
    assert step < STEPS and train(run)[0] == 0
    assert same_runs(uninterrupted, run)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no such signal")
def test_a_signal_that_nohup_ignores_stays_ignored(options, tmp_path, monkeypatch, uninterrupted):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGHUP))
        assert train(*options, f"--out_dir={tmp_path / 'run'}")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert same_runs(uninterrupted, tmp_path / "run")


def test_a_run_in_a_thread_that_is_not_the_main_one_leaves_the_signals_alone(
    options, tmp_path, monkeypatch, uninterrupted
):
    during, numbers = [], [signal.SIGINT, signal.SIGTERM]
    at_step(monkeypatch, 3, lambda: during.extend(map(signal.getsignal, numbers)))
    before = list(map(signal.getsignal, numbers))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train, *options, f"--out_dir={tmp_path / 'run'}").result()[0] == 0
    assert during == before == list(map(signal.getsignal, numbers))
    assert same_runs(uninterrupted, tmp_path / "run")
