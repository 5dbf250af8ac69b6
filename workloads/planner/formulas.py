"""Every formula of a dry run with its numbers, what it gives, and where it is from. Pure."""

from dataclasses import dataclass

from workloads.planner.dry_run import DryRun
from workloads.planner.stage_flops import model_flops_per_token, stage_flops
from workloads.planner.stage_parts import Part, elements_of
from workloads.planner.step_time import UPDATE_BYTES

_OWN = "this planner"


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One line: ``equation`` in symbols, ``numbers`` in the same order, ``value`` in ``unit``."""

    name: str
    equation: str
    numbers: str
    value: float
    unit: str
    source: str


def formulas_of(run: DryRun) -> tuple[Formula, ...]:
    """Return the formulas that made the fullest rank's memory, the bytes of each axis and the step."""
    return (*_memory(run), *_axes(run), *_time(run))


def _memory(run: DryRun) -> list[Formula]:
    ask, part, memory = run.ask, run.fullest.part, run.fullest.memory
    dense, experts = elements_of(ask, part)
    mixed = ask.element_bytes < 4
    widths = "2 + 2 + 12" if mixed else "4 + 4 + 8"
    found = [
        Formula(
            name="parameters of a rank",
            equation="layers (whole + split / t) + ends, experts / ep",
            numbers=f"{part.words}, tp {ask.tp}, ep {ask.ep}",
            value=dense + experts,
            unit="elements",
            source="workloads.shapes",
        ),
        Formula(
            name="state",
            equation=f"({widths}) Psi / fsdp",
            numbers=f"({widths}) * {dense + experts:,.0f} / {ask.fsdp}" + (f", ep {ask.ep}" if experts else ""),
            value=memory.state,
            unit="B",
            source="arXiv 1910.02054, figure 1",
        ),
        _activations(run, part),
    ]
    if memory.buffers:
        found.append(
            Formula(
                name="buffers",
                equation="2 Psi e (a stage gathered and unreduced)" if ask.pp > 1 else "3 layers e (two gathered)",
                numbers=f"Psi {dense:,.0f}, layers {part.layers}, e {ask.element_bytes}",
                value=memory.buffers,
                unit="B",
                source=_OWN,
            )
        )
    return found


def _activations(run: DryRun, part: Part) -> Formula:
    ask, shape = run.ask, run.ask.model.shape
    layer = {
        "none": "s b h e (2/t + 2 + (2 + 2g + 4f/h)/t) + 4 a s b / t"
        if shape.recipe == "llama"
        else "s b h e (2/t + 2 + (4 + 2f/h)/t) + 4 a s b / t",
        "selective": "s b h e (5 + 2g + k f/h) / t",
        "full": "s b h e / t",
    }[ask.checkpointing]
    return Formula(
        name="activations",
        equation=f"in flight * layers * {layer}" + (_head_equation(run) if part.head else ""),
        numbers=f"{part.in_flight:g} * {part.layers}, s {shape.sequence // ask.cp}, b {ask.microbatch}, "
        f"h {shape.hidden}, e {ask.element_bytes}, t {ask.tp}, g {shape.kv_heads / shape.heads:g}, f {shape.ffn}",
        value=run.fullest.memory.activations,
        unit="B",
        source="arXiv 2205.05198 without dropout and with fused attention; workloads.costs",
    )


def _head_equation(run: DryRun) -> str:
    ask = run.ask
    output = "1" if ask.sharded_vocabulary else "1/t"
    loss = "(e + 4)" if ask.float32_loss else "e"
    return f", and of the head b s h e (1/t + {output}) + b s V {loss} / t"


_AXES = {
    "tp": (
        "8 b s h e (t-1)/t a layer and microbatch, 2 b s h e (t-1)/t an end, norms' gradients",
        "arXiv 1909.08053; workloads.costs",
    ),
    "cp": ("2 X e (c-1) forward, 2 X (e+4) (c-1) backward for rings", "workloads.context.cp_costs"),
    "ep": ("4 T k h e (EP-1)/EP a layer and microbatch", "workloads.experts.moe_costs.even_dispatch_bytes"),
    "pp": ("b s h e / t a microbatch, boundary and direction", "arXiv 2104.04473"),
    "fsdp": ("3 Psi e (n-1)/n a microbatch; 2 Psi e (n-1)/n a step in a pipeline", "arXiv 1910.02054; workloads.costs"),
    "dp": ("2 Psi/fsdp e (n-1)/n a step, n = dp * cp", "workloads.costs"),
    "edp": ("2 Psi_experts e (n-1)/n a step, n = all that hold the same experts", "workloads.costs"),
}


def _axes(run: DryRun) -> list[Formula]:
    found = []
    for axis in run.time.axes:
        equation, source = _AXES[axis.name]
        sizes = f"{axis.name} {run.ask.mesh.get(axis.name, 1)}, microbatches {run.ask.microbatches}"
        found.append(
            Formula(
                name=f"bytes on {axis.name}",
                equation=equation,
                numbers=sizes,
                value=axis.sent_bytes,
                unit="B",
                source=source,
            )
        )
        found.append(
            Formula(
                name=f"time on {axis.name}",
                equation="calls (launch + hops + bytes / bandwidth)",
                numbers=f"{axis.where}; exposed {axis.exposed_seconds:.4g} s: {axis.assumption}",
                value=axis.seconds,
                unit="s",
                source=run.hardware.source,
            )
        )
    return found


def _time(run: DryRun) -> list[Formula]:
    ask, time, hardware = run.ask, run.time, run.hardware
    busiest = max((held.part for held in run.ranks), key=lambda part: stage_flops(ask, part).total)
    flops = stage_flops(ask, busiest)
    rate = "FLOP/s" if ask.element_bytes == 2 else f"FLOP/s * {hardware.float32_share:g}"
    return [
        Formula(
            name="compute",
            equation="M (forward + backward + again) / (peak * gemm)",
            numbers=f"{ask.microbatches} * ({flops.forward:.4g} + {flops.backward:.4g} + {flops.again:.4g}) / "
            f"({hardware.flops_per_second:.4g} {rate} * {hardware.efficiency.gemm})",
            value=time.compute_seconds,
            unit="s",
            source="2 FLOPs a weight and token, attention 4 s h / 2 for the mask; efficiency assumed",
        ),
        Formula(
            name="bubble",
            equation=time.bubble_method,
            numbers=f"P {ask.pp}, M {ask.microbatches}, v {ask.stages_per_rank}",
            value=time.bubble_seconds,
            unit="s",
            source="workloads.pipeline (arXiv 2104.04473, 2401.10241)",
        ),
        Formula(
            name="update",
            equation="28 B * parameters owned / (memory rate * share)",
            numbers=f"{UPDATE_BYTES} B, {hardware.memory_bytes_per_second:.4g} B/s * {hardware.efficiency.memory_rate}",
            value=time.update_seconds,
            unit="s",
            source=_OWN,
        ),
        Formula(
            name="mfu",
            equation="tokens/s (6 N + 12 L H Q T) / (GPUs * peak)",
            numbers=f"{run.tokens_per_second:.5g} * {model_flops_per_token(ask.model):.5g} / "
            f"({ask.world} * {hardware.flops_per_second:.4g})",
            value=run.mfu,
            unit="",
            source="PaLM, arXiv 2204.02311, appendix B",
        ),
    ]
