"""Resuming: after any stops and resumes, a run is bit-identical to an uninterrupted one."""

import random
import re
import shlex
import shutil
from dataclasses import replace

import pytest

from storage.checkpoint import LAST, load_checkpoint
from tests.runs import (
    STEPS,
    bits,
    losses,
    same_runs,
    snapshot,
    step_of,
    stop_at,
    train,
    train_and_copy,
    write_checkpoint,
)

# the learning rate rises too far, and soon an evaluation is worse than the one before
EARLY = ["--schedule=constant", "--warmup_ratio=1", "--learning_rate=9", "--muon_learning_rate=9",
         "--patience=1"]  # fmt: skip
ADAMW = [
    "--optimizer=adamw", "--schedule=cosine", "--positions=rope", "--activation=swiglu",
    "--attention_dropout=0.3", "--kernel=batched", "--gradient_accumulation_steps=1",
    "--eval_interval=5", "--log_interval=3",
]  # fmt: skip


@pytest.fixture
def stopped(options, tmp_path):
    """The folder of a run that Ctrl-C has stopped in step 9."""
    stop_at(9, *options, f"--out_dir={tmp_path / 'run'}")
    return tmp_path / "run"


# ------------------------------------------------------------------------------------ bit-exactness


def stop_and_resume(stops, options, folder):
    """Train a run, and another one that stops and resumes so many times; compare both."""
    whole, parts = folder / "whole", folder / "parts"
    assert train(*options, f"--out_dir={whole}")[0] == 0
    end = step_of(whole)
    for step in sorted(random.Random(1).sample(range(end), min(stops, end))):
        stop_at(step, *options, f"--out_dir={parts}", "--resume")
        assert step_of(parts) == step + 1
    code, output = train(parts)
    assert code == 0 and "will differ from an uninterrupted run" not in output
    assert same_runs(whole, parts)
    return end


@pytest.mark.parametrize("recipe", [[], ADAMW, EARLY], ids=["muon", "adamw", "early stopping"])
def test_resume_equals_uninterrupted(recipe, options, tmp_path):
    end = stop_and_resume(3, [*options, *recipe], tmp_path)
    assert (end < STEPS) == (recipe == EARLY)


def test_resume_of_a_finished_run(options, tmp_path):
    """It says how to train further, which is bit-exact."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*options, "--schedule=constant", "--warmup_ratio=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    assert train(*options, f"--out_dir={parts}", "--max_iters=12")[0] == 0
    before = load_checkpoint(parts / LAST)
    output = train(parts)[1]
    assert "\nfinished at step 12 of 12 (a larger --max_iters trains it further) after " in output
    after = load_checkpoint(parts / LAST)
    assert after.progress == before.progress and bits(after.tensors) == bits(before.tensors)
    assert train(parts, f"--max_iters={STEPS}")[0] == 0
    assert same_runs(whole, parts)


def test_resume_after_kill_in_first_step(options, uninterrupted, tmp_path):
    """In another folder, without the one of the start."""
    moved = train_and_copy(tmp_path / "run", 0, *options)
    shutil.rmtree(tmp_path / "run")
    assert step_of(moved) == 0 and train(moved)[0] == 0
    assert same_runs(uninterrupted, moved)
    assert load_checkpoint(moved / LAST).settings.out_dir == str(moved)


def test_resume_by_the_first_command(options, uninterrupted, tmp_path):
    """As torchrun --max-restarts and a cluster that restarts jobs need it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*options, f"--init_from={uninterrupted}"]
    output = stop_at(9, *words, f"--out_dir={parts}", "--resume")
    first = re.sub(r"; other runs: out\b.*", "", output.partition("\n")[0])  # yours, if any
    assert first == f"{parts} has no run to resume: starting one"
    assert "lower learning rates were best for fine-tuning" in output
    code, output = train(*words, f"--out_dir={parts}", "--resume")
    assert code == 0 and f"resuming {parts} at step 10 of 24 with its own settings" in output
    code, output = train(*words, f"--out_dir={whole}", "--resume")  # a misspelled folder, perhaps
    assert f"{whole} has no run to resume: starting one; other runs: {parts}" in output
    assert code == 0 and same_runs(whole, parts)


