"""Exports of a run, as the tools that read them expect, and by ``parbench export``."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.reports.formats.registry import (
    EXPORT_FORMATS,
    IMPORT_FORMATS,
    load_function,
    render_file,
)
from parbench.reports.run_data import RunData
from tests.support.reports.history_fixtures import write_history_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without timelines, which two of the formats need."""
    return write_history_run(tmp_path_factory.mktemp("run"), 0)


def export(run: Path, name: str, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["export", str(run), "--format", name, *args])


@pytest.mark.parametrize("name", ["nccl-tests", "csv"])
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
