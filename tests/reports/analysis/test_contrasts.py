"""Slow-down under load, groups within and across nodes, and settings compared with defaults."""

import math
from typing import Any

import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record
from parbench.bench.results.stats import Estimate
from parbench.reports.analysis.contrasts import settings_words, slow_down
from parbench.reports.analysis.statistics import estimate_ratio
from tests.support.nodes_fixtures import sample_node_run
from tests.support.report_rows import (
    analyze_run,
    assert_cells,
    find_analysis_table,
    report_lines,
    summarize_rows,
    table_lines,
)
from tests.support.reports_fixtures import collective_case, ok_record, seconds_metric


def repeat(case: Case, *seconds: float) -> list[Record]:
    return [ok_record(case, repetition, value) for repetition, value in enumerate(seconds)]


def test_slowdown_is_paired_by_repetition() -> None:
    base = repeat(collective_case(), 1e-3, 2e-3, 4e-3)
    loaded = repeat(collective_case(background="gemm"), 1.5e-3, 3e-3, 6e-3)
    (line,) = report_lines("contrast-1", *base, *loaded)
    assert line["beside gemm"] == "1.50 [1.50, 1.50]"


def test_slowdown_of_one_repetition_joins_both_intervals() -> None:
    exact = {"time": seconds_metric(1e-3, reach=0.0)}
    wide = {"time": seconds_metric(2e-3, reach=0.2)}
    base = ok_record(collective_case(), metrics=exact)
    loaded = ok_record(collective_case(background="gemm"), metrics=wide)
    ratio = slow_down(*summarize_rows(base, loaded))
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 2.0 < ratio.high
    assert ratio.high / ratio.low == pytest.approx(1.2 / 0.8)


def pair_record(number: int, seconds: float, **params: Any) -> Record:
    case = collective_case(group="pairs", group_index=number, **params)
    details = {"group_ranks": [2 * number, 2 * number + 1]}
    return ok_record(case, seconds=seconds, details=details)


def test_groups_are_columns_and_sizes_lines() -> None:
    small, large = report_lines(
        "operation-group",
        pair_record(0, 1e-3),
        pair_record(1, 4e-3),
        pair_record(1, 8e-3, concurrent=True),
        pair_record(0, 1e-3, size_bytes=4096),
        pair_record(2, 1e-3, size_bytes=4096),
    )
    assert_cells(
        small,
        {
            "size": "1K",
            "pairs 0,1": "0.00154",
            "pairs 2,3": "0.000384",
            "pairs 2,3 together": "0.000192",
            "slowest alone": "pairs 2,3",
        },
    )
    assert large["size"] == "4K"
    assert large["pairs 2,3"] == "-"


def test_kinds_are_compared_within_and_across_nodes() -> None:
    table = find_analysis_table(analyze_run(sample_node_run()), "group-kinds")
    assert_cells(
        table_lines(table)[-1],
        {
            "size": "4M",
            "node": "3.93",
            "across / within": "0.127",
            "across / within, together": "0.0636",
        },
    )
    for fact in ("all_reduce", "4M", "0.127", "0.499 GB/s", "3.93 GB/s"):
        assert fact in table.notes[0]


def fsdp_case(**params: Any) -> Case:
    defaults: dict[str, Any] = {"prefetch": "default", "reshard": True}
    for name in params:
        del defaults[name]
    target = "parbench.workloads.fsdp:prepare"
    return make_case("workload.fsdp", target, {"shape": "tiny", **params}, defaults)


def compare_settings(*records: Record) -> list[str]:
    return list(settings_words(summarize_rows(*records)))


@pytest.mark.parametrize(
    ("seconds", "facts"),
    [
        ([0.09, 0.18, 0.35, 0.091], ("-10 % [-13, -8]", "faster")),
        ([0.107, 0.205, 0.42, 0.1], ("+4 % [-1, +9]", "cannot tell", "4 more")),
        ([0.09, 0.18], ("-10 %", "not significant", "2 repetitions")),
    ],
)
def test_setting_is_compared_with_its_default(
    seconds: list[float], facts: tuple[str, ...]
) -> None:
    default = repeat(fsdp_case(), 0.1, 0.2, 0.4, 0.1)
    (text,) = compare_settings(*repeat(fsdp_case(prefetch="explicit"), *seconds), *default)
    for fact in ("prefetch explicit", *facts):
        assert fact in text


def test_comparisons_share_their_error_rate() -> None:
    default = repeat(fsdp_case(), 0.1, 0.1, 0.1, 0.1)
    explicit = repeat(fsdp_case(prefetch="explicit"), 0.09, 0.091, 0.092, 0.09)
    unclear = repeat(fsdp_case(reshard=False), 0.2, 0.05, 0.3, 0.1)
    (single,) = compare_settings(*default, *explicit)
    assert "[-11, -8]" in single
    first, second, note = compare_settings(*default, *unclear, *explicit)
    assert "prefetch" in first
    assert "[-11, -7]" in first
    assert "cannot tell" in second
    assert "Bonferroni" in note


def test_ratio_joins_intervals_in_quadrature() -> None:
    numerator = Estimate(value=6.0, low=6.0 / 1.3, high=6.0 * 1.3, method="")
    denominator = Estimate(value=2.0, low=2.0 / 1.4, high=2.0 * 1.4, method="")
    ratio = estimate_ratio(numerator, denominator)
    factor = math.exp(math.hypot(math.log(1.3), math.log(1.4)))
    assert ratio.value == pytest.approx(3.0)
    assert ratio.low == pytest.approx(3.0 / factor)
    assert ratio.high == pytest.approx(3.0 * factor)
