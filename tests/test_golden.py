"""What parbench prints of stored runs and plans, and what a small real run leaves."""

import difflib

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import summarize
from tests.support.golden import FILES, GOLDEN, page_outline
from tests.support.smoke import OUTPUT_FILE, run_preset


@pytest.mark.parametrize("name", FILES)
def test_output_equals_golden_file(name: str) -> None:
    expected = (GOLDEN / name).read_text().splitlines()
    actual = FILES[name]().splitlines()
    difference = "\n".join(difflib.unified_diff(expected, actual, name, "now", lineterm="", n=1))
    assert difference == "", f"If this is intended, run: make golden\n{difference}"


def test_every_golden_file_is_generated() -> None:
    assert {path.name for path in GOLDEN.glob("*.*")} == set(FILES)


def test_smoke_subset_is_complete(smoke_run: Run) -> None:
    assert_complete(smoke_run)


@pytest.mark.full
def test_smoke_preset_is_complete(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = run_preset(tmp_path_factory.mktemp("preset"), "--launches", "1", "--budget", "8m")
    assert len(run.info.plan.cases) > 20
    assert_complete(run)


def assert_complete(run: Run) -> None:
    """Assert that every planned case was measured, is correct, and is shown."""
    planned = {case.id for case in run.info.plan.cases}
    assert {record.case.id for record in run.records} == planned
    assert {record.status for record in run.records} == {"ok"}
    assert summarize(run).tally.code == 0
    output = (run.path.parents[1] / OUTPUT_FILE).read_text()
    assert f"{len(planned)} of {len(planned)} results equal the reference" in output
    assert output.splitlines()[-1] == f"runs/{run.path.name}"
    shown = CliRunner().invoke(cli.main, ["show", "--all", str(run.path)]).stdout
    for case in run.info.plan.cases:
        assert case.short_name in shown, case.name


def test_smoke_report_is_complete_and_offline(smoke_run: Run) -> None:
    page = (smoke_run.path / "report.html").read_text()
    for attribute in ('src="', "<link "):
        for part in page.split(attribute)[1:]:
            assert part.startswith("data:"), part[:80]
    for case in smoke_run.info.plan.cases:
        assert case.name in page, case.name
    for heading in ("Communication", "Steps", "Environment", "How it was measured"):
        assert f"h2 {heading}" in page_outline(page)
