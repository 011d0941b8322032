"""Does an epoch predict every character?

A text is cut into windows. In the window (start, end) the inputs are ids[start:end] and the targets
ids[start + 1 : end + 1]: each input predicts the next character. Characters are counted from 0, so
the last of 10 is number 9; it is a target and no input. Two mistakes in the function below leave
characters out, and mending them needs a third change.

Task: predict every character but the first exactly once. Hint: the last target of a window is no
input there. Whose input must it be? And the last window may be shorter than the others.
"""

import hornbook
from docs.exercises import expect


def windows(count, context):
    """Return the windows (start, end) of `count` characters, each of at most `context` inputs."""
    # two mistakes
    starts = range(0, count - context, context + 1)
    return [(start, start + context) for start in starts]


# --------------------------------------------------------------------------------------- the checks
for count, context in ((10, 3), (9, 3), (12, 5), (5, 8)):
    cut = windows(count, context)
    predicted = sorted(i + 1 for start, end in cut for i in range(start, end))
    missing = sorted(set(range(1, count)) - set(predicted))
    case = f"of {count} characters in windows of {context}"
    expect(not missing, f"{case}, those at {missing} are never predicted.")
    sentence = f"{case}, a target is number {predicted[-1]}, but the last one is {count - 1}."
    expect(predicted[-1] < count, sentence)
    expect(predicted == list(range(1, count)), f"{case}, these are predicted: {predicted}.")
    expect(all(end - start <= context for start, end in cut), f"{case}, one is too long.")

hornbook.BLOCK_SIZE = 3
epoch = hornbook.windows(9, 0)  # the first argument counts inputs: all characters but the last
print(f"""Windows share a character: the last target of one is the first input of the next. The
first epoch of hornbook.py, of 10 characters in windows of 3, would be
{epoch}: cut at random, shuffled, and still each once. Without the overlap, one
character in 4 would never be predicted.""")
