"""The report on a terminal and in a pipe: what comes where, no line too long, nothing obeyed, colour refused."""

import io
import re
from collections.abc import Callable
from functools import partial

import pytest

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run
from parbench.reports.analysis.analysis import analyse
from parbench.reports.analysis.summary import summarize
from parbench.reports.cells import measured
from parbench.reports.render.terminal import print_report, render_text
from parbench.reports.sections.one_run import report_of
from tests.support import reports_fixtures as fixtures
from tests.support.golden import GOLDEN
from tests.support.nodes_fixtures import EMULATION, sample_node_run
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    curve_records,
    failed_record,
    ok_record,
    pipeline_record,
    sample_run,
    simulated_schedule,
    step_case,
)

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(run: Run, width: int | None = None, color: bool = False) -> str:
    return render_text(report_of(run), width, color)


def told(*records: Record, width: int | None = None) -> str:
    return text_of(run_from_records(*records), width)


def lines_after(text: str, title: str) -> list[list[str]]:
    """Return the cells of the plain table under a title, its head included: two blanks part cells."""
    block = text.split(f"\n{title}\n")[1].split("\n\n")[0]
    return [re.split(r" {2,}", line.strip()) for line in block.splitlines()]


def table(text: str, title: str) -> list[dict[str, str]]:
    head, *rows = lines_after(text, title)
    return [dict(zip(head, row, strict=False)) for row in rows]


def test_pipe_output_is_not_wrapped() -> None:
    long = "x" * 500
    text = told(
        failed_record(collective_case(), reason=long),
        ok_record(step_case("ddp", word="w" * 300), notes=["n" * 300]),
    )
    assert f" {long}\n" in text
    assert "n" * 300 in text
    assert "…" not in text


