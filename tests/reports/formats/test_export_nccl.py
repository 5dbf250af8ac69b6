"""A run in the layout of nccl-tests' text: its tables and its comments."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.results.records import Check, Record
from parbench.reports.formats.export_nccl import render_text
from parbench.reports.run_data import RunData
from tests.support.reports.exchange_fixtures import FORMATS_FOLDER
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    ok_record,
    seconds_metric,
    step_case,
)

LAYOUT: Path = FORMATS_FOLDER / "nccl_layout.txt"
"""The layout of nccl-tests 2.19.6, with numbers of parbench."""


def render(*records: Record) -> str:
    return render_text(RunData(run_from_records(*records, environment={}))).decode()


def find_tables(text: str) -> list[str]:
    return text.split("# nccl-tests version")[1:]


def find_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [line.split() for line in lines if line]


def make_placements(size_bytes: int, out_of_place: float, in_place: float) -> list[Record]:
    """Return the records of both placements, with their seconds."""
    out_of_place_case = collective_case(size_bytes=size_bytes, placement=OUT_OF_PLACE)
    in_place_case = collective_case(size_bytes=size_bytes, placement=IN_PLACE)
    return [
        ok_record(out_of_place_case, seconds=out_of_place),
        ok_record(in_place_case, seconds=in_place),
    ]


def test_text_has_the_layout_of_nccl_tests() -> None:
    assert render(*make_placements(1 << 20, 21.37e-6, 21.10e-6)) == LAYOUT.read_text()


@pytest.mark.parametrize("params", [{"mode": "pipelined"}, {"group": "node"}])
def test_parameter_without_a_column_has_its_own_table(params: dict[str, Any]) -> None:
    text = render(ok_record(collective_case()), ok_record(collective_case(**params)))
    assert len(find_tables(text)) == 2


def test_times_are_means_over_ranks() -> None:
    record = ok_record(collective_case(size_bytes=1 << 20), seconds=2e-3)
    metrics = {**record.metrics, "rank_mean_time": seconds_metric(1e-3)}
    [slower] = find_rows(render(record))
    [row] = find_rows(render(msgspec.structs.replace(record, metrics=metrics)))
    assert row[5:9] == ["N/A"] * 4  # By default, an all_reduce is in place.
    assert (slower[9], row[9]) == ("2000.00", "1000.00")
    assert float(row[10]) == pytest.approx(2 * float(slower[10]), rel=0.02)
    assert float(row[11]) == pytest.approx(1.5 * float(row[10]), rel=0.02)


@pytest.mark.parametrize(
    ("operation", "dtype", "program", "columns"),
    [
        ("all_reduce", "float64", "all_reduce_perf", ["4096", "512", "double", "sum"]),
        ("broadcast", "uint8", "broadcast_perf", ["4096", "4096", "uint8", "none"]),
        ("all_to_all_v", "float32", "alltoallv_perf", ["4096", "256", "float", "none"]),
        ("all_reduce", "MPI_LONG", "all_reduce_perf", ["4096", "N/A", "MPI_LONG", "sum"]),
    ],
)
def test_program_type_and_count_follow_nccl_tests(
    operation: str, dtype: str, program: str, columns: list[str]
) -> None:
    """Counts of operations that gather or distribute are those of one rank."""
    text = render(ok_record(collective_case(operation, 4096, dtype=dtype)))
    assert f"test starting: {program}\n" in text
    assert find_rows(text)[0][:4] == columns


def test_notes_of_cases_are_comments() -> None:
    note = "in 50 % of iterations, the time includes the launch by the host"
    record = msgspec.structs.replace(ok_record(collective_case()), notes=[note])
    assert f"\n# Note: {record.case.label}: {note}\n" in render(record)


def test_case_without_a_counterpart_is_a_comment() -> None:
    case = step_case()
    (comment,) = render(failed_record(case, status="ok")).splitlines()
    assert comment == f"# Not in any table: {case.label}: nccl-tests has no program for it"


def test_bad_results_are_comments() -> None:
    correct = collective_case(size_bytes=4096)
    wrong = collective_case(size_bytes=8192)
    hung = collective_case(size_bytes=16384)
    failed = collective_case(size_bytes=32768)
    text = render(
        ok_record(correct),
        failed_record(wrong, 0, "wrong", "7 differ", check=Check(passed=False, wrong=7)),
        failed_record(hung, 0, "hang", "rank 1\nis lost"),
        failed_record(failed, 0, "failed", f"{HOSTILE_TEXT}\n1 2 3"),
    )
    (row,) = find_rows(text)
    assert row[0] == "4096"
    comments = [line for line in text.splitlines() if line.startswith("# Not in any table: ")]
    assert len(comments) == 3
    assert "rank 1 is lost" in comments[1]
    assert "# Out of bounds values : 7 FAILED\n" in text
    assert "\x1b" not in text
