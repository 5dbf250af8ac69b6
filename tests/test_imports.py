import json
from pathlib import Path
from typing import Any

import pytest
import test_import_gloo
import test_import_nccl
import test_import_osu
import test_import_param
from reports_fixtures import collective, make_plan, make_run, ok, sample_run, step, write_run
from test_nccl_table import on_pairs

from bench.errors import UserError
from bench.runs import Run, load_run
from reports.build import build
from reports.exchange.imports import PARSERS, detect, import_file
from reports.exchange.nccl_json import render_json
from reports.exchange.nccl_text import render_text
from reports.page import render_page
from reports.summary import num_ranks, summarize, verdict

SAMPLES = {
    "nccl-tests": test_import_nccl.TEXT,
    "param": test_import_param.TEXT,
    "osu": test_import_osu.ALLREDUCE,
    "gloo": test_import_gloo.TEXT,
}


def imported(tmp_path: Path, content: str, **more: Any) -> Run:
    file = tmp_path / "other.log"
    file.write_text(content)
    return load_run(import_file(file, tmp_path / "runs", **more))


@pytest.mark.parametrize("tool", PARSERS)
def test_a_tool_is_known_by_what_it_prints(tool: str) -> None:
    assert detect(SAMPLES[tool].encode()) == tool


def test_json_is_known_too() -> None:
    assert detect(json.dumps(test_import_nccl.report()).encode()) == "nccl-tests"
    assert detect(render_json(sample_run())) == "nccl-tests"
    assert detect(b'{"version":3,"nccl_version":22907,"con') == "nccl-tests"


@pytest.mark.parametrize("content", [b"", b"hello", b'{"results": []}', b"\xff\xfe\x00", b"COMMS-RE"])
def test_what_no_tool_printed_is_refused(content: bytes) -> None:
    with pytest.raises(UserError, match=r"f is of no format we know: allowed is what .* print; --from names one"):
        detect(content, "f")


@pytest.mark.parametrize(("tool", "count"), [("nccl-tests", 4), ("param", 2), ("osu", 2), ("gloo", 2)])
def test_a_file_becomes_a_run_of_one_launch(tmp_path: Path, tool: str, count: int) -> None:
    run = imported(tmp_path, SAMPLES[tool], nproc=4)
    assert len(run.records) == count
    assert (run.info.plan.preset, run.info.plan.launches, run.info.plan.nproc) == (f"import:{tool}", 1, 4)
    assert [case.id for case in run.info.plan.cases] == [record.case.id for record in run.records]
    for record in run.records:
        assert record.case.target == f"import:{tool}"
        assert (record.launch, record.world.size, record.stop) == (0, 4, None)
        assert record.details["source"]["tool"] == tool
        assert record.details["source"]["file"] == "other.log"
        assert record.details["convention"] == "nccl-tests"
        assert record.details["busbw_factor"] == 1.5
        assert record.notes[0].startswith(f"imported from {tool} (")
        assert record.samples.values == []
    assert verdict(run).missing == 0


@pytest.mark.parametrize("tool", PARSERS)
def test_an_imported_run_has_a_report(tmp_path: Path, tool: str) -> None:
    run = imported(tmp_path, SAMPLES[tool], nproc=4)
    assert "all_reduce" in render_page(run, summarize(run))


def test_a_wrong_result_has_no_time(tmp_path: Path) -> None:
    run = imported(tmp_path, SAMPLES["nccl-tests"])
    wrong = run.records[-1]
    assert (wrong.status, wrong.reason, wrong.metrics) == ("wrong", "nccl-tests found 2 wrong results", {})
    assert wrong.details["printed"]["time"] == 70.8
    assert verdict(run).code == 1
    osu = imported(tmp_path, SAMPLES["osu"], nproc=4).records[-1]
    assert (osu.status, osu.reason) == ("wrong", "osu found wrong results")


def test_the_host_is_the_one_that_was_measured(tmp_path: Path) -> None:
    assert imported(tmp_path, SAMPLES["nccl-tests"]).info.host == "hopper1, hopper2"
    assert imported(tmp_path, SAMPLES["osu"], nproc=4).info.host == "unknown"


def test_unknown_nodes_are_said_to_be_unknown(tmp_path: Path) -> None:
    known, unknown = imported(tmp_path, SAMPLES["nccl-tests"]), imported(tmp_path, SAMPLES["osu"], nproc=4)
    assert known.records[0].world.nodes == 2
    assert unknown.records[0].world.nodes == 0
    assert [any("number of nodes" in note for note in run.records[0].notes) for run in (known, unknown)] == [
        False,
        True,
    ]


