"""``parbench explain`` tells what traces hold in every form, and what is wrong with them in a sentence."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from tests.support.drawn_steps import MB, RANKS, clean, job, late, one_bucket
from tests.support.reports_fixtures import (
    collective_case,
    make_plan,
    make_run,
    ok_record,
    write_run,
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    job(folder, one_bucket, steps=3)
    (folder / "rank3.json.gz").write_bytes(gzip.compress((folder / "rank3.json").read_bytes()))
    (folder / "rank3.json").unlink()
    return folder


def explain(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["explain", *map(str, words)])


def test_tables_have_ranks_calls_and_what_if(traces: Path, tmp_path: Path) -> None:
    done = explain(traces)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith("10.0 ms a step, the median of 3")
    for words in (
        "all_reduce default_pg 128M 1 2.50 ms 2.50 ms 2.50 ms 80.6 -",
        "3 100 % 2.00 us",
        "all communication hidden 7.50 ms 25.0 %",
    ):
        assert words.split() in [line.split() for line in done.stdout.splitlines()]
    assert "all gradients go in one call at the end" in done.stdout
    assert done.stdout.splitlines()[-1] == "COMPLETE  4 of 4 ranks, 3 steps each"
    written = explain(traces, "--format", "tables", "-o", tmp_path / "tables.txt")
    assert (written.exit_code, written.stdout) == (0, "")
    assert (tmp_path / "tables.txt").read_text() == done.stdout


def test_json_holds_the_same_numbers_and_the_page_stands_alone(
    traces: Path, tmp_path: Path
) -> None:
    told = json.loads(explain(traces, "--format", "json").stdout)
    assert told["look_at_first"][0]["kind"] == "one bucket"
    [row] = told["collectives"]
    assert row["busbw"] == pytest.approx(1.5 * 128 * MB / 2497e-6, rel=1e-3)
    assert [one["rank"] for one in told["ranks"]] == list(RANKS)
    page = tmp_path / "explained.html"
    assert explain(traces, "-o", page).exit_code == 0
    text = page.read_text()
    assert text.count('id="first-step-title"') == 1
    assert "data-download" in text
    assert 'src="http' not in text
    assert explain(traces, "--format", "markdown").stdout.startswith("# ")


def test_transfers_stand_beside_a_runs_fit(traces: Path, tmp_path: Path) -> None:
    cases = {
        size: collective_case(size_bytes=size)
        for size in (1 << power for power in range(12, 28, 3))
    }
    records = [ok_record(case, 0, 1e-5 + size / 1e11) for size, case in cases.items()]
    against = write_run(tmp_path, make_run(make_plan(cases.values()), records))
    done = explain(traces, "--against", against)
    assert done.exit_code == 0
    assert "times what this machine's fit says" in done.stdout
    assert f"fits: those of {against}" in done.stdout


def test_what_cannot_be_explained_is_one_sentence(traces: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    twice = shutil.copy(traces / "rank0.json", tmp_path / "again.json")
    for words, said in (
        ((tmp_path / "none",), "none cannot be read"),
        ((other,), "other.json is no trace of PyTorch's profiler: it has no traceEvents"),
        ((traces, twice), "are both of rank 0: give one job's traces, one a rank"),
        ((), "Missing argument 'TRACE...'"),
    ):
        done = explain(*words)
        assert done.exit_code == 2, said
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_a_clean_job_has_nothing_that_stands_out(tmp_path: Path) -> None:
    for draw, said in (
        (clean, "Nothing stands out"),
        (late, "rank 2 comes last to 100% of collectives"),
    ):
        job(tmp_path, draw)
        assert said in explain(tmp_path).stdout
