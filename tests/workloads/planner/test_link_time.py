"""Times of calls, from declared hardware and from the fits of a measured run."""

from typing import Any

import msgspec
import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.planner.link_time import (
    PlacedCall,
    choose_curve,
    derive_hardware,
    fit_curves_of_run,
    list_extrapolations,
    make_curve_predictor,
    make_hardware_predictor,
)
from parbench.workloads.planner.placement import Place
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    curve_records,
    failed_record,
    ok_record,
    step_case,
)
from tests.support.workloads.planner_asks import SIMPLE_HARDWARE

MEBI = 1 << 20
ONE_NODE = Place(ranks=8, on_node=8)
FOUR_NODES = Place(ranks=32, on_node=8)
ONE_PER_NODE = Place(ranks=4, on_node=1)


def make_call(op: str, num_bytes: float = 8e9, place: Place = ONE_NODE) -> PlacedCall:
    return PlacedCall(axis="dp", op=op, num_bytes=num_bytes, count=1, place=place)


@pytest.mark.parametrize("op", ["all_reduce", "send"])
def test_call_inside_node_takes_bytes_over_bandwidth(op: str) -> None:
    seconds = make_hardware_predictor(SIMPLE_HARDWARE)(make_call(op))
    assert seconds == sent_bytes(op, 8e9, 8) / 100e9


@pytest.mark.parametrize(
    ("on_node", "rails", "nics"), [(1, 0, 1), (8, 0, 8), (8, 4, 4), (2, 8, 2)]
)
def test_collective_uses_one_nic_per_rank(on_node: int, rails: int, nics: int) -> None:
    hardware = msgspec.structs.replace(SIMPLE_HARDWARE, rails=rails)
    place = Place(ranks=2 * on_node, on_node=on_node)
    seconds = make_hardware_predictor(hardware)(make_call("all_gather", place=place))
    assert sent_bytes("all_gather", 8e9, place.ranks) / seconds == pytest.approx(nics * 10e9)


@pytest.mark.parametrize(
    ("op", "place", "hops"),
    [
        ("all_gather", ONE_NODE, 7e-4),
        ("reduce_scatter", ONE_PER_NODE, 3e-2),
        ("all_gather", FOUR_NODES, 7e-4 + 3e-2),
        ("all_reduce", FOUR_NODES, 2 * (7e-4 + 2e-2)),
        ("send", FOUR_NODES, 1e-2),
        # An all_reduce uses a tree.
        ("all_reduce", Place(ranks=1024, on_node=1), 2 * 10 * 1e-2),
    ],
)
def test_latency_is_launch_and_hops(op: str, place: Place, hops: float) -> None:
    hardware = msgspec.structs.replace(
        SIMPLE_HARDWARE, launch_seconds=1e-3, inside_hop_seconds=1e-4, across_hop_seconds=1e-2
    )
    assert make_hardware_predictor(hardware)(make_call(op, 0.0, place)) == pytest.approx(
        1e-3 + hops
    )


def send_records() -> list[Record]:
    """Return messages of a latency of 100 us and a bandwidth of 3 GB/s."""
    params: dict[str, Any] = {"dtype": "float32", "mode": "blocking", "source": 0, "target": 1}
    target = "parbench.bench.operations.p2p:unidirectional"
    records = []
    for size in (1024, 65536, MEBI, 16 * MEBI):
        case = make_case("p2p.unidirectional", target, {"size_bytes": size, **params})
        records.append(ok_record(case, seconds=1e-4 + size / 3e9))
    return records


def make_measured_call(op: str, ranks: int = 4, num_bytes: float = MEBI) -> PlacedCall:
    return make_call(op, num_bytes, Place(ranks=ranks, on_node=ranks))


REDUCE_CURVES = fit_curves_of_run(run_from_records(*curve_records()))
"""An all_reduce on 4 ranks of a latency of 20 us and a bandwidth of 3 GB/s."""


def test_call_takes_time_of_its_fit() -> None:
    records = [*curve_records(), *curve_records("all_gather", latency=50e-6), *send_records()]
    seconds = make_curve_predictor(fit_curves_of_run(run_from_records(*records)))
    for op, latency in (("all_reduce", 20e-6), ("all_gather", 50e-6), ("send", 1e-4)):
        expected = pytest.approx(latency + MEBI / 3e9, rel=1e-3)
        assert seconds(make_measured_call(op)) == expected, op


@pytest.mark.parametrize(
    "records",
    [
        curve_records(mode="pipelined"),
        curve_records(dtype="bfloat16"),
        [failed_record(record.case) for record in curve_records()],
        curve_records()[:2],
    ],
)
def test_other_records_have_no_fit(records: list[Record]) -> None:
    assert fit_curves_of_run(run_from_records(*records)) == []


def test_fits_are_separate_by_group() -> None:
    records = [
        *curve_records(latency=5e-6, group="node"),
        *curve_records(latency=1e-3, group="across"),
        *curve_records(),
    ]
    curves = fit_curves_of_run(run_from_records(*records))
    assert choose_curve(make_call("all_reduce"), curves).inside is True


@pytest.mark.parametrize(
    ("op", "ranks", "sent", "hops"),
    [("all_reduce", 16, 1.875, 30), ("all_gather", 4, 0.75, 3), ("send", 2, 1, 1)],
)
def test_fit_is_scaled_to_other_calls(op: str, ranks: int, sent: float, hops: int) -> None:
    """An all_reduce on 4 ranks sends 1.5 of its bytes over 6 hops."""
    seconds = make_curve_predictor(REDUCE_CURVES)(make_measured_call(op, ranks))
    assert seconds == pytest.approx(20e-6 * hops / 6 + MEBI * sent / 1.5 / 3e9, rel=1e-3)


def test_call_without_a_curve_names_the_missing_case() -> None:
    with pytest.raises(UserError, match=r"send.*parbench run unidirectional"):
        make_curve_predictor([])(make_measured_call("send"))


def test_extrapolated_calls_are_noted() -> None:
    measured = make_measured_call("all_reduce")
    others = [
        make_measured_call("all_reduce", 8),
        make_measured_call("all_gather"),
        make_measured_call("send"),
        make_measured_call("all_reduce", num_bytes=1e12),
    ]
    assert list_extrapolations([measured], REDUCE_CURVES) == ()
    notes = list_extrapolations(others, REDUCE_CURVES)
    assert len(notes) == 4
    assert "all_reduce of 1,048,576 B on 8 ranks is extrapolated from all_reduce" in notes[0]


def test_hardware_of_run_is_measured() -> None:
    peak = {"flops_per_second": 7e10, "source": "matrix multiplications"}
    run = run_from_records(
        ok_record(step_case(), details={"peak": peak}),
        *curve_records(),
        environment=ENVIRONMENT,
    )
    hardware, notes = derive_hardware(run, SIMPLE_HARDWARE)
    assert hardware.flops_per_second == 7e10
    assert hardware.gpus_per_node == 4
    assert notes == ("memory: those of plain",)
