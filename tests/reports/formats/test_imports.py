"""Files of other tools as runs: detected, written, refused, and equal after a round trip."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError
from parbench.reports.compare.environment import collect_environment, find_environment_changes
from parbench.reports.formats.imports import detect_tool, import_file
from parbench.reports.formats.nccl_tests import render_text
from parbench.reports.one_run import make_report
from parbench.reports.render.closing import render_closing
from parbench.reports.run_data import RunData
from tests.support.reports.exchange_fixtures import NCCL, OSU, make_pairs_record, nccl_report
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    curve_records,
    ok_record,
)

NCCL_JSON = json.dumps(nccl_report())


def import_text(folder: Path, text: str, **options: Any) -> Run:
    file = folder / "other.log"
    file.write_text(text)
    return load_run(import_file(file, folder / "runs", **options))


@pytest.mark.parametrize("text", ["", "hello", '{"results": []}'])
def test_unknown_format_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^f has an unknown format.*nccl-tests or osu"):
        detect_tool(text, "f")


@pytest.mark.parametrize(("text", "tool", "count"), [(NCCL, "nccl-tests", 4), (OSU, "osu", 2)])
def test_import_makes_a_run(tmp_path: Path, text: str, tool: str, count: int) -> None:
    run = import_text(tmp_path, text, nproc=4)
    assert run.info.plan.preset == f"import:{tool}"
    assert len(run.records) == count
    assert RunData(run).num_missing == 0
    assert run.records[0].world.size == 4
    source = run.records[0].details["source"]
    assert (source["tool"], source["file"]) == (tool, "other.log")


def test_wrong_results_stay_wrong(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL)
    correct, wrong = run.records[-2:]
    assert correct.status == "ok"
    assert wrong.status == "wrong"
    assert "2 wrong results" in wrong.reason
    assert wrong.metrics == {}
    assert wrong.details["printed"]["time"] == 70.8
    assert RunData(run).exit_code == 1


def test_json_keeps_samples_and_no_secrets(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL_JSON)
    variables = {"NCCL_ALGO": "Ring"}
    assert run.info.environment == {"variables": variables, "imported": {"nccl": "2.29.7"}}
    for name in ("run.json", "records.jsonl"):
        assert "s3cret" not in (run.path / name).read_text()
    assert run.records[0].samples.values == pytest.approx([70e-6, 72e-6])


@pytest.mark.parametrize(
    ("text", "options", "fact"),
    [
        (
            "# OSU MPI Barrier Latency Test v7.5\n# Avg Latency(us)\n 1.2\n",
            {"nproc": 4},
            "Barrier",
        ),
        (NCCL_JSON.replace("71.36", "-71.0"), {}, "time -71 at 4194304 B is negative"),
        (OSU.replace("1048576", "9" * 30), {"nproc": 4}, "cannot be imported"),
        (NCCL, {"tool": "osu", "nproc": 4}, "no result of osu"),
    ],
)
def test_refused_import_leaves_no_run(
    tmp_path: Path, text: str, options: dict[str, Any], fact: str
) -> None:
    with pytest.raises(UserError, match=rf"other\.log.*{fact}"):
        import_text(tmp_path, text, **options)
    assert not (tmp_path / "runs").exists()


def test_export_and_import_keep_the_results(tmp_path: Path) -> None:
    broadcast = collective_case("broadcast", 1 << 20, root=0, placement="out_of_place")
    reduce_scatter = collective_case("reduce_scatter", redop="product", placement="in_place")
    pairs = make_pairs_record(1 << 20)
    originals = [
        *curve_records("all_gather"),
        ok_record(broadcast),
        ok_record(reduce_scatter),
        pairs,
    ]
    text = render_text(RunData(run_from_records(*originals))).decode()
    run = import_text(tmp_path, text)
    for record, original in zip(run.records, originals, strict=True):
        seconds = original.metrics["time"].value
        assert record.case.params["size_bytes"] == original.case.params["size_bytes"]
        assert record.metrics["time"].value == pytest.approx(seconds, rel=5e-3)
        assert record.check == original.check
        assert record.world == original.world
    assert run.records[-3].case.params == broadcast.params
    assert run.records[-1].case.params["group"] == "pairs"
    assert [record.details["busbw_factor"] for record in run.records[-3:]] == [1.0, 0.75, 0.5]
    assert RunData(run).results[-1].num_ranks == 2
    text = render_text(RunData(run)).decode()
    assert render_text(RunData(import_text(tmp_path, text))).decode() == text


def test_logs_of_two_nccl_versions_are_compared(tmp_path: Path) -> None:
    base = import_text(tmp_path, NCCL)
    new = import_text(tmp_path, NCCL.replace("library=22907", "library=23001"))
    base_values = collect_environment(base, base.records)
    new_values = collect_environment(new, new.records)
    (change,) = find_environment_changes(base_values, new_values)
    assert change.text == "imported.nccl: 2.29.7 -> 2.30.1"
    assert not change.is_blocking


def test_import_names_bandwidths_above_the_link(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL, link_bytes_per_second=1e9)
    findings = make_report(RunData(run)).findings
    assert [finding.kind for finding in findings] == ["above-link"]
    assert "above the link of 1.00 GB/s" in findings[0].message
    data = RunData.load(import_text(tmp_path, NCCL).path, link_bytes_per_second=1e15)
    assert not make_report(data).findings


def test_import_shows_gpus_nccl_and_published_bandwidths(tmp_path: Path) -> None:
    run = import_text(tmp_path, (Path(__file__).parent / "nccl_info.txt").read_text())
    assert run.info.environment == {
        "imported": {
            "gpu": "NVIDIA H100 80GB HBM3",
            "nccl": "2.28.9",
            "network": "IB",
            "interface": "eth0",
            "adapters": "mlx5_0, mlx5_3",
            "transport": "P2P, NET/IB/GDRDMA",
            "algorithm": "RING/SIMPLE, NVLS/SIMPLE",
        }
    }
    text = " ".join(render_closing(make_report(RunData(run))).split())
    assert "interface eth0 · adapters mlx5_0, mlx5_3" in text
    assert "all_reduce: 242 GB/s is 50.4 % of the published 480 GB/s of H100" in text


def test_import_advises_more_logs_instead_of_repetitions(tmp_path: Path) -> None:
    hints = [
        verdict.hint for verdict in make_report(RunData(import_text(tmp_path, NCCL))).verdicts
    ]
    assert hints[-1] == "Import 5 logs"
