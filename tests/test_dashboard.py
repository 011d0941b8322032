"""The dashboard: TensorBoard's reader and its server show exactly the logged values, with and
without resuming.
"""

import json
import re
import shutil
import signal
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
from tests.conftest import ROOT
from tests.runs import (
    STEPS,
    at_step,
    resume_if_saved,
    same_runs,
    small_run_args,
    train,
)

SCALARS = {
    "train/loss",
    "train/lr",
    "train/lr/vectors",
    "train/lr/hidden",
    "train/grad_norm",
    "train/tokens_per_sec",
    "train/share_of_peak",
    "train/total_epochs",
    "train/spikes",
    "val/loss",
    "val/bpc",
    "val/gap",
    "val/train_loss",
}
TEXTS = {f"{tag}/text_summary" for tag in ("samples/text", "samples/top_next", "setup/run")}
IMAGES = {"views/attention_layer_1", "views/attention_layer_2", "views/loss_by_position"}
ONCE = {"setup/run/text_summary"}
EVALUATIONS = list(range(6, STEPS + 1, 6))
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logger, "scalars", record)
        assert train(*options, f"--out_dir={folder / 'whole'}")[0] == 0
    for step in (7, 15):
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
            parts = folder / "parts"
            assert train(*options, f"--out_dir={parts}", *resume_if_saved(parts))[0] == 130
    assert train(*options, f"--out_dir={folder / 'parts'}", "--resume")[0] == 0
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
    arguments = [
        "-m",
        "tensorboard.main",
        f"--logdir={runs[0]}",
        "--host=127.0.0.1",
        f"--port={port}",
        request.param,
    ]
    with (tmp_path_factory.mktemp("server") / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log)
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
        return (
            json.loads(content)
            if response.headers["Content-Type"].startswith("application/json")
            else content
        )

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


