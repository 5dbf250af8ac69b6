"""Kinds of groups: told by where their ranks are, medians of their groups, what is left across nodes, and figures."""

from collections.abc import Sequence
from typing import Any

import pytest
from nodes_fixtures import group_records, hosts_of, node_run, operation, rates_of, run_of, world_of
from report_rows import cells_of, rows_of
from reports_fixtures import collective, ok, seconds_metric

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import (
    Kind,
    Kinds,
    kinds,
    largest,
    ratio_words,
    series_of_kinds,
    settings_words,
)
from parbench.reports.analysis.ranks import nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.sections.communication import kind_columns

SIZE = 1 << 22
WITHIN, ACROSS, OVER = "within a node", "across nodes", "over nodes"
TWO = hosts_of(2, 2)


def found(run: Run) -> tuple[Kinds, ...]:
    return kinds(summarize(run).rows, nodes_of(run))


def record(group: str, ranks: list[int], rate: float, member: int = 0, hosts: list[str] = TWO) -> Record:
    case = operation(SIZE, group=group, group_index=member)
    return ok(case, world=world_of(hosts), metrics=rates_of(SIZE, rate), details={"group_ranks": ranks})


def world(rate: float = 2e9, hosts: list[str] = TWO) -> Record:
    return ok(operation(SIZE), world=world_of(hosts), metrics=rates_of(SIZE, rate))


def only(*records: Record, hosts: list[str] = TWO) -> Kinds:
    (one,) = found(run_of(records, hosts))
    return one


def test_groups_are_told_by_where_their_ranks_are() -> None:
    one, *_ = found(node_run("cyclic"))
    told = {kind.label: len(rows) for kind, rows in one.rows.items()}
    assert told == {"world": 1, "node": 4, "node, together": 4, "across": 2, "across, together": 2}
    # neighbours in rank are on one node in block placement, and on two in cyclic
    for placement, reach in (("block", WITHIN), ("cyclic", ACROSS)):
        hosts = hosts_of(2, 2, placement)
        one = only(record("pairs", [0, 1], 1e9, hosts=hosts), world(hosts=hosts), hosts=hosts)
        assert Kind(group="pairs", together=False, reach=reach) in one.rows
        assert f"pairs, {reach}" in {kind.label for kind in one.rows}
    one = only(record("dp=2 tp=2:tp", [0, 1], 4e9), record("dp=2 tp=2:dp", [0, 2], 1e9))
    assert [kind.label for kind in one.rows] == ["tp of dp=2 tp=2, within a node", "dp of dp=2 tp=2, across nodes"]
    assert one.ratio() == pytest.approx(0.25, rel=0.02)


def test_a_kinds_rate_is_the_median_of_its_groups_and_the_ratio_across_over_within() -> None:
    hosts = hosts_of(3, 2)
    rates = (1e9, 4e9, 2e9)
    records = [record("node", [2 * i, 2 * i + 1], rate, i, hosts) for i, rate in enumerate(rates)]
    one = only(*records, world(hosts=hosts), hosts=hosts)
    kind = one.standing_for(WITHIN)
    assert kind is not None
    assert one.rate(kind) == pytest.approx(2e9, rel=0.02)
    one = found(node_run())[-1]
    assert one.ratio() == pytest.approx(1 / 8, rel=0.05)
    assert one.ratio(together=True) == pytest.approx(1 / 16, rel=0.05)


def test_the_world_stands_for_across_only_where_nothing_else_does_and_a_node_for_within() -> None:
    within = record("node", [0, 1], 4e9)
    assert only(world(), within).standing_for(ACROSS, OVER) == Kind(group="world", together=False, reach=OVER)
    kind = only(world(), within, record("across", [0, 2], 1e9)).standing_for(ACROSS, OVER)
    assert kind == Kind(group="across", together=False, reach=ACROSS)
    for names in (("pairs", "node", "contiguous:2"), ("contiguous:2", "node", "pairs"), ("node", "pairs")):
        alike = [record(name, [0, 1], 4e9) for name in names]
        kind = only(*alike, record("across", [0, 2], 1e9)).standing_for(WITHIN)
        assert kind is not None
        assert kind.group == "node", names


def test_the_finding_is_a_sentence_on_the_largest_size() -> None:
    (one,) = largest(found(node_run()))
    assert one.first.size_bytes == SIZE
    assert ratio_words(one) == (
        "all_reduce, blocking float32: across nodes 4M runs at 0.127 of within a node "
        "(across 0.499 GB/s, node 3.93 GB/s)."
    )
    series = series_of_kinds(found(run_of(group_records(TWO, (1 << 22, 1 << 10)), TWO)))
    told = {name: [one.first.size_bytes for one in rows] for name, rows in series.items()}
    assert told == {("all_reduce", "blocking", "float32"): [1 << 10, 1 << 22]}


