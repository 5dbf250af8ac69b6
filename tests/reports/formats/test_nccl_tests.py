"""A run in the layout of nccl-tests' text: its tables and its comments."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.results.records import Check, Record
from parbench.reports.formats.nccl_tests import render_text
from parbench.reports.run_data import RunData
from tests.support.reports.exchange_fixtures import FORMATS_FOLDER
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    WORLD,
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


def test_cuda_tables_have_modes_of_nccl_tests() -> None:
    cuda = msgspec.structs.replace(WORLD, device="cuda", backend="nccl")
    modes = ("blocking", "graph", "async", "pipelined")
    records = [ok_record(collective_case(mode=mode), world=cuda) for mode in modes]
    text = render(*records)
    tables = find_tables(text)
    assert "graph: 1" in tables[0]
    assert "graph: 0" in tables[1]
    comments = [line for line in text.splitlines() if line.startswith("# Not in any table")]
    assert ["mode=blocking" in comments[0], "mode=async" in comments[1]] == [True, True]
    failed = failed_record(collective_case(mode="graph"), world=cuda)
    assert len(find_tables(render(records[0], failed))) == 2
    cpu_records = [ok_record(collective_case(mode=mode)) for mode in modes]
    assert len(find_tables(render(*cpu_records))) == 4


def test_times_are_means_over_ranks_with_their_limits() -> None:
    cuda = msgspec.structs.replace(WORLD, device="cuda", backend="nccl")
    case = collective_case(size_bytes=1 << 20, mode="pipelined")
    record = ok_record(case, seconds=2e-3, world=cuda, details={"launch_hidden": 0.25})
    metrics = {**record.metrics, "rank_mean_time": seconds_metric(1e-3)}
    text = render(msgspec.structs.replace(record, metrics=metrics))
    [slower] = find_rows(render(record))
    [row] = find_rows(text)
    assert (slower[-4], row[-4]) == ("2000.00", "1000.00")
    assert float(row[-2]) == pytest.approx(2 * float(slower[-2]), rel=0.02)
    assert "maxima over ranks" not in text
    assert "One buffer is used again" in text
    assert "75% of iterations include launches" in text


@pytest.mark.parametrize(
    ("operation", "dtype", "program", "columns"),
    [
        ("all_reduce", "float64", "all_reduce_perf", ["4096", "512", "double", "sum"]),
        ("broadcast", "uint8", "broadcast_perf", ["4096", "4096", "uint8", "none"]),
        ("all_to_all_v", "float32", "alltoallv_perf", ["4096", "256", "float", "none"]),
    ],
)
def test_program_type_and_count_follow_nccl_tests(
    operation: str, dtype: str, program: str, columns: list[str]
) -> None:
    """Counts of operations that gather or distribute are those of one rank."""
    text = render(ok_record(collective_case(operation, 4096, dtype=dtype)))
    assert f"test starting: {program}\n" in text
    assert find_rows(text)[0][:4] == columns


@pytest.mark.parametrize(
    ("case", "fact"),
    [
        (step_case(), "no nccl-tests equivalent"),
        (collective_case(dtype="complex64"), "complex64"),
    ],
)
def test_case_without_a_counterpart_is_a_comment(case: Any, fact: str) -> None:
    (comment,) = render(failed_record(case, status="ok")).splitlines()
    assert case.label in comment
    assert fact in comment


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
    comments = [line for line in text.splitlines() if line.startswith("# Left out: ")]
    assert len(comments) == 3
    assert "rank 1 is lost" in comments[1]
    assert "# Out of bounds values : 7 FAILED\n" in text
    assert "\x1b" not in text
