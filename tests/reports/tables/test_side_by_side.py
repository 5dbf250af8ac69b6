"""Times of several runs or environments next to each other."""

from msgspec.structs import replace

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run
from parbench.reports.run_set import RunSet
from parbench.reports.sweeps import MeasuredPoint
from parbench.reports.tables.side_by_side import make_environment_table, make_side_by_side_table
from tests.support.reports.nodes_fixtures import scaling_run
from tests.support.reports.report_rows import run_from_records, table_lines
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
    return table_lines(make_side_by_side_table(join(*runs)))


def test_single_repetitions_have_a_ratio_without_interval() -> None:
    (line,) = lines_of(make_run(), make_run(seconds=2e-3))
    assert line["run 1"].startswith("1.00 ms")
    assert line["run 2 / first"] == "2.00"


def test_ratio_has_the_interval_of_unpaired_repetitions() -> None:
    (line,) = lines_of(make_run(repetitions=3), make_run(seconds=2e-3, repetitions=3))
    assert line["run 2 / first"].startswith("2.00 [1.9")
    assert line["run 1"].startswith("1.02 ms [0.9")


def test_interval_within_a_repetition_is_left_out_next_to_others() -> None:
    (line,) = lines_of(make_run(repetitions=3), make_run())
    assert line["run 2"] == "1.00 ms"


def test_cases_match_across_a_varied_parameter() -> None:
    (line,) = lines_of(make_run(step_case(bucket_mb=1)), make_run(step_case(bucket_mb=25)))
    assert line["run 2 / first"] == "1.00"


def test_more_runs_than_columns_have_a_note() -> None:
    runs = [make_run(collective_case())] * 9
    table = make_side_by_side_table(join(*runs))
    assert table.columns[-1].title == "run 8 / first"
    assert "first 8 of 9 runs" in table.notes[0]


def test_environments_are_compared_on_equal_nodes() -> None:
    runs: list[tuple[Run, MeasuredPoint | None]] = []
    for environment, factor in (("plain", 1.0), ("tuned", 2.0)):
        for nodes in (2, 4):
            point = MeasuredPoint(id=f"{environment} {nodes}", environment=environment)
            runs.append((scaling_run(nodes, factor=factor), point))
    lines = table_lines(make_environment_table(RunSet(runs)))
    assert [line["nodes"] for line in lines[:2]] == ["2", "4"]
    assert lines[-1]["tuned / first"] == "0.500"
