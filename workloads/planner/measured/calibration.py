"""Efficiencies as runs measured them, in the place of assumed ones, and what remains assumed. Pure.

What a step's matrix products reach is what its rank executed over its compute and the peak; of what could hide, the
overlap of an axis is 1 - exposed / transfer. Each is the median over the runs' steps.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.workloads.costs.flops import stage_flops
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.hardware import HIDEABLE, Hardware
from parbench.workloads.planner.link_time import positive
from parbench.workloads.planner.measured.validate import spec_of_record

_ASSUMED = ("gemm", "memory_rate", "memory")  # of Efficiency


def calibrated(runs: Sequence[Run], hardware: Hardware) -> tuple[Hardware, tuple[str, ...]]:
    """Return the machine with the shares that runs measured, and sentences that say which those are and which not.

    ``UserError`` where the runs hold no step that tells one.
    """
    products, overlaps = _shares(runs, hardware)
    if not products and not overlaps:
        names = ", ".join(str(run.path) for run in runs)
        raise UserError(
            f"{names}: no step has real compute and a known peak, nor an axis whose overlap was traced"
        )
    told: dict[str, object] = {"overlap": dict(hardware.efficiency.overlap)}
    notes = []
    if products:
        told["gemm"] = min(1.0, median(products))
        notes.append(f"measured: matrix products at {_words(products)}")
    if overlaps:
        told["overlap"] = {
            **hardware.efficiency.overlap,
            **{name: median(each) for name, each in overlaps.items()},
        }
        notes += [
            f"measured: of {name}'s communication hides {_words(each)}"
            for name, each in overlaps.items()
        ]
    efficiency = msgspec.structs.replace(hardware.efficiency, **told)
    return msgspec.structs.replace(hardware, efficiency=efficiency), (
        *notes,
        _left(hardware, told, overlaps),
    )


def _left(
    hardware: Hardware, told: Mapping[str, object], overlaps: Mapping[str, Sequence[float]]
) -> str:
    """Say what no run told."""
    names = [name for name in _ASSUMED if name not in told]
    names += [f"overlap of {name}" for name in hardware.efficiency.overlap if name not in overlaps]
    links = [] if hardware.links_from else ["links_inside", "links_across"]
    return f"still assumed: {', '.join([*names, *links])}"


def _shares(runs: Sequence[Run], hardware: Hardware) -> tuple[list[float], dict[str, list[float]]]:
    products: list[float] = []
    overlaps: defaultdict[str, list[float]] = defaultdict(list)
    for record in (record for run in runs for record in run.records):
        spec = (
            spec_of_record(record)
            if record.status == "ok" and record.case.name.startswith("workload.")
            else ""
        )
        if isinstance(spec, str):
            continue
        values = {name: metric.value for name, metric in record.metrics.items() if metric.value}
        compute, peak = (
            values.get("compute"),
            _peak(record.details.get("peak"), hardware, spec, record.world.device),
        )
        if compute and peak and not spec.is_simulated:
            executed = max(
                stage_flops(spec.rank_view(rank)).total for rank in range(record.world.size)
            )
            products.append(executed * spec.microbatches / compute / peak)
        for axis in HIDEABLE:
            took = values.get(f"comm_transfer.{axis}")
            exposed = values.get(f"exposed_comm.{axis}", 0.0)
            if took and f"exposed_comm.{axis}" in record.metrics:
                overlaps[axis].append(min(1.0, max(0.0, 1 - exposed / took)))
    return products, dict(overlaps)


def _peak(known: object, hardware: Hardware, spec: StepSpec, device: str) -> float | None:
    """Return the peak that the record has, or on GPUs the declared one."""
    if isinstance(known, dict) and (rate := positive(known.get("flops_per_second"))):
        return rate
    return (
        None
        if device == "cpu"
        else hardware.flops_per_second
        * (1.0 if spec.has_master_weights else hardware.float32_share)
    )


def _words(shares: Sequence[float]) -> str:
    each = f", {min(shares):.0%} to {max(shares):.0%}" if len(shares) > 1 else ""
    return f"{median(shares):.0%} ({len(shares)} step{'s' * (len(shares) > 1)}{each})"
