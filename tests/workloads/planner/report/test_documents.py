"""Documents of a plan: the decision, the meshes, and the pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest

from parbench.bench.results.tables import GanttChart
from parbench.workloads.planner.decision import list_questions
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.documents import (
    make_dry_run_document,
    make_search_document,
)
from parbench.workloads.planner.search import search
from tests.support.workloads.planner_asks import H100, make_request, make_spec
from tests.workloads.planner.conftest import PlanCommand


def test_search_document_has_questions_and_meshes() -> None:
    request = make_request("llama3-70b", 32, 32)
    result = search(request, H100)
    relaxed = replace(result, context_tokens=2047)
    decision, candidates, _ = make_search_document(request, relaxed, 3).sections
    [questions] = decision.tables
    assert [row["question"] for row in questions.rows] == [
        question.text for question in list_questions(request, H100)
    ]
    [meshes] = candidates.tables
    assert meshes.title == "Fastest of the meshes considered"
    assert [row["step_seconds"] for row in meshes.rows] == [
        run.seconds for run in result.runs[:3]
    ]
    assert "cp with more than 2,047 tokens per rank" in meshes.notes[1]


def draw_pipeline(microbatches: int) -> GanttChart:
    spec = make_spec("pp=4,tp=8", "llama3-70b", microbatches=microbatches)
    document = make_dry_run_document(dry_run(spec, H100))
    [gantt] = document.sections[0].tables[0].figures()
    assert isinstance(gantt, GanttChart)
    return gantt


@pytest.mark.parametrize(("microbatches", "num_drawn"), [(8, 8), (512, 12)])
def test_document_draws_pipeline(microbatches: int, num_drawn: int) -> None:
    """The figure of a long pipeline is shortened."""
    gantt = draw_pipeline(microbatches)
    rows = gantt.details.predicted
    assert rows is not None
    assert [len(row) for row in rows] == [2 * num_drawn] * 4
    assert f"{num_drawn} of {microbatches} microbatches" in gantt.caption


@pytest.mark.parametrize(("microbatches", "is_noted"), [(3, True), (4, False)])
def test_document_notes_too_few_microbatches(microbatches: int, is_noted: bool) -> None:
    spec = make_spec("pp=4,tp=8", "llama3-70b", microbatches=microbatches)
    notes = make_dry_run_document(dry_run(spec, H100)).sections[0].tables[0].notes
    text = "3 microbatches for 4 pipeline ranks: use at least 4 (--set microbatches=4"
    assert any(note.startswith(text) for note in notes) == is_noted


def test_page_is_complete_offline(plan_command: PlanCommand, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = plan_command(
        "search --model llama3-8b --gpus 4 --global-batch 4 --microbatch 1 --set schedule=1f1b "
        f"--checkpointing full --format html -o {page}"
    )
    assert result.exit_code == 0, result.output
    html = page.read_text()
    for text in ("http:", "https:", "@import", "src="):
        assert text not in html
    for title in ("Decision path", "Memory of a rank", "all steps that fit", "Formulas"):
        assert title in html
