"""Ten exercises, in the order of docs/exercises.md: python -m docs.exercises.guess"""


def expect(condition: bool, sentence: str) -> None:
    """End the exercise with a sentence unless a condition holds."""
    if not condition:
        raise SystemExit(f"Not yet: {sentence}")
