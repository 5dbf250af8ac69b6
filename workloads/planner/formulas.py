"""Every formula of a dry run with its numbers, what it gives, and where it is from. Pure.

The numbers of an equation give its value; of what is a sum over calls or a simulation they say what went into it.
"""

from dataclasses import dataclass

from workloads.costs.equation import Equation
from workloads.planner.axis_equations import SOURCES, axis_equation
from workloads.planner.calls import calls_of
from workloads.planner.dry_run import DryRun
from workloads.planner.memory_equations import (
    activations_equation,
    buffers_equation,
    dense_equation,
    experts_equation,
    state_equation,
)
from workloads.planner.stage_flops import active_layer_weights, again_bytes, stage_flops
from workloads.planner.stage_parts import Part, elements_of
from workloads.planner.step_time import UPDATE_BYTES, owned_elements

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


def _formula(name: str, equation: Equation, value: float, unit: str, source: str) -> Formula:
    return Formula(name=name, equation=equation.text, numbers=equation.numbers, value=value, unit=unit, source=source)


def _memory(run: DryRun) -> list[Formula]:
    ask, part, memory = run.ask, run.fullest.part, run.fullest.memory
    dense, experts = elements_of(ask, part)
    found = [
        _formula("parameters of a rank", dense_equation(ask, part), dense, "elements", "workloads.model.shapes"),
        _formula("state", state_equation(ask, part), memory.state, "B", "arXiv 1910.02054, figure 1"),
        _formula(
            "activations",
            activations_equation(ask, part),
            memory.activations,
            "B",
            "arXiv 2205.05198 without dropout and with fused attention; workloads.costs",
        ),
    ]
    if experts:
        found.insert(1, _formula("experts of a rank", experts_equation(ask, part), experts, "elements", _OWN))
    if memory.buffers:
        found.append(_formula("buffers", buffers_equation(ask, part), memory.buffers, "B", _OWN))
    return found


def _axes(run: DryRun) -> list[Formula]:
    found = []
    for axis in run.time.axes:
        equation = axis_equation(run.ask, _sends_most(run, axis.name), axis.name)
        found.append(_formula(f"bytes on {axis.name}", equation, axis.sent_bytes, "B", SOURCES[axis.name]))
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


def _sends_most(run: DryRun, axis: str) -> Part:
    def sent(part: Part) -> float:
        return sum(call.sent for call in calls_of(run.ask, part, run.hardware.gpus_per_node) if call.axis == axis)

    return max((held.part for held in run.ranks), key=sent)


def _time(run: DryRun) -> list[Formula]:
    time = run.time
    return [
        _formula(
            "compute",
            _compute(run),
            time.compute_seconds,
            "s",
            "2 FLOPs a weight and token, attention 4 s h / 2 for the mask; efficiency assumed",
        ),
        Formula(
            name="bubble",
            equation=time.bubble_method,
            numbers=f"P {run.ask.pp}, M {run.ask.microbatches}, v {run.ask.stages_per_rank}",
            value=time.bubble_seconds,
            unit="s",
            source="workloads.pipeline (arXiv 2104.04473, 2401.10241)",
        ),
        _formula("update", _update(run), time.update_seconds, "s", _OWN),
        _formula("mfu", _mfu(run), run.mfu, "", "PaLM, arXiv 2204.02311, appendix B"),
    ]


def _compute(run: DryRun) -> Equation:
    """Return FLOPs of forward, backward and what is computed again, and the bytes that ``selective`` moves again."""
    ask, hardware = run.ask, run.hardware
    flops, moved = stage_flops(ask, run.time.busiest), again_bytes(ask, run.time.busiest)
    symbols = {
        "M": ask.microbatches,
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
    peak = "peak gemm" if ask.element_bytes == 2 else "peak float32 gemm"
    arithmetic = f"(forward + backward + again) / ({peak})"
    return Equation(text=f"M ({arithmetic} + moved / (rate share))" if moved else f"M {arithmetic}", symbols=symbols)


def _update(run: DryRun) -> Equation:
    hardware = run.hardware
    symbols = {
        "owned": max(owned_elements(run.ask, held.part) for held in run.ranks),
        "rate": hardware.memory_bytes_per_second,
        "share": hardware.efficiency.memory_rate,
    }
    return Equation(text=f"{UPDATE_BYTES} owned / (rate share)", symbols=symbols)


def _mfu(run: DryRun) -> Equation:
    """Return what PaLM counts: N weights that a token meets, L layers of H heads of size Q, T tokens each."""
    model, shape = run.ask.model, run.ask.model.shape
    symbols = {
        "tokens": run.tokens_per_second,
        "N": shape.layers * active_layer_weights(model) + shape.hidden * shape.vocabulary,
        "L": shape.layers,
        "H": shape.heads,
        "Q": shape.head_size,
        "T": shape.sequence,
        "GPUs": run.ask.world,
        "peak": run.hardware.flops_per_second,
    }
    return Equation(text="tokens (6 N + 12 L H Q T) / (GPUs peak)", symbols=symbols)
