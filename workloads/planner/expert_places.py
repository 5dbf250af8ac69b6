"""Where the ranks sit that deal out experts, shard them, or hold the same ones. Pure.

``ep`` takes blocks of neighbours in the order of dp, fsdp and cp, whatever the order of the mesh, as ``hybrid.axes``
deals them out. A rank's number there, its place on ``ep`` last, reads (dp, fsdp, cp, ep): of cp and fsdp what ``ep``
leaves. Where ``ep`` takes whole axes, and of one more a divisor, these digits are digits of the rank; else ranks are
written out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from workloads.mesh.axes import DATA, multiplied
from workloads.planner.placement import Place, offsets, place_of_digits, place_of_groups, strided


@dataclass(frozen=True, kw_only=True)
class ExpertPlaces:
    """Places of the ranks that deal out a layer's experts, that shard the same ones, and that hold the same shards."""

    dealt: Place
    shards: Place
    copies: Place


def expert_shards(mesh: Mapping[str, int]) -> int:
    """Return over how many ranks ``fsdp`` still shards an expert, once ``ep`` has taken neighbours."""
    return _left(mesh)["fsdp"]


def expert_places(mesh: Mapping[str, int], gpus_per_node: int) -> ExpertPlaces:
    """Return the places of a mixture's own groups."""
    return _places(tuple(multiplied(mesh).items()), mesh.get("ep", 1), gpus_per_node)


@lru_cache(maxsize=1 << 14)
def _places(axes: tuple[tuple[str, int], ...], ep: int, gpus_per_node: int) -> ExpertPlaces:
    mesh = {**dict(axes), "ep": ep}
    make = _by_digits if _takes_whole_axes(mesh) else _written_out
    return ExpertPlaces(
        dealt=make(mesh, ("ep",), gpus_per_node),
        shards=make(mesh, ("fsdp",), gpus_per_node),
        copies=make(mesh, ("dp", "cp", "tp"), gpus_per_node),
    )


def _left(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return what ``ep`` leaves of cp, fsdp and dp, in turn."""
    ep, found = mesh.get("ep", 1), {}
    for name in reversed(DATA):
        taken = math.gcd(ep, mesh.get(name, 1))
        found[name] = mesh.get(name, 1) // taken
        ep //= taken
    return found


def _takes_whole_axes(mesh: Mapping[str, int]) -> bool:
    """Say whether ``ep`` takes an axis whole before it takes of the next."""
    ep = mesh["ep"]
    for name in reversed(DATA):
        size = mesh.get(name, 1)
        if ep % size and size % ep:
            return False
        ep = max(1, ep // size)
    return True


def _by_digits(mesh: Mapping[str, int], kinds: tuple[str, ...], gpus_per_node: int) -> Place:
    """Split the digit of an axis into the one that ``ep`` takes, which is the inner one, and the one it leaves."""
    left, digits = _left(mesh), []
    for name, (stride, size) in strided(reversed(multiplied(mesh).items())).items():
        taken = size // left.get(name, size)
        digits += [(stride, taken, "ep" in kinds), (stride * taken, size // taken, name in kinds)]
    return place_of_digits(digits, gpus_per_node)


def _written_out(mesh: Mapping[str, int], kinds: tuple[str, ...], gpus_per_node: int) -> Place:
    axes = strided(reversed(multiplied(mesh).items()))
    data = offsets(axes[name] for name in reversed(DATA) if name in axes)
    within = offsets(digit for name, digit in axes.items() if name not in DATA and name in kinds)
    begins = offsets(digit for name, digit in axes.items() if name not in DATA and name not in kinds)
    numbers = strided([("ep", mesh["ep"]), *_left(mesh).items()])
    mine = offsets(digit for name, digit in numbers.items() if name in kinds)
    firsts = offsets(digit for name, digit in numbers.items() if name not in kinds)
    groups = [[data[first + i] + rank for i in mine for rank in within] for first in firsts]
    return place_of_groups(groups, begins, gpus_per_node)
