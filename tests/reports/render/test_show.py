"""What is written and shown of runs: data, Markdown, pages in every format, whole files, and a run being followed."""

import csv
import fcntl
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from parbench.bench.results.records import Record
from parbench.bench.results.runs import RecordWriter, Run, load_run, open_writer
from parbench.bench.text import UserError, write_whole
from parbench.reports.analysis.several import several
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import warnings_of
from parbench.reports.render.closing import render_closing
from parbench.reports.render.data import embedded_json, render_csv, render_json
from parbench.reports.render.markdown import escaped, render_markdown
from parbench.reports.render.page import render_page
from parbench.reports.render.show import (
    build,
    build_report,
    follow,
    is_written,
    show_again,
    show_run,
)
from parbench.reports.render.terminal import render_text
from parbench.reports.report import Report
from parbench.reports.sections.one_run import report_of
from parbench.reports.sections.several import report_of_several
from tests.support import reports_fixtures as fixtures
from tests.support.nodes_fixtures import EMULATION, sample_node_run, scaling_run
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
    write_run,
)
from tests.support.traced import make_timeline, traced_record, write_traced_run


def folder(out: Path, *records: Record, launches: int = 1) -> Path:
    return write_run(out, make_run(make_plan([collective_case()], launches=launches), records))


def cut_short(path: Path) -> Path:
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    return path


def csv_lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_json_holds_run_rows_and_gaps() -> None:
    run = sample_run()
    data = json.loads(render_json(report_of(run)))
    assert (data["run"]["id"], data["verdict"]["code"], len(data["rows"])) == ("run-1", 1, 56)
    assert [one["reason"] for one in data["skipped"]] == [
        "size 1001 B is not a multiple of 4 ranks x 4 B"
    ]
    assert [one["launches"] for one in data["missing"]] == [2]
    run = run_from_records(ok_record(collective_case(), details={"send_bytes": 7}))
    (row,) = json.loads(render_json(report_of(run)))["rows"]
    assert row["metrics"]["time"]["value"] == 1e-3
    assert (row["details"], row["case"]["id"], "records" in row) == (
        {"send_bytes": 7},
        collective_case().id,
        False,
    )


def test_csv_has_a_line_per_metric_or_bad_case() -> None:
    first, *more = csv_lines(render_csv(report_of(run_from_records(ok_record(collective_case())))))
    assert [line["metric"] for line in (first, *more)] == ["time", "algbw", "busbw", "time_p99"]
    assert [float(first[name]) for name in ("value", "low")] == pytest.approx([1e-3, 0.9e-3])
    assert (first["run"], first["param_size_bytes"], first["param_dtype"]) == (
        "run-1",
        "1024",
        "float32",
    )
    (line,) = csv_lines(
        render_csv(
            report_of(run_from_records(failed_record(collective_case(), reason=HOSTILE_TEXT)))
        )
    )
    assert (line["status"], line["metric"], line["method"]) == ("failed", "", "")
    unknown = run_from_records(
        ok_record(collective_case(), metrics={"time": fixtures.seconds_metric(None)})
    )
    (line,) = csv_lines(render_csv(report_of(unknown)))
    assert (line["metric"], line["value"], line["low"]) == ("time", "", "")
    assert (
        json.loads(render_json(report_of(unknown)))["rows"][0]["metrics"]["time"]["value"] is None
    )


def report_on(*runs: Run) -> Report:
    return report_of_several(several([(run, summarize(run)) for run in runs]))


def test_data_of_several_runs_names_the_run() -> None:
    run = run_from_records(ok_record(collective_case()))
    other = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, id="run-2"))
    both = report_on(run, other)
    lines = csv_lines(render_csv(both))
    assert [line["run"] for line in lines] == ["run-1"] * 4 + ["run-2"] * 4
    told = json.loads(render_json(both))["runs"]
    assert [one["run"]["id"] for one in told] == ["run-1", "run-2"]
    alone = json.loads(render_json(report_of(run)))
    assert {name: alone.pop(name) for name in ("look_at_first", "settings_compared")} == {
        "look_at_first": [],
        "settings_compared": [],
    }
    assert told[0] == alone


