"""hornbook.py: the computation of train.py; its command."""

import io
import re

import pytest
import torch
from tqdm import tqdm

import hornbook
from configs import schema
from configs.command import parse_train
from configs.schema import settings_by_name
from data.batches import IGNORE_INDEX, Batches, evaluation_windows
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


def by_train(steps, text, *options):
    """Return what train.py computes: losses, exact validation loss, and the run."""
    recipe = ["configs/shakespeare.yaml", f"--sources={text}", "--dropout=0"]
    settings = parse_train([*recipe, *options]).config
    run = Run(settings, load_corpus(settings.data), select_runtime("cpu", "float32"), World())
    losses = [train_step(run).loss for _ in range(steps)]
    context = settings.model.block_size
    batch_size = evaluation_batch_size(context, run.model.vocab_size)
    windows = evaluation_windows(run.corpus.val, context, batch_size)
    return losses, exact_loss(run.model, windows, run.runtime), run


def by_hornbook(steps, text, max_iters):
    """Return what hornbook.py computes: losses, exact validation loss, and a text."""
    vocabulary, train_ids, validation_ids = hornbook.read([text])
    model = hornbook.GPT(len(vocabulary))
    with pytest.MonkeyPatch.context() as patch:  # the first steps of a run of max_iters
        patch.setattr(hornbook, "tqdm", lambda all_steps: tqdm(all_steps[:steps]))
        losses = hornbook.train(model, train_ids, max_iters)
    val_loss = hornbook.validation_loss(model, validation_ids)
    return losses, val_loss, "".join(hornbook.generate(model, vocabulary, 60))


def assert_equal(steps, text, tolerance, *options):
    """Compare the losses of each step, and the validation losses; return a run and a text."""
    losses, val_loss, run = by_train(steps, text, *options)
    ours, our_val_loss, written = by_hornbook(steps, text, run.settings.train.max_iters)
    assert len(ours) == steps
    assert ours == pytest.approx(losses, rel=0, abs=tolerance)
    assert our_val_loss == pytest.approx(val_loss, rel=0, abs=tolerance)
    return run, written


def test_hornbook_has_the_settings():
    """Of configs/shakespeare.yaml."""
    settings = settings_by_name(parse_train(["configs/shakespeare.yaml"]).config)
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
    sizes = ["--n_layer=2", "--n_embd=64", "--block_size=64"]
    run, written = assert_equal(76, text, TOLERANCE, "--max_iters=76", *sizes)
    ids = run.corpus.tokenizer.encode(f"\n{written}")[None].astype(int)
    generator = torch.Generator().manual_seed(hornbook.SEED)
    for n in range(1, 61):  # drawn from the same probabilities
        logits = torch.from_numpy(last_logits(run.model.eval(), ids[:, :n])).float()
        probabilities = (logits / hornbook.TEMPERATURE).softmax(-1)
        assert torch.multinomial(probabilities, 1, generator=generator).item() == ids[0, n]


@pytest.mark.parametrize(
    "contents",
    [
        ("To be,\nor not", "to be\n", "", "that is") ,  # lines that do not end; no characters
        ("question " * 60,),  # shorter than the context
        ("question " * 63 + "now",),  # one window of exactly the context
    ],
)  # fmt: skip
def test_hornbook_reads_as_train_does(contents, tmp_path):
    """The same ids and windows."""
    paths = [tmp_path / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    recipe = ["configs/shakespeare.yaml", *(f"--sources={path}" for path in paths)]
    corpus = load_corpus(parse_train(recipe).config.data)
    vocabulary, train_ids, val_ids = hornbook.read(paths)
    assert "".join(vocabulary) == corpus.tokenizer.vocabulary
    assert train_ids.tolist() == corpus.train.ids.tolist()
    assert val_ids.tolist() == corpus.val.ids.tolist()
    theirs = Batches(corpus.train, hornbook.BLOCK_SIZE, hornbook.BATCH_SIZE, hornbook.SEED)
    for i, (x, y) in zip(range(5), hornbook.batches(train_ids), strict=False):
        T = x.size(1)  # of the longest window: hornbook.py pads no further
        assert x.tolist() == theirs[i][0][:, :T].tolist()
        assert y.tolist() == theirs[i][1][:, :T].tolist()
        assert (theirs[i][1][:, T:] == IGNORE_INDEX).all()


def run_command(folder, *words):
    """Run a small hornbook.py that lies in a folder; return its names."""
    source = (ROOT / "hornbook.py").read_text(encoding="utf-8")
    for name, value in {"BLOCK_SIZE": 64, "N_LAYER": 1, "N_EMBD": 16}.items():
        source, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", source, flags=re.M)
        assert count == 1
    names = {"__name__": "__main__", "__doc__": "", "__file__": f"{folder}/hornbook.py"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hornbook.py", *words])
        exec(source, names)
    return names


def test_hornbook_command(text, tmp_path, capsys):
    """It reads Tiny Shakespeare beside it, else the plays, or texts, which may have a mark."""
    play, shakespeare, mine = (
        tmp_path / name for name in ("data/plays/a.txt", "data/tinyshakespeare/input.txt", "b.txt")
    )
    for path, words, read in (
        (play, [], [play]),
        (shakespeare, [], [shakespeare]),
        (mine, [str(mine)], [str(mine)]),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.read_text(encoding="utf-8"), encoding="utf-8-sig")
        run_command(tmp_path, *words, "--max_iters=2")
        printed = capsys.readouterr()
        about = f"training on 5,400 characters of {read[0]}\nvalidating on 600\n"
        assert re.fullmatch(rf"{about}validation loss \d\.\d{{4}}\n\n(?s:.{{63}})", printed.out)
        assert "2/2" in printed.err and "loss=" in printed.err and "validation: " in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.txt"], "a.txt: No such file or directory; name a .txt file"),
        (["."], ".: Is a directory; name a .txt file"),
        (["~/latin.txt"], "~/latin.txt: not UTF-8; convert it: iconv -f cp1252 -t UTF-8 OLD > NEW"),
        (["short.txt"], "short.txt: too few characters, or all the same; name a longer text"),
        (["short.txt", "--max_iters=0"], "--max_iters: 0; name 1 or more"),
        (["--max_iters=x"], "argument --max_iters: invalid int value: 'x'"),
    ],
)
def test_hornbook_mistakes(words, message, tmp_path, monkeypatch, capsys):
    """One line, and exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "latin.txt").write_text("Café\n" * 99, encoding="latin-1")
    (tmp_path / "short.txt").write_text("ten chars.")
    with pytest.raises(SystemExit) as leaving:
        run_command(tmp_path, *words)
    assert leaving.value.code == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("notebook", [False, True])
def test_hornbook_output(notebook, text, tmp_path, monkeypatch):
    """Of characters that the output lacks; of streams that cannot be reconfigured."""
    text.write_text("\N{SNOWMAN}" + text.read_text(encoding="utf-8"), encoding="utf-8")
    output = io.StringIO() if notebook else io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("torch.multinomial", lambda p, *_, **__: torch.full((1, 1), p.size(1) - 1))
    run_command(tmp_path, str(text), "--max_iters=1")
    output.seek(0)
    assert output.read().endswith("\N{SNOWMAN}" if notebook else r"\u2603")
