"""Links from a run: a call as it was measured, scaled where it was not, refused where nothing can stand in for it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from planner_asks import PLAIN
from reports_fixtures import ENVIRONMENT, bad, collective, curve_records, make_plan, make_run, ok, rate_metric, step

from bench.cases import make_case
from bench.errors import UserError
from bench.records import Record
from bench.runs import Run
from workloads.planner.link_time import Call
from workloads.planner.placement import Place
from workloads.planner.run_fits import beyond, by_curves, curve_for, curves_of, hardware_of_run

MEBI = 1 << 20


def run_of(*records: Record, environment: dict[str, Any] | None = None) -> Run:
    return make_run(make_plan([record.case for record in records]), records, environment)


def call(op: str = "all_reduce", num_bytes: float = MEBI, ranks: int = 4) -> Call:
    return Call(axis="dp", op=op, num_bytes=num_bytes, count=1, place=Place(ranks=ranks, on_node=ranks), why="a test")


REDUCED = curves_of(run_of(*curve_records()))
BOTH = curves_of(run_of(*curve_records(), *curve_records("all_gather", latency=50e-6)))


def test_a_curve_is_an_operation_on_as_many_ranks() -> None:
    assert set(BOTH) == {("all_reduce", 4), ("all_gather", 4)}
    curve = BOTH["all_reduce", 4]
    assert (curve.smallest, curve.largest) == (1024, 16 * MEBI)
    assert curve.fit.segments[0].latency_seconds == pytest.approx(20e-6, rel=0.01)


def test_a_call_as_it_was_measured_takes_what_the_fit_says() -> None:
    assert by_curves(BOTH)(call()) == pytest.approx(20e-6 + MEBI / 3e9, rel=1e-3)
    assert by_curves(BOTH)(call("all_gather")) == pytest.approx(50e-6 + MEBI / 3e9, rel=1e-3)


def test_launches_give_their_median() -> None:
    slow = [msgspec.structs.replace(record, launch=1) for record in curve_records(latency=20e-6)]
    odd = [msgspec.structs.replace(record, launch=2) for record in curve_records(latency=900e-6)]
    found = curves_of(run_of(*curve_records(), *slow, *odd))
    assert found["all_reduce", 4].fit.segments[0].latency_seconds == pytest.approx(20e-6, rel=0.01)


@pytest.mark.parametrize(
    "params", [{"mode": "pipelined"}, {"dtype": "bfloat16"}, {"group": "node"}, {"redop": "max"}, {"beside": "gemm"}]
)
def test_other_ways_of_measuring_are_no_curves(params: dict[str, Any]) -> None:
    assert curves_of(run_of(*curve_records(**params))) == {}


def test_what_failed_is_no_point() -> None:
    assert curves_of(run_of(*(bad(record.case) for record in curve_records()))) == {}


def test_two_sizes_are_no_curve() -> None:
    assert curves_of(run_of(*curve_records()[:2])) == {}


def test_more_ranks_send_more_over_each_link_and_hop_more_often() -> None:
    # an all_reduce sends 2 (n-1)/n over 2 (n-1) hops: of 4 ranks 1.5 over 6, of 16 ranks 1.875 over 30
    found = by_curves(REDUCED)(call(ranks=16))
    assert found == pytest.approx(20e-6 * 30 / 6 + MEBI * 1.875 / 1.5 / 3e9, rel=1e-3)


def test_another_operation_stands_in_with_its_bytes_and_hops() -> None:
    found = by_curves(REDUCED)(call("all_gather"))
    assert found == pytest.approx(20e-6 * 3 / 6 + MEBI * 0.75 / 1.5 / 3e9, rel=1e-3)


def test_an_operations_own_curve_goes_first_even_on_other_ranks() -> None:
    assert curve_for(call("all_gather", ranks=64), BOTH).op == "all_gather"


def test_one_rank_takes_no_time() -> None:
    assert by_curves({})(call(ranks=1)) == 0.0


def sent(seconds: float = 1e-5) -> list[Record]:
    sizes = [1024 * 4**i for i in range(8)]
    params: dict[str, Any] = {"dtype": "float32", "mode": "blocking", "source": 0, "target": 1}
    cases = [make_case("p2p.unidirectional", "bench.p2p:unidirectional", {"size_bytes": n, **params}) for n in sizes]
    return [ok(case, seconds=seconds + int(case.params["size_bytes"]) / 1e9) for case in cases]


def test_a_message_takes_what_one_took_whatever_the_ranks() -> None:
    curves = curves_of(run_of(*sent()))
    for ranks in (2, 16):
        assert by_curves(curves)(call("send", ranks=ranks)) == pytest.approx(1e-5 + MEBI / 1e9, rel=1e-3)


def test_what_nothing_can_stand_in_for_is_refused_with_what_is_needed() -> None:
    with pytest.raises(UserError, match=r"no fit for send: it needs three sizes of p2p\.unidirectional"):
        by_curves(REDUCED)(call("send"))


def test_calls_beyond_what_was_measured_are_told() -> None:
    found = beyond([call(), call(ranks=8), call("all_gather"), call(num_bytes=1e12), call(num_bytes=1e12)], REDUCED)
    assert found == (
        "dp: all_reduce on 8 ranks by the fit of all_reduce on 4",
        "dp: all_gather by the fit of all_reduce",
        "dp: all_reduce of 1,000,000,000,000 B is beyond 1024 to 16777216 B",
    )


def test_a_machine_is_the_runs_as_far_as_it_tells() -> None:
    measured = ok(step(), details={"peak": {"flops_per_second": 7e10, "source": "matrix products"}})
    copy = make_case("memory.copy", "bench.memory:copy", {"size_bytes": MEBI, "dtype": "float32", "mode": "blocking"})
    copied = ok(copy, metrics={"algbw": rate_metric(9e9)})
    environment = {**ENVIRONMENT, "host": {"memory_bytes": 64e9}}
    run = run_of(measured, copied, *curve_records(), environment=environment)
    machine, notes = hardware_of_run(run, PLAIN)
    assert machine.flops_per_second == 7e10
    assert machine.memory_bytes_per_second == 9e9
    assert (machine.gpus_per_node, machine.memory_bytes) == (4, 16e9)
    assert machine.efficiency == PLAIN.efficiency
    assert machine.float32_share == 1.0
    assert notes == ()
    assert "every link is taken to be alike" in machine.links_from


def test_what_a_run_does_not_tell_is_the_bases_and_said() -> None:
    machine, notes = hardware_of_run(run_of(*curve_records(), environment={}), PLAIN)
    assert machine.flops_per_second == PLAIN.flops_per_second
    assert machine.float32_share == 0.5
    assert notes == ("flops_per_second, memory_bytes, memory_bytes_per_second: plain's, for the run does not tell",)


def test_a_run_without_records_is_refused() -> None:
    with pytest.raises(UserError, match="holds no records to fit"):
        hardware_of_run(run_of(), PLAIN)


def test_a_case_without_a_time_is_passed_over(tmp_path: Path) -> None:
    odd = [ok(collective(size_bytes=1024 * 4**i), metrics={}) for i in range(8)]
    assert curves_of(run_of(*odd)) == {}


def test_a_run_of_one_rank_has_no_links_to_fit() -> None:
    alone = msgspec.structs.replace(curve_records()[0].world, size=1)
    records = [msgspec.structs.replace(record, world=alone) for record in curve_records()]
    assert curves_of(run_of(*records)) == {}
    assert set(curves_of(run_of(*records, *curve_records()))) == {("all_reduce", 4)}
