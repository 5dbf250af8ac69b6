import io
import re
from pathlib import Path

import msgspec
import pytest
from late import late_record, samples
from nodes_fixtures import node_run, scaling_run
from reports_fixtures import (
    HOSTILE,
    bad,
    collective,
    comm_call,
    curve_records,
    make_plan,
    make_run,
    ok,
    pipeline_record,
    sample_run,
    simulated,
    step,
    training_metrics,
)
from traced import run_with, timeline, traced_record

from bench.records import Record
from bench.runs import Run, load_run
from reports.several import several
from reports.several_sections import terminal_sections
from reports.summary import summarize
from reports.tables import print_several, print_tables, render_several_tables, render_tables

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_of(*records: Record) -> Run:
    return make_run(make_plan({record.case.id: record.case for record in records}.values()), records)


def text_of(run: Run, width: int | None = None, color: bool = False) -> str:
    return render_tables(run, summarize(run), width=width, color=color)


def lines_after(text: str, title: str) -> list[list[str]]:
    """Return the cells of the plain table under a title, its head included: two blanks part cells."""
    block = text.split(f"\n{title}\n")[1].split("\n\n")[0]
    return [re.split(r" {2,}", line.strip()) for line in block.splitlines()]


def test_a_plain_table_has_a_line_for_each_row_and_cells_parted_by_blanks() -> None:
    run = run_of(ok(collective()), ok(collective("broadcast", 65536, root=1), seconds=2e-3))
    head, first, second = lines_after(text_of(run), "Collectives and point-to-point")
    assert head == [
        *("operation", "mode", "dtype", "size", "time", "algbw GB/s", "busbw GB/s", "p99", "noise", "n", "launches"),
        *("stop", "check"),
    ]
    assert first[:5] == ["all_reduce", "blocking", "float32", "1K", "1.00 ms [0.900, 1.10]"]
    assert second[:5] == ["broadcast root=1", "blocking", "float32", "64K", "2.00 ms [1.80, 2.20]"]
    assert len(first) == len(head)


def test_steps_have_a_table_of_their_own() -> None:
    text = text_of(run_of(ok(step("ddp"), seconds=0.012, notes=["functional only"])))
    head, row = lines_after(text, "Steps")
    assert dict(zip(head, row, strict=True))["notes"] == "functional only"
    assert row[:3] == ["ddp", "12.0 ms [10.8, 13.2]", "341000"]
    assert "Collectives" not in text


def curve(*sizes: int) -> list[Record]:
    return [ok(collective(size_bytes=size), seconds=20e-6 + size / 3e9) for size in sizes]


def test_fits_come_after_the_collectives_with_their_method() -> None:
    text = text_of(run_of(*curve(1024, 1 << 16, 1 << 20, 1 << 24), ok(step())))
    assert text.index("\nCollectives") < text.index("\nFits\n") < text.index("\nFits: time = ") < text.index("\nSteps")
    head, row, *_ = lines_after(text, "Fits")
    cells = dict(zip(head, row, strict=True))
    assert cells["operation"] == "all_reduce"
    assert cells["latency"].startswith("20.0 us [")
    assert cells["busbw GB/s"].startswith("4.50 [")
    assert "of link" not in cells


def test_two_sizes_have_no_fit_and_say_nothing_of_it() -> None:
    assert "Fits" not in text_of(run_of(*curve(1024, 1 << 20)))


def test_a_pipe_cuts_and_wraps_nothing() -> None:
    long = "x" * 500
    text = text_of(run_of(bad(collective(), reason=long), ok(step("ddp", word="w" * 300), notes=["n" * 300])))
    assert f" {long}\n" in text
    assert "n" * 300 in text
    assert "…" not in text


def test_lines_end_without_blanks_and_without_colour() -> None:
    text = text_of(sample_run())
    assert ESCAPE not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_terminal_keeps_numbers_whole(width: int) -> None:
    text = text_of(sample_run(), width)
    assert "21.1 us [19.2, 23.3]" in text
    assert "12.5 ms [11.3, 13.7]" in text
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_is_not_overrun(width: int) -> None:
    assert max(map(len, text_of(sample_run(), width).splitlines())) <= width


