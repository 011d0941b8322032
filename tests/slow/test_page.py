"""The file of the page: what it contains, what it can do, and what it replaces."""

import json
import os
import re

import pytest

from common.console import ConfigError
from page import export
from storage.checkpoint import BEST, load_checkpoint
from tests.conftest import ROOT
from tests.runs import sample_main
from tests.variants import random_model, save_model


def parts_of(page):
    """Return the scripts of a page by id: data, weights, worker-code, model-code."""
    return dict(re.findall(r'<script [^>]*id="([\w-]+)">(.*?)</script>', page, re.DOTALL))


@pytest.fixture(scope="module")
def exported(uninterrupted, tmp_path_factory):
    """The page of a trained model, as sample.py writes it."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    words = [f"--ckpt={uninterrupted}", f"--html={path}", "--prompt=The", "--device=cpu"]
    assert sample_main(words) == 0
    return path.read_text(encoding="utf-8")


def test_page_names_no_path(exported, uninterrupted):
    """It has the vocabulary, the prompt and the name of the text."""
    data = json.loads(parts_of(exported)["data"])
    assert data["vocabulary"] == load_checkpoint(uninterrupted / BEST).vocabulary
    assert (data["prompt"], data["about"]["text"]) == ("The", "text.txt")
    for secret in (str(uninterrupted.parent), str(ROOT), os.path.expanduser("~")):
        assert secret not in exported


def test_page_fetches_nothing(exported):
    """And allows its own code alone."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', exported)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "http" not in policy
    body = re.sub(r"<(script|style)\b.*?</\1>", "", exported, flags=re.DOTALL)
    assert not re.search(r"\bstyle=|\bon\w+=|(src|href)=\"(?!data:|#)|https?:", body)


HOSTILE = "\x00\x07\t\n\r\x1b !\"'&<>/\\`${}ab\x7f\u200b\u202e\u2028\ufffd\u05d0\U0001f600"


def test_hostile_strings_stay_data(tmp_path):
    model, page = random_model(vocab_size=len(HOSTILE)), tmp_path / "page.html"
    name = "/home/somebody/</script><!--<script>\u2028\"'`{{weights}}\x1b[2J"
    path = save_model(tmp_path / "a.safetensors", model, HOSTILE, text={"name": name})
    sample_main([f"--ckpt={path}", f"--html={page}", "--prompt=</ab><b>{{}}"])
    parts = parts_of(page.read_text(encoding="utf-8"))
    data = json.loads(parts["data"])
    assert (data["vocabulary"], data["prompt"]) == (HOSTILE, "</ab><b>{{}}")
    assert not set("<\u2028\u202e\x1b") & set(parts["data"])
    assert parts["model-code"] == export.read("model.js") and "somebody" not in page.read_text()


def test_page_replaces_a_page_alone(uninterrupted, tmp_path):
    path = tmp_path / "page.html"
    words = [f"--ckpt={uninterrupted}", f"--html={path}"]
    assert sample_main(words) == sample_main([*words, "--prompt=another"]) == 0
    assert '"prompt": "another"' in path.read_text()
    path.write_text("no page")
    with pytest.raises(ConfigError, match="exists, and is not a Hornbook page"):
        sample_main(words)
    assert path.read_text() == "no page"


def test_page_refuses_other_parameters(tmp_path):
    path = save_model(tmp_path / "a.safetensors", random_model(bias=True), "\nabcdefghij")
    with pytest.raises(ConfigError, match="a page runs the architectures of the recipes, without"):
        sample_main([f"--ckpt={path}", f"--html={tmp_path / 'page.html'}"])
