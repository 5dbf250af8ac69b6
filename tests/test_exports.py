"""Every format of the table is one that ``parbench export`` offers, and it writes what the table's function returns."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from history_fixtures import put

import parbench
from bench.runs import load_run
from reports.commands import EXPORTS
from reports.exchange.export_action import FILES
from reports.exchange.exports import FOLDERS, FORMATS


def test_the_commands_formats_hold_the_tables() -> None:
    assert set(FORMATS) | set(FOLDERS) < set(EXPORTS)


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_written_to_a_file_and_to_standard_output(tmp_path: Path, form: str) -> None:
    run = put(tmp_path, 0)
    shown = CliRunner().invoke(parbench.main, ["export", str(run), "--format", form])
    assert shown.exit_code == 0
    assert shown.stdout_bytes == FORMATS[form](load_run(run))
    CliRunner().invoke(parbench.main, ["export", str(run), "--format", form, "-o", str(tmp_path / "out.txt")])
    assert (tmp_path / "out.txt").read_bytes() == shown.stdout_bytes


@pytest.mark.parametrize("form", FOLDERS)
def test_a_format_of_several_files_is_written_to_a_folder(tmp_path: Path, form: str) -> None:
    run = put(tmp_path, 0)
    words = ["export", str(run), "--format", form]
    refused = CliRunner().invoke(parbench.main, words)
    assert refused.exit_code == 2
    assert "name their folder with -o FOLDER" in refused.stderr
    assert CliRunner().invoke(parbench.main, [*words, "-o", str(tmp_path / "out")]).exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES.values())
