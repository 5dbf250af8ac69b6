"""Exports of a run, as the tools that read them expect, and by ``parbench export``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.reports.formats.exports import ACTION_FILES, render_action, render_bencher
from parbench.reports.formats.registry import (
    EXPORT_FORMATS,
    IMPORT_FORMATS,
    load_function,
    render_file,
)
from parbench.reports.run_data import RunData
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records
from tests.support.history_fixtures import write_history_run
from tests.support.reports_fixtures import failed_record


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without timelines, which two of the formats need."""
    return write_history_run(tmp_path_factory.mktemp("run"), 0)


def export(run: Path, name: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["export", str(run), "--format", name, *args])


@pytest.mark.parametrize("name", ["nccl-tests", "csv", "bencher"])
def test_export_writes_a_document(run_folder: Path, tmp_path: Path, name: str) -> None:
    content = render_file(name, RunData.load(run_folder))
    result = export(run_folder, name)
    assert result.exit_code == 0
    assert result.stdout_bytes == content
    file = tmp_path / "out.txt"
    assert export(run_folder, name, "-o", str(file)).exit_code == 0
    assert file.read_bytes() == content


def test_formats_are_choices_and_load() -> None:
    """A format is an entry of the registry: choices and help of the commands follow from it."""
    exports = [path for entry in EXPORT_FORMATS.values() for path in (entry.file, entry.folder)]
    parsers = [entry.parser for entry in IMPORT_FORMATS.values()]
    assert all(callable(load_function(path)) for path in [*exports, *parsers] if path)
    for command, names in (("export", EXPORT_FORMATS), ("import", IMPORT_FORMATS)):
        text = CliRunner().invoke(cli.main, [command, "--help"]).output
        assert all(name in text for name in names)


def test_wrong_results_are_not_exported() -> None:
    wrong = failed_record(CASE, 4, "wrong")
    records = [*make_repetitions(CASE, count=4), wrong, *make_repetitions(OTHER_CASE)]
    data = RunData(run_from_records(records))
    exports = [render_bencher(data), *render_action(data).values()]
    for content in exports:
        assert b"collective.broadcast" in content
        assert b"collective.all_reduce" not in content


def test_action_export_divides_times_and_rates() -> None:
    files = render_action(RunData(run_from_records(make_repetitions())))
    (time,) = json.loads(files[ACTION_FILES["lower"]])
    assert time["name"].endswith(" time")
    assert time["value"] == pytest.approx(1e-3, rel=1e-3)
    assert time["unit"] == "s"
    rates = json.loads(files[ACTION_FILES["higher"]])
    assert [rate["name"].split()[-1] for rate in rates] == ["algbw", "busbw"]


def test_bencher_export_has_latency_in_nanoseconds() -> None:
    (measures,) = json.loads(
        render_bencher(RunData(run_from_records(make_repetitions())))
    ).values()
    assert measures.keys() == {"latency", "algbw", "busbw"}
    latency = measures["latency"]
    assert latency["value"] == pytest.approx(1e6, rel=1e-3)
    assert latency["lower_value"] < latency["value"] < latency["upper_value"]
