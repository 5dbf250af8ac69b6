"""Names that tell rows apart, and facts of an environment as text."""

import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.reports.analysis.labels import label_cases
from tests.support.reports.report_rows import summarize_rows
from tests.support.reports.reports_fixtures import ok_record, step_case


@pytest.mark.parametrize(
    ("cases", "labels"),
    [
        ([step_case("ddp"), step_case("ddp", bucket_mb=1.0)], ["ddp", "ddp bucket_mb=1.0"]),
        ([step_case("ddp"), make_case("mine.ddp", "m:f", {})], ["step.ddp", "mine.ddp"]),
        ([step_case("a", b="\x1b[1m"), step_case("a", b="c")], ["a b=\\x1b[1m", "a b=c"]),
    ],
)
def test_labels_have_the_differing_parameters(cases: list[Case], labels: list[str]) -> None:
    rows = summarize_rows(*(ok_record(case) for case in cases))
    assert list(label_cases(rows).values()) == labels
