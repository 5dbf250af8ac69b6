"""The first screen: six lines at most, the step that was traced or piped, and one figure alone as wide as the page."""

import re
from pathlib import Path

from parbench.bench.results.records import Record
from parbench.reports.sections.one_run import draw_first_screen
from tests.support.report_rows import analyze_records, analyze_run
from tests.support.reports_fixtures import collective_case, ok_record
from tests.support.traced import make_timeline, traced_record, write_traced_run


def curve(operation: str, **params: object) -> list[Record]:
    return [ok_record(collective_case(operation, size, **params)) for size in (1024, 1 << 20)]


def titles(shown: list[str]) -> list[str]:
    return [re.findall("<strong>(.*?)</strong>", one)[0] for one in map(str, shown)]


def test_bandwidth_and_the_traced_step_stand_side_by_side_and_one_alone_takes_the_width(
    tmp_path: Path,
) -> None:
    curves = curve("all_reduce")
    traced = (traced_record(), make_timeline())
    both = draw_first_screen(
        analyze_run(write_traced_run(tmp_path / "both", [traced, *((one, None) for one in curves)]))
    )
    assert titles([*both]) == ["Bus bandwidth over size", "Traced step: ddp"]
    assert [one.count('class="chart"') for one in both] == [0, 0]
    step = draw_first_screen(analyze_run(write_traced_run(tmp_path / "step", [traced])))
    rates = draw_first_screen(analyze_records(*curves))
    assert titles([*step, *rates]) == ["Traced step: ddp", "Bus bandwidth over size"]
    assert [one.count('class="chart"') for one in (*step, *rates)] == [1, 1]
    assert draw_first_screen(analyze_records(ok_record(collective_case()))) == []
