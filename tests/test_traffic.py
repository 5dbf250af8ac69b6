"""Uneven traffic: matrices as they are written, shares as whole elements, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.traffic import parse_matrix, read_matrix, size_elements, skewed, whole_counts


def test_a_matrix_is_read_from_a_file_or_as_written(tmp_path: Path) -> None:
    file = tmp_path / "traffic.csv"
    file.write_text("1, 2\n3, 4.5\n\n")
    assert read_matrix(str(file)) == read_matrix("1 2; 3 4.5") == "1 2;3 4.5"
    assert parse_matrix("1 2;3 4.5") == ((1.0, 2.0), (3.0, 4.5))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 2;3", "not square: 2 rows of 2, 1 entries"),
        ("1 2 3;4 5 6", "not square"),
        ("1 -2;3 4", "'-2' in row 1, column 2"),
        ("1 2;x 4", "'x' in row 2, column 1"),
        ("1 2;nan 4", "'nan' in row 2, column 1"),
        ("0 0;0 0", "only zeros"),
        ("absent.csv", "absent.csv cannot be read"),
    ],
)
def test_what_is_no_matrix_is_refused_with_the_place(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_matrix(text)
    assert told in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "traffic.bin"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is no text"):
        read_matrix(str(file))


def test_no_skew_is_even_and_full_skew_sends_all_to_rank_0() -> None:
    assert whole_counts(skewed(4, 0.0), 8) == ((2, 2, 2, 2),) * 4
    assert whole_counts(skewed(4, 1.0), 8) == ((8, 0, 0, 0),) * 4
    assert size_elements(whole_counts(skewed(4, 1.0), 8)) == 32


@given(st.integers(2, 9), st.floats(0, 1), st.integers(0, 100_000))
def test_every_sender_of_a_skewed_exchange_sends_exactly_its_count(n: int, skew: float, count: int) -> None:
    assert {sum(row) for row in whole_counts(skewed(n, skew), count)} == {count}


@given(st.integers(2, 6), st.data())
def test_the_busiest_sender_sends_the_count_and_the_others_in_proportion(n: int, data: st.DataObject) -> None:
    entries = st.integers(0, 50).map(float)
    matrix = tuple(tuple(data.draw(entries) for _ in range(n)) for _ in range(n))
    if not any(map(sum, matrix)):
        return
    counts = whole_counts(matrix, 10_000)
    busiest = max(map(sum, matrix))
    assert max(map(sum, counts)) == 10_000
    for row, shares in zip(counts, matrix, strict=True):
        assert all(abs(found - share * 10_000 / busiest) <= 1 for found, share in zip(row, shares, strict=True))
