"""Measured efficiencies in place of the assumed ones of hardware. Pure.

The share of the peak that compute reaches is the FLOPs of a rank over its compute time. The overlap
of an axis is 1 - exposed / transfer time. Each is the median over the steps of all runs.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, pluralize
from parbench.workloads.costs.flops import count_rank_flops
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.hardware import HIDEABLE, Efficiency, Hardware
from parbench.workloads.planner.link_time import read_peak
from parbench.workloads.planner.measured.validate import build_spec_of_record, get_value


def calibrate_hardware(runs: Sequence[Run], hardware: Hardware) -> tuple[Hardware, tuple[str, ...]]:
    """Return a copy of ``hardware`` with efficiencies that runs measured, and notes on them.

    The efficiencies are the fraction of the peak FLOP/s that compute reaches, and the fraction of
    the communication on each axis that compute hides. Each is the median over the training steps of
    all ``runs``. An efficiency that no step measured stays that of ``hardware``. Raises
    ``UserError`` if no step measured any.
    """
    compute_shares, overlaps = measure_shares(runs, hardware)
    if not compute_shares and not overlaps:
        names = ", ".join(str(run.path) for run in runs)
        reason = "no step has real compute and a known peak, nor an axis whose overlap was traced"
        raise UserError(f"{names}: {reason}")
    efficiency, notes = hardware.efficiency, []
    if compute_shares:
        hardware, efficiency = _replace_compute(hardware, min(1.0, median(compute_shares)))
        share = _describe_shares(compute_shares, "the peak FLOP/s")
        notes.append(f"measured: compute reaches {share}")
    for axis, shares in overlaps.items():
        overlap = {**efficiency.overlap, axis: median(shares)}
        efficiency = msgspec.structs.replace(efficiency, overlap=overlap)
        share = _describe_shares(shares, f"the communication on {axis}")
        notes.append(f"measured: compute hides {share}")
    notes.append("all other efficiencies are assumed")
    return msgspec.structs.replace(hardware, efficiency=efficiency), tuple(notes)


def _replace_compute(hardware: Hardware, share: float) -> tuple[Hardware, Efficiency]:
    """Return hardware and efficiencies with which compute reaches ``share`` of the peak FLOP/s.

    ``share`` is the measured fraction of the peak FLOP/s that a step reaches while it computes,
    with GEMMs and all other kernels. Launches of kernels (a field of ``Hardware``) and traffic in
    memory (fields of ``Efficiency``) then take no time, because ``share`` includes their time.

    The returned hardware still has the old efficiencies. The caller adds measured overlaps to the
    returned efficiencies, and then puts them into the hardware.
    """
    efficiency = msgspec.structs.replace(
        hardware.efficiency,
        gemm=share,
        attention=share,
        gemm_traffic=0.0,
        elementwise_traffic=0.0,
        score_traffic=0.0,
    )
    return msgspec.structs.replace(hardware, kernel_seconds=0.0), efficiency


def measure_shares(
    runs: Sequence[Run], hardware: Hardware
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the efficiencies that the training steps of runs measured: of compute and of overlap.

    The first result has, for each step, the FLOP/s of compute as a fraction of the peak. The second
    has, keyed by mesh axis, the fraction of the communication time that compute hid in each step. A
    step that did not measure an efficiency is left out of the list.
    """
    compute_shares: list[float] = []
    overlaps: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for record in run.records:
            if record.status != "ok" or not record.case.name.startswith("workload."):
                continue
            try:
                spec = build_spec_of_record(record)
            except UserError:
                continue
            share = _measure_compute_share(record, spec, hardware)
            if share is not None:
                compute_shares.append(share)
            for axis in HIDEABLE:
                overlap = _measure_overlap(record, axis)
                if overlap is not None:
                    overlaps[axis].append(overlap)
    return compute_shares, dict(overlaps)


def _measure_compute_share(record: Record, spec: StepSpec, hardware: Hardware) -> float | None:
    """Return the fraction of a device's peak FLOP/s that the compute of a step reached.

    The peak is that of the record. If the record has none, it is that of ``hardware`` for a step on
    GPUs. The result is None if the peak or the compute time is unknown, or if compute is simulated.
    """
    seconds = get_value(record.metrics, "compute")
    peak = read_peak(record)
    if not peak and record.world.device != "cpu":
        peak = hardware.peak(spec.bytes_per_element)
    if not seconds or not peak or spec.is_simulated:
        return None
    flops = max(count_rank_flops(view) for view in spec.distinct_views)
    return flops * spec.microbatches / seconds / peak


def _measure_overlap(record: Record, axis: str) -> float | None:
    """Return the fraction (0 to 1) of an axis' communication time that compute hid in a step.

    The result is None if the step did not measure the seconds of communication on the axis, or the
    seconds that compute does not hide.
    """
    transfer = get_value(record.metrics, f"comm_transfer.{axis}")
    exposed = get_value(record.metrics, f"exposed_comm.{axis}")
    if not transfer or exposed is None:
        return None
    return min(1.0, max(0.0, 1 - exposed / transfer))


def _describe_shares(shares: Sequence[float], total: str) -> str:
    """Return a text such as ``41% of the peak FLOP/s (median of 3 steps)``.

    ``shares`` has one fraction per step, and ``total`` is the text after ``of``.
    """
    return f"{median(shares):.0%} of {total} (median of {pluralize(len(shares), 'step')})"
