"""Kinds of groups: told by where their ranks are, medians of their groups, and what is left across nodes."""

from typing import Any

import pytest
from nodes_fixtures import (
    FAR_RATE,
    WITHIN_RATE,
    group_records,
    hosts_of,
    node_run,
    operation,
    rates_of,
    run_of,
    world_of,
)
from reports_fixtures import ok

from bench.records import Record
from bench.runs import Run
from reports.nodes.group_kinds import (
    ACROSS,
    OVER,
    Kind,
    Kinds,
    kind_columns,
    kinds,
    largest,
    ratio_words,
    series_of_kinds,
)
from reports.nodes.rank_hosts import WITHIN, nodes_of
from reports.summary import summarize

SIZE = 1 << 22


def found(run: Run) -> tuple[Kinds, ...]:
    return kinds(summarize(run).rows, nodes_of(run))


def record(group: str, ranks: list[int], rate: float, hosts: list[str], member: int = 0, **more: Any) -> Record:
    case = operation(SIZE, group=group, member=member, **more)
    return ok(case, world=world_of(hosts), metrics=rates_of(SIZE, rate), details={"group_ranks": ranks})


def only(records: list[Record], hosts: list[str]) -> Kinds:
    (one,) = found(run_of(records, hosts))
    return one


def test_groups_are_told_by_where_their_ranks_are() -> None:
    one, *_ = found(node_run("cyclic"))
    assert {kind.label: len(rows) for kind, rows in one.rows.items()} == {
        "world": 1,
        "node": 4,
        "node, together": 4,
        "across": 2,
        "across, together": 2,
    }


def test_the_same_group_reaches_elsewhere_under_another_placement() -> None:
    """Neighbours in rank are on one node in block placement, and on two in cyclic."""
    for placement, reach in (("block", WITHIN), ("cyclic", ACROSS)):
        hosts = hosts_of(2, 2, placement)
        one = only([record("pairs", [0, 1], 1e9, hosts), ok(operation(SIZE), world=world_of(hosts))], hosts)
        assert Kind(group="pairs", together=False, reach=reach) in one.rows
        assert f"pairs, {reach}" in {kind.label for kind in one.rows}


def test_an_axis_of_a_mesh_is_called_by_its_name() -> None:
    hosts = hosts_of(2, 2)
    one = only([record("dp=2 tp=2:tp", [0, 1], 4e9, hosts), record("dp=2 tp=2:dp", [0, 2], 1e9, hosts)], hosts)
    assert [kind.label for kind in one.rows] == ["tp of dp=2 tp=2, within a node", "dp of dp=2 tp=2, across nodes"]
    assert one.ratio() == pytest.approx(0.25, rel=0.02)


def test_a_kinds_rate_is_the_median_of_its_groups() -> None:
    hosts = hosts_of(3, 2)
    rates = (1e9, 4e9, 2e9)
    records = [record("node", [2 * i, 2 * i + 1], rate, hosts, i) for i, rate in enumerate(rates)]
    one = only([*records, ok(operation(SIZE), world=world_of(hosts))], hosts)
    kind = one.standing_for(WITHIN)
    assert kind is not None
    assert one.rate(kind) == pytest.approx(2e9, rel=0.02)


def test_the_ratio_is_across_over_within_alone_and_together() -> None:
    one = found(node_run())[-1]
    assert one.ratio() == pytest.approx(FAR_RATE / WITHIN_RATE, rel=0.05)
    assert one.ratio(together=True) == pytest.approx(FAR_RATE / 2 / WITHIN_RATE, rel=0.05)


def test_the_world_stands_for_across_only_where_nothing_else_does() -> None:
    hosts = hosts_of(2, 2)
    world = ok(operation(SIZE), world=world_of(hosts), metrics=rates_of(SIZE, 2e9))
    within = record("node", [0, 1], 4e9, hosts)
    assert only([world, within], hosts).standing_for(ACROSS, OVER) == Kind(group="world", together=False, reach=OVER)
    across = record("across", [0, 2], 1e9, hosts)
    kind = only([world, within, across], hosts).standing_for(ACROSS, OVER)
    assert kind == Kind(group="across", together=False, reach=ACROSS)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_node_stands_for_what_is_within_one(order: tuple[int, ...]) -> None:
    hosts = hosts_of(2, 2)
    names = ("pairs", "node", "contiguous:2")
    within = [record(names[i], [0, 1], 4e9, hosts) for i in order]
    kind = only([*within, record("across", [0, 2], 1e9, hosts)], hosts).standing_for(WITHIN)
    assert kind is not None
    assert kind.group == "node"


def test_the_finding_is_a_sentence_on_the_largest_size() -> None:
    (one,) = largest(found(node_run()))
    assert one.size_bytes == SIZE
    assert ratio_words(one) == (
        "all_reduce, blocking float32: across nodes 4M runs at 0.127 of within a node "
        "(across 0.499 GB/s, node 3.93 GB/s)."
    )


def test_columns_go_from_near_to_far_and_alone_before_together() -> None:
    rows = found(node_run())
    titles = [column.title for column in kind_columns(rows)]
    assert titles[4:] == [
        "node",
        "across",
        "world",
        "node, together",
        "across, together",
        "across / within",
        "across / within, together",
    ]
    line = {column.title: column.text(rows[-1]) for column in kind_columns(rows)}
    assert (line["size"], line["node"], line["across"], line["across / within"]) == ("4M", "3.93", "0.499", "0.127")


def test_without_groups_together_there_is_no_column_of_them() -> None:
    hosts = hosts_of(2, 2)
    one = only([record("node", [0, 1], 4e9, hosts), record("across", [0, 2], 1e9, hosts)], hosts)
    assert [column.title for column in kind_columns([one])][-1] == "across / within"


def test_one_node_or_one_kind_is_no_comparison() -> None:
    hosts = hosts_of(1, 4)
    assert found(run_of(group_records(hosts_of(2, 2)), hosts)) == ()
    two = hosts_of(2, 2)
    assert found(run_of([record("node", [0, 1], 4e9, two)], two)) == ()


@pytest.mark.parametrize("details", [{"group_ranks": "0,1"}, {"group_ranks": [0, 99]}, {"group_size": 2}])
def test_groups_of_unknown_ranks_are_left_out(details: dict[str, Any]) -> None:
    hosts = hosts_of(2, 2)
    lost = ok(operation(SIZE, group="node", member=1), world=world_of(hosts), details=details)
    assert found(run_of([lost, ok(operation(SIZE), world=world_of(hosts))], hosts)) == ()


def test_series_are_by_operation_mode_and_type_and_rise_in_size() -> None:
    hosts = hosts_of(2, 2)
    series = series_of_kinds(found(run_of(group_records(hosts, (1 << 22, 1 << 10)), hosts)))
    assert list(series) == [("all_reduce", "blocking", "float32")]
    (rows,) = series.values()
    assert [one.size_bytes for one in rows] == [1 << 10, 1 << 22]
