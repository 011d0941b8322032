"""hornbook.py: the computation of train.py; its command."""

import re

import pytest
import torch

import hornbook
from configs import schema
from configs.command import parse_train
from configs.schema import flat_settings
from data.batches import evaluation_windows
from data.corpus import load_corpus
from model.generate import last_logits
from tests.conftest import ROOT
from tests.runs import small_run_args
from train import train_step
from training.device import select_runtime
from training.distributed import World
from training.evaluate import evaluation_batch_size, exact_loss
from training.state import Run

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


def by_train(steps, text, *options):
    """Return what train.py computes: losses, exact validation loss, and the run."""
    recipe = ["configs/shakespeare.yaml", f"--sources={text}", f"--max_iters={steps}"]
    settings = parse_train([*recipe, "--dropout=0", *options]).config
    run = Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())
    losses = [train_step(run).loss for _ in range(steps)]
    context = settings.model.block_size
    batch_size = evaluation_batch_size(context, run.model.vocab_size)
    windows = evaluation_windows(run.corpus.val, context, batch_size)
    return losses, exact_loss(run.model, windows, run.runtime), run


def by_hornbook(steps, text):
    """Return what hornbook.py computes: losses, exact validation loss, and a text."""
    vocabulary, train_ids, validation_ids = hornbook.read([text])
    model = hornbook.GPT(len(vocabulary))
    losses = hornbook.train(model, train_ids, steps)
    val_loss = hornbook.validation_loss(model, validation_ids)
    return losses, val_loss, "".join(hornbook.generate(model, vocabulary, 60))


def assert_equal(steps, text, tolerance, *options):
    """Compare the losses of each step, and the validation losses; return a run and a text."""
    losses, val_loss, run = by_train(steps, text, *options)
    ours, our_val_loss, written = by_hornbook(steps, text)
    assert ours == pytest.approx(losses, rel=0, abs=tolerance)
    assert our_val_loss == pytest.approx(val_loss, rel=0, abs=tolerance)
    return run, written


def test_hornbook_has_the_settings():
    """Of configs/shakespeare.yaml."""
    settings = flat_settings(parse_train(["configs/shakespeare.yaml"]).config)
    settings |= {"temperature": schema.DEFAULT_TEMPERATURE}
    settings["adamw_betas"] = settings["beta1"], settings["beta2"]
    constants = {name: value for name, value in vars(hornbook).items() if name.isupper()}
    del constants["F"], constants["GPT"]
    assert constants == {name: settings[name.lower()] for name in constants}
    assert settings["muon_learning_rate"] == settings["learning_rate"]


def test_hornbook_computes_what_train_does(text, monkeypatch):
    """76 steps of a small model: a step of warm-up, three new epochs, the cooldown; a text."""
    for name, value in {"N_LAYER": 2, "N_EMBD": 64, "BLOCK_SIZE": 64}.items():
        monkeypatch.setattr(hornbook, name, value)
    run, written = assert_equal(
        76, text, TOLERANCE, "--n_layer=2", "--n_embd=64", "--block_size=64"
    )
    ids = run.corpus.tokenizer.encode(f"\n{written}")[None].astype(int)
    generator = torch.Generator().manual_seed(hornbook.SEED)
    for n in range(1, 61):  # drawn from the same probabilities
        logits = torch.from_numpy(last_logits(run.model.eval(), ids[:, :n])).float()
        probabilities = (logits / hornbook.TEMPERATURE).softmax(-1)
        assert torch.multinomial(probabilities, 1, generator=generator).item() == ids[0, n]


def test_hornbook_command(text, tmp_path, monkeypatch, capsys):
    """It reads Tiny Shakespeare beside it, else the plays, or texts, which may have a mark."""
    small = (ROOT / "hornbook.py").read_text(encoding="utf-8")
    for name, value in {"BLOCK_SIZE": 64, "N_LAYER": 1, "N_EMBD": 16}.items():
        small, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", small, flags=re.M)
        assert count == 1
    play, shakespeare, mine = (
        tmp_path / name for name in ("data/plays/a.txt", "data/tinyshakespeare/input.txt", "b.txt")
    )
    for path, words, read in (
        (play, [], []),  # none: the plays
        (shakespeare, [], [shakespeare]),
        (mine, [str(mine)], [str(mine)]),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.read_text(encoding="utf-8"), encoding="utf-8-sig")
        monkeypatch.setattr("sys.argv", ["hornbook.py", *words, "--max_iters=2"])
        names = {"__name__": "__main__", "__doc__": "", "__file__": f"{tmp_path}/hornbook.py"}
        exec(small, names)
        assert names["texts"] == read
        printed = capsys.readouterr()
        assert re.fullmatch(r"validation loss \d\.\d{4}\n\n(?s:.{63})", printed.out)
        assert "2/2" in printed.err and "loss=" in printed.err
