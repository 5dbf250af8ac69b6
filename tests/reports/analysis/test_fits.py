"""Curves over message sizes with their fits, and the ceiling that bandwidth is compared with."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.fits import (
    COPY,
    LINK,
    NVLINK,
    PCIE,
    Ceiling,
    OperationCurve,
    fit_curves,
)
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import run_from_records, summarize_rows
from tests.support.reports.reports_fixtures import (
    WORLD,
    collective_case,
    curve_records,
    ok_record,
    rate_metric,
    seconds_metric,
)

SIZES = [1024 * 4**i for i in range(8)]
LINK_9 = Ceiling(name=LINK, bytes_per_second=9e9)


def fit_curve(records: Sequence[Record], ceiling: Ceiling | None = None) -> OperationCurve:
    (curve,) = fit_curves(summarize_rows(*records), ceiling)
    return curve


def sizes_of(curve: OperationCurve) -> list[int]:
    return [row.size_bytes for row in curve.rows]


def test_curve_has_rows_of_one_operation_by_size() -> None:
    curve = fit_curve(curve_records(latency=20e-6)[::-1])
    assert sizes_of(curve) == SIZES
    (line,) = curve.fit.segments
    assert line.latency.value == pytest.approx(20e-6)
    assert line.bandwidth is not None
    assert line.bandwidth.value == pytest.approx(3e9)
    assert curve.busbw_factor == pytest.approx(1.5)
    assert fit_curves(summarize_rows(*curve_records()[:2]), None) == ()


def test_efficiency_is_that_of_the_last_segment() -> None:
    records = []
    for power in range(10, 27):
        size = 2**power
        seconds = 10e-6 + size / 1e9 if power <= 16 else 100e-6 + size / 3e9
        records.append(ok_record(collective_case(size_bytes=size), seconds=seconds))
    curve = fit_curve(records, LINK_9)
    assert len(curve.fit.segments) == 2
    assert curve.efficiency == pytest.approx(0.5, rel=1e-3)


def find_ceiling(run: Run) -> Ceiling | None:
    return RunData(run).ceiling


def copy_record(
    size_bytes: int, rate: float, nodes: int = 1, name: str = "memory.copy", **params: Any
) -> Record:
    params = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking", **params}
    case = make_case(name, "parbench.bench.operations.local:copy", params)
    metrics = {"time": seconds_metric(size_bytes / rate), "algbw": rate_metric(rate)}
    return ok_record(case, metrics=metrics, world=replace(WORLD, nodes=nodes))


def test_ceiling_is_the_link_or_the_largest_local_copy() -> None:
    pipelined = copy_record(1 << 26, 8e9, mode="pipelined")
    to_device = copy_record(1 << 26, 8e9, name="memory.to_device")
    of_group = copy_record(1 << 26, 8e9, group="tp")
    copies = run_from_records(
        copy_record(1 << 24, 4e9), copy_record(1 << 10, 9e9), pipelined, to_device, of_group
    )
    assert find_ceiling(copies) == Ceiling(name=COPY, bytes_per_second=4e9)
    plan = replace(copies.info.plan, link_bytes_per_second=9e9)
    linked = replace(copies, info=replace(copies.info, plan=plan))
    assert find_ceiling(linked) == LINK_9
    assert find_ceiling(run_from_records(copy_record(1 << 24, 4e9, nodes=2))) is None


@pytest.mark.parametrize(
    ("gpu", "name", "rate"),
    [
        ({"active_nvlinks": 18, "nvlink_bytes_per_second": 26_562_000_000}, NVLINK, 478.116e9),
        ({"pcie_generation_max": 4, "pcie_width_max": 16}, PCIE, 31.504e9),
    ],
)
def test_ceiling_of_gpus_is_their_links(gpu: dict[str, Any], name: str, rate: float) -> None:
    """A copy in the memory of a GPU is several times as fast as any link."""
    copies = copy_record(1 << 24, 1.5e12)
    record = replace(copies, world=replace(WORLD, device="cuda"))
    ceiling = Ceiling(name=name, bytes_per_second=rate)
    assert find_ceiling(run_from_records(record, environment={"gpu": gpu})) == ceiling
    assert find_ceiling(run_from_records(record, environment={})) is None
