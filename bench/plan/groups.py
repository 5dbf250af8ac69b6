"""Groups of ranks, pairings and uneven shards, as pure arithmetic.

A group is written ``world``, ``node``, ``across``, ``pairs``, or as a mesh with one of its axes,
``dp=2,tp=4:tp``. Every rank is in exactly one of the groups that a text describes.
"""

import math
import re
from collections.abc import Mapping, Sequence

from parbench.bench.text import UserError, format_list

Ranks = tuple[int, ...]
"""The ranks of a process group."""
Pair = tuple[int, int]
"""Two ranks that exchange messages."""

MAX_RANKS = 1 << 17
"""The largest number of ranks that a mesh may have."""
# Axes of a step's mesh that lie inside others and do not multiply the number of ranks.
INSIDE = ("ep", "etp")
FORMS = "world, node, across, pairs, or an axis of a mesh such as dp=2,tp=4:tp"
"""The texts that describe groups of ranks, for help and error messages."""


def parse_mesh(text: str) -> dict[str, int]:
    """Return the number of ranks along each axis of a mesh such as ``dp=2,tp=4``.

    The keys are the names of the axes, outermost first: the last axis varies fastest over the
    ranks. Raises ``UserError`` if the text is not a mesh or the mesh has too many ranks.
    """
    axes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([a-zA-Z]\w*)=(\d{1,9})", part, re.ASCII)
        if match is None or int(match[2]) < 1 or match[1] in axes:
            hint = "write AXIS=SIZE,..., each axis once, as dp=2,tp=4"
            raise UserError(f"invalid mesh {text!r} at {part!r}: {hint}")
        axes[match[1]] = int(match[2])
    if count_mesh_ranks(axes) > MAX_RANKS:
        raise UserError(f"mesh {text!r} has more than {MAX_RANKS} ranks")
    if not axes:
        raise UserError("a mesh needs an axis: write AXIS=SIZE,..., such as dp=2,tp=4")
    return axes


