"""hornbook.py: the computation of train.py, bit for bit; its command."""

import re

import pytest
import torch

import hornbook
from configs.command import parse_train
from configs.schema import DEFAULT_TEMPERATURE
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
# the default kernel, sdpa, and bfloat16 are other computations
OPTIONS = ["--device=cpu", "--dtype=float32", "--kernel=batched"]
# what `auto` gives for 1,400 steps of Tiny Shakespeare
OPTIONS += ["--dropout=0", "--logit_scale=0.91"]
# Seen equal with MKL. Another BLAS, such as Apple's, may sum a matrix and a batch of them
# differently.
TOLERANCE = 0.0 if torch.backends.mkl.is_available() else 1e-5


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
    """Return what train.py computes: losses, weights, exact loss, and a text."""
    files = ["configs/shakespeare.yaml", f"--sources={text}", f"--max_iters={steps}"]
    settings = parse_train([*files, *OPTIONS, *options]).new_settings()
    run = Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())
    losses = [train_step(run).loss for _ in range(steps)]

    context, tokenizer = settings.model.block_size, run.corpus.tokenizer
    batch_size = batch_size_for(context, run.model.vocab_size)
    windows = evaluation_windows(run.corpus.val, context, batch_size)
    val_loss = exact_loss(run.model, windows, run.runtime)

    start = torch.from_numpy(tokenizer.encode(tokenizer.start_character).astype(int))[None]
    sampler = Sampler(settings.seed, temperature=DEFAULT_TEMPERATURE)
    written = [int(i) for i in generate(run.model, start, sampler, characters)]
    return losses, list(run.model.parameters()), val_loss, tokenizer.decode(written)


def by_hornbook(steps, text, characters):
    """Return what hornbook.py computes: losses, weights, exact loss, and a text."""
    vocabulary, train_ids, validation_ids = hornbook.read([text])
    model = hornbook.GPT(len(vocabulary))
    losses = []
    for loss in hornbook.train(model, train_ids, steps):
        losses.append(loss)
        if len(losses) == 2:
            hornbook.validation_loss(model, validation_ids)  # training goes on as if it were not
    val_loss = hornbook.validation_loss(model, validation_ids)
    written = "".join(hornbook.write(model, vocabulary, characters))
    return losses, list(model.parameters()), val_loss, written


def assert_same(ours, theirs):
    losses, weights, val_loss, written = zip(ours, theirs, strict=True)
    for step, (a, b) in enumerate(zip(*losses, strict=True), 1):
        assert abs(a - b) <= TOLERANCE, f"the loss of step {step}: {a} is not {b}"
    for a, b in zip(*weights, strict=True):
        assert (a - b).abs().max() <= TOLERANCE
    assert abs(val_loss[0] - val_loss[1]) <= TOLERANCE
    assert written[0] == written[1]


def test_its_constants_are_what_auto_gives_at_the_end_of_the_recipe(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 53_114, encoding="utf-8")  # as Tiny Shakespeare
    command = parse_train(["configs/shakespeare.yaml", f"--sources={text}"])
    settings = command.new_settings()
    run = Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())
    run.progress.step = settings.train.max_iters
    run.update_logit_scale()
    assert (settings.train.max_iters, run.settings.model.dropout) == (hornbook.STEPS, 0)
    assert run.model.config.logit_scale == hornbook.LOGIT_SCALE


def test_it_computes_what_train_py_does_bit_for_bit(text, monkeypatch):
    """75 steps of a small model: a step of warm-up, three new epochs, the cooldown."""
    for name, value in {"LAYERS": 2, "WIDTH": 64, "CONTEXT": 64}.items():
        monkeypatch.setattr(hornbook, name, value)
    small = ["--n_layer=2", "--n_embd=64", "--block_size=64"]
    assert_same(by_hornbook(75, text, 60), by_train(75, text, 60, *small))


def test_it_computes_what_train_py_does_bit_for_bit_at_full_size(text):
    assert_same(by_hornbook(1, text, 5), by_train(1, text, 5))


# -------------------------------------------------------------------------------------- its command


def run_command(folder, monkeypatch, *arguments):
    """Run hornbook.py, as if it were in a folder, with a small model."""
    small = SOURCE.replace("LAYERS, HEADS, WIDTH = 3, 4, 256", "LAYERS, HEADS, WIDTH = 1, 2, 16")
    small = small.replace("1400, 4, 512", "1400, 4, 64")
    assert small.count("1, 2, 16") == small.count("1400, 4, 64") == 1
    monkeypatch.setattr("sys.argv", ["hornbook.py", *map(str, arguments)])
    exec(small, {"__name__": "__main__", "__doc__": "", "__file__": str(folder / "hornbook.py")})


def test_it_prints_the_validation_loss_500_characters_and_what_is_next(text, monkeypatch, capsys):
    run_command(ROOT, monkeypatch, text, text, "--steps=2")
    printed = capsys.readouterr()
    parts = ("10,800 training characters of .*text.txt", r"validation loss \d\.\d{4}\n", "(.{500})")
    form = "\n".join([*parts, "", r"Next: .*train\.py configs/shakespeare.*\n"])
    assert re.fullmatch(form, printed.out, re.DOTALL), printed.out
    assert "2/2" in printed.err and "loss=" in printed.err


def test_without_a_text_it_reads_tiny_shakespeare_else_the_plays_beside_it(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir("/")  # its texts are beside the file, wherever it is started
    for name in ("plays/a.txt", "tinyshakespeare/input.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
        run_command(tmp_path, monkeypatch, "--steps=0")
        assert f"training characters of {path}\nvalidation" in capsys.readouterr().out
        path.write_text("", encoding="utf-8")  # the next one is preferred to this one


def test_a_text_shorter_than_a_window_is_an_error_of_one_sentence(text, monkeypatch, capsys):
    text.write_text("To be, or not to be.", encoding="utf-8")
    with pytest.raises(SystemExit) as leaving:
        run_command(ROOT, monkeypatch, text, "--steps=0")
    assert leaving.value.code == 3
    assert capsys.readouterr().err == "error: 18 training characters; 66 are needed\n"


def test_it_can_be_read_in_one_sitting():
    assert SOURCE.count("\n") < 300