def test_a_narrow_terminal_drops_columns_and_says_which_and_what_they_held() -> None:
    run = run_of(ok(collective()), ok(collective(size_bytes=2048), stop="budget"))
    text = " ".join(text_of(run, 80).split())
    assert "No room for: dtype (float32), algbw GB/s, n (120), launches (1/1), stop, check (ok)" in text.replace(
        " p99,", ""
    ).replace(" p99 (2.00 ms),", "")
    assert "mode" not in text.split("No room for")[1]
    assert "blocking" in text


def test_a_wide_terminal_has_room_for_all() -> None:
    assert "No room" not in text_of(sample_run(), 250)


def test_problems_come_after_the_results_and_the_verdict_after_them() -> None:
    text = text_of(sample_run())
    parts = ["\nCollectives", "\nSteps", "\nWrong, hung or failed", "\nNot measured", "\nVerdict: a result is wrong"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert lines_after(text, "Wrong, hung or failed")[1][1:] == ["hang", "1/3", "rank 1 did not arrive within 60 s"]
    assert lines_after(text, "Not measured")[2][1:] == ["not measured", "2/3", "no record: the run ended before"]


def test_footnotes_name_convention_method_launches_and_limits() -> None:
    text = text_of(sample_run())
    for expected in ("nccl-tests", "geometric mean of 3 launch medians, t interval", "functional only", "3 launches"):
        assert expected in text


def test_hostile_text_is_shown_and_obeyed_by_nothing() -> None:
    text = text_of(run_of(bad(collective(), reason=HOSTILE)), color=True, width=200)
    assert "<script>alert('x')</script> [bold]$x$ & \\x1b[31mred" in text


def test_a_wrong_row_has_no_numbers() -> None:
    text = text_of(run_of(ok(collective(), 0), bad(collective(), 1, "wrong", "2 elements differ")))
    assert "Collectives" not in text
    assert "1.00 ms" not in text
    assert "2 elements differ" in text


def test_a_run_without_records_says_so() -> None:
    text = text_of(make_run(make_plan([collective(), step()]), []))
    assert "Verdict: something did not run: 2 of 2 measurements without a record" in text
    assert "collective.all_reduce size_bytes=1024" in text


def printed(monkeypatch: pytest.MonkeyPatch, stream: io.TextIOBase, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "120", "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    run = sample_run()
    print_tables(run, summarize(run), stream)  # type: ignore[arg-type]
    stream.seek(0)
    return stream.read()


def test_a_terminal_has_colour_and_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, Terminal())
    assert ESCAPE in text
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    assert ESCAPE not in printed(monkeypatch, Terminal(), **environment)


def test_a_pipe_has_no_colour_even_if_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, io.StringIO(), FORCE_COLOR="1", COLUMNS="40")
    assert ESCAPE not in text
    assert max(map(len, text.splitlines())) > 120


def test_a_stream_that_knows_only_ascii_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run = run_of(bad(collective(), reason="größer"))
    print_tables(run, summarize(run), stream)
    stream.flush()
    assert b"gr\\xf6\\xdfer" in raw.getvalue()


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(ok(collective()))
    print_tables(run, summarize(run))
    assert capsys.readouterr().out == text_of(run)


def test_what_rows_cost_beside_each_other_has_tables() -> None:
    text = text_of(
        run_of(
            ok(collective(), seconds=1e-3),
            ok(collective(beside="gemm"), seconds=2e-3),
            ok(collective(group="pairs"), seconds=1e-3),
            ok(collective(group="pairs", together=True), seconds=3e-3),
        )
    )
    head, row = lines_after(text, "Contention: all groups at once against one alone")
    assert dict(zip(head, row, strict=True))["factor together"].startswith("3.00 [")
    head, row = lines_after(text, "Interference: slow-down beside a load")
    assert dict(zip(head, row, strict=True))["beside gemm"].startswith("2.00 [")


