"""Latency and bandwidth of each operation: fits of time over size, and the bandwidth limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.results.fit import METHOD, CurveFit, CurvePoint, describe_intervals, fit_curve
from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.runs import Run
from parbench.reports.analysis.case_results import CaseResult, group_results

LINK, COPY, NVLINK, PCIE = "link", "copy", "nvlink", "pcie"
_REFERENCES = {
    LINK: "the declared link speed",
    COPY: "the memory-copy bandwidth of all ranks",
    NVLINK: "the bandwidth of all NVLinks of a GPU in one direction",
    PCIE: "the bandwidth of a GPU's PCIe lanes in one direction",
}
_PCIE_LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bandwidth after encoding, keyed by generation (PCI Express Base Specification)."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The bandwidth limit in one direction with which measured bus bandwidth is compared."""

    name: str
    """``link``: a declared link speed. On one host ``nvlink`` or ``pcie``: the links of a GPU.

    ``copy`` is a copy in the memory of CPUs, measured by ``memory.copy``.
    """
    bytes_per_second: float
    """The limit in B/s. For ``nvlink`` and ``pcie``, the sum over the links or lanes of one GPU."""


@dataclass(frozen=True, kw_only=True)
class OperationCurve:
    """The fit of time over size for cases of one operation that differ only in size."""

    rows: tuple[CaseResult, ...]
    """The results of the cases, from the smallest size."""
    fit: CurveFit
    """The piecewise linear fit: latency and bandwidth of each range of sizes."""
    busbw_factor: float | None
    """Bus bandwidth over algorithm bandwidth (nccl-tests), None if it is unknown."""
    ceiling: Ceiling | None
    """The bandwidth limit of the run, None if it is unknown."""

    @property
    def efficiency(self) -> float | None:
        """The fitted bus bandwidth of the largest sizes over the ceiling, as a fraction.

        It may exceed 1. None if the bandwidth, its factor or the ceiling is unknown.
        """
        bytes_per_second = self.fit.segments[-1].bytes_per_second
        if self.busbw_factor is None or bytes_per_second is None or self.ceiling is None:
            return None
        return self.busbw_factor * bytes_per_second / self.ceiling.bytes_per_second


def find_ceiling(run: Run, results: Sequence[CaseResult]) -> Ceiling | None:
    """Return the bandwidth limit of a run, with which measured bandwidths are compared.

    It is the link speed that the user declared. Without one, it is known only on a single host: on
    GPUs it is the speed of their links. On CPUs it is the bandwidth of the measured memory copy of
    the largest size on all ranks, because CPU ranks communicate through memory. Blocking copies are
    preferred, because pipelined ones are not synchronized. None if the limit is unknown.
    ``results`` are the measured cases.
    """
    link = run.info.plan.link_bytes_per_second
    if link is not None:
        return Ceiling(name=LINK, bytes_per_second=link)
    if any(result.world.device == "cuda" for result in results):
        return _find_gpu_link(run) if all(result.world.nodes == 1 for result in results) else None
    copies = [result for result in results if _is_memory_copy(result)]
    blocking = [result for result in copies if result.case.params.get("mode") == "blocking"]
    largest = max(blocking or copies, key=get_size, default=None)
    bytes_per_second = largest.value("algbw") if largest else None
    return Ceiling(name=COPY, bytes_per_second=bytes_per_second) if bytes_per_second else None


def _find_gpu_link(run: Run) -> Ceiling | None:
    """Return the bandwidth of a GPU's NVLinks, or else its PCIe lanes, None if unknown."""
    gpu = (run.info.environment or {}).get("gpu") or {}
    links = gpu.get("active_nvlinks")
    if links:
        link_speed = gpu.get("nvlink_bytes_per_second")
        return Ceiling(name=NVLINK, bytes_per_second=links * link_speed) if link_speed else None
    lane_speed = _PCIE_LANE_BYTES_PER_SECOND.get(gpu.get("pcie_generation_max") or 0)
    lanes = gpu.get("pcie_width_max")
    return Ceiling(name=PCIE, bytes_per_second=lanes * lane_speed) if lanes and lane_speed else None


def _is_memory_copy(result: CaseResult) -> bool:
    """Return True for a ``memory.copy`` on all ranks of one host whose bandwidth is known."""
    return (
        result.case.name == "memory.copy"
        and "group" not in result.case.params
        and result.world.nodes == 1
        and bool(result.value("algbw"))
    )


def fit_curves(
    results: Sequence[CaseResult], ceiling: Ceiling | None
) -> tuple[OperationCurve, ...]:
    """Return a fit of time over size for each operation that was measured at enough sizes.

    ``results`` are cases of one run. Cases that differ in more than size, such as in mode, type or
    ranks, get separate fits. ``ceiling`` is the bandwidth limit that each fit refers to.
    """
    timed = [
        result
        for result in results
        if result.is_communication and get_size(result) and result.value("time")
    ]
    curves = []
    for group in group_results(timed, "size_bytes"):
        rows = sorted(group, key=get_size)
        fit = fit_curve(make_points(rows))
        if fit:
            factor = _find_busbw_factor(rows)
            curves.append(
                OperationCurve(rows=tuple(rows), fit=fit, busbw_factor=factor, ceiling=ceiling)
            )
    return tuple(curves)


def _find_busbw_factor(rows: Sequence[CaseResult]) -> float | None:
    """Return bus bandwidth over algorithm bandwidth at the largest size at which both are known.

    ``rows`` are sorted by size. None if no size has both.
    """
    for row in reversed(rows):
        algbw, busbw = row.value("algbw"), row.value("busbw")
        if algbw and busbw is not None:
            return busbw / algbw
    return None


def make_points(rows: Sequence[CaseResult]) -> tuple[CurvePoint, ...]:
    """Return the points of a fit from results: size in bytes and time in seconds with its interval.

    Results with an unknown time are left out.
    """
    points = []
    for row in rows:
        seconds = row.value("time")
        if seconds:
            metric = row.metrics["time"]
            point = CurvePoint(
                size_bytes=get_size(row),
                seconds=seconds,
                low=metric.low,
                high=metric.high,
                repetitions=row.by_repetition("time"),
            )
            points.append(point)
    return tuple(points)


def get_size(result: CaseResult) -> int:
    """Return the message size of a case in bytes, 0 if the case has no size parameter."""
    return result.size_bytes or 0


def describe_fits(curves: Sequence[OperationCurve], ceiling: Ceiling | None) -> tuple[str, ...]:
    """Return sentences on how the fits were made, and on the bandwidth limit of efficiencies.

    The result is empty if ``curves`` is empty. Without ``ceiling``, the bandwidth limit, only the
    method is described.
    """
    if not curves:
        return ()
    intervals = dict.fromkeys(describe_intervals(curve.fit.repetitions) for curve in curves)
    notes = [
        f"Fits: {METHOD}, {' or '.join(intervals)}.",
        "Latency is extrapolated from the smallest sizes, bandwidth from the largest.",
    ]
    if ceiling is None:
        return tuple(notes)
    bandwidth = format_quantity(ceiling.bytes_per_second, "B/s")
    reference = _REFERENCES[ceiling.name]
    notes.append(f"Efficiency: fitted bus bandwidth over {reference}, {bandwidth}.")
    if any((curve.efficiency or 0) > 1 for curve in curves):
        is_copy = ceiling.name == COPY
        causes = "caches or shared memory" if is_copy else "in-network reduction or caches"
        notes.append(f"Efficiency above 100 % may be due to {causes}.")
    return tuple(notes)
