"""Files: lines that were cut short, and times with a zone."""

from pathlib import Path

import pytest

from parbench.bench.files import read_lines
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
