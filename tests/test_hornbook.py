"""hornbook.py: the computation of train.py; its command."""

import io
import re
import runpy

import pytest
import torch
from tqdm import tqdm

import hornbook
from configs.command import parse_train
from configs.schema import DEFAULT_TEMPERATURE, to_flat
from model.generate import last_logits
from tests.conftest import ROOT
from tests.runs import build
from train import train_step
from training.evaluate import evaluate

PLAY = (ROOT / "data" / "plays" / "admiral.txt").read_text(encoding="utf-8")[:6000]


def assert_equal(steps, texts, tolerance, *options):
    """Compare the losses of both programs, in each step and on validation text.

    Return the run of train.py, and a text by hornbook.py.
    """
    recipe = ["configs/shakespeare.yaml", "--device=cpu", "--dtype=float32", "--dropout=0"]
    run = build(*recipe, *(f"--sources={text}" for text in texts), *options)
    losses = [train_step(run).loss for _ in range(steps)]
    losses.append(evaluate(run).val_loss)

    vocabulary, train_ids, val_ids = hornbook.read(texts)
    model = hornbook.GPT(len(vocabulary))
    with pytest.MonkeyPatch.context() as patch:  # the first steps of a longer run
        patch.setattr(hornbook, "tqdm", lambda all_steps: tqdm(all_steps[:steps]))
        ours = hornbook.train(model, train_ids, run.settings.train.max_iters)
    ours.append(hornbook.validation_loss(model, val_ids))
    assert ours == pytest.approx(losses, rel=0, abs=tolerance)
    return run, "".join(hornbook.generate(model, vocabulary, 60))


def test_hornbook_has_the_settings():
    """Of configs/shakespeare.yaml."""
    settings = to_flat(parse_train(["configs/shakespeare.yaml"]).config)
    settings |= {"temperature": DEFAULT_TEMPERATURE}
    settings |= {"adamw_betas": (settings["beta1"], settings["beta2"])}
    for name in set(filter(str.isupper, vars(hornbook))) - {"F", "GPT"}:
        assert getattr(hornbook, name) == settings[name.lower()], name


@pytest.mark.parametrize(
    ("steps", "contents"),
    [
        (30, (PLAY, "To be,\nor not", "")),  # a step of warm-up, a new epoch, and the cooldown
        (2, ("question " * 8 + "!",)),  # one window
    ],
)
def test_hornbook_computes_what_train_does(steps, contents, tmp_path, monkeypatch):
    """Losses of a small model, and the probabilities from which its text is drawn."""
    texts = [tmp_path / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(texts, contents, strict=True):
        path.write_text(content, encoding="utf-8")
    sizes = {"N_LAYER": 2, "N_EMBD": 64, "BLOCK_SIZE": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(hornbook, name, value)
    options = [f"--{name.lower()}={value}" for name, value in sizes.items()]
    run, written = assert_equal(steps, texts, 7e-6, "--max_iters=76", *options)

    ids = run.corpus.tokenizer.encode(f"{run.corpus.tokenizer.vocabulary[0]}{written}")[None]
    generator = torch.Generator().manual_seed(hornbook.SEED)
    for n in range(1, ids.size):
        logits = torch.from_numpy(last_logits(run.model.eval(), ids[:, :n].astype(int))).float()
        probabilities = (logits / hornbook.TEMPERATURE).softmax(-1)
        assert torch.multinomial(probabilities, 1, generator=generator).item() == ids[0, n]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that runs a small hornbook.py in its folder, which is the home folder too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    source = (ROOT / "hornbook.py").read_text().replace("BLOCK_SIZE = 512", "BLOCK_SIZE = 8")
    (tmp_path / "hornbook.py").write_text(source)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["hornbook.py", *words])
        runpy.run_path(str(tmp_path / "hornbook.py"), run_name="__main__")

    return run


def test_hornbook_command(command, tmp_path, monkeypatch):
    """It reads Tiny Shakespeare; characters that a terminal lacks are escaped."""
    text = tmp_path / "data" / "tinyshakespeare" / "input.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\N{SNOWMAN}\N{CLOUD}" * 300, encoding="utf-8-sig")
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    command("--max_iters=1")
    stdout.seek(0)
    training, validating, loss, _, sample = stdout.read().split("\n")
    assert training == f"training on 540 characters of {text}" and validating == "validating on 60"
    assert re.fullmatch(r"validation loss \d\.\d{4}", loss)
    assert re.fullmatch(r"(\\u260[13]){7}", sample)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "data/plays/short.txt: too few characters, or all the same; name a longer text"),
        (["a.txt"], "a.txt: No such file or directory; name a .txt file"),
        (["~/latin.txt"], "~/latin.txt: not UTF-8; convert it: iconv -f cp1252 -t UTF-8 OLD > NEW"),
        (["--max_iters=0"], "--max_iters: 0; name 1 or more"),
        (["--max_iters=x"], "argument --max_iters: invalid int value: 'x'"),
    ],
)
def test_hornbook_mistakes(words, message, command, tmp_path, monkeypatch, capsys):
    """One line, and exit code 2. Without Tiny Shakespeare, it reads the plays."""
    (tmp_path / "data" / "plays").mkdir(parents=True)
    (tmp_path / "data" / "plays" / "short.txt").write_text("ten chars.")
    (tmp_path / "latin.txt").write_text("Café\n" * 99, encoding="latin-1")
    monkeypatch.setattr("sys.stdout", io.StringIO())  # as in a notebook, it has no `reconfigure`
    with pytest.raises(SystemExit) as leaving:
        command(*words)
    assert leaving.value.code == 2
    error = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert error == f"error: {message}\n"
