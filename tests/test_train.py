"""train.py from the command line: its files, its output, resuming and errors."""

import math
import re
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing.checkpoint import load
from common import files
from common.files import write_atomic
from tests.commands import train_main
from tests.conftest import ROOT
from tests.runs import equal, resume_if_saved
from training.environment import compile_or_fall_back


def scalars(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def assert_same_training(a, b):
    """Check that two checkpoints hold the same tensors and progress, bit for bit."""
    first, second = load(a), load(b)
    assert equal(first.tensors, second.tensors) and first.progress == second.progress


def test_a_run_writes_its_config_checkpoints_and_events(smoke):
    assert {path.name for path in smoke.iterdir()} >= {
        "config.yaml",
        "last.safetensors",
        "best.safetensors",
    }
    assert list(smoke.glob("events.out.tfevents.*"))
    assert load(smoke / "last.safetensors").progress.step == 60


def test_a_run_prints_its_data_model_and_results(smoke):
    printed = (smoke / "printed.txt").read_text()
    labels = ("text", "split", "rarest", "model", "device", "training", "first loss", "speed")
    starts = [line for line in printed.splitlines() if line.startswith(labels)]
    assert [line[:12].strip() for line in starts] == list(labels)
    assert "ln(61)" in printed and "\nstep 60: validation loss " in printed
    assert "  | " in printed  # a sample
    lines = [line for line in printed.splitlines() if not line.startswith(("  ", "note", "/"))]
    assert max(map(len, lines)) <= 80
    assert "\r" not in printed and "\x1b" not in printed  # no terminal: no bar, no colours


def test_the_first_loss_is_near_ln_v_and_the_last_far_below(smoke):
    losses = dict(scalars(smoke)["train/loss"])
    assert losses[1] == pytest.approx(math.log(61), abs=0.1)
    assert losses[60] < 3.2


def test_tensorboard_contains_the_documented_tags(smoke):
    tags = scalars(smoke)
    assert tags.keys() >= {
        "train/loss",
        "val/loss",
        "val/bpc",
        "train/lr",
        "train/grad_norm",
        "train/tokens_per_sec",
    }
    assert [step for step, _ in tags["val/loss"]] == [20, 40, 60]
    events = EventAccumulator(str(smoke)).Reload()
    assert "samples/text/text_summary" in events.Tags()["tensors"]
    loss, bits = (dict(tags[tag])[60] for tag in ("val/loss", "val/bpc"))
    assert bits == pytest.approx(loss / math.log(2), rel=1e-6)


def test_the_best_checkpoint_has_the_lowest_validation_loss(smoke):
    values = dict(scalars(smoke)["val/loss"])
    best = load(smoke / "best.safetensors").progress
    assert best.best_loss == pytest.approx(min(values.values()), rel=1e-6)
    assert values[best.best_step] == min(values.values())


EXACT = {
    "adamw": ["--optimizer=adamw", "--schedule=cosine", "--gradient_accumulation_steps=2"],
    "muon": ["--optimizer=muon", "--schedule=trapezoid"],
}


@pytest.mark.parametrize("recipe", EXACT)
def test_stopping_and_resuming_is_bit_exact(tmp_path, monkeypatch, recipe):
    options = [
        "configs/smoke.yaml",
        "--dtype=float32",
        "--dropout=0.1",
        "--max_iters=24",
        "--warmup_iters=4",
        "--eval_interval=8",
        "--sample_chars=20",
        *EXACT[recipe],
    ]
    monkeypatch.chdir(ROOT)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_main([*options, f"--out_dir={whole}"]) == 0

    def save_and_stop(path, content, previous=None):
        write_atomic(path, content, previous)
        if path.name == "last.safetensors":
            raise KeyboardInterrupt

    for _ in range(2):  # stops at step 8, and again at step 16
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "write_atomic", save_and_stop)
            train_main([*options, f"--out_dir={parts}", *resume_if_saved(parts)])
    assert load(parts / "last.safetensors").progress.step == 16
    assert train_main([*options, f"--out_dir={parts}", "--resume"]) == 0
    assert_same_training(whole / "last.safetensors", parts / "last.safetensors")


