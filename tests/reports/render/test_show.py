"""The output of a finished run and of `parbench show`, and a run that is followed."""

from pathlib import Path

import pytest

from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run
from parbench.reports.render.closing import render_closing
from parbench.reports.render.page import render_page
from parbench.reports.render.show import (
    load_report,
    render_report,
    show_again,
    show_run,
)
from parbench.reports.render.terminal import render_text
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import report_of
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
    write_run,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run

CASE = collective_case()


@pytest.fixture(autouse=True)
def unlimited_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as into a pipe, whose width COLUMNS would limit."""
    monkeypatch.delenv("COLUMNS", raising=False)


def write(folder: Path, *records: Record, repetitions: int = 1) -> Path:
    return write_run(folder, make_run(make_plan([CASE], repetitions=repetitions), records))


def render_tables(path: Path) -> str:
    return render_text(report_of(load_run(path)))


def test_show_run_prints_summary_and_writes_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = failed_record(step_case("tp"), 0, "wrong", "3 gradients differ")
    run = write_traced_run(tmp_path, [(traced_record(), make_timeline()), (wrong, None)])
    assert show_run(RunData(run)) == 1
    assert capsys.readouterr().out == render_closing(report_of(run)) + f"{run.path}\n"
    assert (run.path / "report.html").read_text() == render_page(report_of(run))


def test_show_again_prints_tables_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, ok_record(CASE))
    files = sorted(path.rglob("*"))
    assert show_again(path, show_all=True) == 0
    assert capsys.readouterr().out == render_tables(path) + f"{path}\n"
    assert sorted(path.rglob("*")) == files


@pytest.mark.parametrize(
    ("record", "code"), [(ok_record(CASE), 4), (failed_record(CASE, 0, "wrong"), 1)]
)
def test_show_run_survives_an_unwritable_page(
    record: Record, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, record)
    (path / "report.html").mkdir()
    assert show_run(RunData.load(path)) == code
    captured = capsys.readouterr()
    assert captured.out.endswith(f"\n{path}\n")
    assert str(path / "report.html") in captured.err


def test_missing_record_is_reported_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path, ok_record(CASE), ok_record(CASE, 1), repetitions=2)
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert f"parbench run --resume {path}" in " ".join(render_tables(path).split())
    for form in ("html", "markdown"):
        report = render_report(load_report([path]), form)
        assert b"1 of 2 measurements have no record" in report
    assert show_run(RunData.load(path)) == 4
