"""The first screen: six lines at most, the step that was traced or piped, and one figure alone as wide as the page."""

import re
from pathlib import Path

from report_rows import found_in, found_of
from reports_fixtures import collective, ok
from traced import run_with, timeline, traced_record

from parbench.bench.results.records import Record
from parbench.reports.sections.one_run import draw_first_screen


def curve(operation: str, **params: object) -> list[Record]:
    return [ok(collective(operation, size, **params)) for size in (1024, 1 << 20)]


def titles(shown: list[str]) -> list[str]:
    return [re.findall("<strong>(.*?)</strong>", one)[0] for one in map(str, shown)]


def test_bandwidth_and_the_traced_step_stand_side_by_side_and_one_alone_takes_the_width(tmp_path: Path) -> None:
    curves = curve("all_reduce")
    traced = (traced_record(), timeline())
    both = draw_first_screen(found_of(run_with(tmp_path / "both", [traced, *((one, None) for one in curves)])))
    assert titles([*both]) == ["Bus bandwidth over size", "Traced step: ddp"]
    assert [one.count('class="chart"') for one in both] == [0, 0]
    step = draw_first_screen(found_of(run_with(tmp_path / "step", [traced])))
    rates = draw_first_screen(found_in(*curves))
    assert titles([*step, *rates]) == ["Traced step: ddp", "Bus bandwidth over size"]
    assert [one.count('class="chart"') for one in (*step, *rates)] == [1, 1]
    assert draw_first_screen(found_in(ok(collective()))) == []
