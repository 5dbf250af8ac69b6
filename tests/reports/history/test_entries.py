"""A run as an entry of the history."""

from pathlib import Path

from parbench.reports.history.entries import About, read_entry
from tests.support.history_fixtures import make_entry


def test_entry_digest_changes_when_a_run_grows(tmp_path: Path) -> None:
    entry = make_entry(tmp_path, 1, commit="abc")
    assert entry.run.id == "run-001"
    assert entry.about == About(branch="main", commit="abc")
    file = tmp_path / "run-001" / "records.jsonl"
    content = file.read_bytes()
    file.write_bytes(content + b'{"cut": ')  # a line cut short is not a record
    assert read_entry(tmp_path / "run-001", entry.about).digest == entry.digest
    file.write_bytes(content[: content.index(b"\n") + 1])
    assert read_entry(tmp_path / "run-001", entry.about).digest != entry.digest
