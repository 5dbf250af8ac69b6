"""Files: their size, the names made from texts, times, and rows in a file or on the command line."""

from pathlib import Path

import pytest

from parbench.bench.files import MAX_BYTES, file_name, read_file, read_lines, read_rows, read_text
from parbench.bench.limits import check_time
from tests.support.refusals import usage_error


def test_read_file_refuses_more_than_the_maximum_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo")
    assert read_file(file) == b"one\ntwo"
    assert list(read_lines(file)) == [(1, b"one\n")], "a line cut short is left out"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_BYTES + 1024)
    assert usage_error(read_file, file) == f"{file} has 1048577K bytes, and at most 1G are read"


def test_file_name_leads_to_no_other_folder() -> None:
    for plain in ("3f0a", "20260102T030405Z-node1-1a2b3c", "a.b_c-d"):
        assert file_name(plain) == plain
    odd = ("", ".", "..", "../x", "/etc/x", "a/b", "a\n", "x" * 101, "-o", ".hidden", "é")
    names = {file_name(text) for text in odd}
    assert len(names) == len(odd)
    assert all(len(name) == 12 and name.isalnum() for name in names)


def test_check_time_requires_a_date_with_a_zone() -> None:
    for time in ("2026-01-02T03:04:05.678Z", "2026-02-28T03:04:05+01:00"):
        check_time(time)
    for text in ("yesterday", "", "2026-02-30T00:00:00Z", "2026-01-02T03:04:05"):
        with pytest.raises(ValueError, match=r"zone|day|format"):
            check_time(text)


def test_rows_are_given_between_semicolons_or_in_a_file(tmp_path: Path) -> None:
    assert read_rows("0F0,0B0; 1F0,1B0;") == "0F0,0B0;1F0,1B0"
    file = tmp_path / "order.csv"
    file.write_text("0F0,,0B0\n\n1F0,1B0,\n")
    assert read_rows(str(file)) == "0F0,,0B0;1F0,1B0,"
    absent = tmp_path / "none.csv"
    assert (
        usage_error(read_rows, str(absent))
        == f"file {absent} cannot be read: No such file or directory"
    )
    file.write_bytes(b"\xff\xfe\xff")
    assert usage_error(read_text, str(file), "traffic file x").startswith(
        "traffic file x is no text: "
    )
