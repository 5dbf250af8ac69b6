"""Files: the maximum size, safe names and times."""

from pathlib import Path

import pytest

from parbench.bench.files import (
    MAX_FILE_BYTES,
    make_file_name,
    read_file,
    read_lines,
    read_text,
)
from parbench.bench.limits import check_timestamp
from tests.support.refusals import usage_error


def test_read_file_refuses_more_than_the_maximum_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_file(file) == b"content"
    with file.open("wb") as sparse_file:
        sparse_file.truncate(MAX_FILE_BYTES + 1024)
    message = usage_error(read_file, file)
    assert str(file) in message
    assert "1048577K" in message


def test_read_lines_omits_a_line_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo")
    assert list(read_lines(file)) == [(1, b"one\n")]


def test_file_name_keeps_plain_text() -> None:
    for text in ("20260102T030405Z-node1-1a2b3c", "a.b_c-d"):
        assert make_file_name(text) == text


def test_file_name_leads_to_no_other_folder() -> None:
    texts = ("", ".", "..", "../x", "/etc/x", "a/b", "a\n", "x" * 101, "-o", ".hidden", "é")
    names = {make_file_name(text) for text in texts}
    assert len(names) == len(texts)
    for name in names:
        assert len(name) == 12
        assert name.isalnum()


def test_check_timestamp_requires_a_date_with_a_zone() -> None:
    check_timestamp("2026-01-02T03:04:05.678Z")
    for text in ("yesterday", "2026-02-30T00:00:00Z", "2026-01-02T03:04:05"):
        with pytest.raises(ValueError, match=r"zone|day|format"):
            check_timestamp(text)


def test_unreadable_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\xff")
    assert "traffic file x" in usage_error(read_text, str(file), "traffic file x")
