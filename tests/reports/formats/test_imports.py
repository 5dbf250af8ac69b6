"""Files of other tools as runs: detected, written as records, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError
from parbench.reports.analysis.comparisons import compare_settings
from parbench.reports.analysis.overview import describe_setup
from parbench.reports.compare.environment import collect_environment, find_environment_changes
from parbench.reports.compare.wording import explain_comparison
from parbench.reports.formats.imports import detect_tool, import_file
from parbench.reports.run_data import RunData
from tests.support.reports.compare_fixtures import (
    compare_with_rule,
    make_repetitions,
    run_from_records,
)
from tests.support.reports.exchange_fixtures import NCCL, OSU


def import_text(folder: Path, text: str, **options: Any) -> Run:
    file = folder / "other.log"
    file.write_text(text)
    return load_run(import_file(file, folder / "runs", **options))


@pytest.mark.parametrize(
    ("text", "hint"),
    [("hello", "--from nccl-tests or --from osu"), ('{"results": []}', "not JSON")],
)
def test_unknown_format_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"^f is not output of .*{hint}"):
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


def test_heading_has_no_unknown_number_of_nodes(tmp_path: Path) -> None:
    heading = describe_setup(RunData(import_text(tmp_path, OSU, nproc=4)))
    assert "4 ranks · " in heading
    assert " node" not in heading


def test_wrong_results_stay_wrong(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL)
    correct, wrong = run.records[-2:]
    assert correct.status == "ok"
    assert wrong.status == "wrong"
    assert "2 wrong results" in wrong.reason
    assert wrong.metrics == {}
    assert RunData(run).exit_code == 1


def test_bandwidths_follow_from_size_and_time(tmp_path: Path) -> None:
    metrics = import_text(tmp_path, NCCL).records[0].metrics
    assert metrics["time"].value == pytest.approx(18.93e-6)
    assert metrics["algbw"].value == pytest.approx(1024 / 18.93e-6)
    assert metrics["busbw"].value == pytest.approx(1024 / 18.93e-6 * 1.5)


def test_single_rank_has_no_bus_bandwidth(tmp_path: Path) -> None:
    text = re.sub("#  Rank  [123].*\n", "", NCCL)
    assert import_text(tmp_path, text).records[0].metrics["busbw"].value == 0


def test_repeated_sizes_are_different_cases(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL + NCCL)
    assert len({record.case.id for record in run.records}) == 8
    assert run.records[-1].case.params["repeat"] == 2
    assert compare_settings(RunData(run)) == []


@pytest.mark.parametrize(
    ("text", "tool", "fact"),
    [
        ("# OSU MPI Barrier Latency Test v7.5\n# Avg Latency(us)\n 1.2\n", "osu", "Barrier"),
        (NCCL.replace("18.93", "-18.9"), "nccl-tests", "-18.9"),
    ],
)
def test_refused_import_leaves_no_run(tmp_path: Path, text: str, tool: str, fact: str) -> None:
    with pytest.raises(UserError, match=rf"other\.log.*{fact}"):
        import_text(tmp_path, text, tool=tool)
    assert not (tmp_path / "runs").exists()


def test_logs_of_two_nccl_versions_are_compared(tmp_path: Path) -> None:
    base = import_text(tmp_path, NCCL)
    new = import_text(tmp_path, NCCL.replace("library=22907", "library=23001"))
    base_values = collect_environment(base, base.records)
    new_values = collect_environment(new, new.records)
    (change,) = find_environment_changes(base_values, new_values)
    assert change.text == "imported.nccl: 2.29.7 -> 2.30.1"
    assert not change.is_blocking


def test_imported_times_have_no_machine_drift() -> None:
    base, new = (
        run_from_records(make_repetitions(), preset=preset) for preset in ("all", "import:osu")
    )
    assert "apart" in explain_comparison(compare_with_rule(base, base))[-1]
    assert "apart" not in " ".join(explain_comparison(compare_with_rule(base, new)))


def test_import_compares_bandwidths_with_the_link(tmp_path: Path) -> None:
    run = import_text(tmp_path, NCCL, link_bytes_per_second=1e9)
    ceiling = RunData(run).ceiling
    assert ceiling is not None
    assert ceiling.bytes_per_second == 1e9
