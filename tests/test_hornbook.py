"""hornbook.py: the computation of train.py; its command."""

import io
import re

import pytest
import torch

import hornbook
from configs import schema
from configs.command import parse_train
from configs.schema import flat_settings
from data.batches import evaluation_windows
from data.corpus import load_corpus
from model.generate import Sampler, generate
from tests.conftest import ROOT
from tests.runs import small_run_args
from training.device import select_runtime
from training.distributed import World
from training.evaluate import batch_size_for, exact_loss
from training.state import Run
from training.step import train_step

SOURCE = (ROOT / "hornbook.py").read_text(encoding="utf-8")
# ten times the most by which train.py's losses differ from each other in the test of 76 steps, with
# the kernels batched and sdpa, and with one and two threads
TOLERANCE = 7e-6


@pytest.fixture
def text(tmp_path):
    small_run_args(tmp_path)
    return tmp_path / "text.txt"


@pytest.fixture(autouse=True)
def one_thread():
    """The same number of threads for both: it decides on the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_train(steps, text, characters, *options):
    """Return what train.py computes: losses, exact validation loss, and a text."""
    recipe = ["configs/shakespeare.yaml", f"--sources={text}", f"--max_iters={steps}"]
    settings = parse_train([*recipe, "--dropout=0", *options]).new_settings()
    run = Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())
    losses = [train_step(run).loss for _ in range(steps)]

    run.update_logit_scale()
    context, tokenizer = settings.model.block_size, run.corpus.tokenizer
    batch_size = batch_size_for(context, run.model.vocab_size)
    windows = evaluation_windows(run.corpus.val, context, batch_size)
    val_loss = exact_loss(run.model, windows, run.runtime)

    start = torch.from_numpy(tokenizer.encode(tokenizer.start_character).astype(int))[None]
    sampler = Sampler(settings.seed, temperature=schema.DEFAULT_TEMPERATURE)
    sampler.advance(-1)  # sample.py draws a number for the first newline too, hornbook.py does not
    written = [int(i) for i in generate(run.model, start, sampler, characters)]
    return losses, val_loss, tokenizer.decode(written)


def by_hornbook(steps, text, characters):
    """Return what hornbook.py computes: losses, exact validation loss, and a text."""
    vocabulary, train_ids, validation_ids = hornbook.read([text])
    model = hornbook.GPT(len(vocabulary))
    losses = []
    for loss in hornbook.train(model, train_ids, steps):
        losses.append(loss)
        if len(losses) == 2:
            hornbook.validation_loss(model, validation_ids)  # training goes on as if it were not
    val_loss = hornbook.validation_loss(model, validation_ids)
    return losses, val_loss, "".join(hornbook.write(model, vocabulary, characters))


def assert_equal(ours, theirs, tolerance):
    """Compare the losses of each step, and the validation losses, up to a tolerance."""
    losses, val_losses, _ = zip(ours, theirs, strict=True)
    for step, (a, b) in enumerate(zip(*losses, strict=True), 1):
        assert abs(a - b) < tolerance, f"the loss of step {step}: {a} is not {b}"
    assert abs(val_losses[0] - val_losses[1]) < tolerance


def test_its_constants_are_the_settings_of_the_recipe():
    settings = flat_settings(parse_train(["configs/shakespeare.yaml"]).new_settings())
    settings |= {name.lower(): value for name, value in vars(schema).items() if name.isupper()}
    settings["temperature"] = schema.DEFAULT_TEMPERATURE
    constants = {name: value for name, value in vars(hornbook).items() if name.isupper()}
    del constants["F"], constants["GPT"]
    assert constants == {name: settings[name.lower()] for name in constants}
    assert settings["muon_learning_rate"] == settings["learning_rate"]


def test_it_computes_what_train_py_does(text, monkeypatch):
    """76 steps of a small model: a step of warm-up, three new epochs, the cooldown."""
    for name, value in {"N_LAYER": 2, "N_EMBD": 64, "BLOCK_SIZE": 64}.items():
        monkeypatch.setattr(hornbook, name, value)
    theirs = by_train(76, text, 60, "--n_layer=2", "--n_embd=64", "--block_size=64")
    ours = by_hornbook(76, text, 60)
    assert_equal(ours, theirs, TOLERANCE)
    assert ours[2] == theirs[2]


# -------------------------------------------------------------------------------------- its command


def run_command(folder, monkeypatch, *arguments):
    """Run hornbook.py, as if it were in a folder, with a small model."""
    small = SOURCE.replace(
        "N_LAYER, N_HEAD, N_EMBD = 3, 4, 256", "N_LAYER, N_HEAD, N_EMBD = 1, 2, 16"
    )
    small = small.replace("BLOCK_SIZE = 4, 512", "BLOCK_SIZE = 4, 64")
    assert small.count("1, 2, 16") == small.count("4, 64") == 1
    monkeypatch.setattr("sys.argv", ["hornbook.py", *map(str, arguments)])
    exec(small, {"__name__": "__main__", "__doc__": "", "__file__": str(folder / "hornbook.py")})


def test_it_prints_the_validation_loss_500_characters_and_what_is_next(text, monkeypatch, capsys):
    run_command(ROOT, monkeypatch, text, text, "--max_iters=2")
    printed = capsys.readouterr()
    parts = ("10,800 training characters of .*text.txt", r"validation loss \d\.\d{4}\n", "(.{500})")
    form = "\n".join([*parts, "", r"Next: .*train\.py configs/shakespeare.*\n"])
    assert re.fullmatch(form, printed.out, re.DOTALL), printed.out
    assert "2/2" in printed.err and "loss=" in printed.err


def test_without_a_text_it_reads_tiny_shakespeare_else_the_plays_beside_it(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir("/")  # its texts are beside the file, wherever it is started
    play = tmp_path / "data" / "plays" / "a.txt"
    shakespeare = tmp_path / "data" / "tinyshakespeare" / "input.txt"
    for path in (play, shakespeare):
        path.parent.mkdir(parents=True)
        path.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
        run_command(tmp_path, monkeypatch, "--max_iters=0")
        assert f"training characters of {path}\nvalidation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        ("folder", "Is a directory"),
        ("naïve\n".encode("latin-1") * 100, "'utf-8' codec can't decode byte 0xef in position 2"),
        (b"To be, or not to be.", "18 training characters; use 66 or more"),
    ],
)
def test_a_text_that_it_cannot_read_is_an_error_of_one_line(
    content, reason, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "text.txt"
    if content == "folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as leaving:
        run_command(ROOT, monkeypatch, path)
    assert leaving.value.code == 3
    line = capsys.readouterr().err
    assert line.startswith(f"error: {path}: ") and reason in line and line.count("\n") == 1


def test_a_byte_order_mark_is_no_character_of_the_text(text):
    vocabulary = hornbook.read([text])[0]
    text.write_text(text.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert hornbook.read([text])[0] == vocabulary


def test_a_terminal_that_lacks_a_character_gets_an_escape(text, monkeypatch):
    text.write_text(text.read_text(encoding="utf-8").replace("e", "é"), encoding="utf-8")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    run_command(ROOT, monkeypatch, text, "--max_iters=2")
    terminal.flush()
    assert rb"\xe9" in terminal.buffer.getvalue()


def test_it_has_at_most_286_lines():
    assert SOURCE.count("\n") <= 286
