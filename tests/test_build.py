"""Reports in every format, of one run or several; runs that are broken have one that says so."""

import csv
import io
import json
from pathlib import Path

import pytest
from nodes_fixtures import EMULATION, sample_sweep, scaling_run
from reports_fixtures import bad, collective, make_plan, make_run, ok, sample_run, step, write_run

from bench.errors import UserError
from bench.records import Record
from bench.runs import load_run
from reports.build import build, write_report
from reports.data import as_csv, as_json
from reports.markdown import render_markdown
from reports.page import render_page
from reports.summary import summarize


def folder(out: Path, *records: Record) -> Path:
    cases = {record.case.id: record.case for record in records}.values() or [collective()]
    return write_run(out, make_run(make_plan(cases), records))


def test_one_run_is_built_by_its_own_module(tmp_path: Path) -> None:
    path = write_run(tmp_path, sample_run())
    run = load_run(path)
    summary = summarize(run)
    assert build([path], "html").content == render_page(run, summary).encode()
    assert build([path], "markdown").content == render_markdown(run, summary).encode()
    assert build([path], "csv").content == as_csv(summary).encode()
    assert build([path], "json").content == as_json(run, summary).encode() + b"\n"


def test_several_runs_are_held_against_each_other(tmp_path: Path) -> None:
    paths = [folder(tmp_path, ok(step(), seconds=seconds)) for seconds in (1e-3, 2e-3)]
    page = build(paths, "html").content.decode()
    assert 'id="beside-table"' in page
    assert "fine: all 2 runs" in page
    assert build(paths, "markdown").content.startswith(b"# parbench: 2 runs")
    lines = list(csv.DictReader(io.StringIO(build(paths, "csv").content.decode())))
    assert {line["run"] for line in lines} == {"run-1"}
    assert [line["value"] for line in lines if line["metric"] == "step_time"] == ["0.001", "0.002"]
    assert len(json.loads(build(paths, "json").content)["runs"]) == 2


def test_a_line_cut_short_is_told_in_the_page_and_in_markdown(tmp_path: Path) -> None:
    path = folder(tmp_path, ok(collective()))
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    for form in ("html", "markdown"):
        told = build([path], form)
        assert b"was cut short by a kill" in told.content
        assert told.code == 0


@pytest.mark.parametrize("file", ["run.json", "records.jsonl"])
def test_a_newer_schema_has_a_page_that_says_so(tmp_path: Path, file: str) -> None:
    path = folder(tmp_path, ok(collective()))
    target = path / file
    target.write_bytes(
        target.read_bytes().replace(b'"schema": 1', b'"schema":1').replace(b'"schema":1', b'"schema":99')
    )
    told = build([path], "html")
    assert told.code == 4
    assert b"schema 99 is newer than 1, the newest this parbench reads" in told.content
    with pytest.raises(UserError, match="schema 99 is newer"):
        build([path], "csv")


@pytest.mark.parametrize("records", [(), (bad(collective()),), (bad(collective(), 0, "hang"),)])
@pytest.mark.parametrize("form", ["html", "markdown", "csv", "json"])
def test_runs_without_results_have_reports(tmp_path: Path, records: tuple[Record, ...], form: str) -> None:
    told = build([folder(tmp_path, *records)], form)
    assert told.code == 0
    if form in ("html", "markdown"):
        assert b"something did not run" in told.content


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable run\.json"):
        build([tmp_path], "html")
    with pytest.raises(UserError, match=r"no readable run\.json"):
        build([folder(tmp_path, ok(collective())), tmp_path], "html")


def test_the_same_runs_are_the_same_bytes(tmp_path: Path) -> None:
    paths = [folder(tmp_path, ok(step(), seconds=seconds)) for seconds in (1e-3, 2e-3)]
    assert build(paths, "html") == build(paths, "html")


# --- several nodes and sweeps ---


def test_a_sweeps_folder_is_the_page_of_its_runs(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    page = build([sweep], "html").content.decode()
    assert page.index("What runs 1-10 cannot show: " + EMULATION) < page.index("<nav")
    for anchor in ("runs", "problems", "over-nodes", "environments-table"):
        assert f'id="{anchor}"' in page
    assert 'id="scaling"' not in page  # by ranks, placements would be mixed
    assert page.count("<svg") == 3
    assert "rank 2 (n3) did not arrive" in page
    assert "Not run: 8 nodes x 1, block." in page
    assert build([sweep], "html").content.decode() == page


def test_a_sweep_has_every_other_format(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    told = build([sweep], "markdown").content.decode()
    assert told.startswith("# parbench: 11 runs")
    assert "4 nodes x 2, cyclic, plain" in told
    assert told.index(EMULATION) < told.index("## Runs")
    assert len(json.loads(build([sweep], "json").content)["runs"]) == 11


def test_the_page_of_many_runs_stays_under_a_megabyte(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, sample_run(launches=1)) for _ in range(12)]
    page = build(paths, "html").content
    assert len(page) < 1_000_000
    assert b'id="beside-table"' not in page  # each of so many runs would have two columns


def test_a_report_of_many_runs_is_written_whole_where_it_is_asked_for(tmp_path: Path) -> None:
    good, broken = (write_run(tmp_path, scaling_run(nodes)) for nodes in (2, 4))
    other, target = write_run(tmp_path, scaling_run(1)), tmp_path / "page.html"
    (broken / "run.json").write_text("{")
    write_report([good, broken, other], target)
    page = target.read_text()
    assert "A run cannot be read" in page
    assert 'id="over-nodes"' in page
    with pytest.raises(UserError, match="cannot be written"):
        write_report([good, other], tmp_path / "no" / "page.html")
    assert list(tmp_path.glob(".page*")) == []


def test_one_run_is_written_with_all_that_it_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path, scaling_run(2))
    write_report([run], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == build([run], "html").content
    sweep = sample_sweep(tmp_path / "links")
    write_report([sweep], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == build([sweep], "html").content
