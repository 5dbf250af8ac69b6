"""Every formula of a dry run with its numbers, what it gives, and where it is from. Pure.

The numbers of an equation give its value; of what is a simulation or a sum over links they say what went into it.
"""

from dataclasses import dataclass

from workloads.costs.communication_pattern import SOURCES, calls, equation_of
from workloads.costs.equation import Equation
from workloads.costs.flops import active_layer_weights, again_bytes, stage_flops
from workloads.costs.memory import activations_equation, buffers_equation, owned_elements, state_equation
from workloads.costs.parameter_table import elements_of, layer_elements
from workloads.costs.step_spec import Position
from workloads.planner.dry_run import UPDATE_BYTES, DryRun

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


def _formula(name: str, equation: Equation, unit: str, source: str) -> Formula:
    return Formula(
        name=name, equation=equation.text, numbers=equation.numbers, value=equation.value, unit=unit, source=source
    )


def _memory(run: DryRun) -> list[Formula]:
    at = run.fullest.at
    found = [_formula("parameters of a rank", _dense(at), "elements", "workloads.costs")]
    moe = at.spec.moe
    if moe is not None:
        symbols = {
            "L": at.layers,
            "x": moe.experts_per_rank,
            "expert": layer_elements(at, "routed") / moe.experts_per_rank,
        }
        found.append(_formula("experts of a rank", Equation(text="L x expert", symbols=symbols), "elements", _OWN))
    found.append(_formula("state", state_equation(at), "B", "arXiv 1910.02054, figure 1"))
    source = "arXiv 2205.05198 without dropout and with fused attention; as ranks' tensors are counted"
    found.append(_formula("activations", activations_equation(at), "B", source))
    if run.fullest.memory.buffers:
        found.append(_formula("buffers", buffers_equation(at), "B", _OWN))
    return found


def _dense(at: Position) -> Equation:
    """Return the parameters of a rank that no ``ep`` deals out, before ``fsdp`` shards them."""
    whole, split = (layer_elements(at, kind) for kind in ("whole", "split"))
    ends = elements_of(at, "whole", "split") - at.layers * (whole + split)
    symbols = {"L": at.layers, "whole": whole, "split": split, "ends": ends}
    return Equation(text="L (whole + split) + ends", symbols=symbols)


def _axes(run: DryRun) -> list[Formula]:
    found = []
    for axis in run.time.axes:
        of = [[call for call in calls(held.at) if call.axis == axis.name] for held in run.ranks]
        most = max(of, key=lambda made: sum(call.sent for call in made))
        found.append(_formula(f"bytes on {axis.name}", equation_of(most), "B", SOURCES[axis.name]))
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
    spec, time = run.spec, run.time
    return [
        _formula(
            "compute",
            _compute(run),
            "s",
            "2 FLOPs a weight and token, attention 4 s h / 2 for the mask; efficiency assumed",
        ),
        Formula(
            name="bubble",
            equation=time.bubble_method,
            numbers=f"P {spec.size('pp')}, M {spec.microbatches}, v {spec.stages_per_rank}",
            value=time.bubble_seconds,
            unit="s",
            source="workloads.pipeline_parallel (arXiv 2104.04473, 2401.10241)",
        ),
        _formula("update", _update(run), "s", _OWN),
        _formula("mfu", _mfu(run), "", "PaLM, arXiv 2204.02311, appendix B"),
    ]


def _compute(run: DryRun) -> Equation:
    """Return FLOPs of forward, backward and what is computed again, and the bytes that ``selective`` moves again."""
    spec, hardware = run.spec, run.hardware
    flops, moved = stage_flops(run.time.busiest), again_bytes(run.time.busiest)
    symbols = {
        "M": spec.microbatches,
        "forward": flops.forward,
        "backward": flops.backward,
        "again": flops.again,
        "peak": hardware.flops_per_second,
        "gemm": hardware.efficiency.gemm,
        "float32": hardware.float32_share,
        "moved": moved,
        "rate": hardware.memory_bytes_per_second,
        "share": hardware.efficiency.memory_rate,
    }
    arithmetic = f"(forward + backward + again) / ({'peak gemm' if spec.mixed else 'peak float32 gemm'})"
    return Equation(text=f"M ({arithmetic} + moved / (rate share))" if moved else f"M {arithmetic}", symbols=symbols)


def _update(run: DryRun) -> Equation:
    hardware = run.hardware
    symbols = {
        "owned": max(owned_elements(held.at) for held in run.ranks),
        "rate": hardware.memory_bytes_per_second,
        "share": hardware.efficiency.memory_rate,
    }
    return Equation(text=f"{UPDATE_BYTES} owned / (rate share)", symbols=symbols)


def _mfu(run: DryRun) -> Equation:
    """Return what PaLM counts: N weights that a token meets, L layers of H heads of size Q, T tokens each."""
    spec, shape = run.spec, run.spec.shape
    symbols = {
        "tokens": run.tokens_per_second,
        "N": shape.layers * active_layer_weights(shape, spec.moe) + shape.hidden * shape.vocabulary,
        "L": shape.layers,
        "H": shape.heads,
        "Q": shape.head_size,
        "T": shape.sequence,
        "GPUs": spec.world,
        "peak": run.hardware.flops_per_second,
    }
    return Equation(text="tokens (6 N + 12 L H Q T) / (GPUs peak)", symbols=symbols)
