"""README and docs: valid commands, valid links, the size of the first model."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.trials import parse_trials
from configs.command import parse_sample_options, parse_train
from model.gpt import GPT
from tests.conftest import ROOT

PATTERNS = ("*.md", "docs/*.md", "docs/*.ipynb", "data/README.md")
DOCUMENTS = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]
COMMANDS = [
    re.split(r" [|<] ", line)[0]
    for name in ("README", "docs/own_text", "docs/exercises", "docs/usage", "docs/research")
    for document in [(ROOT / f"{name}.md").read_text(encoding="utf-8")]
    for block in re.findall(r"^```sh\n(.*?)^```|^\| `(.*?)`", document, re.DOTALL | re.MULTILINE)
    for line in "".join(block).splitlines()
    if re.match("python (?!-c |convert.py |train.py out/nano/)", line)  # two need nanoGPT's model
]


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command(command, monkeypatch):
    """Of the guides, too."""
    monkeypatch.chdir(ROOT)
    # the runs of the commands before it are there
    monkeypatch.setattr("configs.command.holds_run", lambda folder: folder.parent == Path("out"))
    _, script, *arguments = shlex.split(command, comments=True)
    if script == "train.py":
        parse_train([word for word in arguments if word not in ("--help", "--print-config")])
    elif script == "sample.py":
        parse_sample_options(arguments)
    elif script == "hornbook.py":
        assert all(word.startswith("--max_iters=") or word.endswith(".txt") for word in arguments)
    elif arguments[0] == "benchmarks.trials":
        parse_trials(arguments[1:])
    else:
        assert script == "-m" and (ROOT / f"{arguments[0].replace('.', '/')}.py").exists()


def test_readme_number_of_parameters():
    number = re.search(r"([\d.]+) million parameters", (ROOT / "README.md").read_text("utf-8"))[1]
    # 65 characters are those of Tiny Shakespeare
    model = GPT(parse_train(["configs/shakespeare.yaml"]).config.model, vocab_size=65)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == float(number)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_recipe_is_trained_offline(path):
    data = parse_train([str(path)]).config.data
    assert (ROOT / (data.fallback or data.sources[0])).exists()  # in the project


def prose(document: Path) -> str:
    """Return a document without its code blocks, whose comments look like headings."""
    text = document.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_links():
    """Of all documents: each leads to a file, and to a heading."""
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose(document))
        for link in map("".join, links):
            if "://" not in link:
                path, _, fragment = link.partition("#")
                target = document.parent / path if path else document
                assert target.exists(), f"{document}: {link}"
                assert not fragment or fragment in anchors(target), f"{document}: {link}"
