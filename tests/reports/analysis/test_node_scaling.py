"""Several runs over nodes: a series for each placement from one base, repeats, environments, and their sections."""

from typing import Any

import msgspec
import pytest

from parbench.bench.results.runs import Run
from parbench.reports.analysis.over_nodes import OverNodes, environments, layout_of, over_nodes
from parbench.reports.analysis.several import Point, RunSet, several
from parbench.reports.analysis.summary import summarize
from parbench.reports.report import Table
from parbench.reports.sections.several import report_of_several
from tests.support.nodes_fixtures import (
    failed_node_run,
    make_group_case,
    make_hosts,
    make_node_run,
    make_rates,
    make_world,
    scaling_run,
)
from tests.support.report_rows import column_texts, require
from tests.support.reports_fixtures import ok_record, step_case

SIZE = 1 << 22


def of(*runs: Run, points: tuple[Point, ...] = ()) -> RunSet:
    return several([(run, summarize(run)) for run in runs], points)


def series(*runs: Run, points: tuple[Point, ...] = ()) -> dict[str, OverNodes]:
    return {one.label: one for one in over_nodes(of(*runs, points=points))}


def timed(nodes: int, rate: float) -> Run:
    hosts = make_hosts(nodes, 1)
    return make_node_run(
        [ok_record(make_group_case(SIZE), world=make_world(hosts), metrics=make_rates(SIZE, rate))],
        hosts,
    )


def tuned() -> RunSet:
    runs = [scaling_run(nodes, factor=factor) for factor in (1.0, 2.0) for nodes in (2, 4)]
    names = [(name, f"{name}{nodes}") for name in ("plain", "tuned") for nodes in (2, 4)]
    return of(*runs, points=tuple(Point(id=point, environment=name) for name, point in names))


def table_named(found: RunSet, table_id: str) -> Table[Any] | None:
    tables = [table for section in report_of_several(found).sections for table in section.tables]
    return next((table for table in tables if table.id == table_id), None)


def lines(found: RunSet, table_id: str) -> list[dict[str, str]]:
    table = table_named(found, table_id)
    assert table is not None
    return [column_texts(table.columns, row) for row in table.rows]


def test_runs_on_more_nodes_are_a_series() -> None:
    found = series(*(scaling_run(nodes) for nodes in (1, 2, 4)))
    assert list(found) == [
        "all_reduce 64K blocking float32",
        "all_reduce 4M blocking float32",
        "ddp",
    ]
    big = found["all_reduce 4M blocking float32"].scaled
    assert sorted(big.rows) == [1, 2, 4]
    assert big.efficiency(2) == pytest.approx(0.125, rel=0.05)
    steps = found["ddp"].scaled
    # as many times the tokens in longer steps: the efficiency is the ratio of step times
    first, last = (steps.rows[nodes].value("step_time") or 0 for nodes in (1, 4))
    assert steps.efficiency(4) == pytest.approx(first / last)


def test_placements_are_series_from_one_base() -> None:
    runs = [
        scaling_run(nodes, 2, placement) for placement in ("block", "cyclic") for nodes in (2, 4)
    ]
    found = series(scaling_run(1, 2), *runs)
    assert list(found)[:2] == [
        "all_reduce 64K blocking float32, block",
        "all_reduce 64K blocking float32, cyclic",
    ]
    block, cyclic = (
        found[f"all_reduce 4M blocking float32, {name}"].scaled for name in ("block", "cyclic")
    )
    assert block.rows[1] is cyclic.rows[1]
    assert (cyclic.rate(4) or 0) / (block.rate(4) or 1) == pytest.approx(0.5, rel=0.02)
    labels = list(series(*(scaling_run(nodes, each) for each in (1, 2) for nodes in (2, 4))))
    assert labels[-2:] == ["ddp, 1 a node", "ddp, 2 a node, block"]


def test_layout_is_the_placement_found() -> None:
    runs = scaling_run(4, 1, "cyclic"), scaling_run(4, 2, "cyclic")
    points = Point(id="a", placement="cyclic"), Point(id="b", placement="block")
    layouts = [layout_of(one, one.shown[0]) for one in of(*runs, points=points).runs]
    assert [(one.ranks_per_node, one.placement) for one in layouts] == [(1, ""), (2, "cyclic")]
    # a run that does not tell its hosts, as those of older versions, stands apart from block and cyclic
    silent = scaling_run(4, 2)
    records = tuple(msgspec.structs.replace(one, environment={}) for one in silent.records)
    info = msgspec.structs.replace(silent.info, environment={})
    silent = msgspec.structs.replace(silent, info=info, records=records)
    labels = list(series(scaling_run(1, 2), scaling_run(4, 2), silent))
    assert labels[-2:] == ["ddp, block", "ddp, placement unknown"]


