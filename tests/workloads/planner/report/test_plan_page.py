"""A plan as a page: candidates, their front, the pipeline, and what-if variants."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from parbench.bench.results.document import Gantt, Points, Stacks
from parbench.workloads.planner.candidates import Wanted
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.report.plan_page import dry_run_document, label_of, search_document
from parbench.workloads.planner.report.what_if import what_if
from parbench.workloads.planner.search import search
from tests.workloads.planner.test_plan_command import typed

H100 = PRESETS["h100"]
SMALL_GPU = msgspec.structs.replace(H100, memory_bytes=2e7)
STEP = replace(model_of("llama3-70b"), checkpointing="selective")
RUN = dry_run(STEP.on({"dp": 2, "pp": 4, "tp": 8}).with_batch(64), H100)


def test_what_if_changes_one_thing() -> None:
    told = {name: run for name, run in what_if(RUN) if not isinstance(run, str)}
    as_is = told["as it is"].seconds
    assert as_is == RUN.seconds
    assert (
        told["links inside a node half as fast"].seconds
        > as_is
        < told["links across nodes half as fast"].seconds
    )
    assert told["no communication hidden"].exposed_seconds > RUN.exposed_seconds
    assert told["twice the batch"].spec.global_batch == 128
    assert as_is < told["twice the batch"].seconds < 2 * as_is  # the bubble is as long as it was
    assert (told["twice the GPUs"].spec.world, told["twice the GPUs"].spec.global_batch) == (
        128,
        64,
    )
    assert told["twice the GPUs and batch"].spec.global_batch == 128
    assert sum(RUN.parts.values()) == pytest.approx(RUN.seconds)


def test_a_link_that_a_run_measured_is_halved_too_and_what_cannot_be_says_why() -> None:
    one = dry_run(STEP.on({"fsdp": 64}).with_batch(64), H100, seconds=lambda call: 1e-3)
    told = dict(what_if(one, lambda call: 1e-3))
    slower = told["all links half as fast"]
    assert not isinstance(slower, str)
    assert slower.axes[0].seconds == pytest.approx(2 * one.axes[0].seconds)
    assert str(told["twice the GPUs"]).startswith("global batch(64) % (dp(1) * fsdp(128)")


def test_search_document_lists_and_draws_candidates() -> None:
    wanted = Wanted(
        step=model_of("small-llama"), gpus=8, global_batch=16, microbatch=1, schedule="1f1b"
    )
    found = search(wanted, SMALL_GPU, top=8)
    fastest, front, refused = search_document(found, wanted, 3).parts[0].tables
    assert [row[3] for row in fastest.rows] == [run.seconds for run in found.best[:3]]
    assert [row[-1] for row in front.rows] == [
        run.fullest.memory.total / 1e9 for run in found.front
    ]
    (points,) = front.figures
    assert isinstance(points, Points)
    assert {*points.front} <= points.points.keys()
    assert len(points.points) >= len(found.best)
    stacks = [figure for figure in fastest.figures if isinstance(figure, Stacks)]
    assert [list(figure.bars) for figure in stacks] == [
        [label_of(run) for run in found.best[:3]]
    ] * 2
    assert any("too large" in str(row[0]) for row in refused.rows)


def test_caveats_stand_in_the_text() -> None:
    step = replace(model_of("llama3-8b", 4194304), checkpointing="selective")
    run = dry_run(step.on({"cp": 64, "tp": 8}), H100)
    [caveat] = run.caveats
    assert caveat in dry_run_document(run).parts[0].tables[0].notes


def test_the_pipeline_is_drawn_action_by_action() -> None:
    (gantt,) = dry_run_document(RUN).parts[0].tables[0].figures
    assert isinstance(gantt, Gantt)
    facts = gantt.facts
    assert [len(line) for line in facts.predicted or ()] == [2 * RUN.spec.microbatches] * 4
    end = max(line[-1].stop_us for line in facts.predicted or ())
    long = dry_run(RUN.spec.with_batch(1024), H100)
    (gantt,) = dry_run_document(long).parts[0].tables[0].figures
    assert isinstance(gantt, Gantt)
    assert (long.spec.microbatches, gantt.facts.microbatches) == (512, 40)
    assert gantt.told.endswith("Of 512 microbatches 40 are drawn: the others repeat the middle.")
    assert end / 1e6 == pytest.approx(RUN.seconds - RUN.update_seconds - _after(RUN.axes), rel=0.01)


def _after(axes: object) -> float:
    return sum(axis.exposed_seconds for axis in axes if axis.name == "dp")  # type: ignore[attr-defined]


def test_page_fetches_nothing_and_shows_the_plan(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    small = ("--gpus", "4", "--global-batch", "4", "--microbatch", "1", "--schedule", "1f1b")
    shown = typed("--model", "llama3-8b", *small, "-o", str(page))
    assert (shown.exit_code, shown.output) == (0, f"{page}\n")
    html = page.read_text()
    assert len(html) < 500_000
    for word in ("http:", "https:", "@import", "src="):
        assert word not in html
    for words in ("Time against memory", "What memory holds", "What if", "Formulas", "tiles"):
        assert words in html


def test_step_that_does_not_fit_is_written_and_exits_with_2(tmp_path: Path) -> None:
    page, tables = tmp_path / "plan.md", tmp_path / "plan.json"
    for file in (page, tables):
        shown = typed("--model", "llama3-70b", "--mesh", "tp=8", "-o", str(file))
        assert shown.exit_code == 2
        assert "needs 188.1 GB" in shown.stderr
    assert "**TOO LARGE** llama3-70b with tp=8 needs" in page.read_text()
    assert {"time", "memory", "what-if", "equations"} <= json.loads(tables.read_text()).keys()
    assert "ends in none of .html, .md or .json" in str(typed("--guide", "-o", "x.txt").output)


def test_guide_prints_the_strategy_table_and_writes_a_page(tmp_path: Path) -> None:
    shown = typed("--guide")
    assert shown.exit_code == 0, shown.output
    assert "llama3-8b: 8.03 B parameters" in shown.stdout
    assert "2 Psi e r" in shown.stdout
    page = tmp_path / "guide.html"
    assert (
        typed("--guide", "--model", "mixtral-8x7b", "--gpus", "16", "-o", str(page)).exit_code == 0
    )
    assert "HSDP" in page.read_text()
    assert json.loads(typed("--guide", "--json").stdout)["table"][0]["strategy"] == "DDP"
