"""A mesh of named axes: what they multiply to, where a rank stands, and when it can carry a step. Pure.

``dp`` replicates parameters, ``fsdp`` shards them, ``pp`` deals out layers, ``cp`` the tokens of a sequence, ``tp`` the
matrices of a layer and the tokens between them. ``ep`` deals out experts among the ranks of dp, fsdp and cp, ``etp``
splits each among those of tp: they are no axes of their own, and are not multiplied.

Each rule is an equation, each refusal the equation with its numbers; ``StepSpec.refusal`` asks them in the order in
which one fixes them.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Params
from parbench.bench.plan.groups import INSIDE, parse_mesh
from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_choices
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from parbench.workloads.expert_parallel.routing import NAMES as ROUTINGS
from parbench.workloads.expert_parallel.routing import ROUTER
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from parbench.workloads.pipeline_parallel.pipeline_case import (
    format_checkpointing_refusal,
    split_layers,
)
from parbench.workloads.pipeline_parallel.schedules import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    find_schedule,
)

Mesh = Mapping[str, int]

AXES = ("dp", "fsdp", "pp", "cp", "tp", *INSIDE)
DATA = ("dp", "fsdp", "cp")
"""The axes whose ranks hold the same layers and see other tokens."""
CP_METHODS = [name for name in CONTEXT_METHODS if name != "usp"]
_MOST_GATHERED_STAGES = 3
_word = partial(Param, kind="str", optional=True)
_int = partial(Param, kind="int", optional=True)
_MESH = (
    "ranks per axis, outermost first, of dp, fsdp, pp, cp, tp; ep lies inside dp, fsdp and cp, etp inside tp; "
    "empty = dp over all"
)
_ROUTED = "routed experts per layer; 0 = a dense model, or 8 if the mesh has ep"
PARAMS = (
    Param(name="mesh", kind="mesh", default="", help=_MESH),
    Param(
        name="microbatches",
        kind="int",
        default=4,
        minimum=1,
        help="microbatches per step and data rank",
    ),
    _word(
        name="schedule",
        default=DEFAULT_SCHEDULE,
        choices=tuple(SCHEDULES),
        help="of pp: order of forward and backward passes",
    ),
    *(param for param in PIPELINE if param.name in ("chunks", "split")),
    choice("cp_method", "of cp: how queries reach keys that other ranks hold", *CP_METHODS),
    _int(name="experts", default=0, minimum=0, help=_ROUTED),
    _int(name="top_k", default=2, minimum=1, help="experts per token"),
    _word(
        name="routing",
        default=ROUTER,
        choices=ROUTINGS,
        help="who chooses experts: the trained router, or a generator",
    ),
)
"""What can be asked of a step on a mesh."""


def with_experts(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Give a mixture to a mesh that deals out experts or splits them, where nothing is said of one."""
    dealt = size_of(mesh_of(str(given.get("mesh", "")), 1), *INSIDE)
    return ({**given, "experts": 8} if dealt > 1 and "experts" not in given else given,)


def mesh_of(text: str, world: int) -> dict[str, int]:
    """Return the axes of ``dp=2,pp=2,tp=2`` and their sizes, outermost first; without any, ``dp`` over all."""
    return parse_mesh(text) if text else {"dp": world}


def multiplied(mesh: Mesh) -> dict[str, int]:
    """Return the axes that the world is the product of, in their order."""
    return {name: size for name, size in mesh.items() if name not in INSIDE}


def size_of(mesh: Mesh, *axes: str) -> int:
    """Return the product of some axes, 1 for those that a mesh does not have."""
    size = 1
    for axis in axes:  # a search asks this two million times, and a generator takes twice as long
        size *= mesh.get(axis, 1)
    return size


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
    return _blocks(groups_along(mesh, *DATA), mesh.get("ep", 1))


def expert_parts(mesh: Mesh) -> list[list[int]]:
    """Return the groups that split experts: blocks of ``etp`` neighbours in the order of tp."""
    return _blocks(groups_along(mesh, "tp"), mesh.get("etp", 1))


def _blocks(groups: list[list[int]], size: int) -> list[list[int]]:
    return [ranks[first : first + size] for ranks in groups for first in range(0, len(ranks), size)]


def expert_copies(mesh: Mesh) -> list[list[int]]:
    """Return the groups that hold the same experts, or the same parts of them, of the same layers."""
    copies: dict[tuple[int, int, int], list[int]] = {}
    for ranks in expert_groups(mesh):
        for place, rank in enumerate(ranks):
            at = coordinate_of(mesh, rank)
            copies.setdefault((at["pp"], place, at["tp"] % mesh.get("etp", 1)), []).append(rank)
    return [sorted(ranks) for ranks in copies.values()]


