"""Kinds of groups within and across nodes, and settings compared with their defaults."""

from collections.abc import Sequence
from typing import Any

import pytest

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
from tests.support.nodes_fixtures import (
    group_records,
    make_group_case,
    make_hosts,
    make_node_run,
    make_rates,
    make_world,
    sample_node_run,
)
from tests.support.report_rows import column_texts, summarize_rows
from tests.support.reports_fixtures import collective_case, ok_record, seconds_metric

SIZE = 1 << 22
WITHIN, ACROSS, OVER = "within a node", "across nodes", "over nodes"
HOSTS = make_hosts(2, 2)


def kinds_in(run: Run) -> tuple[Kinds, ...]:
    return kinds(summarize(run).rows, nodes_of(run))


def group(
    name: str, ranks: list[int], rate: float, index: int = 0, hosts: list[str] = HOSTS
) -> Record:
    case = make_group_case(SIZE, group=name, group_index=index)
    metrics = make_rates(SIZE, rate)
    return ok_record(case, world=make_world(hosts), metrics=metrics, details={"group_ranks": ranks})


def world(hosts: list[str] = HOSTS) -> Record:
    return ok_record(make_group_case(SIZE), world=make_world(hosts), metrics=make_rates(SIZE, 2e9))


def only(*records: Record, hosts: list[str] = HOSTS) -> Kinds:
    (row,) = kinds_in(make_node_run(records, hosts))
    return row


def test_kinds_group_rows_by_reach() -> None:
    row, *_ = kinds_in(sample_node_run("cyclic"))
    counts = {kind.label: len(rows) for kind, rows in row.rows.items()}
    assert counts == {
        "world": 1, "node": 4, "node, together": 4, "across": 2, "across, together": 2
    }  # fmt: skip


@pytest.mark.parametrize(("placement", "reach"), [("block", WITHIN), ("cyclic", ACROSS)])
def test_reach_of_neighbors_follows_placement(placement: str, reach: str) -> None:
    hosts = make_hosts(2, 2, placement)
    row = only(group("pairs", [0, 1], 1e9, hosts=hosts), world(hosts), hosts=hosts)
    assert Kind(group="pairs", together=False, reach=reach) in row.rows


def test_mesh_axes_are_kinds() -> None:
    row = only(group("dp=2 tp=2:tp", [0, 1], 4e9), group("dp=2 tp=2:dp", [0, 2], 1e9))
    labels = [f"tp of dp=2 tp=2, {WITHIN}", f"dp of dp=2 tp=2, {ACROSS}"]
    assert [kind.label for kind in row.rows] == labels
    assert row.ratio() == pytest.approx(0.25, rel=0.02)


def test_rate_of_a_kind_is_the_median_of_groups() -> None:
    hosts = make_hosts(3, 2)
    rates = enumerate((1e9, 4e9, 2e9))
    groups = [group("node", [2 * i, 2 * i + 1], rate, i, hosts) for i, rate in rates]
    row = only(*groups, world(hosts), hosts=hosts)
    kind = row.standing_for(WITHIN)
    assert kind is not None
    assert row.rate(kind) == pytest.approx(2e9, rel=0.02)


def test_ratio_divides_across_by_within() -> None:
    row = kinds_in(sample_node_run())[-1]
    assert row.ratio() == pytest.approx(1 / 8, rel=0.05)
    assert row.ratio(together=True) == pytest.approx(1 / 16, rel=0.05)


def test_standing_for_prefers_nodes_and_groups_to_the_world() -> None:
    node = group("node", [0, 1], 4e9)
    over = Kind(group="world", together=False, reach=OVER)
    assert only(world(), node).standing_for(ACROSS, OVER) == over
    across = Kind(group="across", together=False, reach=ACROSS)
    row = only(world(), node, group("across", [0, 2], 1e9))
    assert row.standing_for(ACROSS, OVER) == across
    pairs = group("pairs", [0, 1], 4e9)
    kind = only(pairs, node, group("across", [0, 2], 1e9)).standing_for(WITHIN)
    assert kind is not None
    assert kind.group == "node"


def test_largest_size_is_described_with_both_rates() -> None:
    (row,) = largest(kinds_in(sample_node_run()))
    assert row.first.size_bytes == SIZE
    for fact in ("all_reduce", "4M", "0.127", "0.499 GB/s", "3.93 GB/s"):
        assert fact in ratio_words(row)


def test_series_of_kinds_are_ordered_by_size() -> None:
    series = series_of_kinds(
        kinds_in(make_node_run(group_records(HOSTS, (1 << 22, 1 << 10)), HOSTS))
    )
    sizes = {name: [row.first.size_bytes for row in rows] for name, rows in series.items()}
    assert sizes == {("all_reduce", "blocking", "float32"): [1 << 10, 1 << 22]}


