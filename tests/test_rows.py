"""Rows are given between semicolons or in a file."""

from pathlib import Path

import pytest

from bench.errors import UserError
from bench.rows import read_rows, read_text


def test_rows_between_semicolons_are_themselves() -> None:
    assert read_rows("0F0,0B0; 1F0,1B0;") == "0F0,0B0;1F0,1B0"


def test_rows_of_a_file_are_written_between_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,,0B0\n\n1F0,1B0,\n")
    assert read_rows(str(file)) == "0F0,,0B0;1F0,1B0,"


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    name = str(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"^file .*none\.csv cannot be read: No such file or directory$"):
        read_rows(name)


def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "order.bin"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"^traffic file x is no text: "):
        read_text(str(file), "traffic file x")