def refuse_axes(mesh: Mesh, world: int) -> str | None:
    for name, size in mesh.items():
        if name not in AXES:
            return f"mesh axis {name!r} is not {format_choices(AXES, name)}"
        if size < 1:
            return f"{name}({size}) < 1"
    axes = multiplied(mesh) or {"dp": 1}
    return None if size_of(mesh, *axes) == world else f"{_product(axes)} != world size({world})"


def refuse_heads(shape: Shape, mesh: Mesh, *, experts: bool = False) -> str | None:
    """Refuse layers that ``tp`` does not divide; a mixture's FFNs are not split."""
    tp = mesh.get("tp", 1)
    for name in ("heads", "kv_heads", "hidden", *(() if experts else ("ffn",))):
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    return None


def refuse_sequence(shape: Shape, mesh: Mesh, *, cp_method: str = "ring") -> str | None:
    """Refuse tokens that do not divide: over ``cp`` as its method deals them out, and what it leaves over ``tp``."""
    cp, tp = mesh.get("cp", 1), mesh.get("tp", 1)
    if cp_method not in CP_METHODS:
        return f"cp method {cp_method!r} is not {format_choices(CP_METHODS, cp_method)}"
    if cp > 1:
        broken_rule = CONTEXT_METHODS[cp_method].find_broken_rule(shape, ranks=cp, tp=tp)
        if broken_rule:
            return broken_rule
    if shape.sequence // cp % tp:
        return f"sequence({shape.sequence}) % {f'(cp({cp}) * tp({tp}))' if cp > 1 else f'tp({tp})'} != 0"
    return None


def refuse_stages(
    shape: Shape,
    mesh: Mesh,
    microbatch: int,
    microbatches: int,
    schedule: str,
    chunks: int,
    split: str,
) -> str | None:
    pp, fsdp = mesh.get("pp", 1), mesh.get("fsdp", 1)
    for name, count in (("microbatch", microbatch), ("microbatches", microbatches)):
        if count < 1:
            return f"{name}({count}) < 1"
    if pp == 1:
        return None
    try:
        size = find_schedule(schedule).size(pp, microbatches, chunks)
        of_rank = size.stages_per_rank
        if shape.layers < pp * of_rank:
            return f"layers({shape.layers}) < pp({pp}) * chunks({of_rank})"
        split_layers(shape.layers, size.num_stages, split)
    except UserError as error:
        return str(error)
    if fsdp > 1 and of_rank > _MOST_GATHERED_STAGES:
        why = "torch's runtime keeps so many stages gathered and would gather the others again"
        return f"chunks({of_rank}) > {_MOST_GATHERED_STAGES} with fsdp({fsdp}): {why}"
    return None


def refuse_experts(mesh: Mesh, num_experts: int) -> str | None:
    """Refuse experts that do not divide over ``ep``, which divides the data axes' ranks, or ``etp``, which ``tp``'s."""
    ep, etp, tp = mesh.get("ep", 1), mesh.get("etp", 1), mesh.get("tp", 1)
    if not num_experts:
        if etp > 1:
            return f"etp({etp}) > 1 without experts: a dense model has none to split"
        return (
            None if ep == 1 else f"ep({ep}) > 1 without experts: a dense model has none to deal out"
        )
    if tp % etp:
        return f"tp({tp}) % etp({etp}) != 0"
    if num_experts % ep:
        return f"experts({num_experts}) % ep({ep}) != 0"
    if size_of(mesh, *DATA) % ep:
        return f"({_product({axis: mesh.get(axis, 1) for axis in DATA})}) % ep({ep}) != 0"
    return None


def refuse_split_backward(
    mesh: Mesh, schedule: str, checkpointing: str, num_experts: int
) -> str | None:
    if mesh.get("pp", 1) == 1 or not find_schedule(schedule).splits_backward:
        return None
    if checkpointing != "none":
        return format_checkpointing_refusal(schedule, checkpointing)
    if mesh.get("fsdp", 1) > 1:
        other = f"fsdp({mesh['fsdp']}): torch's FSDP reduces gradients after a whole backward pass"
    elif num_experts:
        other = (
            f"experts({num_experts}): tokens come back from their experts once in a backward pass"
        )
    else:
        return None
    return f"schedule = {schedule} is not allowed with {other}, and this schedule splits it"


def _product(axes: Mesh) -> str:
    return " * ".join(f"{name}({size})" for name, size in axes.items())