def test_an_existing_run_is_never_overwritten_without_a_flag(run, smoke):
    before = (smoke / "last.safetensors").read_bytes()
    done = run("train.py", "configs/smoke.yaml", f"--out_dir={smoke}", check=2)
    assert re.fullmatch(r"error: .*--resume.*--overwrite.*--out_dir.*\n", done.stderr)
    assert (smoke / "last.safetensors").read_bytes() == before


def test_overwrite_starts_a_new_run(run, smoke, tmp_path):
    out = shutil.copytree(smoke, tmp_path / "copy")
    run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        "--overwrite",
        "--max_iters=3",
        "--warmup_iters=1",
    )
    assert load(out / "last.safetensors").progress.step == 3
    assert max(step for step, _ in scalars(out)["train/loss"]) == 3


def test_resume_starts_a_run_in_the_empty_folder_of_a_config_prints_so_and_resumes_it(
    run, tmp_path
):
    """One command starts a run and resumes it, as torchrun --max-restarts needs."""
    config, out = tmp_path / "mine.yaml", tmp_path / "out"
    settings = (ROOT / "configs/smoke.yaml").read_text(encoding="utf-8")
    config.write_text(f"out_dir: {out}\n{settings}", encoding="utf-8")
    words = ["train.py", config, "--resume", "--max_iters=2", "--warmup_iters=1"]
    done = run(*words)
    note = f"nothing to resume in {out}: starting from the beginning\n"
    assert note in done.stdout and load(out / "last.safetensors").progress.step == 2
    done = run(*words)
    assert f"resuming from {out / 'last.safetensors'} at step 2\n" in done.stdout
    assert note not in done.stdout


def test_resume_with_another_layout_and_kernel_converts_the_weights(run, smoke, tmp_path):
    out = tmp_path / "other"
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        f"--resume={smoke}",
        "--dtype=float32",
        "--attention=unrolled",
        "--kernel=loop",
        "--max_iters=62",
    )
    assert "model.attention" in done.stdout and "unrolled" in done.stdout
    assert load(out / "last.safetensors").progress.step == 62


def test_resume_with_another_architecture_is_rejected_with_the_difference(run, smoke):
    done = run(
        "train.py", "configs/smoke.yaml", f"--out_dir={smoke}", "--resume", "--n_layer=3", check=4
    )
    assert "model.n_layer 2 -> 3" in done.stderr and done.stderr.count("\n") == 1


def test_training_a_finished_run_further_prints_where_the_learning_rate_goes(run, smoke, tmp_path):
    out = shutil.copytree(smoke, tmp_path / "out")
    words = ["train.py", "configs/smoke.yaml", f"--out_dir={out}", "--resume", "--dtype=float32"]
    done = run(*words, "--max_iters=120", "--warmup_iters=0")
    assert "; the learning rate goes from 10% to 55% of its peak; " in done.stdout
    out = shutil.copytree(smoke, tmp_path / "again")
    done = run(*words[:2], f"--out_dir={out}", *words[3:])
    assert "the learning rate goes" not in done.stdout


def test_resume_prints_a_changed_learning_rate_in_one_line(run, smoke, tmp_path):
    out = shutil.copytree(smoke, tmp_path / "copy")
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        "--resume",
        "--dtype=float32",
        "--learning_rate=0.0005",
        "--max_iters=61",
    )
    assert re.search(
        r"resuming from .* at step 60; .*train.learning_rate \S+ -> 0.0005", done.stdout
    )


def test_init_from_starts_with_the_weights_and_vocabulary_of_another_run(run, smoke, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Who goes there? None but I, and the wind.\n" * 40)
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={tmp_path / 'new'}",
        f"--init_from={smoke}",
        f"--data.sources={text}",
        "--max_iters=1",
        "--warmup_iters=0",
    )
    assert (
        load(tmp_path / "new" / "last.safetensors").vocabulary
        == load(smoke / "last.safetensors").vocabulary
    )
    assert "ln(61)" in done.stdout