def test_columns_go_from_near_to_far_and_alone_before_together() -> None:
    rows = found(node_run())
    line = cells_of(kind_columns(rows), rows[-1])
    groups = ["node", "across", "world", "node, together", "across, together"]
    assert list(line)[4:] == [*groups, "across / within", "across / within, together"]
    assert (line["size"], line["node"], line["across"], line["across / within"]) == ("4M", "3.93", "0.499", "0.127")
    alone = only(record("node", [0, 1], 4e9), record("across", [0, 2], 1e9))
    assert [column.title for column in kind_columns([alone])][-1] == "across / within"


def test_one_node_one_kind_or_groups_of_unknown_ranks_are_no_comparison() -> None:
    assert found(run_of(group_records(TWO), hosts_of(1, 4))) == ()
    assert found(run_of([record("node", [0, 1], 4e9)], TWO)) == ()
    unknown: tuple[dict[str, Any], ...] = ({"group_ranks": "0,1"}, {"group_ranks": [0, 99]}, {"group_size": 2}, {})
    for details in unknown:
        lost = ok(operation(SIZE, group="node", group_index=1), world=world_of(TWO), details=details)
        assert found(run_of([lost, world()], TWO)) == (), details


def launches(case: Case, seconds: Sequence[float]) -> list[Record]:
    return [ok(case, i, one) for i, one in enumerate(seconds)]


def fsdp(prefetch: str = "", **more: Any) -> Case:
    params = {"shape": "tiny", **more, **({"prefetch": prefetch} if prefetch else {})}
    usual: dict[str, Any] = {"prefetch": "default", "reshard": True}
    defaults = {name: value for name, value in usual.items() if name not in params}
    return make_case("workload.fsdp", "parbench.workloads.fsdp:prepare", params, defaults)


def compared(*records: Record) -> list[str]:
    return list(settings_words(rows_of(*records, launches=6)))


def test_cases_that_differ_in_one_setting_are_compared_against_the_default_launch_by_launch() -> None:
    default = launches(fsdp(), [0.1, 0.2, 0.4, 0.1])
    explicit = launches(fsdp("explicit"), [0.09, 0.18, 0.35, 0.091])  # of launches that scatter by a factor of four
    assert compared(*explicit, *default) == ["fsdp: prefetch explicit against default: -10 % [-13, -8] time, faster"]
    assert compared(*default, *launches(fsdp("explicit"), [0.107, 0.205, 0.42, 0.1])) == [
        "fsdp: prefetch explicit against default: +4 % [-1, +9] time, cannot tell; about 4 more launches would"
    ]
    assert compared(*default[:2], *explicit[:2]) == [
        "fsdp: prefetch explicit against default: -10 % time, not significant (2 launches; an interval takes 3)"
    ]
    (told,) = compared(*default, *launches(fsdp("explicit"), [0.1001, 0.3, 0.3, 0.1]))
    assert told.endswith("cannot tell; 50 launches would not")
    # what differs in two things, or in what has a table of its own, is compared by nobody
    assert compared(*default, *launches(fsdp("explicit", hidden=64), [0.1] * 4)) == []
    assert compared(*launches(collective(), [1e-3] * 4), *launches(collective(mode="pipelined"), [2e-3] * 4)) == []


def test_comparisons_share_their_error_and_those_that_tell_most_come_first() -> None:
    def told(reshard: Sequence[float]) -> list[str]:
        default, explicit = launches(fsdp(), [0.1] * 4), launches(fsdp("explicit"), [0.09, 0.091, 0.092, 0.09])
        return compared(*default, *explicit, *launches(fsdp(reshard=False), reshard))

    alone = compared(*launches(fsdp(), [0.1] * 4), *launches(fsdp("explicit"), [0.09, 0.091, 0.092, 0.09]))
    first, second, meant = told([0.13, 0.12, 0.131, 0.125])
    assert first.startswith("fsdp: reshard False against True: +26 %")
    assert alone == ["fsdp: prefetch explicit against default: -9 % [-11, -8] time, faster"]
    assert second == "fsdp: prefetch explicit against default: -9 % [-11, -7] time, faster", "wider than alone"
    assert meant == "Launches are paired; the intervals hold for all 2 comparisons at once (95 %, Bonferroni)."
    first, second, _ = told([0.2, 0.05, 0.3, 0.1])
    assert ("prefetch" in first, "cannot tell" in second) == (True, True)
    many = [launches(fsdp(hidden=64 * (i + 1)), [0.1 + 0.01 * i] * 4) for i in range(8)]
    *most, left, meant = compared(*(one for of in many for one in of))
    assert (len(most), left) == (5, "2 more comparisons tell less.")
    wild = [
        ok(fsdp(hidden=64 * (i + 1)), launch, metrics={"step_time": seconds_metric(seconds if i else 0.1)})
        for i in range(8)
        for launch, seconds in enumerate((0.1, 1e-90, 1e29))
    ]
    assert len(compared(*wild)) == 7, "however far launches reach"
