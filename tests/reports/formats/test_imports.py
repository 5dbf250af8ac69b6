"""A file of another tool as a run of ours: found out, written, reported, refused, and the same after there and back."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError
from parbench.reports.analysis.summary import num_ranks, summarize
from parbench.reports.formats.imports import PARSERS, detect, import_file
from parbench.reports.formats.nccl_tests import render_text
from parbench.reports.render.page import render_page
from parbench.reports.render.show import build
from parbench.reports.sections.one_run import report_of
from tests.support.exchange_fixtures import NCCL, OSU, make_pairs_record, nccl_report
from tests.support.reports_fixtures import (
    collective_case,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
    write_run,
)

SAMPLES = {"nccl-tests": NCCL, "osu": OSU}


def imported(tmp_path: Path, content: str, **more: Any) -> Run:
    file = tmp_path / "other.log"
    file.write_text(content)
    return load_run(import_file(file, tmp_path / "runs", **more))


def test_detect_knows_tools_by_their_output() -> None:
    assert list(SAMPLES) == list(PARSERS)
    for tool, text in SAMPLES.items():
        assert detect(text.encode()) == tool
    for content in (json.dumps(nccl_report()).encode(), b'{"version":3,"nccl_version":2,"con'):
        assert detect(content) == "nccl-tests"
    known = "^f has an unknown format. Formats that can be imported: output of nccl-tests or osu. Name the tool"
    nothing = render_text(make_run(make_plan([step_case()]), [ok_record(step_case())])).encode()
    param = b"\tCOMMS-RES-all_gather\t65536\t4096\t40.0\n"
    for content in (b"", b"hello", b'{"results": []}', b"\xff\xfe\x00", param, nothing):
        with pytest.raises(UserError, match=known):
            detect(content, "f")


def test_import_makes_a_run_with_a_report(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "ours", sample_run())]
    for tool, count in (("nccl-tests", 4), ("osu", 2)):
        run = imported(tmp_path, SAMPLES[tool], nproc=4)
        assert len(run.records) == count, tool
        plan = run.info.plan
        assert (plan.preset, plan.launches, plan.nproc, plan.notes) == (f"import:{tool}", 1, 4, ())
        assert [case.id for case in plan.cases] == [record.case.id for record in run.records]
        for record in run.records:
            assert record.case.target == f"import:{tool}"
            assert (record.launch, record.world.size, record.stop) == (0, 4, None)
            assert (record.details["source"]["tool"], record.details["source"]["file"]) == (
                tool,
                "other.log",
            )
            assert (record.details["convention"], record.details["busbw_factor"]) == (
                "nccl-tests",
                1.5,
            )
            assert record.notes[0].startswith(f"imported from {tool} (")
            assert record.samples.values == []
        assert summarize(run).tally.missing == 0
        assert "all_reduce" in render_page(report_of(run)), tool
        paths.append(run.path)
    assert b"all_reduce" in build(paths, "markdown")[0]


def test_import_keeps_wrong_results_and_hosts(tmp_path: Path) -> None:
    runs = known, unknown = imported(tmp_path, NCCL), imported(tmp_path, OSU, nproc=4)
    right, wrong = known.records[-2:]
    assert (right.status, right.reason) == ("ok", "")
    assert (wrong.status, wrong.reason, wrong.metrics) == (
        "wrong",
        "nccl-tests found 2 wrong results",
        {},
    )
    assert (wrong.details["printed"]["time"], summarize(known).tally.code) == (70.8, 1)
    assert (unknown.records[-1].status, unknown.records[-1].reason) == (
        "wrong",
        "osu found wrong results",
    )
    assert [run.info.host for run in runs] == ["hopper1, hopper2", "unknown"]
    assert [run.records[0].world.nodes for run in runs] == [2, 0]
    told = [any("number of nodes" in note for note in run.records[0].notes) for run in runs]
    assert told == [False, True]


def test_import_keeps_allowed_variables_and_samples(tmp_path: Path) -> None:
    run = imported(tmp_path, json.dumps(nccl_report()))
    assert run.info.environment == {"variables": {"NCCL_ALGO": "Ring"}}
    assert imported(tmp_path, NCCL).info.environment is None
    content = b"".join(path.read_bytes() for path in run.path.iterdir() if path.is_file())
    assert b"s3cret" not in content
    first, second = run.records
    assert first.samples.values == pytest.approx([70e-6, 72e-6])
    assert first.noise is not None
    assert first.noise.grade == "stable"
    assert second.noise is None
    assert first.metrics["time"].value == pytest.approx(71.36e-6)


def test_import_keeps_repeats_and_notes_omissions(tmp_path: Path) -> None:
    run = imported(tmp_path, OSU + OSU + "# OSU MPI Barrier Latency Test v7.5\n", nproc=4)
    assert [record.case.params.get("repeat") for record in run.records] == [None, None, 2, 2]
    assert len(summarize(run).rows) == 4
    assert run.info.plan.notes == (
        "not imported: OSU Barrier Latency: no case of ours measures the same",
    )


def test_import_refuses_without_making_a_run(tmp_path: Path) -> None:
    document = nccl_report()
    document["results"][0]["in_place"]["time"] = -71.0
    barrier = "# OSU MPI Barrier Latency Test v7.5\n# Avg Latency(us)\n    1.2\n"
    for content, more, told in (
        (
            barrier,
            {"nproc": 4},
            r"other\.log holds no result of osu: left out: OSU Barrier Latency: no case",
        ),
        (json.dumps(document), {}, r"other\.log, line 1: time -71 at 4194304 B is negative"),
        (
            OSU.replace("1048576", "9" * 30),
            {"nproc": 4},
            r"other\.log cannot be imported: the record of .* <= 922337",
        ),
        (NCCL.replace("Rank  0", f"Rank  {'9' * 5000}"), {}, r"other\.log cannot be imported: "),
        (
            NCCL,
            {"tool": "osu", "nproc": 4},
            r"other\.log holds no result of osu$",
        ),  # a named tool is not looked for
    ):
        with pytest.raises(UserError, match=told):
            imported(tmp_path, content, **more)
    with pytest.raises(UserError, match=r"absent\.txt cannot be read"):
        import_file(tmp_path / "absent.txt", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# --- our own, there and back ---


def key(case: Case) -> tuple[object, ...]:
    return (case.name, *(case.params.get(one) for one in ("size_bytes", "dtype", "mode", "root")))


def test_export_and_import_keep_numbers(tmp_path: Path) -> None:
    run = sample_run()
    expected = {
        key(row.case): row
        for row in summarize(run).rows
        if row.is_communication and row.status == "ok"
    }
    once = imported(tmp_path, render_text(run))
    assert len(once.records) == len(expected) == 49
    for record in once.records:
        row = expected[key(record.case)]
        for name, digits in (("time", 5e-4), ("algbw", 1e-2)):
            assert record.metrics[name].value == pytest.approx(
                row.metrics[name].value, rel=digits
            ), record.case
        assert (record.check, record.world) == (row.check, row.world)
        assert record.details["source"]["written_by"] == "parbench 0.1.0"
    assert render_text(imported(tmp_path, render_text(once))) == render_text(once)


def test_export_and_import_keep_parameters(tmp_path: Path) -> None:
    records = [
        ok_record(
            collective_case(
                "broadcast", 1 << 20, root=0, placement="out_of_place", dtype="float8_e4m3fn"
            )
        ),
        ok_record(
            collective_case(
                "reduce_scatter", 1 << 20, redop="product", placement="in_place", group="node"
            )
        ),
        ok_record(collective_case("all_gather", 1 << 20)),
        make_pairs_record(1 << 20),
    ]
    run = make_run(make_plan([record.case for record in records]), records)
    again = imported(tmp_path, render_text(run))
    assert [record.case.params for record in again.records[:2]] == [
        record.case.params for record in records[:2]
    ]
    group = again.records[3].case.params
    assert (group["group"], "world" in group) == ("pairs", False)
    assert [num_ranks(row) for row in summarize(again).rows] == [4, 4, 4, 2]
    assert [row.world.size for row in summarize(again).rows] == [4] * 4
    assert [record.details["busbw_factor"] for record in again.records] == [1.0, 0.75, 0.75, 0.5]
    # The text has too few digits of so low a rate, so it is computed for the group's two ranks.
    slow = imported(tmp_path, render_text(make_run(make_plan([]), [make_pairs_record()]))).records[
        0
    ]
    algbw, busbw = (slow.metrics[name].value or 0 for name in ("algbw", "busbw"))
    assert busbw == pytest.approx(algbw * 0.5)
    two = msgspec.structs.replace(
        records[2], world=msgspec.structs.replace(records[2].world, nodes=2)
    )
    spread = imported(tmp_path, render_text(make_run(make_plan([two.case]), [two])))
    assert (spread.records[0].world.nodes, spread.info.host) == (2, "unknown")
