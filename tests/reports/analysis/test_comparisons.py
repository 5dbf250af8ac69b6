"""Parameters compared with their defaults, and cases under load with the same ones without it."""

from typing import Any

import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record
from parbench.reports.analysis.comparisons import compare_with_loads, describe_settings
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import find_table_of_run, report_lines, run_from_records
from tests.support.reports.reports_fixtures import collective_case, ok_record


def repeat(case: Case, *seconds: float) -> list[Record]:
    return [ok_record(case, repetition, value) for repetition, value in enumerate(seconds)]


def fsdp_case(**params: Any) -> Case:
    defaults: dict[str, Any] = {"prefetch": "default", "reshard": True}
    for name in params:
        del defaults[name]
    target = "parbench.workloads.fsdp:prepare"
    return make_case("workload.fsdp", target, {"shape": "tiny", **params}, defaults)


def describe(*records: Record) -> list[str]:
    return describe_settings(RunData(run_from_records(*records)))


def test_slowdown_is_paired_by_repetition() -> None:
    base = repeat(collective_case(), 1e-3, 2e-3, 4e-3)
    loaded = repeat(collective_case(background="gemm"), 1.5e-3, 3e-3, 6e-3)
    [line] = report_lines("contention-background", *base, *loaded)
    assert line["slow-down by gemm"] == "1.50 [1.50, 1.50]"


def test_concurrent_groups_are_compared_with_one() -> None:
    group: dict[str, Any] = {"group": "pairs", "group_index": 0}
    base = repeat(collective_case(**group), 1e-3)
    concurrent = repeat(collective_case(**group, concurrent=True), 3e-3)
    data = RunData(run_from_records(*base, *concurrent))
    assert find_table_of_run(data, "contention-concurrent").notes == ["Not significant (n=1)."]
    [comparison] = compare_with_loads(data, "concurrent")
    assert comparison.effect.ratio == pytest.approx(3.0)
    assert not comparison.is_significant


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.09, 0.18, 0.35, 0.091], "10 % faster than default [-13 %, -8 %]"),
        (
            [0.107, 0.205, 0.42, 0.1],
            "4 % slower than default [-1 %, +9 %], not significant (n=4). Try: --repetitions 8",
        ),
        ([0.09, 0.18], "10 % faster than default, not significant (n=2)"),
        ([0.09], "10 % faster than default, not significant (n=1)"),
    ],
)
def test_setting_is_compared_with_its_default(seconds: list[float], expected: str) -> None:
    default = repeat(fsdp_case(), 0.1, 0.2, 0.4, 0.1)
    text = describe(*repeat(fsdp_case(prefetch="explicit"), *seconds), *default)[0]
    assert text == f"fsdp: prefetch=explicit is {expected}"


def test_significance_is_corrected_for_the_number_of_comparisons() -> None:
    default = repeat(fsdp_case(), 0.1, 0.101, 0.099, 0.1)
    slower = repeat(fsdp_case(prefetch="explicit"), 0.104, 0.108, 0.1, 0.106)
    noise = [
        record
        for number in range(3, 9)
        for record in repeat(
            fsdp_case(reshard=number), 0.1 + number / 1e3, 0.1, 0.1, 0.1 - number / 1e3
        )
    ]
    assert "not significant" not in describe(*default, *slower)[0]
    sentences = describe(*default, *slower, *noise)
    assert all("not significant" in sentence for sentence in sentences[:-2])
    assert "not significant after correction for 7 comparisons (n=4)" in sentences[0]
    assert sentences[-1].endswith("(false discovery rate 5 %).")
