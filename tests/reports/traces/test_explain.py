"""``parbench explain`` reports traces in every format, and refuses bad ones."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from tests.support.reports.drawn_steps import MB, RANKS, draw_clean, draw_one_bucket, make_job
from tests.support.reports.kineto_files import RankFile
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
    assert "all_reduce default_pg 128 MiB 1 2.50 ms 2.50 ms 2.50 ms 80.6" in lines
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


def test_parts_of_a_step_add_up_and_sizes_are_exact(tmp_path: Path) -> None:
    def draw(file: RankFile, rank: int, start: float) -> None:
        file.kernel(start + 10, start + 5000 + 0.1 * start)
        for number, elements in enumerate((5 * MB, 6 * MB)):
            begin = start + 8000 + 900 * number
            file.collective("allreduce", begin, begin + 500 - 0.004 * start, elements)

    make_job(tmp_path, draw, steps=3)
    document = json.loads(explain(tmp_path, "--format", "json").stdout)
    [call] = document["tables"]["collectives"]
    assert call["size"] == "20.0 MiB to 24.0 MiB"
    for row in document["tables"]["ranks"]:
        parts = (row[name] for name in ("compute", "exposed", "copies", "idle"))
        assert sum(parts) == pytest.approx(1)


def test_clean_job_has_no_finding(tmp_path: Path) -> None:
    make_job(tmp_path, draw_clean)
    assert "Nothing stands out" in explain(tmp_path).stdout
