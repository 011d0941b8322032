"""Less common runs: a fallback text, saves by the clock, another length."""

from types import SimpleNamespace

from storage import folder as folder_module
from storage.checkpoint import LAST, load_checkpoint
from tests.runs import STEPS, at_step, raised, small_run_args, train


def test_fallback_stays(tmp_path, monkeypatch):
    """Even if the download works later: another text is another run."""
    *words, text = small_run_args(tmp_path)
    fallback, run, config = text.partition("=")[2], tmp_path / "run", tmp_path / "mine.yaml"
    source = f"https://nowhere.invalid/corpus/input.txt#sha256={'0' * 64}"
    config.write_text(f"sources: {source!r}\nfallback: {fallback}\n")
    monkeypatch.setattr("data.text.urlopen", raised(OSError("no network")))
    code, output = train(config, *words[1:], "--max_iters=4", f"--out_dir={run}")
    assert code == 0 and f"training on {fallback}, losses on it are not comparable" in output
    monkeypatch.setattr("data.text.urlopen", raised(AssertionError("downloaded")))
    code, output = train(run, "--max_iters=5")
    assert code == 0 and "not comparable" not in output, output
    assert load_checkpoint(run / LAST).settings.data.sources == (fallback,)


def test_save_every_minute(train_run, monkeypatch):
    saved, clock, to_bytes = set(), SimpleNamespace(now=0.0), folder_module.to_bytes
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    noted = lambda saving: saved.add(saving.progress.step) or to_bytes(saving)  # noqa: E731
    monkeypatch.setattr(folder_module, "to_bytes", noted)
    for step in range(STEPS):
        at_step(monkeypatch, step, lambda: setattr(clock, "now", clock.now + 20))
    assert train_run("--eval_interval=99")[0] == 0
    assert saved == {*range(0, STEPS + 1, 3)}


def test_longer_run_keeps_what_auto_was(options, tmp_path):
    """Unless options choose it anew."""
    run, anew = tmp_path / "run", ["--dropout=auto", "--eval_interval=auto", "--device=auto"]
    words = ["--batch_size=16", "--n_embd=32", *anew, "--max_iters=10", f"--out_dir={run}"]
    assert train(*options, *words)[0] == 0
    for more, expected in (["--max_iters=12"], (0, 10)), (["--max_iters=120", *anew], (0.2, 12)):
        assert train(run, *more)[0] == 0
        settings = load_checkpoint(run / LAST).settings
        assert (settings.model.dropout, settings.train.eval_interval) == expected
        assert settings.device == "auto"  # what depends on the machine stays a word
