"""The door for files from elsewhere: what is no regular file, too large, too deep or damaged is one sentence."""

import gzip
import json
import os
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refusal

from parbench.bench.files import (
    MOST_DEPTH,
    decode_json,
    file_name,
    inflate,
    is_deep,
    read_file,
    read_lines,
    read_rows,
    read_text,
)
from parbench.bench.limits import check_time
from parbench.bench.text import UserError, reading


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    Path("folder").mkdir()
    links = {"zero": "/dev/zero", "loop": "loop", "to-pipe": "pipe"}
    for name, target in links.items():
        Path(name).symlink_to(target)
    for name in ("pipe", "socket", "folder", *links):
        with pytest.raises((UserError, OSError)):
            read_file(Path(name))
        assert refusal(read_text, name, f"file {name}").count("\n") == 0
    Path("file").write_bytes(b"text")
    Path("link").symlink_to("file")
    assert read_file(Path("link")) == b"text"


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    assert refusal(read_file, file, 4) == f"{file} holds more than 4 bytes"
    with file.open("wb") as sparse:
        sparse.write(b"one\ntwo\n")
        sparse.truncate(1 << 40)
    assert refusal(read_file, file).endswith("holds more than 64M bytes")
    lines = read_lines(file, 100)
    assert [next(lines), next(lines)] == [(1, b"one\n"), (2, b"two\n")]
    assert refusal(next, lines) == f"{file}, line 3: longer than 100 bytes"
    file.write_bytes(b"one\ntwo")
    assert list(read_lines(file)) == [(1, b"one\n")], "a line cut short is none"


def test_what_is_compressed_is_no_larger_than_is_allowed() -> None:
    content = zlib.compress(bytes(1 << 20))
    assert inflate(content, "it", most=1 << 20) == bytes(1 << 20)
    assert (
        refusal(inflate, content, "it", most=(1 << 20) - 1)
        == "it holds more than 1048575 bytes once it is decompressed"
    )
    for damaged in (content[:-1], b"", b"junk", content[:10] + b"x" + content[11:]):
        with pytest.raises(UserError, match=r"^it is damaged: "), reading("it", "is damaged"):
            inflate(damaged, "it")
    with pytest.raises(zlib.error):
        inflate(content, "it", wbits=31)
    assert inflate(gzip.compress(b"a"), "it", wbits=31) == b"a"


@example({"": []})
@settings(deadline=None, max_examples=50)
@given(
    st.recursive(
        st.text('[]{}"\\a', max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{"', max_size=2), inner, max_size=2),
        max_leaves=6,
    )
)
def test_depth_is_that_of_brackets_outside_of_texts(value: Any) -> None:
    def depth(one: Any) -> int:
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inside is None else 1 + max(map(depth, inside), default=0)

    left = MOST_DEPTH - depth(value)
    for more, deep in ((left, False), (left + 1, True)):
        text = "[" * more + json.dumps(value) + "]" * more
        assert is_deep(text.encode()) is deep, text


def test_json_too_deep_for_what_reads_it_is_refused() -> None:
    for depth in (MOST_DEPTH + 1, 500, 5_000, 100_000):
        for one in ("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth, "[" * depth):
            with pytest.raises(ValueError, match="nested"):
                decode_json(one.encode(), object)


def test_no_text_makes_a_name_that_leads_elsewhere() -> None:
    for plain in ("3f0a", "20260102T030405Z-node1-1a2b3c", "a.b_c-d"):
        assert file_name(plain) == plain
    odd = ("", ".", "..", "../evil", "/etc/evil", "a/b", "\x00", "a\n", "x" * 101, "-o", ".hidden", "\udc80", "é")
    names = {file_name(text) for text in odd}
    assert len(names) == len(odd)
    assert all(len(name) == 12 and name.isalnum() for name in names)


def test_a_time_is_one_that_has_a_zone_and_a_year_that_dates_are_drawn_for() -> None:
    for fine in ("2026-01-02T03:04:05.678Z", "2026-02-28T03:04:05+01:00", "1999-12-31T23:59:59Z"):
        check_time(fine)
    for wrong in (
        "yesterday",
        "",
        "2026",
        "2026-02-30T00:00:00Z",
        "0001-01-01T00:00:00Z",
        "9999-01-01T00:00:00Z",
        "2026-01-02T03:04:05",
    ):
        with pytest.raises(ValueError, match=r"time|zone|month|format"):
            check_time(wrong)


def test_rows_are_given_between_semicolons_or_in_a_file(tmp_path: Path) -> None:
    assert read_rows("0F0,0B0; 1F0,1B0;") == "0F0,0B0;1F0,1B0"
    file = tmp_path / "order.csv"
    file.write_text("0F0,,0B0\n\n1F0,1B0,\n")
    assert read_rows(str(file)) == "0F0,,0B0;1F0,1B0,"
    absent = tmp_path / "none.csv"
    assert refusal(read_rows, str(absent)) == f"file {absent} cannot be read: No such file or directory"
    file.write_bytes(b"\xff\xfe\xff")
    assert refusal(read_text, str(file), "traffic file x").startswith("traffic file x is no text: ")
