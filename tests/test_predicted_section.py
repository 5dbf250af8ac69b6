"""Predictions in the report: beside what was measured, and a file that cannot be read stops nothing."""

from pathlib import Path

import msgspec
import pytest
from reports_fixtures import make_plan, make_run, ok, step

from bench.runs import Run
from reports.findings import find
from reports.markdown import render_markdown
from reports.panels import Section
from reports.predicted_section import PLAN, Prediction, predicted_section
from reports.summary import summarize
from workloads.planner.published import Published, published
from workloads.planner.validate import Component, RowCheck, Validation, write_validation

BYTES = Component(name="bytes dp", predicted=2048.0, measured=2048.0, unit="B")
TIME = Component(name="step", predicted=0.012, measured=0.010, unit="s")
NOTHING = Component(name="bytes tp", predicted=0.0, measured=None, unit="B")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return msgspec.structs.replace(make_run(make_plan([]), [ok(step())]), path=tmp_path)


def section_of(run: Run) -> Section | None:
    return predicted_section(find(run, summarize(run)))


def write(run: Run, *rows: RowCheck, left_out: dict[str, str] | None = None) -> None:
    write_validation(run.path, Validation(run="run-1", fits="run-1", rows=list(rows), left_out=left_out or {}))


def row(*components: Component, notes: tuple[str, ...] = ()) -> RowCheck:
    return RowCheck(
        case="a", label="ddp", ranks=2, rule="r", compute="measured", components=list(components), notes=list(notes)
    )


def test_a_run_that_was_not_predicted_has_no_section(run: Run) -> None:
    assert section_of(run) is None


def test_what_the_planner_wrote_is_shown_as_it_wrote_it(run: Run) -> None:
    write(run, row(BYTES, TIME, NOTHING, notes=("its compute is of another pass",)), left_out={"cp": "not priced"})
    section = section_of(run)
    assert section is not None
    (panel,) = section.panels
    cells = [[column.text(one) for column in panel.columns] for one in panel.rows]
    assert cells == [
        ["ddp", "bytes dp", "2.00 KiB", "2.00 KiB", "+0.0%"],
        ["ddp", "step", "12.0 ms", "10.0 ms", "+20.0%"],
        ["ddp", "bytes tp", "0 B", "-", "-"],
    ]
    assert [column.sort(panel.rows[1]) for column in panel.columns][2:] == [0.012, 0.010, pytest.approx(0.2)]
    assert panel.notes == (
        "Predicted from the run's own collectives and each step's measured compute.",
        "ddp: r",
        "ddp: its compute is of another pass",
        "Not predicted: cp: not priced",
    )


def test_whose_collectives_and_which_compute_are_told(run: Run) -> None:
    declared = msgspec.structs.replace(row(TIME), compute="declared")
    write_validation(run.path, Validation(run="run-1", fits="run-0", rows=[row(TIME), declared], left_out={}))
    section = section_of(run)
    assert section is not None
    assert "from the collectives of run-0 and each step's measured or declared compute" in section.panels[0].caption


def test_where_nothing_could_be_predicted_the_reasons_stand_alone(run: Run) -> None:
    write(run, left_out={"cp": "not priced"})
    section = section_of(run)
    assert section is not None
    assert (section.panels, section.notes) == ((), ("Not predicted: cp: not priced",))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is not what parbench plan --validate wrote"),
        (b'{"schema": 1}', "is not what parbench plan --validate wrote"),
        (b"\xff", "is not what parbench plan --validate wrote"),
        (b'{"schema": 2, "rows": []}', "has schema 2, newer than 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_stops_nothing(run: Run, content: bytes, told: str) -> None:
    (run.path / PLAN).write_bytes(content)
    section = section_of(run)
    assert section is not None
    assert section.panels == ()
    assert told in section.notes[0]


def claim(predicted: float, unit: str = "GB") -> Published:
    return Published(name="ZeRO memory: ddp", quoted=120.0, predicted=predicted, unit=unit, source="arXiv 1910.02054")


def test_published_numbers_stand_below_the_runs_own_and_say_that_they_are_not_of_this_machine(run: Run) -> None:
    found = Validation(
        run="run-1", fits="run-1", rows=[row(TIME)], left_out={}, published=[claim(119.5), claim(0.25, "")]
    )
    write_validation(run.path, found)
    section = section_of(run)
    assert section is not None
    own, published = section.panels
    assert (own.id, published.id) == ("predictions", "published")
    assert "declared hardware, not for this machine" in published.caption
    assert [[column.text(one) for column in published.columns] for one in published.rows] == [
        ["ZeRO memory: ddp", "arXiv 1910.02054", "120 GB", "120 GB"],
        ["ZeRO memory: ddp", "arXiv 1910.02054", "120.0000", "0.2500"],
    ]
    assert [column.sort(published.rows[1]) for column in published.columns][2:] == [120.0, 0.25]


def test_published_numbers_are_shown_where_no_step_could_be_predicted(run: Run) -> None:
    found = Validation(run="run-1", fits="run-1", rows=[], left_out={"ep": "routes"}, published=[claim(120.0)])
    write_validation(run.path, found)
    section = section_of(run)
    assert section is not None
    assert [panel.id for panel in section.panels] == ["published"]
    assert section.notes == ("Not predicted: ep: routes",)


def test_the_same_file_gives_the_same_bytes_with_all_that_the_planner_claims(run: Run) -> None:
    write_validation(run.path, Validation(run="run-1", fits="run-1", rows=[], left_out={}, published=published()))
    first, again = (render_markdown(run, summarize(run)) for _ in range(2))
    assert first == again
    assert "TP+PP+DP, 1536 GPUs" in first


def test_the_report_has_it(run: Run) -> None:
    write(run, row(TIME))
    text = render_markdown(run, summarize(run))
    assert "Predicted and measured" in text
    assert "+20.0%" in text


def test_nothing_measured_has_no_error() -> None:
    assert Prediction(step="a", name="b", predicted=1.0, measured=0.0, unit="B").error is None
