"""Packed documents fill the sequence, are a function of the seed, and count their places anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.context.documents import document_lengths, document_of, places, starts_of


@given(st.integers(1, 300), st.integers(0, 20))
def test_documents_fill_the_sequence_and_none_is_empty(sequence: int, seed: int) -> None:
    lengths = document_lengths(sequence, seed)
    assert sum(lengths) == sequence
    assert min(lengths) >= 1
    assert len(lengths) == min(6, sequence)


def test_lengths_differ_and_depend_on_the_seed_alone() -> None:
    assert document_lengths(128, 0) == document_lengths(128, 0)
    assert len({document_lengths(128, seed) for seed in range(5)}) == 5
    assert len(set(document_lengths(128, 0))) > 2


def test_documents_start_where_the_one_before_stops() -> None:
    assert starts_of((3, 1, 4)) == (0, 3, 4)
    assert starts_of((5,)) == (0,)


@pytest.mark.parametrize(("position", "document"), [(0, 0), (2, 0), (3, 1), (4, 2), (7, 2)])
def test_each_position_has_its_document(position: int, document: int) -> None:
    assert document_of(position, (0, 3, 4)) == document


def test_places_begin_anew_with_each_document() -> None:
    assert places(range(8), (0, 3, 4)) == [0, 1, 2, 0, 0, 1, 2, 3]
    assert places([2, 4, 6], (0, 3, 4)) == [2, 0, 2]
    assert places([2, 4, 6], (0,)) == [2, 4, 6]
