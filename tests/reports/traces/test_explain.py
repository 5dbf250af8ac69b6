"""``parbench explain`` reports traces in every format, and refuses bad ones."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from tests.support.reports.drawn_steps import MB, RANKS, draw_clean, draw_one_bucket, make_job
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    ok_record,
    write_run,
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    make_job(folder, draw_one_bucket, steps=3)
    return folder


def explain(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["explain", *map(str, args)])


def test_tables_have_ranks_calls_and_gains(traces: Path, tmp_path: Path) -> None:
    result = explain(traces)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "all_reduce default_pg 128M 1 2.50 ms 2.50 ms 2.50 ms 80.6" in lines
    assert "in one bucket" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("COMPLETE")
    file = tmp_path / "tables.txt"
    assert explain(traces, "--format", "tables", "-o", file).exit_code == 0
    assert file.read_text() == result.stdout


def test_missing_ranks_make_the_report_partial(traces: Path) -> None:
    result = explain(traces / "rank0.json", traces / "rank2.json")
    assert "2 of 4 ranks" in result.stdout.splitlines()[-1]
    assert result.stdout.splitlines()[-1].startswith("PARTIAL")


def test_json_has_the_same_numbers(traces: Path) -> None:
    document = json.loads(explain(traces, "--format", "json").stdout)
    assert document["findings"][0]["kind"] == "one-bucket"
    [collective] = document["tables"]["collectives"]
    assert collective["busbw"] == pytest.approx(1.5 * 128 * MB / 2497e-6, rel=1e-3)
    ranks = {row["rank"]: row for row in document["tables"]["ranks"]}
    assert sorted(ranks) == list(RANKS)
    assert ranks[0]["compute"] == pytest.approx(0.749, abs=1e-3)
    assert ranks[3]["wait"] == pytest.approx(2e-6, abs=1e-6)


def test_page_needs_no_other_file(traces: Path, tmp_path: Path) -> None:
    page = tmp_path / "explained.html"
    assert explain(traces, "-o", page).exit_code == 0
    text = page.read_text()
    assert 'id="step-title"' in text
    assert 'src="http' not in text


def test_transfers_are_compared_with_the_fit_of_a_run(traces: Path, tmp_path: Path) -> None:
    records = []
    for power in range(12, 28, 3):
        case = collective_case(size_bytes=1 << power)
        records.append(ok_record(case, seconds=1e-5 + 2**power / 1e11))
    run = write_run(tmp_path, run_from_records(*records))
    result = explain(traces, "--against", run)
    assert result.exit_code == 0
    assert "as long as its fit" in result.stdout
    assert str(run) in result.stdout


def test_bad_traces_are_refused(traces: Path, tmp_path: Path) -> None:
    duplicate = shutil.copy(traces / "rank0.json", tmp_path / "again.json")
    for paths, problem in (
        ([traces, duplicate], "both of rank 0"),
        ([tmp_path / "absent"], "absent"),
    ):
        result = explain(*paths)
        assert result.exit_code == 2
        assert problem in result.stderr


def test_clean_job_has_no_finding(tmp_path: Path) -> None:
    make_job(tmp_path, draw_clean)
    assert "Nothing stands out" in explain(tmp_path).stdout
