"""The columns that tables of communication share."""

import pytest

from parbench.bench.results.records import Check
from parbench.reports.sections.row_columns import communication_columns
from tests.support.report_rows import column_texts, report_lines, summarize_row
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
)


def test_interval_of_one_repetition_is_marked() -> None:
    (line,) = report_lines("communication", ok_record(collective_case()))
    assert line["time, within this launch"] == "1.00 ms [0.900, 1.10]"
    assert line["noise (one launch)"] == "stable"
    repeated = [ok_record(collective_case("broadcast"), i, 1e-3 * 2**i) for i in range(3)]
    line, repeated_line = report_lines("communication", ok_record(collective_case()), *repeated)
    assert line["time"] == "1.00 ms (one launch)"
    assert line["noise"] == "stable within this launch"
    assert repeated_line["time"].startswith("2.00 ms [")
    assert repeated_line["noise"] == "very noisy"
    assert repeated_line["launches"] == "3/3"


@pytest.mark.parametrize(
    ("check", "word"),
    [
        (Check(), "unchecked"),
        (Check(passed=False, wrong=3), "3 wrong"),
        (Check(passed=False), "wrong"),
    ],
)
def test_check_column_has_one_word(check: Check, word: str) -> None:
    row = summarize_row(failed_record(collective_case(), check=check))
    assert column_texts(communication_columns([row]), row)["check"] == word