def test_init_from_a_vocabulary_that_lacks_characters_is_rejected_with_their_names(
    run, smoke, tmp_path
):
    text = tmp_path / "text.txt"
    text.write_text("Café, naïve; and so on, and on.\n" * 40, encoding="utf-8")
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={tmp_path / 'new'}",
        f"--init_from={smoke}",
        f"--data.sources={text}",
        check=4,
    )
    assert "U+00E9" in done.stderr and "U+00EF" in done.stderr


def test_resume_with_a_changed_text_is_rejected(run, smoke, tmp_path):
    out = shutil.copytree(smoke, tmp_path / "copy")
    text = tmp_path / "text.txt"
    text.write_text("Another text.\n" * 100)
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        "--resume",
        f"--data.sources={text}",
        check=4,
    )
    assert "SHA-256" in done.stderr or "changed" in done.stderr


def test_allow_data_change_resumes_with_a_changed_text_in_the_same_vocabulary(run, smoke, tmp_path):
    out = shutil.copytree(smoke, tmp_path / "copy")
    text = tmp_path / "text.txt"
    text.write_text("Another text.\n" * 200)
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        "--resume",
        "--allow-data-change",
        f"--data.sources={text}",
        "--max_iters=61",
        "--dtype=float32",
    )
    assert re.search(
        r"resuming from .* at step 60; .*data.sha256 \w{64} -> \w{64}.*not be bit-identical",
        done.stdout,
    )
    assert load(out / "last.safetensors").progress.step == 61
    text.write_text("Encyclopædia.\n" * 200, encoding="utf-8")
    done = run(
        "train.py",
        "configs/smoke.yaml",
        f"--out_dir={out}",
        "--resume",
        "--allow-data-change",
        f"--data.sources={text}",
        check=4,
    )
    assert "'æ' (U+00E6)" in done.stderr


def test_resume_with_a_changed_validation_text_is_rejected(run, tmp_path):
    book, val = tmp_path / "book.txt", tmp_path / "val.txt"
    book.write_text("Some text.\n" * 200), val.write_text("More text.\n" * 20)
    options = [
        "configs/smoke.yaml",
        f"--out_dir={tmp_path / 'out'}",
        f"--data.sources={book}",
        "--max_iters=1",
        f"--data.val_sources={val}",
        "--warmup_iters=0",
    ]
    run("train.py", *options)
    assert load(tmp_path / "out" / "last.safetensors").data.val_sha256
    val.write_text("Less text.\n" * 20)
    done = run("train.py", *options, "--resume", check=4)
    assert (
        done.stderr.startswith("error: data.val_sources: the text has changed")
        and done.stderr.count("\n") == 1
    )


def test_an_unavailable_device_is_rejected_with_the_available_ones(run):
    device = "mps" if torch.cuda.is_available() else "cuda"
    done = run("train.py", "configs/smoke.yaml", f"--device={device}", check=5)
    assert "cpu" in done.stderr and done.stderr.count("\n") == 1


def test_a_failing_compiler_is_disabled_with_one_message(monkeypatch):
    def broken(model):
        def forward(ids):
            raise RuntimeError("no compiler")

        return forward

    messages = []
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch, "compile", broken)
    forward = compile_or_fall_back(model, messages.append)
    for _ in range(2):
        assert torch.equal(forward(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert len(messages) == 1 and "continuing without" in messages[0]


def test_settings_help_and_config_errors_need_no_torch_import(run):
    probe = (
        "import sys; sys.argv = sys.argv[1:]; import runpy\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    for arguments, code in (
        (["train.py", "configs/smoke.yaml", "--n_laier=3"], 2),
        (["train.py", "--help"], 0),
        (["train.py", "configs/smoke.yaml", "--print-config"], 0),
        (["sample.py", "--help"], 0),
        (["sample.py", "--ckpt", "x", "--temperature=-1"], 2),
    ):
        assert run("-c", probe, *arguments, check=code).stdout.endswith("False\n")