def test_repeats_use_the_median_or_the_last() -> None:
    runs = [timed(1, 4e9), *(timed(2, rate) for rate in (1e9, 3e9, 2e9))]
    of_two = "the slower of two, which is a run that there was"
    cases = [(runs, "abcd", 3, 2e9, "the median"), (runs[:3], "", 2, 1e9, of_two)]
    for given, ids, repeats, rate, what in [*cases, (runs[:3], "abb", 1, 3e9, "the last")]:
        (found,) = over_nodes(of(*given, points=tuple(Point(id=name) for name in ids)))
        assert found.repeats == repeats, what
        assert found.scaled.rate(2) == pytest.approx(rate, rel=0.02), what


def test_over_nodes_needs_nodes_times_and_the_world() -> None:
    assert over_nodes(of(scaling_run(2), scaling_run(2))) == ()
    hosts = {n: make_hosts(n, 2) for n in (2, 4)}
    grouped = [
        make_node_run([ok_record(make_group_case(SIZE, group="node"), world=make_world(of))], of)
        for of in hosts.values()
    ]
    assert over_nodes(of(*grouped)) == ()
    timeless = make_node_run(
        [ok_record(step_case(), world=make_world(hosts[2]), metrics={})], hosts[2]
    )
    assert over_nodes(of(scaling_run(1), timeless)) == ()
    # an imported file's, which does not tell its nodes
    runs = [scaling_run(nodes) for nodes in (1, 2)]
    unknown = msgspec.structs.replace(runs[0].records[0].world, nodes=0)
    records = tuple(msgspec.structs.replace(one, world=unknown) for one in runs[0].records)
    foreign = msgspec.structs.replace(runs[0], records=records)
    assert over_nodes(of(foreign, *runs)) == over_nodes(of(*runs)) != ()
    assert over_nodes(of(foreign, runs[1])) == ()
    assert environments(of(foreign)) == ()


def test_environments_are_compared_on_equal_nodes() -> None:
    assert [one.label for one in over_nodes(tuned())][-2:] == ["ddp, plain", "ddp, tuned"]
    found = environments(tuned())
    small = "all_reduce 64K blocking float32"
    assert [(one.label, one.nodes) for one in found][:2] == [(small, 2), (small, 4)]
    assert {one.names for one in found} == {("plain", "tuned")}
    ratio = found[-1].beside.ratio(1)
    assert ratio is not None
    assert ratio.value == pytest.approx(0.5)
    runs = [scaling_run(2), scaling_run(4)]
    for told in (("", ""), ("plain", "plain"), ("plain", "tuned")):  # the last on other nodes
        points = tuple(Point(id=f"{i}", environment=name) for i, name in enumerate(told))
        assert environments(of(*runs, points=points)) == (), told


def test_problems_name_point_and_host() -> None:
    found = of(
        scaling_run(2),
        failed_node_run(),
        points=(Point(id="a"), Point(id="b", label="4 nodes x 1")),
    )
    (line,) = lines(found, "problems-table")
    assert (line["run"], line["status"]) == ("run 2: 4 nodes x 1", "hang")
    assert line["reason"] == "no end within 10 s: rank 2 (n3) did not arrive"
    assert table_named(of(scaling_run(2)), "problems-table") is None
    pointed = of(failed_node_run(), failed_node_run(), points=(Point(id="ab"),))
    assert [line["run"] for line in lines(pointed, "problems-table")] == ["run 1: ab", "run 2"]


def test_over_nodes_table_has_rates_and_efficiency() -> None:
    small, big, ddp = lines(of(*(scaling_run(nodes, 2) for nodes in (1, 2, 4))), "over-nodes-table")
    assert (small["case"], small["placement"]) == ("all_reduce 64K blocking float32", "block")
    assert (big["what"], big["ranks a node"]) == ("busbw", "2")
    assert (big["1 node"], big["2 nodes"]) == ("3.93 GB/s", "0.499 GB/s")
    assert (big["efficiency 2 nodes"], big["efficiency 4 nodes"]) == ("12.7 %", "6.36 %")
    assert (ddp["what"], ddp["1 node"], ddp["4 nodes"]) == ("step time", "10.0 ms", "20.0 ms")
    assert ddp["efficiency 4 nodes"] == "50.0 %"
    table = require(
        table_named(of(scaling_run(1), scaling_run(2), scaling_run(2)), "over-nodes-table")
    )
    assert table.notes == ("Up to 2 repeats: the one with the median time is shown.",)
    assert table_named(of(scaling_run(2)), "over-nodes-table") is None
