"""The dashboard: TensorBoard's reader and its server show exactly the logged values, with and
without resuming.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.fields import settings_of
from configs.schema import Config
from dashboard import report, summaries
from dashboard.logger import Logger
from tests.conftest import CHROMIUM, ROOT
from tests.runs import STEPS, same_runs, small_run_args, stop_at, train

SCALARS = {
    "train/loss", "train/lr", "train/lr/vectors", "train/lr/hidden", "train/grad_norm",
    "train/tokens_per_sec", "train/share_of_peak", "train/total_epochs", "train/spikes",
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


@pytest.fixture(scope="module", params=["--load_fast=true", "--load_fast=false"])
def server(request, runs, tmp_path_factory):
    """Start a TensorBoard server of both runs, with one of its two loaders; yield a function
    `ask(path, **query)`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--host=127.0.0.1", request.param]
    with (tmp_path_factory.mktemp("server") / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--logdir={runs[0]}", f"--port={port}"], stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}/"

    def ask(path, post=None, **query):
        content = None if post is None else json.dumps(post).encode()
        request = urllib.request.Request(
            f"{address}data/{path}?{urllib.parse.urlencode(query)}",
            content,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            content = response.read()
        is_json = response.headers["Content-Type"].startswith("application/json")
        return json.loads(content) if is_json else content

    ask.address = address
    try:
        for _ in range(300):
            try:
                if len(ask("runs")) == 2 and len(ask("plugin/images/tags")) == 2:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait()


def read_events(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_scalars_have_the_values_that_their_tags_promise(runs):
    logged = {tag: dict(points) for tag, points in runs[1].items()}
    defaults = {name: field.default for name, field in settings_of(Config).items()}
    gap = logged["val/loss"][24] - logged["val/train_loss"][24]
    assert logged["val/gap"][24] == pytest.approx(gap, rel=1e-3)
    assert logged["train/total_epochs"][24] == pytest.approx(24 * 2 * 4 * 16 / 5399)
    learning_rate = pytest.approx(defaults["train.learning_rate"])
    assert logged["train/lr"][8] == logged["train/lr/vectors"][8] == learning_rate
    assert logged["train/lr/hidden"][8] == pytest.approx(defaults["train.muon_learning_rate"])
    assert 0 < logged["train/share_of_peak"][24] < 1


def test_the_runs_log_every_scalar_and_resuming_changes_nothing(runs):
    folder, logged = runs
    steps = {tag: [step for step, _ in points] for tag, points in logged.items()}
    assert steps.keys() == SCALARS
    assert steps["train/loss"] == list(range(1, STEPS + 1)) and steps["val/gap"] == EVALUATIONS
    assert same_runs(folder / "whole", folder / "parts")  # every scalar, text and image


@pytest.mark.parametrize("run", ["whole", "parts"])
def test_the_server_shows_every_tag_and_point_once_and_no_other_run(server, runs, run):
    assert set(server("runs")) == {"whole", "parts"}
    for plugin, tags in {"scalars": SCALARS, "text": TEXTS, "images": IMAGES}.items():
        assert set(server(f"plugin/{plugin}/tags")[run]) == tags, plugin
    for tag, points in runs[1].items():
        shown = server("plugin/scalars/scalars", run=run, tag=tag)
        if run == "whole":
            assert [(step, value) for _, step, value in shown] == points, tag
        else:  # its timings are others
            assert [step for _, step, _ in shown] == [step for step, _ in points], tag
    for plugin, path, tags in (("text", "text", TEXTS), ("images", "images", IMAGES)):
        for tag in tags:
            shown = server(f"plugin/{plugin}/{path}", run=run, tag=tag)
            assert [each["step"] for each in shown] == ([0] if tag in ONCE else EVALUATIONS), tag


def test_the_server_shows_the_config_images_and_custom_charts(server):
    config = server("plugin/text/text", run="whole", tag="setup/run/text_summary")[0]["text"]
    row = r"<td>train\.cooldown_iters</td>\s*<td>10</td>"
    assert "<table>" in config and re.search(row, config)
    query = server("plugin/images/images", run="parts", tag="views/attention_layer_2")[-1]["query"]
    query = dict(urllib.parse.parse_qsl(query))
    image = Image.open(BytesIO(server("plugin/images/individualImage", **query)))
    assert image.format == "PNG" and min(image.size) > 150
    category = server("plugin/custom_scalars/layout")["category"][0]
    assert [chart["title"] for chart in category["chart"]] == list(summaries.CHARTS)


def test_losses_come_before_pictures_and_samples_before_settings():
    """TensorBoard sorts the groups of tags by name."""
    groups = [tag.partition("/")[0] for tag in sorted(SCALARS | IMAGES)]
    assert list(dict.fromkeys(groups)) == ["train", "val", "views"]
    assert sorted(TEXTS)[0] == "samples/text/text_summary"
    assert sorted(TEXTS)[-1] == "setup/run/text_summary"


def test_the_hparams_page_shows_each_run_with_its_settings_and_final_loss(server, runs):
    metrics = [{"metric": {"tag": tag}} for tag in summaries.HPARAM_METRICS]
    request = {"allowedStatuses": ["STATUS_UNKNOWN"], "colParams": metrics, "sliceSize": 9}
    groups = server("plugin/hparams/session_groups", request | {"experimentName": ""})
    groups = groups["sessionGroups"]
    names = [group["sessions"][0]["name"] for group in groups]
    assert sorted(names) == ["parts", "whole"]
    for group in groups:
        values = {each["name"]["tag"]: each["value"] for each in group["metricValues"]}
        assert values["val/loss"] == pytest.approx(dict(runs[1]["val/loss"])[STEPS])
        settings = group["hparams"]
        assert settings["3model.n_layer"] == 2 and settings["train.optimizer"] == "muon"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_dashboard_without_errors(server, tmp_path):
    # messages of TensorBoard's own pages, and of the browser about the speed of its drawing
    expected = r"Multiple instances of Three\.js|software WebGL|is deprecated|GL Driver Message"
    for tab in ("timeseries", "images", "text", "hparams"):
        screenshot = tmp_path / f"{tab}.png"
        arguments = [
            "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--screenshot={screenshot}", "--window-size=1200,900", "--virtual-time-budget=8000",
            f"--user-data-dir={screenshot}.user",
        ]  # fmt: skip
        done = subprocess.run(
            [CHROMIUM, *arguments, f"{server.address}#{tab}"],
            capture_output=True, errors="replace", timeout=200,
        )  # fmt: skip
        messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert [line for line in messages if not re.search(expected, line)] == [], tab
        colors = Image.open(screenshot).convert("RGB").resize((300, 225)).getcolors(10**6)
        assert len(colors) > 50, f"{tab} is empty"


# ----------------------------------------------------------------------------- descriptions of runs


def test_resuming_with_other_settings_replaces_the_description_and_with_the_same_changes_no_file(
    train_run, tmp_path
):
    run = tmp_path / "run"
    assert train_run("--max_iters=14")[0] == 0
    before = {path: path.read_bytes() for path in run.glob("*tfevents*")}
    assert train_run("--max_iters=14", "--resume")[0] == 0
    assert {path: path.read_bytes() for path in run.glob("*tfevents*")} == before
    assert train_run("--max_iters=15", "--resume")[0] == 0
    (config,) = read_events(run).Tensors("setup/run/text_summary")
    assert b"| train\\.max\\_iters | 15 |" in config.tensor_proto.string_val[0]


def test_log_scalars_writes_scalars_and_samples_but_no_images(train_run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "figures", None)
    assert train_run("--log=scalars")[0] == 0
    tags = read_events(tmp_path / "run").Tags()
    assert "samples/text/text_summary" in tags["tensors"]
    assert "samples/top_next/text_summary" not in tags["tensors"]
    assert set(tags["scalars"]) == SCALARS - {"train/share_of_peak"}


def test_tensorflow_is_not_imported_even_if_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was loaded')")
    modules = "training.state, dashboard.logger"
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


def test_a_table_escapes_markdown():
    block = summaries.code_block(["a\tb", "c\r![x](https://example.org)", "\x1b[2J\u2028d"])
    assert block == "    a\tb\n    c\\r![x](https://example.org)\n    \\x1b[2J\\u2028d\n"
    text = summaries.table({"a_b": "x|y *z* [c](d)", "n": 0.5}, ("setting", "value"))
    assert text.splitlines()[2:] == [r"| a\_b | x\|y \*z\* \[c\]\(d\) |", r"| n | 0\.5 |"]
