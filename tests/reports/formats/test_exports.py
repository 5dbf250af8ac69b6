"""Exports of a run by ``parbench export``, and the registry of formats."""

from pathlib import Path

from click.testing import CliRunner

from parbench import cli
from parbench.reports.formats.registry import EXPORT_FORMATS, IMPORT_FORMATS, load_function
from tests.support.reports.history_fixtures import write_history_run


def test_export_writes_a_document(tmp_path: Path) -> None:
    command = ["export", str(write_history_run(tmp_path, 0)), "--format", "nccl-tests"]
    content = CliRunner().invoke(cli.main, command).stdout_bytes
    assert content.startswith(b"# nccl-tests version")
    file = tmp_path / "out.txt"
    assert CliRunner().invoke(cli.main, [*command, "-o", str(file)]).exit_code == 0
    assert file.read_bytes() == content


def test_missing_format_is_reported_on_one_line() -> None:
    text = CliRunner().invoke(cli.main, ["export", "."]).stderr
    assert "Choose from: nccl-tests, chrome-trace" in text


def test_formats_are_choices_and_load() -> None:
    """A format is an entry of the registry: choices and help of the commands follow from it."""
    paths = list(EXPORT_FORMATS.values())
    paths += [entry.parser for entry in IMPORT_FORMATS.values()]
    assert all(callable(load_function(path)) for path in paths)
    for command, names in (("export", EXPORT_FORMATS), ("import", IMPORT_FORMATS)):
        text = CliRunner().invoke(cli.main, [command, "--help"]).output
        assert all(name in text for name in names)
