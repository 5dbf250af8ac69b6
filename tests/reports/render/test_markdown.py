"""A report as Markdown."""

import re
from dataclasses import replace

import pytest

from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Document
from parbench.reports.findings.finding import Finding
from parbench.reports.render.markdown import render_markdown
from parbench.reports.report import make_report_of_document
from tests.support.reports.nodes_fixtures import EMULATION, sample_node_run
from tests.support.reports.report_rows import report_of, run_from_records
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    ok_record,
    sample_run,
    step_case,
)


def render(run: Run) -> str:
    return render_markdown(report_of(run))


def assert_tables_are_intact(text: str) -> None:
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    for table in tables:
        borders = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(borders) == 1


def test_markdown_has_verdicts_then_sections() -> None:
    finding = Finding(
        kind="slow-rank",
        subject="rank 1",
        message="Rank 1.",
        time_share=0.5,
    )
    text = render_markdown(replace(report_of(sample_run()), findings=[finding]))
    title, _, verdict, *_ = text.splitlines()
    assert title == "# parbench run-1"
    assert "**WRONG** 1 of 54 results" in verdict
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Wrong, hung or failed",
        "Look at first",
        "Settings compared",
        "Not measured",
        "Communication",
        "Training steps",
        "How it was measured",
    ]
    assert_tables_are_intact(text)


def test_markdown_names_an_emulation_first() -> None:
    text = render(sample_node_run())
    assert text.index(f"**emulated: {EMULATION}**") < text.index("preset node")


@pytest.mark.parametrize(
    "text",
    [HOSTILE_TEXT, "a|b", "line\n# heading", "`code`", "[x](javascript:1)", "\u202eevil"],
)
def test_markdown_escapes_hostile_text(text: str) -> None:
    failed = failed_record(collective_case(), reason=text)
    markdown = render(run_from_records(failed, ok_record(step_case(), notes=[text])))
    for markup in ("<script", "\n# heading", "[x](", "\u202e"):
        assert markup not in markdown
    assert_tables_are_intact(markdown)


def test_markdown_of_a_plan_has_heading_and_tiles() -> None:
    tiles = [("0.5 s", "a step")]
    document = Document(
        name="plan",
        heading="llama on 8 GPUs",
        sections=[],
        tiles=tiles,
    )
    text = render_markdown(make_report_of_document(document))
    assert "\nllama on 8 GPUs\n" in text
    assert "* **0.5 s** a step" in text
