"""Files: lines that were cut short, times with a zone, and text that cannot be read."""

from pathlib import Path

import pytest

from parbench.bench.files import read_lines, read_text
from parbench.bench.limits import check_timestamp
from tests.support.refusals import usage_error


def test_read_lines_omits_a_line_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo")
    assert list(read_lines(file)) == [(1, b"one\n")]


def test_check_timestamp_requires_a_date_with_a_zone() -> None:
    check_timestamp("2026-01-02T03:04:05.678Z")
    for text in ("yesterday", "2026-02-30T00:00:00Z", "2026-01-02T03:04:05"):
        with pytest.raises(ValueError, match=r"zone|day|format"):
            check_timestamp(text)


def test_unreadable_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\xff")
    assert "traffic file x" in usage_error(read_text, str(file), "traffic file x")
