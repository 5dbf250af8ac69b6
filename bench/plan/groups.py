"""Which ranks take part, and who sends how much to whom: groups, pairings and traffic, as pure arithmetic.

A group is written ``world``, ``node``, ``across``, ``contiguous:K``, ``strided:K``, ``pairs``, or as a mesh with one
of its axes, ``dp=2 tp=4:tp``. Every rank is in exactly one of the groups that a text means.

A traffic matrix is written as rows of numbers, one row a sender, its n entries the shares of the receivers: rows are
separated by ``;`` or new lines, entries by blanks or commas. Only proportions count."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress

from parbench.bench.files import read_text
from parbench.bench.text import UserError, did_you_mean, listed, one_of

Ranks = tuple[int, ...]
Pair = tuple[int, int]
Matrix = tuple[tuple[float, ...], ...]

MOST_RANKS = 1 << 17
INSIDE = ("ep", "etp")  # axes of a step's mesh that lie inside others: ranks are not multiplied by them
FORMS = "world, node, across, contiguous:K, strided:K, pairs, or a mesh and its axis such as dp=2 tp=4:tp"


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of ``dp=2,tp=4`` (or with spaces) and their sizes, outermost first."""
    axes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or len(size) > 9 or int(size) < 1 or name in axes:
            how = "write AXIS=SIZE,..., each axis once, as dp=2,tp=4"
            raise UserError(f"mesh {text!r} is not understood at {part!r}: {how}")
        axes[name] = int(size)
    if math.prod(size for name, size in axes.items() if name not in INSIDE) > MOST_RANKS:
        raise UserError(f"mesh {text!r} has more than {MOST_RANKS} ranks")
    if not axes:
        raise UserError("a mesh needs an axis: write AXIS=SIZE,..., such as dp=2,tp=4")
    return axes


def mesh_group(mesh: str, axis: str) -> str:
    axes = parse_mesh(mesh)
    if axis not in axes:
        raise UserError(f"--group {axis!r} is no axis of the mesh: it has {one_of(axes, axis)}")
    return f"{' '.join(f'{name}={size}' for name, size in axes.items())}:{axis}"


