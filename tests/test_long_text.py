"""A long validation text: an evaluation predicts a part of it, and says so."""

import re

import pytest

from common.stop import Stop
from configs.schema import Config, DataConfig, ModelConfig, TrainConfig
from data.corpus import load_corpus
from tests.runs import train
from training import duration
from training.device import select_runtime
from training.distributed import World
from training.duration import Timing
from training.evaluate import evaluate
from training.state import Run

LINES = "".join(f"line {number}, and {number * 37 % 101}.\n" for number in range(1000))
ITEMS = "".join(f"{number}={number * 7}\n" for number in range(1000))


def run_on(folder, content, max_val, **data):
    """Build a small run on a text."""
    (folder / "text.txt").write_text(content)
    settings = Config(
        DataConfig(sources=(str(folder / "text.txt"),), max_val=max_val, **data),
        ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16),
        TrainConfig(batch_size=2),
        device="cpu",
    )
    return Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())


@pytest.mark.parametrize("max_val", [0, 16, 500, 250_000])
def test_an_evaluation_predicts_max_val_characters_or_all(tmp_path, max_val):
    run = run_on(tmp_path, LINES, max_val)
    result, every = evaluate(run, Stop()), len(run.corpus.val) - 1
    predicted = int(result.val_losses.counts.sum())
    assert predicted == (496 if max_val == 500 else min(max_val or every, every))
    # it is spread over all that is held out, which stays as it is
    assert len(run.corpus.val) == len(LINES) // 10 + 1
    if max_val == 500:
        assert run.val.segments[0][0] == 0 and run.val.segments[-1][1] == len(run.corpus.val)
        trained = sum(end - start - 1 for start, end in run.train_sample.segments)
        assert trained == 48  # a tenth, in whole windows


def test_of_a_list_an_evaluation_predicts_whole_items_and_counts_right_answers_of_these(tmp_path):
    run = run_on(tmp_path, ITEMS, 200, separator="\\n", answer_after="=")
    assert set(run.val.segments) < set(run.corpus.val.segments)
    result = evaluate(run, Stop())
    assert max(result.val_losses.wrong_segments) < len(run.val.segments) < 30
    assert result.exact_match == 1 - len(result.val_losses.wrong_segments) / len(run.val.segments)


def test_the_time_left_counts_evaluations_until_one_is_timed(options, tmp_path, monkeypatch):
    monkeypatch.setattr("storage.log.SECONDS_BETWEEN_LINES", 0)
    more = ["--max_iters=9", "--warmup_ratio=0", "--eval_interval=4", f"--out_dir={tmp_path}/run"]
    left = re.findall(r" minutes(.*) left", train(*options, *more)[1])
    assert left == [" and 3 evaluations"] * 3 + [""] * 4  # after steps 2, 3, 4, and 5 to 8


@pytest.mark.parametrize(("seconds", "noted"), [(10, True), (0.1, False)])
def test_minutes_of_which_evaluations_take_a_quarter_get_a_note_that_names_max_val(
    options, tmp_path, monkeypatch, seconds, noted
):
    monkeypatch.setattr(duration, "measure_timing", lambda *_: Timing(1.0, seconds))
    words = [word for word in options if not word.startswith(("--max_iters", "--patience"))]
    code, output = train(*words, "--minutes=1", f"--out_dir={tmp_path / 'run'}")
    note = "note: evaluations take more than a quarter of the time; a smaller --max_val shortens"
    assert code == 0 and (note in output) == noted
