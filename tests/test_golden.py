"""What parbench prints of stored runs and plans (`make golden` renews it), and what a small real run leaves."""

import difflib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import summarize
from tests.support.golden import FILES, GOLDEN, page_outline
from tests.support.smoke import measure


def assert_same(name: str, found: str) -> None:
    kept = (GOLDEN / name).read_text()
    diff = "\n".join(
        difflib.unified_diff(kept.splitlines(), found.splitlines(), name, "now", lineterm="", n=1)
    )
    assert found == kept, f"`make golden` renews it, if this is meant:\n{diff}"


@pytest.mark.parametrize("name", FILES)
def test_kept_runs_and_plans_are_shown_as_before(name: str) -> None:
    assert_same(name, FILES[name]())


def test_a_difference_is_shown_by_its_line() -> None:
    [name, *_] = FILES
    with pytest.raises(AssertionError, match=r"make golden(.|\n)*\+another line"):
        assert_same(name, (GOLDEN / name).read_text() + "another line\n")


def test_every_kept_file_is_asked_for() -> None:
    assert {path.name for path in GOLDEN.glob("*.*")} == {*FILES}


def test_run_measures_and_shows_every_case(smoke_run: Run) -> None:
    assert_complete(smoke_run)


@pytest.mark.full
def test_smoke_preset_is_complete(tmp_path: Path) -> None:
    run = measure(tmp_path, "--preset", "smoke", "--launches", "1", "--budget", "8m")
    assert len(run.info.plan.cases) > 20
    assert_complete(run)


def assert_complete(smoke_run: Run) -> None:
    planned = {case.id for case in smoke_run.info.plan.cases}
    assert {record.case.id for record in smoke_run.records} == planned
    assert {record.status for record in smoke_run.records} == {"ok"}
    assert summarize(smoke_run).tally.code == 0
    printed = (smoke_run.path.parents[1] / "printed").read_text()
    assert f"{len(planned)} of {len(planned)} results equal the reference" in printed
    assert printed.splitlines()[-1] == f"runs/{smoke_run.path.name}"
    every = CliRunner().invoke(cli.main, ("show", "--all", str(smoke_run.path))).stdout
    for case in smoke_run.info.plan.cases:
        assert case.short_name in every, case.name


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            str(value)
            for name, value in attrs
            if name == "src" or (tag == "link" and name == "href")
        ]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_contains_every_case_and_fetches_nothing(smoke_run: Run) -> None:
    source = (smoke_run.path / "report.html").read_text()
    page = _Page()
    page.feed(source)
    shown = " ".join(" ".join(page.text).split())
    assert not [url for url in page.fetched if not url.startswith("data:")]
    for case in smoke_run.info.plan.cases:
        assert case.name in shown, case.name
    sections = {
        line.removesuffix(" #")
        for line in page_outline(source).splitlines()
        if line.startswith("h2 ")
    }
    assert {"h2 Communication", "h2 Steps", "h2 Environment", "h2 How it was measured"} <= sections
