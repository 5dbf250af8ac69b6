"""Words, formulas and JSON of dry runs and searches, in SI units. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from parbench.workloads.costs.communication_pattern import SOURCES, list_calls, sum_calls
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.flops import matmul_weights, recomputed_bytes, stage_flops
from parbench.workloads.costs.memory import (
    activations_equation,
    buffers_equation,
    state_equation,
    updated_elements,
)
from parbench.workloads.costs.parameter_table import (
    Parts,
    list_units,
    num_active_parameters,
    num_parameters,
)
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.schedules import find_schedule
from parbench.workloads.planner.candidates import Wanted, limits
from parbench.workloads.planner.dry_run import DryRun
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.rationale import binding_of, rationale
from parbench.workloads.planner.search import Found
from parbench.workloads.planner.state_widths import count_updated_bytes


def batch_words(run: DryRun) -> str:
    spec = run.spec
    return (
        f"{spec.name} on {spec.ranks} GPUs ({run.hardware.name}), mesh {spec.dims.label}: global batch "
        f"{spec.global_batch} = {spec.dims.size('dp', 'fsdp')} data ranks x {spec.microbatches} microbatches x "
        f"{spec.microbatch}, sequence {spec.shape.sequence}, {parameter_words(spec.shape, spec.moe)}"
    )


def parameter_words(shape: Shape, moe: Moe | None) -> str:
    """Return how many parameters a model has and, where tokens choose experts, how many of them one token meets."""
    whole, met = num_parameters(shape, moe), num_active_parameters(shape, moe)
    unit, factor = ("B", 1e9) if whole >= 1e9 else ("M", 1e6)
    active = f" ({met / factor:.4g} {unit} active)" if moe else ""
    return f"{whole / factor:.4g} {unit} parameters{active}"


def assumptions(hardware: Hardware, bytes_per_element: int, notes: Sequence[str] = ()) -> list[str]:
    e = hardware.efficiency
    links = [
        f"links at {e.links_inside:.0%} of {hardware.inside_bytes_per_second / 1e9:.4g} GB/s inside a node of "
        f"{hardware.gpus_per_node}, {e.links_across:.0%} of {hardware.across_bytes_per_second / 1e9:.4g} GB/s a card "
        "across",
        f"launch {hardware.launch_seconds * 1e6:.3g} us, hop {hardware.inside_hop_seconds * 1e6:.3g} us inside, "
        f"{hardware.across_hop_seconds * 1e6:.3g} us across",
    ]
    return [
        f"matrix products, and attention's half that no mask hides, at {e.gemm:.0%} of "
        f"{hardware.flops_per_second / 1e12:.4g} TFLOP/s"
        + ("" if bytes_per_element == 2 else f" * {hardware.float32_share:g} for float32"),
        *([f"links: {hardware.links_from}"] if hardware.links_from else links),
        f"memory at {e.memory_rate:.0%} of {hardware.memory_bytes_per_second / 1e12:.4g} TB/s, {e.memory:.0%} of "
        f"{hardware.memory_bytes / 1e9:.4g} GB usable",
        "of communication that could hide does: "
        + (", ".join(f"{name} {share:.0%}" for name, share in e.overlap.items()) or "none"),
        f"hardware: {hardware.source}",
        *notes,
    ]


def refusals_of(found: Found, wanted: Wanted) -> list[str]:
    """Return an example of each rule that stops some candidate, and of memory, with its numbers."""
    rules = list(limits(wanted).values())
    rules += [
        f"{reason} ({found.refused[rule]:,} alike)" for rule, reason in found.equations.items()
    ]
    if found.too_large:
        rules.append(
            f"{found.too_large:,} too large{f', such as {found.nearest.missing}' if found.nearest else ''}"
        )
    return rules


def as_line(value: object) -> str:
    return msgspec.json.encode(value).decode()


def dry_run_json(run: DryRun, notes: Sequence[str] = ()) -> dict[str, Any]:
    spec = run.spec
    return {
        "kind": "dry-run",
        "predicted": True,
        "model": spec.name,
        "parameters": num_parameters(spec.shape, spec.moe),
        "active_parameters": num_active_parameters(spec.shape, spec.moe),
        "gpus": spec.ranks,
        "mesh": spec.dims.sizes,
        "microbatch": spec.microbatch,
        "microbatches": spec.microbatches,
        "global_batch": spec.global_batch,
        "sequence": spec.shape.sequence,
        "bytes_per_element": spec.bytes_per_element,
        "checkpointing": spec.checkpointing_label,
        "schedule": spec.pipeline_options.schedule,
        "chunks": spec.stages_per_rank,
        "split": spec.pipeline_options.split,
        "cp_method": spec.cp_method,
        "zero": spec.zero_stage,
        "fits": run.fits,
        "memory_bytes": [
            {"rank": held.at.label, **asdict(held.memory), "total": held.memory.total}
            for held in run.ranks
        ],
        "usable_bytes": run.hardware.usable_bytes,
        "step_seconds": run.seconds,
        "compute_seconds": run.compute_seconds,
        "update_seconds": run.update_seconds,
        "bubble_seconds": run.bubble_seconds,
        "bubble_method": run.bubble_method,
        "axes": {
            axis.name: {key: value for key, value in asdict(axis).items() if key != "name"}
            for axis in run.axes
        },
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "hardware": run.hardware,
        "formulas": [asdict(formula) for formula in formulas_of(run)],
        "notes": [*run.caveats, *notes],
    }


def search_json(found: Found, notes: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "kind": "search",
        "predicted": True,
        "tried": found.tried,
        "too_large": found.too_large,
        "refused": found.refused,
        "refused_such_as": found.equations,
        "best": [{**dry_run_json(run), "bound_by": binding_of(run)} for run in found.best],
        "front": [dry_run_json(run) for run in found.front],
        "why": rationale(found),
        "notes": notes,
    }


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
    return (*_memory_formulas(run), *_axis_formulas(run), *_time_formulas(run))


def _formula(name: str, equation: Equation, unit: str, source: str) -> Formula:
    return Formula(
        name=name,
        equation=equation.text,
        numbers=equation.numbers,
        value=equation.value,
        unit=unit,
        source=source,
    )


def _memory_formulas(run: DryRun) -> list[Formula]:
    at = run.fullest.at
    units, moe = list_units(at), at.spec.moe
    dense_layers = units.layers[-1][1] if at.dense_layers else ()
    symbols = {
        "layers": at.layers - at.dense_layers,
        "layer": _count_unsplit(units.layers[0][1]),
        "dense_layers": at.dense_layers,
        "dense_layer": _count_unsplit(dense_layers),
        "embedding": _count_unsplit(units.embeddings),
        "norm_and_head": _count_unsplit(units.head),
    }
    dense = "dense_layers * dense_layer + " if at.dense_layers else ""
    text = f"layers * layer + {dense}embedding + norm_and_head"
    parameters = Equation(text=text, symbols=symbols)  # before FSDP shards them
    found = [_formula("parameters of a rank", parameters, "elements", _OWN)]
    if moe is not None:
        routed = sum(part.numel for part in units.layers[0][1] if part.kind == "routed")
        expert_symbols: dict[str, float] = {
            "layers": at.layers - at.dense_layers,
            "experts_per_rank": moe.experts_per_rank,
            "expert": routed / moe.experts_per_rank,
        }
        experts = Equation(text="layers * experts_per_rank * expert", symbols=expert_symbols)
        found.append(_formula("experts of a rank", experts, "elements", _OWN))
    found.append(_formula("state", state_equation(at), "B", "arXiv 1910.02054, figure 1"))
    source = "arXiv 2205.05198 without dropout and with flash attention"
    found.append(_formula("activations", activations_equation(at), "B", source))
    if run.fullest.memory.buffers:
        found.append(_formula("buffers", buffers_equation(at), "B", _OWN))
    return found


def _count_unsplit(parts: Parts) -> int:
    """Return the elements of a unit without routed experts."""
    return sum(part.numel for part in parts if part.kind != "routed")


def _axis_formulas(run: DryRun) -> list[Formula]:
    found = []
    for axis in run.axes:
        of = [
            [call for call in list_calls(held.at) if call.axis == axis.name] for held in run.ranks
        ]
        most = max(of, key=lambda made: sum(call.sent for call in made))
        found.append(_formula(f"bytes on {axis.name}", sum_calls(most), "B", SOURCES[axis.name]))
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


def _time_formulas(run: DryRun) -> list[Formula]:
    spec, hardware = run.spec, run.hardware
    update = Equation(
        text=f"{count_updated_bytes(spec.widths)} * owned / (rate * share)",
        symbols={
            "owned": max(updated_elements(held.at) for held in run.ranks),
            "rate": hardware.memory_bytes_per_second,
            "share": hardware.efficiency.memory_rate,
        },
    )
    counted = "2 FLOPs per weight and token, half of attention is masked; efficiency assumed"
    return [
        _formula("compute", _compute(run), "s", counted),
        Formula(
            name="bubble",
            equation=run.bubble_method,
            numbers=f"P {spec.dims.size('pp')}, M {spec.microbatches}, v {spec.stages_per_rank}",
            value=run.bubble_seconds,
            unit="s",
            source=find_schedule(spec.pipeline_options.schedule).source,
        ),
        _formula("update", update, "s", _OWN),
        _formula("mfu", _mfu(run), "", "PaLM, arXiv 2204.02311, appendix B"),
    ]


def _compute(run: DryRun) -> Equation:
    """Return FLOPs of forward, backward and what is computed again, and the bytes that ``selective`` moves again."""
    spec, hardware = run.spec, run.hardware
    flops, moved = stage_flops(run.busiest), recomputed_bytes(run.busiest)
    symbols = {
        "M": spec.microbatches,
        "forward": flops.forward,
        "backward": flops.backward,
        "recomputed": flops.recomputed,
        "peak": hardware.flops_per_second,
        "gemm": hardware.efficiency.gemm,
        "float32": hardware.float32_share,
        "moved": moved,
        "rate": hardware.memory_bytes_per_second,
        "share": hardware.efficiency.memory_rate,
    }
    rate = "peak * gemm" if spec.has_master_weights else "peak * float32 * gemm"
    arithmetic = f"(forward + backward + recomputed) / ({rate})"
    return Equation(
        text=f"M * ({arithmetic} + moved / (rate * share))" if moved else f"M * {arithmetic}",
        symbols=symbols,
    )


def _mfu(run: DryRun) -> Equation:
    """Return what PaLM counts: N weights that a token meets, L layers of H heads of size Q, T tokens each."""
    spec, shape = run.spec, run.spec.shape
    symbols = {
        "tokens": run.tokens_per_second,
        "N": matmul_weights(shape, spec.moe),
        "L": shape.layers,
        "H": shape.heads,
        "Q": (shape.head_size + shape.value_size) / 2,
        "T": shape.sequence,
        "GPUs": spec.ranks,
        "peak": run.hardware.flops_per_second,
    }
    return Equation(text="tokens * (6 * N + 12 * L * H * Q * T) / (GPUs * peak)", symbols=symbols)