def test_only_allowed_variables_are_kept(tmp_path: Path) -> None:
    run = imported(tmp_path, json.dumps(test_import_nccl.report()))
    assert run.info.environment == {"variables": {"NCCL_ALGO": "Ring"}}
    assert imported(tmp_path, SAMPLES["gloo"]).info.environment is None
    content = b"".join(path.read_bytes() for path in run.path.iterdir() if path.is_file())
    assert b"s3cret" not in content


def test_iterations_of_the_file_are_samples(tmp_path: Path) -> None:
    first, second = imported(tmp_path, json.dumps(test_import_nccl.report())).records
    assert first.samples.values == pytest.approx([70e-6, 72e-6])
    assert first.noise is not None
    assert first.noise.grade == "quiet"
    assert second.noise is None
    assert first.metrics["time"].value == pytest.approx(71.36e-6)


def test_what_was_measured_twice_stays_two_rows(tmp_path: Path) -> None:
    text = SAMPLES["osu"] + SAMPLES["osu"]
    run = imported(tmp_path, text, nproc=4)
    assert [record.case.params.get("repeat") for record in run.records] == [None, None, 2, 2]
    assert len(summarize(run).rows) == 4


def test_what_was_left_out_is_a_note_of_the_run(tmp_path: Path) -> None:
    run = imported(tmp_path, SAMPLES["osu"] + "# OSU MPI Barrier Latency Test v7.5\n", nproc=4)
    assert run.info.plan.notes == ("not imported: OSU Barrier Latency: no case of ours measures the same",)


def test_a_file_without_results_makes_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no result of osu: left out: OSU Barrier Latency: no case"):
        imported(tmp_path, "# OSU MPI Barrier Latency Test v7.5\n# Avg Latency(us)\n    1.2\n", nproc=4)
    assert not (tmp_path / "runs").exists()


def test_a_bad_file_makes_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other\.log, line \d+: 9 of 13 values"):
        imported(tmp_path, SAMPLES["nccl-tests"][: SAMPLES["nccl-tests"].index("   70.80")])
    assert not (tmp_path / "runs").exists()


def test_a_named_tool_is_not_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no result of osu"):
        imported(tmp_path, SAMPLES["gloo"], tool="osu", nproc=4)


def test_a_file_that_cannot_be_read_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.txt cannot be read: No such file or directory"):
        import_file(tmp_path / "absent.txt", tmp_path)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        import_file(tmp_path, tmp_path)


@pytest.mark.parametrize("render", [lambda run: render_text(run).encode(), render_json], ids=["text", "json"])
def test_an_export_that_is_imported_exports_the_same(tmp_path: Path, render: Any) -> None:
    file = tmp_path / "ours"
    file.write_bytes(render(sample_run()))
    once = load_run(import_file(file, tmp_path / "runs"))
    file.write_bytes(render(once))
    twice = load_run(import_file(file, tmp_path / "runs"))
    assert [record.case for record in twice.records] == [record.case for record in once.records]
    for one, two in zip(once.records, twice.records, strict=True):
        for name in ("time", "algbw", "busbw"):
            assert two.metrics[name].value == pytest.approx(one.metrics[name].value, rel=1e-12)


def test_a_groups_export_is_imported_with_its_ranks(tmp_path: Path) -> None:
    world, pair = ok(collective("all_gather", 1 << 20)), on_pairs(1 << 20)
    run = imported(tmp_path, render_text(make_run(make_plan([world.case, pair.case]), [world, pair])))
    whole, group = summarize(run).rows
    assert [row.world.size for row in (whole, group)] == [4, 4]
    assert [num_ranks(row) for row in (whole, group)] == [4, 2]
    assert [row.records[0].details["busbw_factor"] for row in (whole, group)] == [0.75, 0.5]
    again = imported(tmp_path, render_text(run))
    assert [num_ranks(row) for row in summarize(again).rows] == [4, 2]


def test_a_negative_time_makes_no_run(tmp_path: Path) -> None:
    document = test_import_nccl.report()
    document["results"][0]["in_place"]["time"] = -71.0
    with pytest.raises(UserError, match=r"other\.log, line 1: time -71 at 4194304 B is negative"):
        imported(tmp_path, json.dumps(document))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tool", PARSERS)
def test_an_imported_run_is_reported_beside_another(tmp_path: Path, tool: str) -> None:
    run = imported(tmp_path, SAMPLES[tool], nproc=4)
    found = build([run.path, write_run(tmp_path / "ours", sample_run())], "markdown")
    assert b"all_reduce" in found.content


def test_an_export_without_collectives_is_refused(tmp_path: Path) -> None:
    text = render_text(make_run(make_plan([step()]), [ok(step())]))
    with pytest.raises(UserError, match="is of no format we know"):
        imported(tmp_path, text)