UNIT_ALONE = re.compile(r"\d\n\s*([num]?s|min|[KMGT]?i?B(/s)?|%)(?![\w/])")
RUNS: dict[str, Callable[[], Run]] = {
    **{path.name: partial(load_run, path) for path in sorted((GOLDEN / "runs").iterdir())},
    "sample": sample_run,
    "nodes": lambda: sample_node_run("cyclic"),
    "training": lambda: training_run(),
    "pipeline": lambda: pipeline_run(),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_width_shows_all_cells(name: str) -> None:
    report = report_of(run := RUNS[name]())
    tables = [
        table for section in report.sections for table in section.tables if table.where != "page"
    ]
    cells = [
        (column, column.text(row))
        for table in tables
        for column in table.columns
        for row in table.rows
    ]
    found = analyse(run, summarize(run))
    rows = [*found.communication, *found.steps]
    for width in (60, 80, 100, 140, None):
        text = render_text(report, width)
        flat = " ".join(text.split())
        assert width is None or max(map(len, text.splitlines())) <= width
        assert not UNIT_ALONE.search(text)
        assert not re.search(r"\[[-+.\d]+,?\n", text)
        assert [told for column, told in cells if column.number and told not in text] == []
        assert [word for _, told in cells for word in told.split() if word not in flat] == []
        assert [
            row.case.label for row in rows if measured(row.metrics.get(row.headline)) not in text
        ] == []


def test_common_cells_are_above_the_table() -> None:
    records = [
        ok_record(collective_case(size_bytes=size, dtype=dtype))
        for size in (1024, 4096)
        for dtype in ("float32", "int32")
    ]
    head, *lines = (
        told(*records)
        .split("time over size, within this launch\n")[1]
        .split("\n\n")[0]
        .splitlines()
    )
    assert head == "All rows: mode blocking."
    assert [re.split(r" {2,}", line) for line in lines] == [
        ["operation", "dtype", "1K", "4K"],
        ["all_reduce", "float32", "1.00 ms [0.900, 1.10]", "1.00 ms [0.900, 1.10]"],
        ["all_reduce", "int32", "1.00 ms [0.900, 1.10]", "1.00 ms [0.900, 1.10]"],
    ]
    alone = told(
        ok_record(collective_case()), ok_record(collective_case("broadcast", 1024, root=0))
    )
    assert (
        "All rows: mode blocking; dtype float32; size 1K; noise (one launch) stable; n 120;"
        in alone
    )
    assert alone.count("1.00 ms [0.900, 1.10]") == 2


def test_wide_tables_are_stacked() -> None:
    many = [
        ok_record(collective_case(size_bytes=1024 << i), seconds=1e-3 * (i + 1)) for i in range(8)
    ]
    pipelined = [
        ok_record(collective_case(size_bytes=1024 << i, mode="pipelined"), seconds=1e-3)
        for i in range(2)
    ]
    text = told(*many, *pipelined, width=80)
    blocks = (
        text.split("time over size, within this launch\n")[1]
        .split("bus bandwidth")[0]
        .split("\n\n")
    )
    assert [block.count("\nall_reduce") for block in blocks[:-1]] == [2, 1, 1, 1]
    alone = told(*many, width=60)
    assert "\nall_reduce\n  mode blocking; dtype float32; 1K 1.00 ms [0.900, 1.10];" in alone


def test_noisy_and_wrong_cells_are_colored() -> None:
    records = [
        ok_record(collective_case(size_bytes=size), grade="very noisy") for size in (1024, 4096)
    ]
    text = text_of(
        run_from_records(*records, failed_record(collective_case(size_bytes=8), status="wrong")),
        100,
        color=True,
    )
    assert f"{ESCAPE}[1;33m1.00 ms [0.900, 1.10]" in text
    assert f"{ESCAPE}[1;31mwrong" in text


def printed(monkeypatch: pytest.MonkeyPatch, stream: io.TextIOBase, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "120", "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    print_report(report_of(sample_run()), stream)  # type: ignore[arg-type]
    stream.seek(0)
    return stream.read()


def test_terminal_width_and_color(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, Terminal())
    assert ESCAPE in text
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= 120
    assert ESCAPE not in printed(monkeypatch, Terminal(), NO_COLOR="1")
    assert ESCAPE not in printed(monkeypatch, Terminal(), TERM="dumb")


def test_pipe_output_has_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, io.StringIO(), FORCE_COLOR="1", COLUMNS="")
    assert ESCAPE not in text
    assert max(map(len, text.splitlines())) > 120
    assert max(map(len, printed(monkeypatch, io.StringIO(), COLUMNS="80").splitlines())) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_ascii_streams_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_from_records(failed_record(collective_case(), reason="größer"))
    print_report(report_of(run))
    assert capsys.readouterr().out == text_of(run)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_report(report_of(run), stream)
    stream.flush()
    assert b"gr\\xf6\\xdfer" in raw.getvalue()


def test_hostile_text_is_escaped() -> None:
    text = text_of(
        run_from_records(failed_record(collective_case(), reason=HOSTILE_TEXT)),
        color=True,
        width=200,
    )
    assert "<script>alert('x')</script> [bold]$x$ & \\x1b[31mred" in text


def test_wrong_row_and_empty_run_have_no_numbers() -> None:
    text = text_of(
        run_from_records(
            ok_record(collective_case(), 0),
            failed_record(collective_case(), 1, "wrong", "2 elements differ"),
            launches=2,
        )
    )
    assert "Collectives" not in text
    assert "1.00 ms" not in text
    assert "2 elements differ" in text
    text = text_of(fixtures.make_run(fixtures.make_plan([collective_case(), step_case()]), []))
    assert "UNFINISHED  2 of 2 measurements have no record -> parbench run --resume" in text
    assert "collective.all_reduce size_bytes=1024" in text


def training_run() -> Run:
    trained = ok_record(
        step_case("ddp"),
        metrics=fixtures.training_metrics(0.010),
        details={"comm_calls": [fixtures.comm_call()]},
    )
    return run_from_records(*curve_records(), trained, ok_record(step_case("fsdp"), seconds=0.02))


def pipeline_run() -> Run:
    others = [
        simulated_schedule("zb_v", 0.018, 2),
        simulated_schedule("dualpipe_v", chunks=2, why_not="it needs 4 microbatches more"),
    ]
    return run_from_records(
        ok_record(step_case("ddp")),
        pipeline_record(comparison=others),
        pipeline_record("gpipe", seconds=0.03),
    )


def test_nodes_groups_and_pairs_have_tables() -> None:
    text = text_of(sample_node_run("cyclic"))
    assert text.splitlines()[1] == EMULATION
    assert lines_after(text, "Nodes")[2] == ["n1", "0,4", "spine.leaf1", "0"]
    head, *_ = lines_after(text, "Rank to rank: bus bandwidth in GB/s, 1M float32, blocking")
    assert head == ["from \\ to", "0 n1", "4 n1", "1 n2", "5 n2", "2 n3", "6 n3", "3 n4", "7 n4"]
    alone = text_of(sample_run())
    assert "Nodes" not in alone.splitlines()
    assert "Within and across nodes" not in alone
