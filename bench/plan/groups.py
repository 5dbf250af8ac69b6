"""Groups of ranks, as pure arithmetic: splits of the world, nodes, and axes of a mesh.

A group is written ``world``, ``node``, ``across``, ``contiguous:K``, ``strided:K``, ``pairs``, or as a mesh with one
of its axes, ``dp=2 tp=4:tp``. Every rank is in exactly one of the groups that a text means.
"""

import math
from collections.abc import Sequence

from bench.errors import UserError
from bench.words import did_you_mean, listed

Ranks = tuple[int, ...]

FORMS = "world, node, across, contiguous:K, strided:K, pairs, or a mesh and its axis such as dp=2 tp=4:tp"


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of ``dp=2,tp=4`` (or with spaces) and their sizes, outermost first."""
    axes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in axes:
            raise UserError(
                f"mesh {text!r} is not understood at {part!r}: write AXIS=SIZE,..., each axis once, as dp=2,tp=4"
            )
        axes[name] = int(size)
    if not axes:
        raise UserError("a mesh needs an axis: write AXIS=SIZE,..., such as dp=2,tp=4")
    return axes


def mesh_group(mesh: str, axis: str) -> str:
    """Return the text of a group that is an axis of a mesh."""
    axes = parse_mesh(mesh)
    if axis not in axes:
        raise UserError(f"--group {axis!r} is no axis of the mesh: it has {listed(axes)}{did_you_mean(axis, axes)}")
    return f"{' '.join(f'{name}={size}' for name, size in axes.items())}:{axis}"


def groups_of(text: str, size: int, hosts: Sequence[str] | None = None) -> tuple[Ranks, ...]:
    """Return the groups that ``text`` means in a world of ``size`` ranks; ``UserError`` if it cannot form them.

    ``hosts`` names each rank's host, in rank order; without it all ranks are on one.
    """
    hosts = hosts or [""] * size
    if text == "world":
        return (tuple(range(size)),)
    if text == "node":
        return _by_key([hosts[rank] for rank in range(size)])
    if text == "across":
        return _across(hosts)
    if text == "pairs":
        return _contiguous(2, size, text)
    kind, _, rest = text.rpartition(":")
    if "=" in kind:
        return _axis(kind, rest, size)
    if kind in ("contiguous", "strided") and rest.isdecimal() and int(rest) > 0:
        return _contiguous(int(rest), size, text) if kind == "contiguous" else _strided(int(rest), size, text)
    raise UserError(
        f"group {text!r} is not known: it is {FORMS}{did_you_mean(text, ('world', 'node', 'across', 'pairs'))}"
    )


def _by_key(keys: Sequence[object]) -> tuple[Ranks, ...]:
    """Return the ranks that share a key, in order of their first rank."""
    members: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def _across(hosts: Sequence[str]) -> tuple[Ranks, ...]:
    """Return one group for each local index: the ranks of that index on all nodes."""
    nodes = _by_key(hosts)
    if len(nodes) < 2:
        raise UserError("group 'across' needs ranks on at least 2 nodes; all are on one")
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1:
        told = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"group 'across' needs as many ranks on every node; nodes have {told}")
    return tuple(zip(*nodes, strict=True))


def _contiguous(each: int, size: int, text: str) -> tuple[Ranks, ...]:
    _check_divides(each, size, text)
    return tuple(tuple(range(first, first + each)) for first in range(0, size, each))


def _strided(each: int, size: int, text: str) -> tuple[Ranks, ...]:
    """Return groups of ``each`` ranks that lie size/each apart."""
    _check_divides(each, size, text)
    return tuple(tuple(range(first, size, size // each)) for first in range(size // each))


def _check_divides(each: int, size: int, text: str) -> None:
    if size % each:
        raise UserError(f"group {text!r} cannot be formed: world size({size}) % {each} != 0")


def _axis(mesh: str, axis: str, size: int) -> tuple[Ranks, ...]:
    """Return the groups along an axis: ranks whose other coordinates are equal, the innermost axis varying fastest."""
    axes = parse_mesh(mesh)
    if math.prod(axes.values()) != size:
        product = " * ".join(f"{name}({length})" for name, length in axes.items())
        raise UserError(f"{product} != world size({size})")
    names = list(axes)
    if axis not in names:
        raise UserError(f"group {mesh}:{axis}: {axis!r} is no axis of the mesh; it has {listed(names)}")
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    return _by_key([rank - (rank // stride % axes[axis]) * stride for rank in range(size)])
