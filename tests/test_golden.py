"""Golden output of stored runs and plans, and the folder of a small real run."""

import difflib
import re

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.runs import Run
from tests.support.golden import FILES, GOLDEN, page_outline
from tests.support.smoke import OUTPUT_FILE


@pytest.mark.parametrize("name", FILES)
def test_output_equals_golden_file(name: str) -> None:
    expected = (GOLDEN / name).read_text().splitlines()
    actual = FILES[name]().splitlines()
    difference = difflib.unified_diff(
        expected, actual, "golden file", "output", lineterm="", n=1
    )
    text = "\n".join(difference)
    assert text == "", f"If this is intended, run: make golden\n{text}"


def test_every_golden_file_is_generated() -> None:
    assert {path.name for path in GOLDEN.glob("*.*")} == set(FILES)


def assert_complete(run: Run) -> None:
    """Assert that every planned case was measured, is correct, and is shown."""
    cases = run.info.plan.cases
    measured_ids = {record.case.id for record in run.records}
    assert measured_ids == {case.id for case in cases}
    assert {record.status for record in run.records} == {"ok"}
    output = (run.path.parents[1] / OUTPUT_FILE).read_text()
    assert f"{len(cases)} of {len(cases)} results match the reference" in output
    assert output.splitlines()[-1] == f"runs/{run.path.name}"
    result = CliRunner().invoke(cli.main, ["show", "--all", str(run.path)])
    assert result.exit_code == 0
    for case in cases:
        assert case.short_name in result.stdout


@pytest.mark.xdist_group("smoke_run")
def test_smoke_subset_is_complete(smoke_run: Run) -> None:
    assert_complete(smoke_run)


@pytest.mark.xdist_group("smoke_run")
def test_smoke_report_is_complete_and_offline(smoke_run: Run) -> None:
    page = (smoke_run.path / "report.html").read_text()
    sources = re.findall(r'(?:src="|<link )(.{5})', page)
    assert set(sources) <= {"data:"}
    for case in smoke_run.info.plan.cases:
        assert case.name.rpartition(".")[2] in page
    outline = page_outline(page)
    for heading in ("Communication", "Training steps", "Environment", "How it was measured"):
        assert f"h2 {heading}" in outline