def test_embedded_json_keeps_metrics_when_cut() -> None:
    runs = report_on(sample_run(), sample_run())
    assert embedded_json(runs, 10_000_000) == render_json(runs)
    brief = embedded_json(runs, 1000)
    assert len(brief) < len(render_json(runs))
    whole, read = json.loads(render_json(runs)), json.loads(brief)
    assert [run["run"]["id"] for run in read["runs"]] == ["run-1", "run-1"]
    for full, short in zip(whole["runs"][0]["rows"], read["runs"][0]["rows"], strict=True):
        assert {"details", "notes", "reasons"} & set(short) == set()
        assert all(
            full[name] == short[name]
            for name in ("case", "metrics", "check", "grade", "status", "iterations")
        )


def markdown_of(run: Run) -> str:
    return render_markdown(report_of(run))


def assert_tables_are_whole(text: str, at_least: int = 1) -> None:
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= at_least
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown_has_verdicts_then_sections() -> None:
    text = markdown_of(sample_run())
    assert text.startswith(
        "# parbench run-1\n\n* **WRONG** 1 of 54 results differ from the reference -&gt; do not use"
    )
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        *(
            "Wrong, hung or failed",
            "Look at first",
            "Settings compared",
            "Not measured",
            "Communication",
            "Steps",
            "How it was measured",
        )
    ]
    assert_tables_are_whole(text, at_least=5)
    emulated = markdown_of(sample_node_run())
    assert emulated.index(f"**{EMULATION}**") < emulated.index("preset node")
    runs = [run_from_records(ok_record(step_case(), seconds=seconds)) for seconds in (1e-3, 2e-3)]
    text = render_markdown(report_on(*runs))
    assert text.startswith("# parbench: 2 runs\n\n* **FINE** all 2 runs")
    assert "| ddp | 1.00 ms" in text


def test_markdown_escapes_hostile_text() -> None:
    for evil in (
        HOSTILE_TEXT,
        "a|b",
        "line\n# heading",
        "`code`",
        "[x](javascript:1)",
        "\u202eevil",
    ):
        text = markdown_of(
            run_from_records(
                failed_record(collective_case(), reason=evil), ok_record(step_case(), notes=[evil])
            )
        )
        for markup in ("<script", "\n# heading", "[x](", "\u202e"):
            assert markup not in text
        assert_tables_are_whole(text)
    plain = "a*b [c] `d` <e> & f|g~h#i \\ all_reduce"
    unescaped = re.sub(r"\\([\\`*\[\]|~#])", r"\1", escaped(plain))
    assert unescaped.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == plain


def test_truncated_record_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(
        tmp_path, ok_record(collective_case()), ok_record(collective_case(), 1), launches=2
    )
    assert warnings_of(load_run(path)) == ()
    run = load_run(cut_short(path))
    assert len(run.records) == 1
    (told,) = warnings_of(run)
    assert told.startswith(
        "The last line of records.jsonl is being written, or was cut short by a kill"
    )
    assert f"parbench run --resume {path}" in told
    for form in ("html", "markdown"):
        assert b"was cut short by a kill" in build([path], form)[0]
    assert "was cut short by a kill" in tables_of(path)
    assert show_run(path) == 4
    assert "1 of 2 measurements have no record" in capsys.readouterr().out
    assert "1 of 2 measurements have no record" in (path / "report.html").read_text()
    assert warnings_of(load_run(folder(tmp_path))) == warnings_of(make_run(make_plan([]), [])) == ()


