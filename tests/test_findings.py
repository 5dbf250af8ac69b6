"""What a run's rows say together: each row in one place, timelines read before they are taken out."""

from pathlib import Path
from typing import Any

from reports_fixtures import (
    bad,
    collective,
    curve_records,
    make_plan,
    make_run,
    ok,
    pipeline_record,
    sample_run,
    step,
)
from traced import run_with, timeline, traced_record

from bench.cases import make_case
from reports.findings import Findings, find
from reports.summary import summarize


def found_in(*records: object) -> Findings:
    run = make_run(make_plan([]), records)  # type: ignore[arg-type]
    return find(run, summarize(run))


def pair(source: int, target: int) -> object:
    params: dict[str, Any] = {
        "size_bytes": 1024,
        "dtype": "float32",
        "mode": "blocking",
        "source": source,
        "target": target,
    }
    return ok(make_case("p2p.matrix", "m:f", params))


def test_every_row_with_a_measurement_stands_in_one_place() -> None:
    found = found_in(ok(collective()), ok(step()), pair(0, 1), pair(1, 0), bad(collective("broadcast")))
    assert [row.case.name for row in found.communication] == ["collective.all_reduce"]
    assert [row.case.name for row in found.steps] == ["step.ddp"]
    assert [len(matrix.rows) for matrix in found.matrices] == [2]
    assert len(found.shown) == 4


def test_curves_are_fitted_against_the_ceiling() -> None:
    found = found_in(*curve_records())
    assert len(found.curves) == 1
    assert found.ceiling is None


def test_pipelines_keep_the_timelines_that_the_rows_lose() -> None:
    found = found_in(pipeline_record())
    assert found.pipelines[0].measured is not None
    assert "measured" not in found.steps[0].records[0].details["pipeline"]
    assert found.unreadable == ()


def test_the_folder_is_read_only_when_it_is_asked_for(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline())])
    found = find(run, summarize(run))
    assert {"timelines", "late"} & set(vars(found)) == set()
    assert len(found.timelines) == 1
    assert found.late == ()
    assert "timelines" in vars(found)


def test_a_run_of_everything_is_found_whole() -> None:
    run = sample_run()
    found = find(run, summarize(run))
    assert len(found.communication) + len(found.steps) == len(found.shown)
