"""sample.py from the command line: samples, prompts, stop strings, copied passages and scores."""

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from common.messages import printable, quoted
from configs.command import parse_sample_options
from configs.schema import Config, DataConfig
from data.batches import Split, evaluation_windows
from sampling.novel import longest_passage
from storage.checkpoint import load_model
from tests.runs import run_sample
from tests.variants import random_model, save_model
from training.device import select_runtime
from training.evaluate import exact_loss

HEADING = re.compile(r"-+ sample \d -+\n")


# ------------------------------------------------------------------------------------------ samples


def test_sample_length(uninterrupted):
    """It is the prompt and max_new_tokens characters."""
    text, _ = run_sample(uninterrupted, "--prompt=So it:", "--max-new-tokens=100")
    assert text.startswith("So it:") and len(text) == len("So it:") + 100 + 1


def test_sample_3_alone(uninterrupted, monkeypatch):
    """It depends on its number and the seed alone."""
    options = [uninterrupted, "--prompt=So ", "--max-new-tokens=60"]
    together, _ = run_sample(*options, "--num-samples=3")
    numbers, texts = HEADING.findall(together), HEADING.split(together)[1:]
    assert numbers == [f"---------- sample {i} ----------\n" for i in (1, 2, 3)]
    assert [run_sample(*options, f"--sample={number}")[0] for number in (1, 2, 3)] == texts
    assert len({*texts, run_sample(*options, "--seed=8")[0]}) == 4
    monkeypatch.setattr(sample, "SAMPLES_PER_BATCH", 2)
    assert run_sample(*options, "--num-samples=3")[0] == together


def test_sample_without_a_prompt(uninterrupted):
    """It is the text after a newline."""
    text, _ = run_sample(uninterrupted, "--prompt=", "--max-new-tokens=50")
    assert run_sample(uninterrupted, "--prompt=\n", "--max-new-tokens=50")[0] == f"\n{text}"


def test_prompt_with_an_accent(tmp_path):
    """Of two characters: it is composed, unless the model has read both."""
    for vocabulary, text in {"\ncafe\xe9": "caf\xe9", "\ncafe\u0301": "cafe\u0301"}.items():
        path = tmp_path / f"{len(text)}.safetensors"
        save_model(path, random_model(vocab_size=len(vocabulary)), vocabulary)
        words = ["--prompt=cafe\u0301", "--max-new-tokens=0"]
        assert run_sample(path, *words) == (f"{text}\n", "")


def test_sample_by_layout_kernel_and_cache(uninterrupted):
    """The text is the same."""
    options = [uninterrupted, "--max-new-tokens=100", "--dtype=float32"]
    changed = ["--layout=heads", "--kernel=loop", "--cache=false"]
    assert run_sample(*options) == run_sample(*options, *changed)
    loaded = sample.LoadedModel(parse_sample_options([f"--ckpt={uninterrupted}", *changed]))
    generation = loaded.start_generation("So", [1])
    config = generation.model.config
    assert (config.layout, config.kernel, generation.cache) == ("heads", "loop", None)


# ------------------------------------------------------------------------- stop strings, passages


def test_stop_string(uninterrupted):
    """Each sample of a batch ends at its own, which may begin in the prompt."""
    options = [uninterrupted, "--prompt=So ", "--max-new-tokens=60"]
    texts = HEADING.split(run_sample(*options, "--num-samples=4")[0])[1:]
    ended = [re.sub("([en]).*", r"\1\n", text, count=1, flags=re.DOTALL) for text in texts]
    stops = ["--stop=e", "--stop=n", "--stop=\xe9t\xe9"]
    found, note = run_sample(*options, "--num-samples=4", *stops)
    assert HEADING.split(found)[1:] == ended != texts
    assert note == "stop: the model can never write '\xe9t\xe9'\n"
    assert run_sample(*options, f"--stop={texts[0][1:5]}")[0] == f"{texts[0][:5]}\n"


@given(st.text("abc", max_size=20), st.text("abc", max_size=30))
@settings(max_examples=200, deadline=None)
def test_longest_passage(text, original):
    """It is the first of the longest that both texts have."""
    passages = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    copied = [passage for passage in passages if passage in original]
    assert longest_passage(text, original) == max(copied, key=len, default="")


def test_novel_names_the_passage(uninterrupted, tmp_path):
    """Of what the model wrote; the prompt, which is in the text too, does not count."""
    prompt = "So what say you to this, my dear sir"
    options = [uninterrupted, f"--prompt={prompt}", "--max-new-tokens=300", "--num-samples=2"]
    plain, _ = run_sample(*options)
    passages = [text[100:131] for text in HEADING.split(plain)[1:]]
    (tmp_path / "text.txt").write_text("QQQ".join([prompt, *passages, ""]), encoding="utf-8")
    found = f"longest passage that is in {tmp_path}: 31 characters: "
    notes = "".join(f"{found}{printable(quoted(passage))}\n" for passage in passages)
    assert run_sample(*options, f"--novel={tmp_path}") == (plain, notes)


# ------------------------------------------------------------------------------------------- scores


def test_score_is_the_exact_loss(uninterrupted, tmp_path):
    """Without characters that the model does not know, and the licence of a book."""
    text, (model, tokenizer) = "So it is, and so it was.\n" * 20, load_model(uninterrupted)
    windows = evaluation_windows(Split(tokenizer.encode(text)), 16, 7)
    nats = exact_loss(model, windows, select_runtime("cpu", "float32"))
    bits = nats / np.log(2)
    mark = "*** {} OF THE PROJECT GUTENBERG EBOOK SO ***\n"
    book = f"{mark.format('START')}\xe9{text}{mark.format('END')}Licence.\n"
    (tmp_path / "text.txt").write_text(book, encoding="utf-8")
    output, notes = run_sample(uninterrupted, f"--score={tmp_path}", "--device=cpu")
    assert output == f"{nats:.4f} nats, {bits:.4f} bits per character, over 499 predictions\n"
    assert "outside the marks of Project" in notes
    assert "left out, never read: '\xe9' (U+00E9)\n" in notes


def test_score_has_the_encoding_of_training(tmp_path):
    vocabulary, text = "\nacf\xe9", tmp_path / "text.txt"
    model = random_model(vocab_size=len(vocabulary))
    config = Config(data=DataConfig(encoding="cp1252"), model=model.config)
    path = save_model(tmp_path / "last.safetensors", model, vocabulary, config)
    text.write_bytes(b"caf\xe9\n" * 9)
    assert "over 44 predictions" in run_sample(path, f"--score={text}")[0]
