"""The page's figures: each under the id of the panel whose table holds its numbers, none for what has nothing."""

import re
from pathlib import Path

import msgspec
from late import late_record, samples
from reports_fixtures import WORLD, make_plan, make_run, ok, pipeline_record, sample_run, step, training_metrics
from traced import run_with, timeline, traced_record

from bench.runs import Run, load_run
from reports.findings import Findings, find
from reports.illustrations import FIGURES, illustrations, scaling_figures
from reports.sections import sections
from reports.several import several
from reports.summary import summarize


def found_of(run: Run) -> Findings:
    return find(run, summarize(run))


def test_every_figure_belongs_to_a_panel_that_is_there() -> None:
    found = found_of(sample_run())
    drawn = illustrations(found)
    assert drawn.keys() <= {panel.id for section in sections(found) for panel in section.panels}
    assert [len(drawn[name]) for name in ("communication-1", "communication-2", "steps-table")] == [2, 2, 1]
    assert len(FIGURES) == 9


def test_a_timeline_has_its_step_launch_and_clock_below_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline()), (traced_record(step("tp")), timeline(clock=""))])
    (chart,) = illustrations(found_of(run))["step-timelines"]
    caption = re.findall(r"<figcaption>(.*?)</figcaption>", chart)[0]
    assert chart.index("<figcaption>") < chart.index("<svg")
    assert caption.startswith("<strong>ddp</strong> Launch 1. One traced step on one clock (one host, one monotonic")


def test_memory_and_parts_are_drawn_where_they_are_known() -> None:
    run = make_run(make_plan([step()]), [ok(step(), metrics=training_metrics())])
    assert set(illustrations(found_of(run))) == {"steps-table", "step-time", "step-memory"}
    assert set(illustrations(found_of(make_run(make_plan([step()]), [ok(step())])))) == {"steps-table"}


def test_late_ranks_are_drawn_from_the_samples(tmp_path: Path) -> None:
    record = late_record()
    run = run_with(tmp_path, [(record, None)])
    assert "arrivals-table" not in illustrations(found_of(run))
    (run.path / "samples" / f"{record.case.id}-0.npz").write_bytes(samples([[0, 0], [3000, 7000]]))
    (strip,) = illustrations(found_of(load_run(run.path)))["arrivals-table"]
    assert "5.00 us" in strip


def test_pipelines_share_the_room() -> None:
    records = [pipeline_record(), pipeline_record("gpipe", measured=None)]
    run = make_run(make_plan([record.case for record in records]), records)
    assert len(illustrations(found_of(run))["pipelines"]) == 1


def test_scaling_is_drawn_where_worlds_differ() -> None:
    runs = []
    for ranks in (2, 4):
        record = ok(step(), world=msgspec.structs.replace(WORLD, size=ranks))
        run = make_run(make_plan([record.case]), [record])
        runs.append((run, summarize(run)))
    assert "Efficiency against ranks" in scaling_figures(several(runs))["scaling-table"][0]
    assert scaling_figures(several(runs[:1])) == {}
