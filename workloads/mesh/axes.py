"""A mesh of named axes: which there are, what they multiply to, where a rank stands on it. Pure.

``dp`` replicates parameters, ``fsdp`` shards them, ``pp`` deals out layers, ``cp`` the tokens of a sequence, ``tp`` the
matrices of a layer and the tokens between them. ``ep`` deals out experts among the ranks of dp, fsdp and cp, ``etp``
splits each among those of tp: they are no axes of their own, and are not multiplied.
"""

import math
from collections.abc import Mapping

from bench.plan.groups import parse_mesh
from workloads.mesh.constraints import AXES, INSIDE

Mesh = Mapping[str, int]

DATA = ("dp", "fsdp", "cp")
"""The axes whose ranks hold the same layers and see other tokens."""


def mesh_of(text: str) -> dict[str, int]:
    """Return the axes of ``dp=2,pp=2,tp=2`` and their sizes, outermost first; ``UserError`` where it is not one."""
    return parse_mesh(text)


def multiplied(mesh: Mesh) -> dict[str, int]:
    """Return the axes that the world is the product of, in their order."""
    return {name: size for name, size in mesh.items() if name not in INSIDE}


def size_of(mesh: Mesh, *axes: str) -> int:
    """Return the product of some axes, 1 for those that a mesh does not have."""
    return math.prod(mesh.get(axis, 1) for axis in axes)


def coordinate_of(mesh: Mesh, rank: int) -> dict[str, int]:
    """Return where a rank stands on each multiplied axis; the innermost varies fastest."""
    place = {}
    for name, size in reversed(multiplied(mesh).items()):
        rank, place[name] = divmod(rank, size)
    return {name: place.get(name, 0) for name in AXES if name not in INSIDE}


def along(coordinate: Mesh, mesh: Mesh, *axes: str) -> int:
    """Return the number of a rank among those that differ in some axes alone, the last of them varying fastest."""
    number = 0
    for axis in axes:
        number = number * mesh.get(axis, 1) + coordinate.get(axis, 0)
    return number


def groups_along(mesh: Mesh, *axes: str) -> list[list[int]]:
    """Return the groups of ranks that differ in some axes alone, each in the order that ``along`` counts."""
    groups: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in range(size_of(mesh, *multiplied(mesh))):
        place = coordinate_of(mesh, rank)
        key = tuple(at for axis, at in place.items() if axis not in axes)
        groups.setdefault(key, {})[along(place, mesh, *axes)] = rank
    return [[ranks[i] for i in sorted(ranks)] for ranks in groups.values()]


def expert_groups(mesh: Mesh) -> list[list[int]]:
    """Return the groups that deal out experts: blocks of ``ep`` neighbours in the order of dp, fsdp and cp."""
    ep = mesh.get("ep", 1)
    return [ranks[first : first + ep] for ranks in groups_along(mesh, *DATA) for first in range(0, len(ranks), ep)]


def expert_parts(mesh: Mesh) -> list[list[int]]:
    """Return the groups that split experts: blocks of ``etp`` neighbours in the order of tp."""
    etp = mesh.get("etp", 1)
    return [ranks[first : first + etp] for ranks in groups_along(mesh, "tp") for first in range(0, len(ranks), etp)]


def expert_copies(mesh: Mesh) -> list[list[int]]:
    """Return the groups that hold the same experts, or the same parts of them, of the same layers."""
    copies: dict[tuple[int, int, int], list[int]] = {}
    for ranks in expert_groups(mesh):
        for place, rank in enumerate(ranks):
            at = coordinate_of(mesh, rank)
            copies.setdefault((at["pp"], place, at["tp"] % mesh.get("etp", 1)), []).append(rank)
    return [sorted(ranks) for ranks in copies.values()]
