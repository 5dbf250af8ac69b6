"""Expert-parallel steps: their table."""

from tests.support.reports.report_rows import assert_cells, report_lines
from tests.support.reports.reports_fixtures import expert_record


def test_table_shows_load_and_drops() -> None:
    (line,) = report_lines("experts-table", expert_record("ep_step", "zipf", 1.25, 0.02))
    assert_cells(
        line,
        {
            "step": "ep_step",
            "EP": "2",
            "rank load": "1.35",
            "dropped": "12.5 %",
        },
    )