def test_event_files_contain_every_logged_scalar_and_resuming_changes_nothing(runs):
    folder, logged = runs
    events = read_events(folder / "whole")
    assert set(events.Tags()["scalars"]) == set(logged) == SCALARS
    for tag in SCALARS:
        assert [(each.step, each.value) for each in events.Scalars(tag)] == logged[tag], tag
    assert [step for step, _ in logged["train/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in logged["val/gap"]] == EVALUATIONS
    assert same_runs(folder / "whole", folder / "parts")  # every scalar, text and image


def test_scalars_have_the_values_that_their_tags_promise(runs):
    logged = {tag: dict(points) for tag, points in runs[1].items()}
    settings = settings_of(Config)
    assert logged["val/gap"][24] == pytest.approx(
        logged["val/loss"][24] - logged["val/train_loss"][24], rel=1e-3
    )
    assert logged["train/total_epochs"][24] == pytest.approx(24 * 2 * 4 * 16 / 5399)
    assert logged["train/lr/hidden"][8] == pytest.approx(
        settings["train.muon_learning_rate"].default
    )
    assert (
        logged["train/lr"][8]
        == logged["train/lr/vectors"][8]
        == pytest.approx(settings["train.learning_rate"].default)
    )
    assert 0 < logged["train/share_of_peak"][24] < 1


def test_the_server_lists_every_tag_of_both_runs_and_no_other_run(server):
    assert set(server("runs")) == {"whole", "parts"}
    for plugin, tags in {"scalars": SCALARS, "text": TEXTS, "images": IMAGES}.items():
        found = server(f"plugin/{plugin}/tags")
        assert {run: set(found[run]) for run in found} == {"whole": tags, "parts": tags}, plugin


@pytest.mark.parametrize("run", ["whole", "parts"])
def test_the_server_shows_every_point_once(server, runs, run):
    for tag, points in runs[1].items():
        shown = server("plugin/scalars/scalars", run=run, tag=tag)
        assert [step for _, step, _ in shown] == [step for step, _ in points], tag
        if run == "whole":
            assert [value for *_, value in shown] == pytest.approx(
                [value for _, value in points]
            ), tag
    for tag in TEXTS:
        shown = server("plugin/text/text", run=run, tag=tag)
        assert [each["step"] for each in shown] == ([0] if tag in ONCE else EVALUATIONS), tag
    for tag in IMAGES:
        assert [
            each["step"] for each in server("plugin/images/images", run=run, tag=tag)
        ] == EVALUATIONS, tag


def test_the_server_shows_the_config_images_and_custom_charts(server):
    config = server("plugin/text/text", run="whole", tag="setup/run/text_summary")[0]["text"]
    assert "<table>" in config and re.search(
        r"<td>train\.cooldown_iters</td>\s*<td>10</td>", config
    )
    query = server("plugin/images/images", run="parts", tag="views/attention_layer_2")[-1]["query"]
    image = Image.open(
        BytesIO(server("plugin/images/individualImage", **dict(urllib.parse.parse_qsl(query))))
    )
    assert image.format == "PNG" and min(image.size) > 150
    titles = [
        chart["title"] for chart in server("plugin/custom_scalars/layout")["category"][0]["chart"]
    ]
    assert titles == list(summaries.CHARTS)


def test_losses_come_before_pictures_and_samples_before_settings():
    """TensorBoard sorts the groups of tags by name."""
    groups = [tag.partition("/")[0] for tag in sorted(SCALARS | IMAGES)]
    assert list(dict.fromkeys(groups)) == ["train", "val", "views"]
    assert sorted(TEXTS)[0] == "samples/text/text_summary"
    assert sorted(TEXTS)[-1] == "setup/run/text_summary"


def test_the_hparams_page_shows_each_run_with_its_settings_and_final_loss(server, runs):
    metrics = [{"name": {"tag": tag}} for tag in summaries.HPARAM_METRICS]
    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN"],
        "colParams": [],
        "sliceSize": 9,
    }
    groups = server(
        "plugin/hparams/session_groups",
        request | {"colParams": [{"metric": m["name"]} for m in metrics]},
    )
    assert sorted(group["sessions"][0]["name"] for group in groups["sessionGroups"]) == [
        "parts",
        "whole",
    ]
    for group in groups["sessionGroups"]:
        values = {each["name"]["tag"]: each["value"] for each in group["metricValues"]}
        assert values["val/loss"] == pytest.approx(dict(runs[1]["val/loss"])[STEPS])
        assert (
            group["hparams"]["3model.n_layer"] == 2
            and group["hparams"]["train.optimizer"] == "muon"
        )


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_dashboard_without_errors(server, tmp_path):
    # messages of TensorBoard's own pages, and of the browser about the speed of its drawing
    expected = r"Multiple instances of Three\.js|software WebGL|is deprecated|GL Driver Message"
    for tab in ("timeseries", "images", "text", "hparams"):
        screenshot = tmp_path / f"{tab}.png"
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--screenshot={screenshot}",
            "--window-size=1200,900",
            "--virtual-time-budget=8000",
            f"--user-data-dir={screenshot}.user",
        ]
        done = subprocess.run(
            [CHROMIUM, *arguments, f"{server.address}#{tab}"], capture_output=True, timeout=200
        )
        messages = [
            line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line
        ]
        assert [line for line in messages if not re.search(expected, line)] == [], tab
        assert (
            len(Image.open(screenshot).convert("RGB").resize((300, 225)).getcolors(10**6)) > 50
        ), f"{tab} is empty"


# ----------------------------------------------------------------------------- descriptions of runs


def test_resuming_with_other_settings_replaces_the_description_and_with_the_same_changes_no_file(
    tmp_path,
):
    options, run = small_run_args(tmp_path), tmp_path / "run"
    assert train(*options, f"--out_dir={run}", "--max_iters=14")[0] == 0
    before = {path: path.read_bytes() for path in run.glob("*tfevents*")}
    assert train(*options, f"--out_dir={run}", "--max_iters=14", "--resume")[0] == 0
    assert {path: path.read_bytes() for path in run.glob("*tfevents*")} == before
    assert train(*options, f"--out_dir={run}", "--max_iters=15", "--resume")[0] == 0
    (config,) = read_events(run).Tensors("setup/run/text_summary")
    assert b"| train\\.max\\_iters | 15 |" in config.tensor_proto.string_val[0]


def test_log_scalars_writes_scalars_and_samples_but_no_images(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "figures", None)
    assert (
        train(*small_run_args(tmp_path), "--log=scalars", f"--out_dir={tmp_path / 'run'}")[0] == 0
    )
    tags = read_events(tmp_path / "run").Tags()
    assert (
        "samples/text/text_summary" in tags["tensors"]
        and "samples/top_next/text_summary" not in tags["tensors"]
    )
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
