import subprocess
import sys
from pathlib import Path

import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, pipeline_record, sample_run, write_run

from bench.errors import UserError
from bench.records import Record
from reports.chrome_trace import render_trace
from reports.exchange.nccl_json import render_json
from reports.exchange.nccl_text import render_text
from reports.page import render_page
from reports.show import build_report, export_files, export_run, show_again, show_run, write_files
from reports.summary import summarize
from reports.tables import render_tables


def folder(out: Path, *records: Record, launches: int = 1) -> Path:
    return write_run(out, make_run(make_plan([collective()], launches=launches), records))


def test_tables_come_first_and_the_folder_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sample_run()
    path = write_run(tmp_path, run)
    code = show_run(path)
    out = capsys.readouterr().out
    assert out == render_tables(run, summarize(run), width=None) + f"{path}\n"
    assert code == 1


def test_the_report_lies_in_the_folder(tmp_path: Path) -> None:
    run = sample_run()
    path = write_run(tmp_path, run)
    show_run(path)
    assert (path / "report.html").read_text() == render_page(run, summarize(run))
    assert [one.name for one in path.iterdir() if one.name.startswith(".")] == []


def test_the_page_can_be_left_out(tmp_path: Path) -> None:
    path = folder(tmp_path, ok(collective()))
    assert show_run(path, page=False) == 0
    assert not (path / "report.html").exists()


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ((ok(collective()),), 0),
        ((bad(collective(), 0, "skipped", "no float8"),), 0),
        ((bad(collective()),), 4),
        ((bad(collective(), 0, "hang"),), 4),
        ((bad(collective(), 0, "wrong"),), 1),
        ((), 4),
    ],
)
def test_the_exit_code_is_the_verdicts(tmp_path: Path, records: tuple[Record, ...], code: int) -> None:
    assert show_run(folder(tmp_path, *records), page=False) == code


def test_a_truncated_run_is_shown_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, ok(collective(), 0), ok(collective(), 1), launches=2)
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert show_run(path) == 4
    assert "1 of 2 measurements without a record" in capsys.readouterr().out
    assert "1 of 2 measurements without a record" in (path / "report.html").read_text()


def test_results_are_shown_even_if_the_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, ok(collective()))
    (path / "report.html").mkdir()
    assert show_run(path) == 4
    captured = capsys.readouterr()
    assert "1.00 ms [0.900, 1.10]" in captured.out
    assert captured.out.endswith(f"\n{path}\n")
    assert captured.err.startswith(f"no report: {path / 'report.html'} cannot be written: ")


def test_a_wrong_result_outweighs_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    path = folder(tmp_path, bad(collective(), 0, "wrong"))
    (path / "report.html").mkdir()
    assert show_run(path) == 1


def test_a_report_goes_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, ok(collective()))
    target = tmp_path / "mine.html"
    assert build_report([path], out=target) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert not (path / "report.html").exists()
    assert build_report([path]) == 0
    assert capsys.readouterr().out == f"{path / 'report.html'}\n"
    assert (path / "report.html").read_bytes() == target.read_bytes()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = folder(tmp_path, ok(collective()))
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken cannot be written"):
        build_report([path], out=tmp_path / "taken")
    with pytest.raises(UserError, match="No such file"):
        build_report([path], out=tmp_path / "nowhere" / "x.html")
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([path.name, "taken"])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable run\.json"):
        show_run(tmp_path)
    with pytest.raises(UserError, match=r"no readable run\.json"):
        build_report([tmp_path])


def test_tables_alone_do_not_wait_for_matplotlib() -> None:
    code = "import sys, reports.show; sys.exit(bool({'matplotlib', 'torch', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_format_is_written_by_its_own_module() -> None:
    record = pipeline_record()
    run = make_run(make_plan([record.case, collective()]), [record, ok(collective())])
    assert export_run(run, "chrome-trace") == render_trace(run)
    assert export_run(run, "nccl-tests-json") == render_json(run)
    assert export_run(run, "nccl-tests") == render_text(run).encode()


def test_a_run_is_shown_again_in_full_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sample_run()
    path = write_run(tmp_path, run)
    before = sorted(path.rglob("*"))
    assert show_again(path) == 1
    assert capsys.readouterr().out == render_tables(run, summarize(run), width=None, full=True) + f"{path}\n"
    assert sorted(path.rglob("*")) == before


def test_formats_that_are_no_pages_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, ok(collective()))
    assert build_report([path], "csv") == 0
    assert capsys.readouterr().out.startswith("case,name,params,")
    assert not (path / "report.html").exists()


def test_files_are_written_under_a_folder_that_is_made(tmp_path: Path) -> None:
    written = write_files(tmp_path / "new", {"a/x.json": b"1", "y.json": b"2"})
    assert [file.read_bytes() for file in written] == [b"1", b"2"]
    assert written == [tmp_path / "new/a/x.json", tmp_path / "new/y.json"]
    with pytest.raises(UserError, match="cannot be made: Not a directory"):
        write_files(tmp_path / "new/y.json", {"z/x.json": b""})


def test_a_trace_for_each_case_is_a_file_named_by_its_id() -> None:
    record = pipeline_record()
    run = make_run(make_plan([record.case, collective()]), [record, ok(collective())])
    assert export_files(run, "chrome-trace") == {f"{record.case.id}.json": render_trace(run)}
    with pytest.raises(UserError, match="holds no traced step"):
        export_files(run, "hta")
