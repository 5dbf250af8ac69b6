"""Who sends how much to whom in an uneven all-to-all: a skew knob or a matrix, as whole elements. Pure.

A matrix is written as rows of numbers, one row a sender, its n entries the shares of the receivers: rows are separated
by ``;`` or new lines, entries by blanks or commas. Only proportions count: the busiest sender sends the case's size.
"""

import math
from collections.abc import Sequence

from bench.errors import UserError
from bench.rows import read_text

Matrix = tuple[tuple[float, ...], ...]
Counts = tuple[tuple[int, ...], ...]


def read_matrix(text: str) -> str:
    """Return a matrix, written out or in the file of this name, as one canonical line; ``UserError`` if it is none."""
    where = "traffic"
    if not _looks_like_matrix(text):
        where = f"traffic file {text}"
        text = read_text(text, where)
    matrix = _parse(text, where)
    return ";".join(" ".join(f"{entry:g}" for entry in row) for row in matrix)


def parse_matrix(text: str) -> Matrix:
    """Return the entries of a canonical line."""
    return _parse(text, "traffic")


def _looks_like_matrix(text: str) -> bool:
    return ";" in text or text.replace(".", "").replace(" ", "").isdigit()


def _parse(text: str, where: str) -> Matrix:
    rows = [row.replace(",", " ").split() for row in text.replace(";", "\n").splitlines() if row.strip()]
    if not rows or any(len(row) != len(rows) for row in rows):
        shape = ", ".join(str(len(row)) for row in rows) or "no row"
        raise UserError(f"{where} is not square: {len(rows)} rows of {shape} entries; write n rows of n")
    matrix = tuple(tuple(_entry(word, where, i, j) for j, word in enumerate(row)) for i, row in enumerate(rows))
    if not any(entry for row in matrix for entry in row):
        raise UserError(f"{where} holds only zeros: nothing would be sent")
    return matrix


def _entry(word: str, where: str, row: int, column: int) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{where} has {word!r} in row {row + 1}, column {column + 1}: allowed are numbers from 0 up")
    return value


def skewed(n: int, skew: float) -> Matrix:
    """Return shares in which every rank sends ``skew`` of its data to rank 0 and spreads the rest evenly."""
    row = tuple((1 - skew) / n + (skew if j == 0 else 0.0) for j in range(n))
    return (row,) * n


def whole_counts(matrix: Matrix, count: int) -> Counts:
    """Return elements for each sender and receiver: the busiest sender sends ``count``, the rest in proportion."""
    busiest = max(sum(row) for row in matrix)
    return tuple(_apportion([entry * count / busiest for entry in row]) for row in matrix)


def _apportion(shares: Sequence[float]) -> tuple[int, ...]:
    """Round shares to whole numbers with the same sum (largest remainder)."""
    floors = [math.floor(share + 1e-9) for share in shares]
    missing = round(sum(shares)) - sum(floors)
    by_remainder = sorted(range(len(shares)), key=lambda j: floors[j] - shares[j])
    for j in by_remainder[: max(missing, 0)]:
        floors[j] += 1
    return tuple(floors)


def size_elements(counts: Counts) -> int:
    """Return S in elements: the maximum over ranks of what it sends and what it receives, itself included."""
    sent = [sum(row) for row in counts]
    received = [sum(row[j] for row in counts) for j in range(len(counts))]
    return max(*sent, *received)
