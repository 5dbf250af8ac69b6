"""The first screen: six lines at most, the step that was traced or piped, and one figure alone as wide as the page."""

import re
from pathlib import Path

from report_rows import found_in, found_of, rows_of
from reports_fixtures import collective, ok, pipeline_record
from traced import run_with, timeline, traced_record

from parbench.bench.plan.catalogue import OPERATIONS as CATALOGUE
from parbench.bench.results.records import Record
from parbench.reports.sections.one_run import draw_first_screen, first_lines


def curve(operation: str, **params: object) -> list[Record]:
    return [ok(collective(operation, size, **params)) for size in (1024, 1 << 20)]


def titles(shown: list[str]) -> list[str]:
    return [re.findall("<strong>(.*?)</strong>", one)[0] for one in map(str, shown)]


def test_no_more_than_six_lines_one_for_each_operation_of_the_usual_mode() -> None:
    every = [one.name.partition(".")[2] for one in CATALOGUE if one.name.startswith("collective.")]
    assert len(every) > 6
    rows = rows_of(*(record for name in reversed(every) for record in curve(name)))
    assert [line.label for line in first_lines(rows)][:5] == [
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    ]
    assert len(first_lines(rows)) == 6
    mixed = rows_of(
        *curve("broadcast", root=1),
        *curve("all_reduce", group="node", group_index=0),
        *curve("all_reduce"),
        *curve("all_gather", mode="pipelined"),
        ok(collective("gather")),
    )
    assert [line.label for line in first_lines(mixed)] == ["all_reduce", "broadcast root=1"]
    assert first_lines(rows_of(ok(collective()))) == ()


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


def test_a_pipeline_is_drawn_as_it_was_measured() -> None:
    (shown,) = draw_first_screen(found_in(pipeline_record()))
    assert titles([shown]) == ["Pipeline: pp"]
    assert "measured: " in shown
    assert "simulated: " not in shown
