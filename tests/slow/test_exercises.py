"""The exercises: each fails with a sentence until it is solved; here are the solutions."""

import re
import runpy

import pytest

import hornbook
from tests.conftest import ROOT

EXERCISES = sorted((ROOT / "docs" / "exercises").glob("[a-z]*.py"))
# the functions with a gap, in the order of docs/exercises.md
SOLUTIONS = """
def uniform_loss(V):
    return math.log(V)

def perplexity(loss):
    return math.exp(loss)

def first_loss(V, sigma):
    return math.log(V) + sigma**2 / 2

def probabilities(logits, temperature):
    odds = np.exp((logits - logits.max()) / temperature)
    return odds / odds.sum()

def sample(seed, i, length):
    rng, text = np.random.default_rng((seed, i)), "\\n"
    for _ in range(length):
        counts = COUNTS[VOCABULARY.index(text[-1])]
        text += rng.choice(VOCABULARY, p=counts / counts.sum())
    return text[1:]

def windows(count, context):
    starts = range(0, count - 1, context)
    return [(start, min(start + context, count - 1)) for start in starts]

def future(T, S):
    return torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)

def project(x, weight, H):
    heads = (x @ weight.T).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, 3D)
    return heads.chunk(3, dim=-1)

def rotate(x, position):
    D = len(x)
    angles = position * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    a, b = x[: D // 2], x[D // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin])

def forget(model, cache):
    newer = hornbook.Cache(1)
    model(cache.ids[:, cache.ids.size(1) // 2 :], newer)
    return newer

def changes():
    return {"LEARNING_RATE": 0.04}
"""


@pytest.fixture(autouse=True)
def restore_hornbook():
    """An exercise is a process of its own, and may change constants of hornbook.py."""
    before = dict(vars(hornbook))
    yield
    vars(hornbook).update(before)


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_exercise_fails_until_solved(path, capsys):
    """With one sentence; then it says what was learned."""
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module(f"docs.exercises.{path.stem}", run_name="__main__")
    assert re.fullmatch(r"Not yet: [^\n]+\.", leaving.value.code)
    assert capsys.readouterr().out == ""
    gaps, checks = re.split("# -+ the checks\n", path.read_text(encoding="utf-8"))
    solved = gaps + SOLUTIONS + checks
    exec(compile(solved, path, "exec"), {"__name__": "__main__", "__file__": str(path)})
    assert 150 < len(capsys.readouterr().out) < 500
