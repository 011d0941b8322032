"""Stop requests: a run finishes its step, saves, prints the resume command, and loses nothing."""

import re
import shlex
import signal
import threading
from functools import partial

import pytest

from storage.checkpoint import LAST, load_checkpoint
from tests.runs import STEPS, before_call, count_checkpoints, same_runs, step_of, train

MOMENTS = [  # a function that only one phase of a run uses, which of its calls, and the signals
    ("train.load_corpus", 1, ["SIGINT"]),  # Python's own until the folder is touched
    ("train.Saver", 1, ["SIGTERM"]),
    ("training.evaluate.position_losses", 1, ["SIGTERM"]),
    ("training.samples.generate", 1, ["SIGTERM"]),
    ("os.fsync", 3, ["SIGTERM"]),
    ("os.fsync", 3, ["SIGINT", "SIGINT"]),  # leaves at once
    ("train.lr_multiplier", 1, ["SIGINT"]),
    ("train.lr_multiplier", 1, ["SIGHUP"]),
]


def send(names):
    for name in names:
        signal.raise_signal(getattr(signal, name))


def test_stop_at_any_moment(train_run, run, uninterrupted):
    """The checkpoints are whole, and the printed command resumes bit-exactly."""
    for function, call, names in MOMENTS:
        with pytest.MonkeyPatch.context() as patch:
            before_call(patch, function, call, partial(send, names))
            code, output = train_run("--resume")
        assert code == (130 if "SIGINT" in names else 143), f"{function}, {names}: {output}"
        count_checkpoints(run)
        if "load" not in function and len(names) == 1:
            printed = r"stopped and saved at step \d+; to resume:\n  \S+ \S*train.py (.*)\n"
            assert shlex.split(re.search(printed, output)[1]) == [str(run)]
        if "samples" in function:  # what is recorded is logged, and drawn
            assert "\nstep 12: validation loss" in output
            assert load_checkpoint(run / LAST).progress.last_eval_step == 12
    assert step_of(run) < STEPS and train(run)[0] == 0
    assert same_runs(uninterrupted, run)


def test_stop_outside_the_main_thread(train_run, run):
    """Such a thread trains; signals stay the main thread's."""
    before, codes = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: codes.append(train_run("--max_iters=2")[0]))
    thread.start(), thread.join()
    assert codes == [0] and step_of(run) == 2
    assert signal.getsignal(signal.SIGINT) == before