def count_mesh_ranks(axes: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh, of which ``axes`` holds the ranks along each axis.

    The axes ``ep`` and ``etp`` do not count, because they lie inside the other axes.
    """
    return math.prod(size for axis, size in axes.items() if axis not in INSIDE)


def join_mesh_axes(values: str) -> str:
    """Return the values of an option with blanks instead of commas between the axes of a mesh.

    The remaining commas separate values: ``dp=2,tp=4:tp,node`` becomes ``dp=2 tp=4:tp,node``.
    """
    return re.sub(r"(?<==)(\d+),(?=\w+=)", r"\1 ", values)


def form_groups(text: str, size: int, hosts: Sequence[str] | None = None) -> tuple[Ranks, ...]:
    """Divide the ranks 0 to ``size`` - 1 into groups, and return each group as a tuple of ranks.

    ``hosts`` holds the host of each rank. If it is None, all ranks are on one node. Raises
    ``UserError`` if the groups cannot be formed. Ranks in a group are in ascending order, and
    groups in the order of their first ranks. ``text`` is the way to divide the ranks:

    - ``world``: all ranks form one group.
    - ``node``: the ranks of a node form a group.
    - ``across``: a group has one rank of every node.
    - ``pairs``: two successive ranks form a group.
    - ``dp=2,tp=4:tp``: ranks that differ only in their coordinate on the axis ``tp`` of the mesh
      form a group. The last axis varies fastest: these groups are the ranks 0 to 3 and 4 to 7.
    """
    keys = _compute_keys(text, size, hosts or [""] * size)
    members: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    groups = tuple(map(tuple, members.values()))
    if text == "across" and (len(groups[0]) < 2 or len(groups[0]) != len(groups[-1])):
        raise UserError("group 'across' needs equal numbers of ranks on at least 2 nodes")
    return groups


def _compute_keys(text: str, size: int, hosts: Sequence[str]) -> Sequence[object]:
    """Return a key for each rank, in rank order, such that ranks with equal keys form a group.

    The keys have no other meaning. ``text`` names the groups, such as ``node`` or ``dp=2,tp=4:tp``.
    The other arguments and the errors are those of ``form_groups``, too.
    """
    if text == "world":
        return [0] * size
    if text == "node":
        return hosts
    if text == "across":
        # The key is the number of earlier ranks on the same host.
        return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    if text == "pairs":
        text = f"pair={max(size // 2, 1)},rank=2:rank"
    mesh, _, axis = text.rpartition(":")
    if "=" not in mesh:
        raise UserError(f"group {text!r} is not allowed: choose {FORMS}")
    return _compute_axis_keys(mesh, axis, size)


def _compute_axis_keys(mesh: str, axis: str, size: int) -> list[int]:
    """Return the first rank of each rank's group, whose ranks differ only on one axis of a mesh.

    ``mesh`` is a text such as ``dp=2,tp=4`` and ``axis`` one of its names. The mesh must contain
    all ``size`` ranks, in row-major order: the last axis varies fastest.
    """
    axes = parse_mesh(mesh)
    if math.prod(axes.values()) != size:
        product = " * ".join(f"{name}({length})" for name, length in axes.items())
        raise UserError(f"{product} != world size({size})")
    names = list(axes)
    if axis not in names:
        raise UserError(f"group {mesh}:{axis}: the mesh has the axes {format_list(names, 'and')}")
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    return [rank - (rank // stride % axes[axis]) * stride for rank in range(size)]


def count_rounds(n: int) -> int:
    """Return the number of rounds of a round-robin tournament of ``n`` ranks.

    In each round a rank has at most one partner, and over all rounds it meets every other rank. The
    number is n - 1, or n if n is odd.
    """
    return max(n - 1 + n % 2, 1)


def list_round_pairs(n: int, index: int) -> tuple[Pair, ...]:
    """Return the pairs of ranks in round ``index`` of a round-robin tournament of ``n`` ranks.

    Pairs are sorted, each with the smaller rank first. If n is odd, one rank has no partner. This
    is the circle method: the last rank stays and the others rotate around it. The numbers of two
    partners add up to twice the index of the round, modulo the number of rounds. Raises
    ``UserError`` if there is no round ``index``.
    """
    rounds = count_rounds(n)
    if not 0 <= index < rounds:
        raise UserError(f"round {index} is not a round of {n} ranks, 0 to {rounds - 1}")
    pairs = []
    if n % 2 == 0 and n >= 2:
        pairs.append((index, n - 1))
    for distance in range(1, (rounds - 1) // 2 + 1):
        partners = (index + distance) % rounds, (index - distance) % rounds
        pairs.append((min(partners), max(partners)))
    return tuple(sorted(pairs))


def parse_pairs(text: str, n: int) -> tuple[Pair, ...]:
    """Return the pairs of ranks in a text such as ``0-3 1-2``, each with the smaller rank first.

    ``n`` is the number of ranks. Raises ``UserError`` if a rank occurs twice or is not below ``n``.
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
            if rank >= n or rank in paired_ranks:
                allowed = f"each of the ranks 0 to {n - 1} can be in one pair"
                raise UserError(f"pairs {text!r}: rank {rank} is not possible; {allowed}")
            paired_ranks.add(rank)
        pairs.append((min(pair), max(pair)))
    return tuple(pairs)


def format_pairs(pairs: tuple[Pair, ...]) -> str:
    """Return pairs of ranks as text such as ``0-3 1-2``, which ``parse_pairs`` reads."""
    return " ".join(f"{first}-{second}" for first, second in pairs)


def choose_pairs(n: int, index: int, text: str) -> tuple[Pair, ...]:
    """Return the pairs of ranks in ``text``, or the pairs of round ``index`` if it is empty.

    ``n`` is the number of ranks. Raises ``UserError`` if the pairs or the round do not exist.
    """
    return parse_pairs(text, n) if text.strip() else list_round_pairs(n, index)


def split_with_skew(num_ranks: int, skew: float, count: int) -> tuple[int, ...]:
    """Return the number of elements that each rank gets of ``count`` elements, by rank.

    ``skew`` is the fraction of the elements that only rank 0 gets. The rest is divided equally over
    all ranks, including rank 0, which also gets the remainder of the division.
    """
    even = int((1 - skew) * count / num_ranks + 1e-9)
    return (count - even * (num_ranks - 1), *[even] * (num_ranks - 1))
