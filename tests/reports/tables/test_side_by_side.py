"""Times of several runs, environments, settings or loads next to each other."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.run_set import RunSet
from parbench.reports.sweeps import MeasuredPoint
from parbench.reports.tables.side_by_side import make_environment_table, make_run_table
from tests.support.reports.nodes_fixtures import scaling_run
from tests.support.reports.report_rows import report_lines, run_from_records, table_lines
from tests.support.reports.reports_fixtures import collective_case, ok_record, step_case


def make_run(
    case: Case | None = None, seconds: float = 1e-3, repetitions: int = 1, spread: float = 0.02
) -> Run:
    """Return a run of a case, whose repetitions take up to ``spread`` more time."""
    records = []
    for index in range(repetitions):
        record = ok_record(case or step_case(), seconds=seconds * (1 + spread * index))
        records.append(replace(record, repetition=index))
    return run_from_records(*records, repetitions=repetitions)


def join(*runs: Run) -> RunSet:
    return RunSet([(run, None) for run in runs])


def lines_of(*runs: Run) -> list[dict[str, str]]:
    return table_lines(make_run_table(join(*runs)))


def test_single_repetitions_have_a_ratio_without_interval() -> None:
    (line,) = lines_of(make_run(), make_run(seconds=2e-3))
    assert line["run 1"] == "1.00 ms"
    assert line["run 2 / first"] == "2.00"


def test_ratio_has_the_interval_of_unpaired_repetitions() -> None:
    (line,) = lines_of(make_run(repetitions=3), make_run(seconds=2e-3, repetitions=3))
    assert line["run 2 / first"].startswith("2.00 [1.9")
    assert line["run 1"].startswith("1.02 ms [0.9")


def test_cases_match_across_a_varied_parameter() -> None:
    (line,) = lines_of(make_run(step_case(bucket_mb=1)), make_run(step_case(bucket_mb=25)))
    assert line["run 2 / first"] == "1.00"


def test_more_runs_than_columns_have_a_note() -> None:
    runs = [make_run(collective_case())] * 9
    table = make_run_table(join(*runs))
    assert table.columns[-1].title == "run 8 / first"
    assert "first 8 of 9 runs" in table.notes[0]


def test_cases_of_one_run_only_are_named() -> None:
    table = make_run_table(join(make_run(step_case()), make_run(collective_case())))
    assert not table.rows
    assert table.notes[0].startswith("2 cases in one run only: run 1 ")
    assert make_run_table(join(make_run())).notes == []


def test_environments_are_compared_on_equal_nodes() -> None:
    runs: list[tuple[Run, MeasuredPoint | None]] = []
    for environment, factor in (("plain", 1.0), ("tuned", 2.0)):
        for nodes in (2, 4):
            point = MeasuredPoint(id=f"{environment} {nodes}", environment=environment)
            runs.append((scaling_run(nodes, factor=factor), point))
    lines = table_lines(make_environment_table(RunSet(runs)))
    assert {line["case"].partition(", ")[2] for line in lines} == {"2 nodes", "4 nodes"}
    assert lines[-1]["tuned / first"] == "0.500"


def repeat(case: Case, *seconds: float) -> list[Record]:
    return [ok_record(case, repetition, value) for repetition, value in enumerate(seconds)]


@pytest.mark.parametrize(
    ("table", "base", "params", "side"),
    [
        ("settings", {"NCCL_ALGO": ""}, {"NCCL_ALGO": "Ring"}, "Ring"),
        ("contention-background", {}, {"background": "gemm"}, "gemm"),
        (
            "contention-concurrent",
            {"group": "pairs", "group_index": 0},
            {"group": "pairs", "group_index": 0, "concurrent": True},
            "concurrent",
        ),
    ],
)
def test_cases_of_a_run_are_paired_by_repetition(
    table: str, base: dict[str, Any], params: dict[str, Any], side: str
) -> None:
    loaded = repeat(collective_case(**params), 1.5e-3, 3e-3, 6e-3)
    [line] = report_lines(table, *repeat(collective_case(**base), 1e-3, 2e-3, 4e-3), *loaded)
    assert line["case"].startswith("all_reduce")
    assert line["case"].endswith("1K blocking float32")
    assert line[f"{side} / first"] == "1.50 [1.50, 1.50]"
