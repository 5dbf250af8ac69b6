"""Groups of ranks, pairings and uneven shards, as pure arithmetic.

A group is written ``world``, ``node``, ``across``, ``contiguous:K``, ``strided:K``, ``pairs``, or
as a mesh with one of its axes, ``dp=2,tp=4:tp``. Every rank is in exactly one of the groups that a
text describes.
"""

import math
import re
from collections.abc import Sequence

from parbench.bench.text import UserError, format_list, suggest_similar

Ranks = tuple[int, ...]
Pair = tuple[int, int]

MOST_RANKS = 1 << 17
# Axes of a step's mesh that lie inside others and do not multiply the number of ranks.
INSIDE = ("ep", "etp")
FORMS = (
    "world, node, across, contiguous:K, strided:K, pairs, or an axis of a mesh such as dp=2,tp=4:tp"
)


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes of a mesh such as ``dp=2,tp=4`` by name, outermost first."""
    axes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([a-zA-Z]\w*)=(\d{1,9})", part, re.ASCII)
        if match is None or int(match[2]) < 1 or match[1] in axes:
            hint = "write AXIS=SIZE,..., each axis once, as dp=2,tp=4"
            raise UserError(f"mesh {text!r} is not understood at {part!r}: {hint}")
        axes[match[1]] = int(match[2])
    if math.prod(size for name, size in axes.items() if name not in INSIDE) > MOST_RANKS:
        raise UserError(f"mesh {text!r} has more than {MOST_RANKS} ranks")
    if not axes:
        raise UserError("a mesh needs an axis: write AXIS=SIZE,..., such as dp=2,tp=4")
    return axes


def join_mesh_axes(groups: str) -> str:
    """Return the text with blanks between the axes of each mesh, because commas separate groups."""
    return re.sub(r"(?<==)(\d+),(?=\w+=)", r"\1 ", groups)


def form_groups(text: str, size: int, hosts: Sequence[str] | None = None) -> tuple[Ranks, ...]:
    """Return the groups that ``text`` describes in a world of ``size`` ranks.

    ``hosts`` holds the host of each rank. Without it all ranks are on one node. Raises
    ``UserError`` if the groups cannot be formed.
    """
    if text == "world":
        return (tuple(range(size)),)
    if text == "node":
        return _group_by_key(hosts or [""] * size)
    if text == "across":
        return _form_groups_across(_group_by_key(hosts or [""] * size))
    kind, _, argument = ("contiguous:2" if text == "pairs" else text).rpartition(":")
    if "=" in kind:
        return _form_groups_along_axis(kind, argument, size)
    group_size = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if kind not in ("contiguous", "strided") or group_size < 1:
        hint = suggest_similar(text, ("world", "node", "across", "pairs"))
        raise UserError(f"group {text!r} is not known: it is {FORMS}{hint}")
    if size % group_size:
        raise UserError(f"group {text!r} cannot be formed: world size({size}) % {group_size} != 0")
    if kind == "contiguous":
        return _group_by_key([rank // group_size for rank in range(size)])
    return _group_by_key([rank % (size // group_size) for rank in range(size)])


def _form_groups_across(nodes: Sequence[Ranks]) -> tuple[Ranks, ...]:
    """Return groups that each have one rank of every node."""
    if len(nodes) < 2:
        raise UserError("group 'across' needs ranks on at least 2 nodes; all are on one")
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1:
        numbers = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"group 'across' needs as many ranks on every node; nodes have {numbers}")
    return tuple(zip(*nodes, strict=True))


def _group_by_key(keys: Sequence[object]) -> tuple[Ranks, ...]:
    """Return the groups of ranks with equal keys, in order of their first rank."""
    members: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    return tuple(map(tuple, members.values()))


def _form_groups_along_axis(mesh: str, axis: str, size: int) -> tuple[Ranks, ...]:
    """Return the groups of ranks that differ only in their coordinate on this axis of the mesh.

    The innermost axis of the mesh varies fastest.
    """
    axes = parse_mesh(mesh)
    if math.prod(axes.values()) != size:
        product = " * ".join(f"{name}({length})" for name, length in axes.items())
        raise UserError(f"{product} != world size({size})")
    names = list(axes)
    if axis not in names:
        raise UserError(
            f"group {mesh}:{axis}: {axis!r} is not an axis of the mesh; it has {format_list(names)}"
        )
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    first_ranks = [rank - (rank // stride % axes[axis]) * stride for rank in range(size)]
    return _group_by_key(first_ranks)


def count_rounds(n: int) -> int:
    """Return the number of rounds in which each of ``n`` ranks meets every other.

    It is n - 1, or n if n is odd.
    """
    return max(n - 1 + n % 2, 1)


def list_round_pairs(n: int, index: int) -> tuple[Pair, ...]:
    """Return the pairs of a round of ``n`` ranks, the smaller rank first.

    If n is odd, one rank has no partner. This is the circle method of round-robin tournaments:
    the last rank stays and the others rotate around it. The numbers of two partners add up to
    twice the round, modulo the number of rounds.
    """
    rounds = count_rounds(n)
    if not 0 <= index < rounds:
        raise UserError(
            f"round {index} is not one of the {rounds} rounds of {n} ranks, 0 to {rounds - 1}"
        )
    pairs = []
    if n % 2 == 0 and n >= 2:
        pairs.append((index, n - 1))
    for distance in range(1, (rounds - 1) // 2 + 1):
        partners = (index + distance) % rounds, (index - distance) % rounds
        pairs.append((min(partners), max(partners)))
    return tuple(sorted(pairs))


def parse_pairs(text: str, n: int) -> tuple[Pair, ...]:
    """Return the pairs of a text such as ``0-3 1-2``.

    Raises ``UserError`` if a rank occurs twice or is not one of ``n``.
    """
    pairs: list[Pair] = []
    paired_ranks: set[int] = set()
    for word in text.split():
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", word, re.ASCII)
        if match is None:
            hint = "write two ranks as 0-3, and pairs as '0-3 1-2'"
            raise UserError(f"pairs {text!r}: {word!r} is not a pair; {hint}")
        pair = int(match[1]), int(match[2])
        for rank in pair:
            if rank >= n:
                raise UserError(f"pairs {text!r}: rank {rank} is not one of the {n} ranks")
            if rank in paired_ranks:
                raise UserError(
                    f"pairs {text!r}: rank {rank} is named twice; a rank meets one other in a round"
                )
            paired_ranks.add(rank)
        pairs.append((min(pair), max(pair)))
    return tuple(pairs)


def format_pairs(pairs: tuple[Pair, ...]) -> str:
    """Return pairs as text such as ``0-3 1-2``, which ``parse_pairs`` reads."""
    return " ".join(f"{first}-{second}" for first, second in pairs)


def choose_pairs(n: int, index: int, text: str) -> tuple[Pair, ...]:
    """Return the pairs in ``text``, or the pairs of round ``index`` if ``text`` is empty."""
    return parse_pairs(text, n) if text.strip() else list_round_pairs(n, index)


def split_with_skew(num_ranks: int, skew: float, count: int) -> tuple[int, ...]:
    """Return the number of elements, of ``count``, that each rank gets.

    Rank 0 gets a share ``skew`` of all elements in addition to an equal part, and the remainder.
    """
    even = int((1 - skew) * count / num_ranks + 1e-9)
    return (count - even * (num_ranks - 1), *[even] * (num_ranks - 1))
