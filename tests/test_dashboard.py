"""The dashboard: TensorBoard's reader and its server show exactly the logged values, with and
without resuming; what a run prints.
"""

import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams import metadata as hparams

from configs.fields import settings_of
from configs.schema import Config
from dashboard import report
from dashboard.logger import Logger
from tests.conftest import ROOT
from tests.runs import STEPS, same_runs, small_run_args, stop_at, train

SCALARS = {
    "train/loss", "train/lr", "train/lr/vectors", "train/lr/hidden", "train/grad_norm",
    "train/tokens_per_sec", "train/total_epochs", "train/spikes",
    "val/loss", "val/bpc", "val/gap", "val/train_loss",
}  # fmt: skip
TEXTS = {f"{tag}/text_summary" for tag in ("samples/text", "samples/top_next", "setup/run")}
IMAGES = {"views/attention_layer_1", "views/attention_layer_2", "views/loss_by_position"}
ONCE = {"setup/run/text_summary"}
EVALUATIONS = list(range(6, STEPS + 1, 6))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train the same run as `whole` and as `parts`, stopped twice; return their folder and the
    scalars that `whole` logged.
    """
    folder, logged = tmp_path_factory.mktemp("runs"), {}
    options, scalars = [*small_run_args(folder), "--n_layer=2"], Logger.scalars

    def record(logger, step, values):
        for tag, value in values.items():
            logged.setdefault(tag, []).append((step, float(np.float32(value))))
        scalars(logger, step, values)

    whole, parts = f"--out_dir={folder / 'whole'}", f"--out_dir={folder / 'parts'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logger, "scalars", record)
        assert train(*options, whole)[0] == 0
    stop_at(7, *options, parts)
    stop_at(15, *options, parts, "--resume")
    assert train(*options, parts, "--resume")[0] == 0
    (folder / "text.txt").unlink()
    return folder, logged


def read_events(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_scalars_have_the_values_that_their_tags_promise(runs):
    logged = {tag: dict(points) for tag, points in runs[1].items()}
    defaults = {name: field.default for name, field in settings_of(Config).items()}
    gap = logged["val/loss"][24] - logged["val/train_loss"][24]
    assert logged["val/gap"][24] == pytest.approx(gap, rel=1e-3)
    assert logged["val/bpc"][24] == pytest.approx(logged["val/loss"][24] / math.log(2))
    assert logged["train/total_epochs"][24] == pytest.approx(24 * 2 * 4 * 16 / 5399)
    learning_rate = pytest.approx(defaults["train.learning_rate"])
    assert logged["train/lr"][5] == logged["train/lr/vectors"][5] == learning_rate
    assert logged["train/lr/hidden"][5] == pytest.approx(defaults["train.muon_learning_rate"])


def test_the_runs_log_every_scalar_and_resuming_changes_nothing(runs):
    folder, logged = runs
    steps = {tag: [step for step, _ in points] for tag, points in logged.items()}
    assert steps.keys() == SCALARS
    assert steps["train/loss"] == list(range(1, STEPS + 1)) and steps["val/gap"] == EVALUATIONS
    assert same_runs(folder / "whole", folder / "parts")  # every scalar and text


@pytest.mark.parametrize("run", ["whole", "parts"])
def test_tensorboard_reads_every_tag_and_point_once(runs, run):
    events = read_events(runs[0] / run)
    tags = events.Tags()
    assert set(tags["scalars"]) == SCALARS and set(tags["images"]) == IMAGES
    assert set(tags["tensors"]) == TEXTS | {CONFIG_SUMMARY_TAG}
    for tag in TEXTS | IMAGES:
        shown = events.Images(tag) if tag in IMAGES else events.Tensors(tag)
        assert [each.step for each in shown] == ([0] if tag in ONCE else EVALUATIONS), tag
    for tag, points in runs[1].items():
        shown = [(each.step, each.value) for each in events.Scalars(tag)]
        if run == "whole":
            assert shown == points, tag
        else:  # its timings are others
            assert [step for step, _ in shown] == [step for step, _ in points], tag


def test_the_settings_of_a_run_are_in_its_hparams(runs):
    content = read_events(runs[0] / "parts").PluginTagToContent(hparams.PLUGIN_NAME)
    start = hparams.parse_session_start_info_plugin_data(content[hparams.SESSION_START_INFO_TAG])
    assert start.hparams["3model.n_layer"].number_value == 2
    assert start.hparams["train.optimizer"].string_value == "muon"


def test_the_server_shows_the_scalars_of_each_run_in_the_folder(runs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen([*command, f"--logdir={runs[0]}"], stderr=subprocess.DEVNULL)
    address, shown = f"http://127.0.0.1:{port}/data/plugin/scalars/tags", {}
    try:
        for _ in range(300):
            with suppress(OSError), urllib.request.urlopen(address, timeout=120) as response:
                shown = {run: set(tags) for run, tags in json.load(response).items()}
            if shown == {"whole": SCALARS, "parts": SCALARS}:
                return
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
    pytest.fail(f"the server shows {shown}")


# ----------------------------------------------------------------------------- descriptions of runs


def test_log_scalars_writes_scalars_and_samples_but_no_images(train_run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "figures", None)
    assert train_run("--log=scalars")[0] == 0
    tags = read_events(tmp_path / "run").Tags()
    assert "samples/text/text_summary" in tags["tensors"]
    assert "samples/top_next/text_summary" not in tags["tensors"]
    assert set(tags["scalars"]) == SCALARS


def test_tensorflow_is_not_imported_even_if_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was loaded')")
    modules = "training.state, dashboard.logger"
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------ the console


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
