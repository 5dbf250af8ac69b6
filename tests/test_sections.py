"""The whole report as sections: in order, with anchors that differ, nothing without content."""

import subprocess
import sys

from reports_fixtures import bad, collective, make_plan, make_run, ok, sample_run, step

from bench.runs import Run
from reports.findings import find
from reports.panels import Section
from reports.sections import sections
from reports.summary import summarize


def sections_of(run: Run) -> tuple[Section, ...]:
    return sections(find(run, summarize(run)))


def test_sections_come_in_the_order_in_which_they_are_read() -> None:
    run = make_run(
        make_plan([]),
        [
            ok(step()),
            ok(collective(group="pairs", member=0)),
            ok(collective(group="pairs", member=0, together=True)),
            ok(collective()),
        ],
    )
    assert [section.id for section in sections_of(run)] == ["communication", "contrasts", "groups", "steps"]


def test_anchors_differ() -> None:
    found = sections_of(sample_run())
    ids = [section.id for section in found] + [panel.id for section in found for panel in section.panels]
    assert len(ids) == len(set(ids))
    assert "communication-2" in ids


def test_every_column_is_explained() -> None:
    columns = [column for section in sections_of(sample_run()) for panel in section.panels for column in panel.columns]
    assert columns
    assert all(column.help for column in columns)


def test_a_run_without_results_has_none() -> None:
    assert sections_of(make_run(make_plan([collective()]), [bad(collective())])) == ()


def test_they_need_neither_torch_nor_matplotlib() -> None:
    code = "import sys, reports.sections; sys.exit(bool({'torch', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