def test_pairs_are_a_matrix_and_not_rows() -> None:
    ends = [(source, target) for source in range(3) for target in range(3) if source != target]
    cases = [collective("matrix", 1 << 20, source=source, target=target) for source, target in ends]
    cases = [msgspec.structs.replace(case, name="p2p.matrix") for case in cases]
    text = text_of(run_of(*(ok(case) for case in cases)))
    head, *rows = lines_after(text, "Rank to rank: bus bandwidth in GB/s, 1M float32, blocking")
    assert head == ["from \\ to", "0", "1", "2"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[1][2] == "-"
    assert "Collectives" not in text


def training_run() -> Run:
    trained = ok(step("ddp"), metrics=training_metrics(0.010), details={"comm_calls": [comm_call()]})
    return run_of(*curve_records(), trained, ok(step("fsdp"), seconds=0.02))


def test_steps_are_linked_to_the_collectives_of_their_run() -> None:
    head, first, second = lines_after(text_of(training_run()), "Steps")
    cells = dict(zip(head, first, strict=True))
    assert (cells["exposed comm"], cells["predicted comm"], cells["bytes ratio"]) == ("3.00 ms", "370 us", "1.000")
    assert dict(zip(head, second, strict=True))["predicted comm"] == "-"


def test_where_the_time_went_and_memory_stand_after_the_steps() -> None:
    text = text_of(training_run())
    head, *rows = lines_after(text, "Where the time went")
    assert [row[0] for row in rows] == ["ddp"]
    assert dict(zip(head, rows[0], strict=True))["exposed dp"] == "3.00 ms"
    head, *rows = lines_after(text, "Memory by component")
    assert rows[0] == ["ddp", "parameters", "1.00 MiB", "1.00 MiB", "1.00 MiB"]
    assert [row[1] for row in rows] == ["parameters", "gradients", "optimizer", "activations"]
    places = [text.index(f"\n{title}\n") for title in ("Steps", "Where the time went", "Memory by component")]
    assert places == sorted(places)


def test_steps_that_know_nothing_of_it_have_neither_table() -> None:
    text = text_of(run_of(ok(step())))
    assert "Where the time went" not in text
    assert "Memory by component" not in text


def test_a_narrow_terminal_keeps_exposed_and_predicted() -> None:
    text = text_of(training_run(), 80)
    assert max(map(len, text.splitlines())) <= 80
    steps = text.split("\nSteps\n")[1].split("No room for")[0]
    for expected in ("exposed comm", "predicted comm", "tokens/s", "10.0 ms [9.00, 11.0]"):
        assert expected in steps
    assert "mfu" not in steps


def pipeline_run() -> Run:
    others = [simulated("zb_v", 0.018, 2), simulated("dualpipe_v", chunks=2, why_not="it needs 4 microbatches more")]
    return run_of(ok(step("ddp")), pipeline_record(comparison=others), pipeline_record("gpipe", seconds=0.03))


def test_pipelines_and_their_schedules_have_tables_of_their_own() -> None:
    text = text_of(pipeline_run())
    head, first, second = lines_after(text, "Pipelines")
    cells = dict(zip(head, first, strict=True))
    assert (cells["schedule"], cells["P"], cells["M"], cells["v"]) == ("1f1b", "2", "4", "1")
    assert (cells["bubble fraction"], cells["simulated"], cells["formula"]) == ("26.3 %", "23.7 %", "21.0 %")
    assert (cells["idle: schedule"], cells["activations"]) == ("3.00 ms", "5.00 MiB")
    assert second[0] == "gpipe"
    head, *rows = lines_after(text, "Schedules compared: 2 ranks, 4 microbatches")
    assert [row[:4] for row in rows] == [
        ["zb_v", "2", "18.0 ms", "simulated"],
        ["1f1b", "1", "20.0 ms", "measured"],
        ["gpipe", "1", "30.0 ms", "measured"],
        ["dualpipe_v", "2", "-", "-"],
    ]
    assert rows[-1][-1] == "it needs 4 microbatches more"
    places = [
        text.index(f"\n{title}") for title in ("Steps", "Where the time went", "Pipelines", "Schedules", "Memory")
    ]
    assert places == sorted(places)


def test_runs_without_pipelines_do_not_speak_of_them() -> None:
    text = text_of(training_run())
    assert "Pipelines" not in text
    assert "Schedules compared" not in text


def test_pipeline_facts_that_cannot_be_read_are_said_so() -> None:
    text = text_of(run_of(pipeline_record(measured=[[["nonsense", 0, 1]], []])))
    assert "Pipelines" not in text
    assert "\nNo pipeline facts: the pipeline of workload.pp schedule=1f1b" in text
    assert "'nonsense' on rank 0 is no action" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_keeps_schedule_step_time_and_bubble(width: int) -> None:
    text = text_of(pipeline_run(), width)
    assert max(map(len, text.splitlines())) <= width
    table = text.split("\nPipelines\n")[1].split("No room for")[0]
    for expected in ("1f1b", "20.0 ms [18.0, 22.0]", "26.3 %"):
        assert expected in table


def test_what_stands_out_comes_before_the_verdict() -> None:
    text = text_of(run_of(ok(collective(), grade="wild")))
    assert text.index("Slow or noisy\nWild scatter") < text.index("Verdict: fine")
    assert "Slow or noisy" not in text_of(run_of(ok(collective())))


def test_groups_stand_side_by_side() -> None:
    members = [ok(collective(group="pairs", member=i), details={"group_ranks": [i, i + 4]}) for i in range(2)]
    head, first = lines_after(text_of(run_of(*members)), "Operation x group: bus bandwidth in GB/s")
    assert head[-3:] == ["pairs 0,4", "pairs 1,5", "slowest alone"]
    assert first[:4] == ["all_reduce", "blocking", "float32", "1K"]


def test_in_full_the_folder_is_read_too(tmp_path: Path) -> None:
    record = late_record()
    run = run_with(tmp_path, [(traced_record(), timeline()), (record, None)])
    (run.path / "samples" / f"{record.case.id}-0.npz").write_bytes(samples([[0, 0], [3000, 7000]]))
    text = render_tables(run, summarize(run), width=None, full=True)
    head, first, _ = lines_after(text, "Traced steps, rank by rank")
    assert dict(zip(head, first, strict=True))["comm dp"] == "4.00 ms"
    head, line = lines_after(text, "Who comes late")
    assert dict(zip(head, line, strict=True))["rank 1"] == "5.00 us"
    assert "rank by rank" not in render_tables(run, summarize(run), width=None)


def test_a_line_cut_short_is_told(tmp_path: Path) -> None:
    path = run_with(tmp_path, [(traced_record(), None)]).path
    (path / "records.jsonl").write_text((path / "records.jsonl").read_text() + '{"case"')
    run = load_run(path)
    assert "was cut short by a kill" in render_tables(run, summarize(run), width=None)


# --- several nodes ---


def test_nodes_groups_and_pairs_are_told_node_by_node() -> None:
    text = text_of(node_run("cyclic"))
    assert lines_after(text, "Nodes")[:2] == [
        ["host", "ranks", "ranks a node", "switches", "cores"],
        ["n1", "0,4", "2", "spine.leaf1", "0"],
    ]
    assert "Placement of 8 ranks on 4 nodes: cyclic." in text
    assert "across nodes 4M runs at 0.127 of within a node" in text
    matrix = lines_after(text, "Rank to rank: bus bandwidth in GB/s, 1M float32, blocking")
    assert matrix[0] == ["from \\ to", "0 n1", "4 n1", "1 n2", "5 n2", "2 n3", "6 n3", "3 n4", "7 n4"]
    assert "Medians: within a node 3.84 GB/s (8 pairs), same switch" in text


def test_one_node_has_none_of_it() -> None:
    text = text_of(sample_run())
    assert "Nodes" not in text.splitlines()
    assert "Within and across nodes" not in text


def test_several_runs_tables_fit_a_terminal_and_end_with_the_verdict() -> None:
    found = several([(run, summarize(run)) for run in (scaling_run(nodes, 2) for nodes in (1, 2, 4))])
    text = render_several_tables(found, terminal_sections(found), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "Over nodes" in text.splitlines()
    assert text.splitlines()[-1] == "Verdict: fine: all 3 runs"
    out = Terminal()
    print_several(found, terminal_sections(found), out)
    assert "Over nodes" in out.getvalue()