def groups_of(text: str, size: int, hosts: Sequence[str] | None = None) -> tuple[Ranks, ...]:
    """Return the groups that ``text`` means in a world of ``size`` ranks; ``UserError`` if it cannot form them."""
    if text == "world":
        return (tuple(range(size)),)
    if text in ("node", "across"):
        nodes = _by_key(hosts or [""] * size)  # without hosts, one for each rank, all are on one
        if text == "node":
            return nodes
        if len(nodes) < 2:
            raise UserError("group 'across' needs ranks on at least 2 nodes; all are on one")
        if len(sizes := {len(node) for node in nodes}) > 1:
            told = ", ".join(map(str, sorted(sizes)))
            raise UserError(f"group 'across' needs as many ranks on every node; nodes have {told}")
        return tuple(zip(*nodes, strict=True))
    kind, _, rest = ("contiguous:2" if text == "pairs" else text).rpartition(":")
    if "=" in kind:
        return _axis(kind, rest, size)
    each = int(rest) if rest.isdecimal() and len(rest) < 10 else 0
    if kind not in ("contiguous", "strided") or each < 1:
        hint = did_you_mean(text, ("world", "node", "across", "pairs"))
        raise UserError(f"group {text!r} is not known: it is {FORMS}{hint}")
    if size % each:
        raise UserError(f"group {text!r} cannot be formed: world size({size}) % {each} != 0")
    return _by_key([rank // each if kind == "contiguous" else rank % (size // each) for rank in range(size)])


def _by_key(keys: Sequence[object]) -> tuple[Ranks, ...]:
    """Return the ranks that share a key, in order of their first rank."""
    members: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    return tuple(map(tuple, members.values()))


def _axis(mesh: str, axis: str, size: int) -> tuple[Ranks, ...]:
    """Return the groups along an axis: ranks whose other coordinates are equal, the innermost axis varying fastest."""
    axes = parse_mesh(mesh)
    if math.prod(axes.values()) != size:
        product = " * ".join(f"{name}({length})" for name, length in axes.items())
        raise UserError(f"{product} != world size({size})")
    if axis not in (names := list(axes)):
        raise UserError(f"group {mesh}:{axis}: {axis!r} is no axis of the mesh; it has {listed(names)}")
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    return _by_key([rank - (rank // stride % axes[axis]) * stride for rank in range(size)])


def num_rounds(n: int) -> int:
    """Return how many rounds it takes for each of ``n`` ranks to meet every other: n - 1, or n where n is odd."""
    return max(n - 1 + n % 2, 1)


def round_pairs(n: int, index: int) -> tuple[Pair, ...]:
    """Return the pairs of a round of ``n`` ranks, the smaller rank first; where n is odd, one rank rests."""
    turns = num_rounds(n)
    if not 0 <= index < turns:
        raise UserError(f"round {index} is not one of the {turns} rounds of {n} ranks, 0 to {turns - 1}")
    # the circle method: the last rank stays, the others turn around it, and ranks meet whose places add up to twice the
    # round, modulo the number of rounds; one that would meet the missing last one rests
    across = [((index + k) % turns, (index - k) % turns) for k in range(1, (turns - 1) // 2 + 1)]
    fixed = [] if n % 2 or n < 2 else [(index, n - 1)]
    return tuple(sorted((min(pair), max(pair)) for pair in [*fixed, *across]))


def parse_pairs(text: str, n: int) -> tuple[Pair, ...]:
    """Return the pairs of a text such as ``0-3 1-2``; ``UserError`` unless each is of two of ``n`` ranks, met once."""
    pairs: list[Pair] = []
    met: set[int] = set()
    for word in text.split():
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", word, re.ASCII)
        if match is None:
            raise UserError(f"pairs {text!r}: {word!r} is no pair; write two ranks as 0-3, and pairs as '0-3 1-2'")
        pair = int(match[1]), int(match[2])
        for rank in pair:
            if rank >= n:
                raise UserError(f"pairs {text!r}: rank {rank} is not one of the {n} ranks")
            if rank in met:
                raise UserError(f"pairs {text!r}: rank {rank} is named twice; a rank meets one other in a round")
            met.add(rank)
        pairs.append((min(pair), max(pair)))
    return tuple(pairs)


def format_pairs(pairs: tuple[Pair, ...]) -> str:
    return " ".join(f"{one}-{other}" for one, other in pairs)


def pairs_of(n: int, index: int, text: str) -> tuple[Pair, ...]:
    return parse_pairs(text, n) if text.strip() else round_pairs(n, index)


def read_matrix(text: str) -> str:
    """Return a matrix, written out or in the file of this name, as one canonical line; ``UserError`` if it is none."""
    where = "traffic"
    if ";" not in text and not text.replace(".", "").replace(" ", "").isdigit():
        where = f"traffic file {text}"
        text = read_text(text, where)
    return ";".join(" ".join(f"{entry:g}" for entry in row) for row in parse_matrix(text, where))


def parse_matrix(text: str, where: str = "traffic") -> Matrix:
    rows = [row.replace(",", " ").split() for row in text.replace(";", "\n").splitlines() if row.strip()]
    if not rows or any(len(row) != len(rows) for row in rows):
        shape = ", ".join(str(len(row)) for row in rows) or "no row"
        raise UserError(f"{where} is not square: {len(rows)} rows of {shape} entries; write n rows of n")
    matrix = tuple(tuple(_entry(word, where, i, j) for j, word in enumerate(row)) for i, row in enumerate(rows))
    if not any(map(any, matrix)):
        raise UserError(f"{where} holds only zeros: nothing would be sent")
    return matrix


def _entry(word: str, where: str, row: int, column: int) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(word)) and value >= 0:
            return value
    raise UserError(f"{where} has {word!r} in row {row + 1}, column {column + 1}: allowed are numbers from 0 up")


def skewed(n: int, skew: float) -> Matrix:
    """Return shares in which every rank sends ``skew`` of its data to rank 0 and spreads the rest evenly."""
    return (tuple((1 - skew) / n + (skew if j == 0 else 0.0) for j in range(n)),) * n


def whole_counts(matrix: Matrix, count: int) -> tuple[tuple[int, ...], ...]:
    """Return elements for each sender and receiver: the busiest sender sends ``count``, the rest in proportion."""
    counts, busiest = [], max(map(sum, matrix))
    for row in matrix:
        shares = [entry * count / busiest for entry in row]
        whole = [math.floor(share + 1e-9) for share in shares]
        # the largest remainders get one more, so that each sender's sum stays
        remainders = sorted((few - share, j) for j, (few, share) in enumerate(zip(whole, shares, strict=True)))
        for _, j in remainders[: max(round(sum(shares)) - sum(whole), 0)]:
            whole[j] += 1
        counts.append(tuple(whole))
    return tuple(counts)
