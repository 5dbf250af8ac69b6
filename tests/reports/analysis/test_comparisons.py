"""Parameters compared with their defaults."""

from typing import Any

import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record
from parbench.reports.analysis.comparisons import describe_settings
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import run_from_records
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


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.09, 0.18, 0.35, 0.091], "10 % faster than default [-13 %, -8 %]"),
        (
            [0.107, 0.205, 0.42, 0.1],
            "4 % slower than default [-1 %, +9 %], not significant (n=4)",
        ),
        ([0.09, 0.18], "10 % faster than default, not significant (n=2)"),
        ([0.09], "10 % faster than default, not significant (n=1)"),
    ],
)
def test_setting_is_compared_with_its_default(seconds: list[float], expected: str) -> None:
    default = repeat(fsdp_case(), 0.1, 0.2, 0.4, 0.1)
    text = describe(*repeat(fsdp_case(prefetch="explicit"), *seconds), *default)[0]
    assert text == f"fsdp: prefetch=explicit is {expected}"


def test_comparison_names_the_whole_case() -> None:
    records = [
        ok_record(collective_case(size_bytes=size, redop=redop), seconds=seconds)
        for size in (1024, 1 << 20)
        for redop, seconds in (("sum", size * 1e-6), ("max", size * 1.1e-6))
    ]
    assert [text.partition(" is ")[0] for text in describe(*records)] == [
        "all_reduce 1K blocking float32: redop=max",
        "all_reduce 1M blocking float32: redop=max",
    ]


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
    sentences = describe(*default, *slower)
    assert "not significant" not in sentences[0]
    assert sentences[-1].endswith("Brackets are 95 % CIs.")
    sentences = describe(*default, *slower, *noise)
    assert all("not significant" in sentence for sentence in sentences[:-1])
    assert sentences[-1].endswith("over all 7 comparisons is at most 5 %.")