def test_resume_with_another_batch_size(options, tmp_path):
    """If a step keeps its windows, 4 * 2; another number would skip text."""
    whole, parts, options = tmp_path / "whole", tmp_path / "parts", [*options, "--dropout=0"]
    assert train(*options, f"--out_dir={whole}")[0] == 0
    stop_at(9, *options, f"--out_dir={parts}")
    code, output = train(parts, "--batch_size=6")
    advice = "--batch_size=2 --gradient_accumulation_steps=4"
    assert code == 2 and output.endswith(f"must stay 8, or the run would skip text: {advice}\n")
    assert train(parts, "--batch_size=8", "--gradient_accumulation_steps=1")[0] == 0
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)


# --------------------------------------------------------------- files, text, settings of a run


def test_resume_on_another_machine(stopped, monkeypatch):
    """With a note of the difference."""
    saved = load_checkpoint(stopped / LAST)
    saved.environment = "\x1b[2J"
    saved.settings = replace(saved.settings, device="mps")
    write_checkpoint(stopped / LAST, saved)
    for name in ("torch.backends.mps.is_available", "torch.cuda.is_available"):
        monkeypatch.setattr(name, lambda: False)
    code, output = train(stopped)
    assert code == 2 and "no MPS device on this machine" in output
    assert output.endswith("; use --device=auto\n")
    code, output = train(stopped, "--device=auto")
    assert code == 0 and "\nnote: \\x1b[2J -> torch " in output
    assert ": the result will differ from an uninterrupted run\n" in output


@pytest.mark.parametrize(("name", "new"), [("sources", ""), ("val_sources", "\xe9")])
def test_resume_with_another_text(name, new, train_run, tmp_path):
    """It is refused, and the command in the message starts a new run, as it is printed."""
    text, val, run = tmp_path / "text.txt", tmp_path / "val.txt", tmp_path / "run"
    val.write_text(text.read_text()[:600])
    assert train_run(f"--val_sources={val}", "--max_iters=8")[0] == 0
    before, other = snapshot(run), tmp_path / "other.txt"
    changed = val if name == "val_sources" else text
    other.write_text(changed.read_text()[::-1] + new, encoding="utf-8")
    code, output = train(run, f"--{name}={other}")
    assert code == 2 and snapshot(run) == before
    assert output.startswith(f"error: {name}: not the text of this run, by its SHA-256; ")

    command = shlex.split(output.partition("from these weights: ")[2])[2:]
    assert f"--{name}={other}" in command
    code, output = train(*command, "--max_iters=2")
    assert code == 0 and step_of(tmp_path / "run-2") == 2, output
    # another time, it names another folder
    assert f"--out_dir={tmp_path / 'run-3'}" in train(run, f"--{name}={other}")[1]


def test_resume_with_a_text_that_has_moved(stopped, uninterrupted, tmp_path):
    """An option says where it is, and a later resume remembers that."""
    moved = tmp_path / "text2.txt"
    (tmp_path / "text.txt").rename(moved)
    code, output = train(stopped)
    assert code == 2
    text = tmp_path / "text.txt"
    fault = f"{text} (--sources={text}): no such file or folder; did you mean {moved}?\n"
    assert output.endswith(fault)
    assert train(stopped, f"--sources={moved}")[0] == train(stopped)[0] == 0
    a, b = (load_checkpoint(run / LAST) for run in (uninterrupted, stopped))
    assert bits(a.tensors) == bits(b.tensors)


def test_config_never_changes_a_run(stopped, uninterrupted, tmp_path):
    """Neither its architecture nor its length, and a validation text in it frees none."""
    config, other = tmp_path / "mine.yaml", tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text()[::-1])
    config.write_text(f"max_iters: 7\nn_layer: 7\nval_sources: {other}\n")
    code, output = train(config, f"--out_dir={stopped}", "--resume")
    start = f"resuming {stopped} at step 10 of 24"
    line = f"{start} with its own settings and length, not those of {config}\n"
    assert code == 0 and line in output and "will differ from an uninterrupted run" not in output
    assert same_runs(uninterrupted, stopped)
