"""Files: lines that were cut short, and times with a zone."""

import os
from pathlib import Path

import pytest

from parbench.bench.files import read_lines, replace_file
from parbench.bench.limits import check_timestamp


def test_read_lines_omits_a_line_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo")
    assert list(read_lines(file)) == [(1, b"one\n")]


def test_check_timestamp_requires_a_date_with_a_zone() -> None:
    check_timestamp("2026-01-02T03:04:05.678Z")
    for text in ("yesterday", "2026-02-30T00:00:00Z", "2026-01-02T03:04:05"):
        with pytest.raises(ValueError, match=r"zone|day|format"):
            check_timestamp(text)


def test_file_may_be_written_by_equal_processes_of_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have equal process ids, and may share a folder."""
    file = tmp_path / "file"

    def write_meanwhile(descriptor: int) -> None:
        monkeypatch.undo()
        replace_file(file, b"other")

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    replace_file(file, b"own")
    assert file.read_bytes() == b"own"
    assert list(tmp_path.iterdir()) == [file]