def test_kind_columns_are_ordered_by_reach() -> None:
    rows = kinds_in(sample_node_run())
    cells = column_texts(kind_columns(rows), rows[-1])
    kinds_shown = ["node", "across", "world", "node, together", "across, together"]
    assert list(cells)[4:] == [*kinds_shown, "across / within", "across / within, together"]
    assert (cells["size"], cells["node"], cells["across / within"]) == ("4M", "3.93", "0.127")


@pytest.mark.parametrize("details", [{"group_ranks": "0,1"}, {"group_ranks": [0, 99]}, {}])
def test_kinds_need_known_ranks(details: dict[str, Any]) -> None:
    case = make_group_case(SIZE, group="node", group_index=1)
    unknown = ok_record(case, world=make_world(HOSTS), details=details)
    assert kinds_in(make_node_run([unknown, world()], HOSTS)) == ()


def test_kinds_need_two_nodes_and_two_kinds() -> None:
    assert kinds_in(make_node_run(group_records(HOSTS), make_hosts(1, 4))) == ()
    assert kinds_in(make_node_run([group("node", [0, 1], 4e9)], HOSTS)) == ()


def launches(case: Case, seconds: Sequence[float]) -> list[Record]:
    return [ok_record(case, i, time) for i, time in enumerate(seconds)]


def fsdp(**params: Any) -> Case:
    usual: dict[str, Any] = {"prefetch": "default", "reshard": True}
    defaults = {name: value for name, value in usual.items() if name not in params}
    target = "parbench.workloads.fsdp:prepare"
    return make_case("workload.fsdp", target, {"shape": "tiny", **params}, defaults)


def compared(*records: Record) -> list[str]:
    return list(settings_words(summarize_rows(*records, launches=6)))


DEFAULT = launches(fsdp(), [0.1, 0.2, 0.4, 0.1])


@pytest.mark.parametrize(
    ("seconds", "facts"),
    [
        ([0.09, 0.18, 0.35, 0.091], ("-10 % [-13, -8]", "faster")),
        ([0.107, 0.205, 0.42, 0.1], ("+4 % [-1, +9]", "cannot tell", "4 more")),
        ([0.1001, 0.3, 0.3, 0.1], ("cannot tell", "50 ")),
        ([0.09, 0.18], ("-10 %", "not significant", "2 launches")),
    ],
)
def test_setting_is_compared_with_its_default(seconds: list[float], facts: tuple[str, ...]) -> None:
    (text,) = compared(*launches(fsdp(prefetch="explicit"), seconds), *DEFAULT)
    assert "prefetch explicit" in text
    assert [fact for fact in facts if fact not in text] == []


def test_settings_differ_in_one_parameter_without_a_table() -> None:
    assert compared(*DEFAULT, *launches(fsdp(prefetch="explicit", hidden=64), [0.1] * 4)) == []
    pipelined = launches(collective_case(mode="pipelined"), [2e-3] * 4)
    assert compared(*launches(collective_case(), [1e-3] * 4), *pipelined) == []


def test_comparisons_share_their_error_rate() -> None:
    default = launches(fsdp(), [0.1] * 4)
    explicit = launches(fsdp(prefetch="explicit"), [0.09, 0.091, 0.092, 0.09])
    whole = launches(fsdp(reshard=False), [0.13, 0.12, 0.131, 0.125])
    (single,) = compared(*default, *explicit)
    assert "[-11, -8]" in single
    first, second, note = compared(*default, *explicit, *whole)
    assert "reshard False" in first
    assert "[-11, -7]" in second, "wider than one comparison"
    assert "Bonferroni" in note


def test_comparisons_end_with_the_unclear() -> None:
    default = launches(fsdp(), [0.1] * 4)
    explicit = launches(fsdp(prefetch="explicit"), [0.09, 0.091, 0.092, 0.09])
    unclear = launches(fsdp(reshard=False), [0.2, 0.05, 0.3, 0.1])
    first, second, _ = compared(*default, *explicit, *unclear)
    assert "prefetch" in first
    assert "cannot tell" in second


def test_comparisons_are_limited() -> None:
    sizes = [launches(fsdp(hidden=64 * (i + 1)), [0.1 + 0.01 * i] * 4) for i in range(8)]
    *shown, rest, _ = compared(*(record for records in sizes for record in records))
    assert (len(shown), rest[0]) == (5, "2")


def test_comparison_of_extreme_times_is_no_error() -> None:
    metrics = [{"step_time": seconds_metric(seconds)} for seconds in (0.1, 1e-90, 1e29)]
    extreme = [ok_record(fsdp(hidden=64), i, metrics=metric) for i, metric in enumerate(metrics)]
    usual = [ok_record(fsdp(hidden=128), i, metrics=metrics[0]) for i in range(3)]
    assert len(compared(*usual, *extreme)) == 1
