"""A hybrid step as it is asked for: its parameters, what they mean, and when they mean nothing. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Params
from bench.plan.groups import INSIDE
from bench.plan.params import Param, Value, choice
from bench.text import UserError
from workloads.expert_parallel.moe_case import Moe, moe_of
from workloads.expert_parallel.routing import NAMES as ROUTINGS
from workloads.expert_parallel.routing import ROUTER
from workloads.mesh.axes import CP_METHODS, DATA, mesh_of, refuse, size_of
from workloads.model.shapes import Shape
from workloads.pipeline_parallel import schedules
from workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from workloads.pipeline_parallel.pipeline_case import Pipeline, pipeline_of

_word = partial(Param, kind="str", optional=True)
_int = partial(Param, kind="int", optional=True)
_MESH = (
    "axes and their ranks, outermost first, such as dp=2,pp=2,tp=2: dp, fsdp, pp, cp, tp; ep lies inside dp, fsdp and "
    "cp, etp inside tp; empty = dp over all"
)
_ROUTED = "routed experts in place of each FFN, which ep deals out; 0 = a dense model; 8 where a mesh has ep"
PARAMS = (
    Param(name="mesh", kind="mesh", default="", help=_MESH),
    Param(name="microbatches", kind="int", default=4, minimum=1, help="microbatches of one step, on every data rank"),
    _word(name="schedule", default="1f1b", choices=schedules.NAMES, help="of pp: who does what when"),
    *(param for param in PIPELINE if param.name in ("chunks", "split")),
    choice("cp_method", "of cp: how queries meet keys that other ranks hold", *CP_METHODS),
    _int(name="experts", default=0, minimum=0, help=_ROUTED),
    _int(name="top_k", default=2, minimum=1, help="experts that a token takes"),
    _word(name="routing", default=ROUTER, choices=ROUTINGS, help="who chooses experts: the router, or a generator"),
)


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """What is to run: a mesh, outermost axis first, and what its axes carry.

    ``pipeline`` is None where one rank has all layers, ``moe`` where the model is dense.
    """

    mesh: Mapping[str, int]
    pipeline: Pipeline | None
    cp_method: str
    moe: Moe | None

    def size(self, *axes: str) -> int:
        return size_of(self.mesh, *axes)

    @property
    def gradient_ranks(self) -> int:
        """Ranks over whose tokens a gradient is the mean: all that hold the same layers."""
        return self.size(*DATA, "tp")


def hybrid_of(params: Mapping[str, Value], shape: Shape, world: int) -> Hybrid:
    """Return what a case means on so many ranks; ``UserError`` by equation where it cannot run."""
    given = {**{param.name: param.default for param in PARAMS}, **params}
    mesh = mesh_of(str(given["mesh"]), world)
    experts = int(given["experts"])
    reason = refuse(
        shape,
        mesh,
        microbatches=int(given["microbatches"]),
        microbatch=int(given.get("microbatch", 1)),
        world=world,
        num_experts=experts or None,
        schedule=str(given["schedule"]),
        cp_method=str(given["cp_method"]),
        chunks=int(given["chunks"]),
        split=str(given["split"]),
        split_experts=True,
        checkpointing=str(given.get("checkpointing", "none")),
    )
    if reason is not None:
        raise UserError(reason)
    moe = None
    if experts:
        names = ("experts", "top_k", "routing", "checkpointing")  # its chunks are not the pipeline's
        inside = {axis: mesh.get(axis, 1) for axis in INSIDE}
        moe = moe_of({**inside, **{name: given[name] for name in names if name in given}}, shape, world)
    return Hybrid(
        mesh=mesh,
        pipeline=pipeline_of(given, shape, mesh["pp"]) if mesh.get("pp", 1) > 1 else None,
        cp_method=str(given["cp_method"]),
        moe=moe,
    )


def with_experts(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Give a mixture to a mesh that deals out experts or splits them, where nothing is said of one."""
    dealt = size_of(mesh_of(str(given.get("mesh", "")), 1), *INSIDE)
    return ({**given, "experts": 8} if dealt > 1 and "experts" not in given else given,)
