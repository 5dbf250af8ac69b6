"""Latency and bandwidth of each operation: fits of time over size, and the bandwidth limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.results.fit import METHOD, CurveFit, CurvePoint, fit_curve
from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.runs import Run
from parbench.reports.analysis.case_results import CaseResult, group_results

LINK, COPY, NVLINK, PCIE = "link", "memory copy", "nvlink", "pcie"
_REFERENCES = {
    LINK: "the declared link speed",
    COPY: "the memory-copy bandwidth of all ranks",
    NVLINK: "the bandwidth of all NVLinks of a GPU in one direction",
    PCIE: "the bandwidth of a GPU's PCIe lanes in one direction",
}
"""The description of each bandwidth limit for notes, keyed by ``Ceiling.name``."""
_PCIE_LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bandwidth of one PCIe lane in one direction after encoding (B/s), keyed by generation.

The source is the PCI Express Base Specification.
"""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The bandwidth limit in one direction with which measured bus bandwidth is compared."""

    name: str
    """The origin of the limit: ``link``, ``nvlink``, ``pcie`` or ``copy``.

    ``link`` is a link speed that the user declared. The others apply to a single host: ``nvlink``
    and ``pcie`` are the links of a GPU, and ``copy`` is a copy in the memory of CPUs, measured by
    ``memory.copy``.
    """
    bytes_per_second: float
    """The limit in B/s. For ``nvlink`` and ``pcie``, the sum over the links or lanes of one GPU."""


@dataclass(frozen=True, kw_only=True)
class OperationCurve:
    """The fit of time over size for cases of one operation that differ only in size."""

    rows: tuple[CaseResult, ...]
    """The results of the cases, from the smallest size."""
    fit: CurveFit
    """The fitted latency and bandwidth of one or two ranges of sizes."""
    busbw_factor: float | None
    """The ratio of bus to algorithm bandwidth (nccl-tests), None if it is unknown."""
    ceiling: Ceiling | None
    """The bandwidth limit of the run, None if it is unknown."""

    @property
    def efficiency(self) -> float | None:
        """The fitted bus bandwidth of the largest sizes over the ceiling, as a fraction.

        It may exceed 1, due to caches or reduction in the network. None if the fitted bandwidth,
        ``busbw_factor`` or ``ceiling`` is unknown.
        """
        bandwidth = self.fit.segments[-1].bandwidth
        if self.busbw_factor is None or bandwidth is None or self.ceiling is None:
            return None
        return self.busbw_factor * bandwidth.value / self.ceiling.bytes_per_second


def find_ceiling(run: Run, results: Sequence[CaseResult]) -> Ceiling | None:
    """Return the bandwidth limit of a run, with which measured bandwidths are compared.

    It is the link speed that the user declared. If none was declared, it is known only on a single
    host. For GPUs, it is then the bandwidth of a GPU's NVLinks or PCIe lanes. For CPUs, it is the
    measured bandwidth of the largest memory copy on all ranks, because CPU ranks communicate
    through memory. None if the limit is unknown. ``results`` are the measured cases.
    """
    link = run.info.plan.link_bytes_per_second
    if link is not None:
        return Ceiling(name=LINK, bytes_per_second=link)
    if any(result.world.nodes != 1 for result in results):
        return None
    if any(result.world.device == "cuda" for result in results):
        return _find_gpu_link(run)
    copies = [
        result
        for result in results
        if result.case.name == "memory.copy"
        and result.case.params.get("mode") == "blocking"
        and "group" not in result.case.params
    ]
    largest = max(copies, key=lambda result: result.size_bytes, default=None)
    bytes_per_second = largest.value("algbw") if largest else None
    return Ceiling(name=COPY, bytes_per_second=bytes_per_second) if bytes_per_second else None


def _find_gpu_link(run: Run) -> Ceiling | None:
    """Return the bandwidth limit of one GPU of a run: its NVLinks, without them its PCIe lanes.

    None if the environment of the run does not have their number and speed.
    """
    gpu = (run.info.environment or {}).get("gpu") or {}
    links = gpu.get("active_nvlinks")
    if links:
        link_speed = gpu.get("nvlink_bytes_per_second")
        return Ceiling(name=NVLINK, bytes_per_second=links * link_speed) if link_speed else None
    lane_speed = _PCIE_LANE_BYTES_PER_SECOND.get(gpu.get("pcie_generation_max") or 0)
    lanes = gpu.get("pcie_width_max")
    return Ceiling(name=PCIE, bytes_per_second=lanes * lane_speed) if lanes and lane_speed else None


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
        if result.is_communication and result.size_bytes and result.value("time")
    ]
    curves = []
    for group in group_results(timed, "size_bytes"):
        rows = sorted(group, key=lambda result: result.size_bytes)
        points = [
            CurvePoint(
                size_bytes=row.size_bytes,
                seconds=row.value("time") or 0.0,
                repetitions=row.by_repetition("time"),
            )
            for row in rows
        ]
        fit = fit_curve(points)
        if fit:
            algbw, busbw = rows[-1].value("algbw"), rows[-1].value("busbw")
            factor = busbw / algbw if algbw and busbw is not None else None
            curves.append(
                OperationCurve(rows=tuple(rows), fit=fit, busbw_factor=factor, ceiling=ceiling)
            )
    return tuple(curves)


def describe_fits(ceiling: Ceiling | None) -> list[str]:
    """Return sentences on the method of the fits of time over size, and on their efficiencies.

    An efficiency is a fitted bandwidth over ``ceiling``, the bandwidth limit of the run. If
    ``ceiling`` is None, only the method is described.
    """
    notes = [f"Fits: {METHOD}."]
    if ceiling is not None:
        bandwidth = format_quantity(ceiling.bytes_per_second, "B/s")
        notes.append(f"Efficiency: bus bandwidth over {_REFERENCES[ceiling.name]}, {bandwidth}.")
    return notes
