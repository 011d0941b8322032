"""Does an epoch predict every character?

A text is cut into windows. In the window (start, end) the inputs are ids[start:end] and the targets
ids[start + 1 : end + 1]: each input predicts the next character. Characters are counted from 0, so
the last of 10 is number 9; it is a target and no input. Three mistakes in the function below leave
characters out.

Task: predict every character but the first exactly once. Hint: the last target of a window is no
input there. Whose input must it be? And the last window may be shorter than the others.
"""

import hornbook
from docs.exercises import expect


def windows(length, context):
    """Return the windows (start, end) of a text, each of at most `context` inputs."""
    # three mistakes
    starts = range(0, length - context, context + 1)
    return [(start, start + context) for start in starts]


# --------------------------------------------------------------------------------------- the checks
for length, context in ((10, 3), (9, 3), (12, 5), (5, 8)):
    cut = windows(length, context)
    predicted = sorted(i + 1 for start, end in cut for i in range(start, end))
    missing = sorted(set(range(1, length)) - set(predicted))
    case = f"of {length} characters in windows of {context}"
    expect(not missing, f"{case}, those at {missing} are never predicted.")
    expect(predicted == list(range(1, length)), f"{case}, these are predicted: {predicted}.")
    expect(all(end - start <= context for start, end in cut), f"{case}, one is too long.")

hornbook.BLOCK_SIZE = 3
epoch = hornbook.windows(9, 0)
print(f"""Windows share a character: the last target of one is the first input of the next. The
first epoch of hornbook.py, of 10 characters in windows of 3, would be {epoch}:
cut at random, shuffled, and still each once. Without the overlap, one character in 4 would never
be predicted.""")
