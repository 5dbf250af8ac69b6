"""What can be asked of context parallelism, and what cannot be built."""

from collections.abc import Mapping

from bench.machine.world_spec import WorldSpec
from bench.plan.params import Param, Value
from bench.text import UserError
from workloads.context_parallel.exchange_plan import MASKS, METHODS, ContextPlan
from workloads.context_parallel.token_order import indivisible
from workloads.model.compute_kind import COMPUTE, REAL, TIMED, parse_compute
from workloads.model.shapes import Shape

METHOD = Param(
    name="method", kind="str", default="ring", choices=METHODS, help="how queries meet keys that other ranks hold"
)
MASK = Param(
    name="mask",
    kind="str",
    default="causal",
    choices=MASKS,
    optional=True,
    help="what a query sees: what is not later, all, or what is not later of its own document",
)
ULYSSES = Param(
    name="ulysses", kind="int", default=0, minimum=0, optional=True, help="usp's ranks that share heads; 0 = half"
)
ATTENTION = Param(
    name="attention",
    kind="str",
    default=REAL,
    optional=True,
    help="real, or timed:DURATION: waits instead, so long for a layer's forward on the mean rank; wants timed compute",
)
PARAMS = (METHOD, MASK, ULYSSES, ATTENTION)


def refuse_context(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Refuse what cannot be dealt out to so many ranks, and times that mean nothing; the equation with its numbers."""
    given = {**{param.name: param.default for param in PARAMS}, "compute": COMPUTE.default, **params}
    try:
        reason = refusal_of_times(str(given["attention"]), str(given["compute"]))
    except UserError as error:
        return str(error)
    return reason or refusal(str(given["method"]), str(given["mask"]), shape, nproc, int(given["ulysses"]))


def refuse_place(params: Mapping[str, Value], spec: WorldSpec) -> str | None:
    """Refuse torch's own method where torch has none."""
    return refusal_of_place(str(params["method"]), spec.backend, spec.device)


def ulysses_of(method: str, given: int, ranks: int) -> int:
    """Return the ranks of the Ulysses axis: all, what is given of usp (0: half of all), else one."""
    if method == "ulysses":
        return ranks
    return (given or max(1, ranks // 2)) if method == "usp" else 1


def refusal(method: str, mask: str, shape: Shape, ranks: int, given_ulysses: int) -> str | None:
    """Return by equation why a sequence cannot be computed so, None if it can."""
    if given_ulysses and method != "usp":
        return f"ulysses = {given_ulysses} is not allowed with method = {method}: it is the inner axis of usp alone"
    if method == "torch_cp" and mask != "causal":
        return f"mask = {mask} is not allowed with method = torch_cp: torch balances causal masks alone"
    ulysses = ulysses_of(method, given_ulysses, ranks)
    if ranks % ulysses:
        return f"ulysses({ulysses}) * ring({ranks // ulysses}) != cp({ranks})"
    for name, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
        if heads % ulysses:
            return f"{name}({heads}) % ulysses({ulysses}) != 0"
    if shape.sequence % ranks:
        return f"sequence({shape.sequence}) % cp({ranks}) != 0"
    plan = ContextPlan(method=method, mask=mask, sequence=shape.sequence, ranks=ranks, ulysses=ulysses)
    return indivisible(plan.order, plan.sequence, plan.parts, "ring" if method == "usp" else "cp")


def parse_attention(text: str) -> float | None:
    """Return the seconds of a layer's attention that is only waited for, None for real; ``UserError`` else."""
    if text != REAL and not text.startswith(TIMED):
        raise UserError(f"attention = {text!r} is not allowed: attention is real or timed:DURATION, such as timed:20ms")
    return parse_compute(text)


def refusal_of_times(attention: str, compute: str) -> str | None:
    """Return why attention cannot be timed beside such compute, None if it can."""
    if parse_attention(attention) is None or parse_compute(compute) is not None:
        return None
    return f"attention = {attention} is not allowed with compute = {compute}: what waits has no results to train on"


def refusal_of_place(method: str, backend: str, device: str) -> str | None:
    """Return why a method cannot run with a backend on a device, None if it can."""
    if method == "torch_cp" and "cpu" in (device, {"gloo": "cpu"}.get(backend)):
        where = f"{backend} and {device}"
        return (
            f"method = torch_cp is not allowed on {where}: torch's context_parallel raises NotImplementedError on cpu"
        )
    return None
