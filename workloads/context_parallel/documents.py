"""Documents of different lengths packed into one sequence: attention and positions begin anew with each."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_DOCUMENTS = 6
"""The most documents of a sequence: few, so that some are long."""


def document_lengths(sequence: int, seed: int) -> tuple[int, ...]:
    """Return the tokens of each document, a function of the seed alone: all sequences of all steps are cut alike."""
    draw = random.Random(f"documents {seed} {sequence}")
    cuts = sorted(draw.sample(range(1, sequence), min(_DOCUMENTS, sequence) - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, sequence], strict=True))


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the position at which each document starts."""
    return tuple(accumulate(lengths, initial=0))[:-1]


def document_of(position: int, starts: Sequence[int]) -> int:
    """Return the number of the document that has a position."""
    return bisect_right(starts, position) - 1


def places(positions: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return for each position its place in its own document."""
    return [position - starts[document_of(position, starts)] for position in positions]
