"""A plan as a page: candidates, their front, the pipeline and its variants."""

import json
from pathlib import Path

import msgspec
import pytest

from parbench.bench.results.document import GanttChart, ScatterPlot
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.plan_page import dry_run_document, search_document
from parbench.workloads.planner.search import search
from tests.support.planner_asks import H100, make_request, make_spec
from tests.workloads.planner.conftest import PlanCommand


def test_search_document_lists_and_draws_candidates() -> None:
    hardware = msgspec.structs.replace(H100, memory_bytes=2e7)
    request = make_request("small-llama", 8, 16, microbatch=1, schedule="1f1b")
    result = search(request, hardware, top=8)
    fastest, front, refused = search_document(result, request, 3).parts[0].tables
    assert [row[3] for row in fastest.rows] == [run.seconds for run in result.best[:3]]
    memory = [run.fullest.memory.total / 1e9 for run in result.front]
    assert [row[-1] for row in front.rows] == memory
    [points] = front.figures
    assert isinstance(points, ScatterPlot)
    assert {*points.front} <= points.points.keys()
    assert any("too large" in str(row[0]) for row in refused.rows)


def draw_pipeline(microbatches: int) -> GanttChart:
    spec = make_spec("pp=4,tp=8", "llama3-70b", microbatches=microbatches)
    document = dry_run_document(dry_run(spec, H100))
    [gantt] = document.parts[0].tables[0].figures
    assert isinstance(gantt, GanttChart)
    return gantt


@pytest.mark.parametrize(("microbatches", "num_drawn"), [(32, 32), (512, 40)])
def test_document_draws_pipeline(microbatches: int, num_drawn: int) -> None:
    """Long pipelines are drawn shortened, and say so."""
    gantt = draw_pipeline(microbatches)
    rows = gantt.facts.predicted
    assert rows is not None
    assert [len(row) for row in rows] == [2 * num_drawn] * 4
    is_shortened = num_drawn < microbatches
    assert ("Of 512 microbatches 40 are drawn" in gantt.caption) == is_shortened


def test_page_is_complete_offline(tmp_path: Path, plan_command: PlanCommand) -> None:
    page = tmp_path / "plan.html"
    result = plan_command(
        "--model llama3-8b --gpus 4 --global-batch 4 --microbatch 1 --schedule 1f1b "
        f"--checkpointing full -o {page}"
    )
    assert result.exit_code == 0, result.output
    html = page.read_text()
    for text in ("http:", "https:", "@import", "src="):
        assert text not in html
    for title in ("Time against memory", "What memory holds", "What if", "Formulas"):
        assert title in html


def test_page_of_too_large_step(tmp_path: Path, plan_command: PlanCommand) -> None:
    path = tmp_path / "plan.json"
    result = plan_command(f"--model llama3-70b --mesh tp=8 -o {path}")
    assert result.exit_code == 2
    assert "168.9 GB" in result.stderr
    tables = json.loads(path.read_text())
    assert {"time", "memory", "what-if", "equations"} <= tables.keys()


def test_page_needs_known_suffix(plan_command: PlanCommand) -> None:
    result = plan_command("--guide -o x.txt")
    assert result.exit_code == 2
    assert ".html, .md or .json" in result.stderr
