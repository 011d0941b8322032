"""--init_from with new characters: the vocabulary grows, and nothing changes for the old ones."""

import torch

from convert import GPT2
from data.tokenizer import CharTokenizer
from storage.checkpoint import BEST, LAST, load_checkpoint, restore_weights
from tests.variants import checkpoint_of, random_model

OLD = "\n abdyz"
NEW = f"{OLD}!c\xe9\U0001f600"  # an old id stays the same
CHOICES = GPT2 | {"bias": True}


def test_new_characters_keep_the_logits():
    """Of old characters over old text."""
    old, grown = random_model(1, len(OLD), **CHOICES), random_model(3, len(NEW), **CHOICES)
    restore_weights(checkpoint_of(old, OLD), grown)
    ids = torch.from_numpy(CharTokenizer(OLD).encode("bad day\n")).long()
    with torch.no_grad():
        before, after = old(ids[None]), grown(ids[None])
    assert torch.allclose(after[..., : len(OLD)], before, atol=1e-5)


def test_new_characters_on_another_device(monkeypatch):
    """As on a GPU, which the device meta stands for; the checkpoint is on the CPU."""
    monkeypatch.setattr("storage.checkpoint.check_tensors", lambda *_: None)  # it reads numbers
    saved = checkpoint_of(random_model(1, len(OLD), **CHOICES), OLD)
    restore_weights(saved, random_model(3, len(NEW), **CHOICES).to("meta"))


def test_new_characters_are_added(uninterrupted, train_run, run, tmp_path):
    """And named; a run that is resumed has them already."""
    text = "Enter the ca\xf1\xf3n's cur\xe9 #.\n\u2028" * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    code, output = train_run(f"--init_from={uninterrupted}", "--max_iters=6")
    assert code == 0 and "new characters (5): '#' (U+0023), " in output, output
    old, new = load_checkpoint(uninterrupted / BEST), load_checkpoint(run / LAST)
    # also what sorts before the old ones
    assert new.vocabulary == old.vocabulary + "#\xe9\xf1\xf3\u2028"
    code, output = train_run("--max_iters=8", "--resume")
    assert code == 0 and "new characters (" not in output, output
