"""The columns that tables of communication share."""

from tests.support.report_rows import report_lines
from tests.support.reports_fixtures import (
    collective_case,
    ok_record,
)


def test_interval_of_one_repetition_is_marked() -> None:
    (line,) = report_lines("communication", ok_record(collective_case()))
    assert line["time, within this repetition"] == "1.00 ms [0.900, 1.10]"
    assert line["noise (one repetition)"] == "stable"
    repeated = [ok_record(collective_case("broadcast"), i, 1e-3 * 2**i) for i in range(3)]
    line, repeated_line = report_lines("communication", ok_record(collective_case()), *repeated)
    assert line["time"] == "1.00 ms (one repetition)"
    assert line["noise"] == "stable within this repetition"
    assert repeated_line["time"].startswith("2.00 ms [")
    assert repeated_line["noise"] == "very noisy"
    assert repeated_line["repetitions"] == "3/3"
