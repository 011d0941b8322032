"""What a run of train.py writes and prints."""

import math

import pytest

from checkpointing.checkpoint import load
from tests.runs import scalars


def test_a_run_writes_its_config_checkpoints_and_events(smoke):
    names = {path.name for path in smoke.iterdir()}
    assert names >= {"config.yaml", "last.safetensors", "best.safetensors", "metrics.csv"}
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


def test_each_evaluation_is_logged_in_nats_and_bits_and_the_best_one_is_kept(smoke):
    losses, bits = (dict(scalars(smoke)[tag]) for tag in ("val/loss", "val/bpc"))
    assert list(losses) == [20, 40, 60]
    assert bits[60] == pytest.approx(losses[60] / math.log(2), rel=1e-6)
    best = load(smoke / "best.safetensors").progress
    assert best.best_loss == pytest.approx(min(losses.values()), rel=1e-6)
    assert losses[best.step] == losses[best.best_step] == min(losses.values())


def test_init_from_starts_with_the_weights_and_vocabulary_of_another_run(run, smoke, tmp_path):
    text, new = tmp_path / "text.txt", tmp_path / "new"
    text.write_text("Who goes there? None but I, and the wind.\n" * 40)
    words = [f"--out_dir={new}", f"--init_from={smoke}", f"--data.sources={text}"]
    run("train.py", "configs/smoke.yaml", *words, "--max_iters=1", "--warmup_iters=0")
    vocabularies = [load(each / "last.safetensors").vocabulary for each in (smoke, new)]
    assert vocabularies[0] == vocabularies[1]
    assert scalars(new)["train/loss"][0][1] < 3.6 < math.log(61)


@pytest.mark.parametrize(
    ("option", "code"),
    [("--n_laier=3", 2), ("--help", 0), ("--print-config", 0), ("--init_from=test", 4)],
)
def test_help_and_wrong_settings_or_paths_need_no_torch_import(option, code, run):
    probe = (
        "import sys; sys.argv = sys.argv[1:]; import runpy\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = run("-c", probe, "train.py", "configs/smoke.yaml", option, check=code)
    assert done.stdout.endswith("False\n")
