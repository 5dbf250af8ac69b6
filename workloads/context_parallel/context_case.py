"""What can be asked of context parallelism, and what cannot be built."""

from collections.abc import Mapping

from bench.machine.world_spec import WorldSpec
from bench.plan.params import Param, Value
from bench.text import UserError
from workloads.context_parallel.exchange_plan import MASKS, METHODS, ContextPlan, indivisible
from workloads.model.shapes import COMPUTE, REAL, TIMED, Shape, parse_compute

PARAMS = (
    Param(
        name="method", kind="str", default="ring", choices=METHODS, help="how queries meet keys that other ranks hold"
    ),
    Param(
        name="mask",
        kind="str",
        default="causal",
        choices=MASKS,
        optional=True,
        help="what a query sees: what is not later, all, or what is not later of its own document",
    ),
    Param(
        name="ulysses", kind="int", default=0, minimum=0, optional=True, help="usp's ranks that share heads; 0 = half"
    ),
    Param(
        name="attention",
        kind="str",
        default=REAL,
        optional=True,
        help="real, or timed:DURATION: waits instead, so long for a layer's forward on the mean rank; wants timed "
        "compute",
    ),
)


def ulysses_of(method: str, given: int, ranks: int) -> int:
    """Return the ranks of the Ulysses axis: all, what is given of usp (0: half of all), else one."""
    if method == "ulysses":
        return ranks
    return (given or max(1, ranks // 2)) if method == "usp" else 1


def parse_attention(text: str) -> float | None:
    """Return the seconds of a layer's attention that is only waited for, None for real; ``UserError`` else."""
    if text != REAL and not text.startswith(TIMED):
        raise UserError(f"attention = {text!r} is not allowed: attention is real or timed:DURATION, such as timed:20ms")
    return parse_compute(text)


def plan_of(shape: Shape, params: Mapping[str, Value], ranks: int, seed: int = 0) -> ContextPlan:
    """Return how a case deals sequences out; ``UserError`` by equation where it cannot, or its times mean nothing."""
    given = {**{param.name: param.default for param in (*PARAMS, COMPUTE)}, **params}
    method, mask, inner = str(given["method"]), str(given["mask"]), int(given["ulysses"])
    attention, compute = str(given["attention"]), str(given["compute"])
    if parse_attention(attention) is not None and parse_compute(compute) is None:
        why = "what waits has no results to train on"
        raise UserError(f"attention = {attention} is not allowed with compute = {compute}: {why}")
    if inner and method != "usp":
        raise UserError(f"ulysses = {inner} is not allowed with method = {method}: it is the inner axis of usp alone")
    if method == "torch_cp" and mask != "causal":
        raise UserError(f"mask = {mask} is not allowed with method = torch_cp: torch balances causal masks alone")
    ulysses = ulysses_of(method, inner, ranks)
    if ranks % ulysses:
        raise UserError(f"ulysses({ulysses}) * ring({ranks // ulysses}) != cp({ranks})")
    for name, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
        if heads % ulysses:
            raise UserError(f"{name}({heads}) % ulysses({ulysses}) != 0")
    if shape.sequence % ranks:
        raise UserError(f"sequence({shape.sequence}) % cp({ranks}) != 0")
    plan = ContextPlan(method=method, mask=mask, sequence=shape.sequence, ranks=ranks, ulysses=ulysses, seed=seed)
    if reason := indivisible(plan.order, plan.sequence, plan.parts, "ring" if method == "usp" else "cp"):
        raise UserError(reason)
    return plan


def refuse_context(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Return why a step cannot run on so many ranks, None if it can."""
    try:
        plan_of(shape, params, nproc)
    except UserError as error:
        return str(error)
    return None


def refuse_place(params: Mapping[str, Value], spec: WorldSpec) -> str | None:
    """Refuse torch's own method where torch has none."""
    if params["method"] != "torch_cp" or "cpu" not in (spec.device, {"gloo": "cpu"}.get(spec.backend)):
        return None
    where = f"{spec.backend} and {spec.device}"
    return f"method = torch_cp is not allowed on {where}: torch's context_parallel raises NotImplementedError on cpu"