def test_is_written_leaves_the_lock_alone(tmp_path: Path) -> None:
    path = folder(tmp_path, ok_record(collective_case()))
    with open_writer(path) as writer:
        assert is_written(path)
        writer.write(ok_record(collective_case(), 2))
    assert not is_written(path)
    with (path / "records.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing holds it after the look
    assert not is_written(tmp_path)


def test_write_whole_replaces_or_leaves_no_trace(tmp_path: Path) -> None:
    target, taken = tmp_path / "page.html", tmp_path / "taken"
    target.write_text("old")
    taken.mkdir()
    write_whole(target, b"new")
    assert target.read_bytes() == b"new"
    for refused in (taken, tmp_path / "no" / "page.html"):
        with pytest.raises(UserError, match=f"{refused} cannot be written: "):
            write_whole(refused, b"new")
    assert sorted(tmp_path.iterdir()) == [target, taken]


def test_show_run_prints_summary_and_writes_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = failed_record(step_case("tp"), 0, "wrong", "3 gradients differ")
    run = write_traced_run(tmp_path, [(traced_record(), make_timeline()), (wrong, None)])
    path = run.path
    assert show_run(path) == 1
    assert capsys.readouterr().out == render_closing(report_of(run)) + f"{path}\n"
    assert (path / "report.html").read_text() == render_page(report_of(run))
    assert [one.name for one in path.iterdir() if one.name.startswith(".")] == []
    before = sorted(path.rglob("*"))
    assert show_again(path, whole=True) == 1
    out = capsys.readouterr().out
    assert out == render_text(report_of(run)) + f"{path}\n"
    assert "Traced steps, rank by rank" in out
    assert sorted(path.rglob("*")) == before


def test_show_run_survives_an_unwritable_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for record, code in (
        (ok_record(collective_case()), 4),
        (failed_record(collective_case(), 0, "wrong"), 1),
    ):
        path = folder(tmp_path, record)
        (path / "report.html").mkdir()
        assert show_run(path) == code
        captured = capsys.readouterr()
        assert captured.out.endswith(f"\n{path}\n")
        assert ("1.00 ms" in captured.out) is (code == 4)
        assert captured.err.startswith(f"no report: {path / 'report.html'} cannot be written: ")


def test_newer_schema_has_a_page_only(tmp_path: Path) -> None:
    for file in ("run.json", "records.jsonl"):
        path = folder(tmp_path, ok_record(collective_case()))
        target = path / file
        target.write_bytes(re.sub(rb'"schema": ?[12]', b'"schema":99', target.read_bytes()))
        told, code = build([path], "html")
        assert code == 4
        assert b"schema 99 is newer than 2" in told
        with pytest.raises(UserError, match="schema 99 is newer"):
            build([path], "csv")
    fine = folder(tmp_path, ok_record(collective_case()))
    with pytest.raises(UserError, match=r"no readable run\.json"):
        build([fine, fine / "traces"], "html")


def test_build_report_needs_every_run(tmp_path: Path) -> None:
    good, broken, other = (write_run(tmp_path, scaling_run(nodes)) for nodes in (2, 4, 1))
    target = tmp_path / "page.html"
    assert build_report([good, other], out=target) == 0
    assert 'id="over-nodes"' in target.read_text()
    with pytest.raises(UserError, match="cannot be written"):
        build_report([good, other], out=tmp_path / "no" / "page.html")
    (broken / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json"):
        build([good, broken, other], "html")
    assert list(tmp_path.glob(".page*")) == []


def pauses(path: Path, *steps: Callable[[RecordWriter], None]) -> Callable[[float], None]:
    """Return what to do in each pause: a step, then the end of the writer."""

    def written() -> Iterator[None]:
        with open_writer(path) as writer:
            yield
            for step_case in steps:
                step_case(writer)
                yield
        yield

    told = written()
    next(told)
    return lambda seconds: next(told)


def tables_of(path: Path) -> str:
    run = load_run(path)
    return render_text(report_of(run))


def test_follow_prints_progress_then_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = folder(tmp_path, ok_record(collective_case()), launches=3), io.StringIO()
    assert follow(path, out, pause=lambda seconds: pytest.fail("nobody writes"), whole=True) == 4
    assert out.getvalue() == tables_of(path)
    out = io.StringIO()
    write: list[Callable[[RecordWriter], None]] = [
        lambda writer: writer.write(ok_record(collective_case(), 1)),
        lambda writer: None,
        lambda writer: writer.write(failed_record(collective_case(), 2)),
    ]
    assert follow(path, out, pauses(path, *write), whole=True) == 4
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3 measurements; cases: 1 ok, about 1 s left",
        "2 of 3 measurements; cases: 1 ok, about 500 ms left",
        "3 of 3 measurements; cases: 1 failed",
    ]
    assert out.getvalue() == tables_of(path)
    path = folder(tmp_path)
    follow(path, io.StringIO(), pauses(path))
    assert capsys.readouterr().err == "0 of 1 measurements; cases: none yet\n"


def test_follow_redraws_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = folder(tmp_path, ok_record(collective_case()), launches=3), io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    follow(
        path,
        out,
        pauses(path, lambda writer: writer.write(ok_record(collective_case(), 1))),
        whole=True,
    )
    screens = out.getvalue().split("\x1b[2J\x1b[3J\x1b[H")
    assert screens[0] == ""
    assert ["n 240" in screen for screen in screens[1:]] == [False, True, True]
