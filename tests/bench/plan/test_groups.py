"""Who meets whom: groups and meshes of ranks, rounds of pairs, uneven traffic; refusals with the numbers."""

import itertools
import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.plan.groups import (
    format_pairs,
    groups_of,
    mesh_group,
    num_rounds,
    pairs_of,
    parse_matrix,
    parse_mesh,
    parse_pairs,
    read_matrix,
    round_pairs,
    skewed,
    whole_counts,
)
from tests.support.refusals import usage_error

SPLITS = {
    "world": ((0, 1, 2, 3),),
    "node": ((0, 1), (2, 3)),
    "across": ((0, 2), (1, 3)),
    "pairs": ((0, 1), (2, 3)),
    "contiguous:2": ((0, 1), (2, 3)),
    "contiguous:4": ((0, 1, 2, 3),),
    "strided:2": ((0, 2), (1, 3)),
    "dp=2 tp=2:tp": ((0, 1), (2, 3)),
    "dp=2 tp=2:dp": ((0, 2), (1, 3)),
}


def test_four_ranks_on_two_nodes_split_as_written() -> None:
    for text, groups in SPLITS.items():
        assert groups_of(text, 4, ["a", "a", "b", "b"]) == groups, text
    assert groups_of("contiguous:2", 6) == ((0, 1), (2, 3), (4, 5))
    assert groups_of("strided:2", 6) == ((0, 3), (1, 4), (2, 5))
    assert groups_of("node", 4, ["a", "b", "a", "b"]) == ((0, 2), (1, 3))
    assert groups_of("across", 4, ["a", "b", "a", "b"]) == ((0, 1), (2, 3))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_mesh_is_laid_out_row_by_row_as_torchs_device_mesh_is(
    sizes: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(sizes) - 1))
    text = " ".join(f"a{i}={size}" for i, size in enumerate(sizes))
    rows = (
        np.arange(math.prod(sizes))
        .reshape(sizes)
        .swapaxes(-1, position)
        .reshape(-1, sizes[position])
        .tolist()
    )
    groups = groups_of(f"{text}:a{position}", math.prod(sizes))
    assert sorted(map(list, groups)) == sorted(rows)
    assert list(groups) == sorted(groups)


def test_groups_that_cannot_be_formed_are_refused_in_words() -> None:
    for text, size, told in (
        ("dp=2 tp=4:tp", 6, "dp(2) * tp(4) != world size(6)"),
        ("dp=2 tp=2:pp", 4, "'pp' is no axis of the mesh; it has dp or tp"),
        ("contiguous:3", 4, "world size(4) % 3 != 0"),
        ("pairs", 3, "world size(3) % 2 != 0"),
        ("contiguous:0", 4, "contiguous:K"),
        (f"strided:{'9' * 5000}", 4, "strided:K"),
        ("word", 4, "did you mean 'world'"),
        ("dp=two:dp", 4, "at 'dp=two'"),
        ("dp=2 dp=2:dp", 4, "each axis once"),
        ("across", 4, "at least 2 nodes"),
    ):
        assert told in usage_error(groups_of, text, size), text
    assert "nodes have 1, 2" in usage_error(groups_of, "across", 3, ["a", "a", "b"])


def test_the_command_lines_mesh_and_group_become_one_text() -> None:
    assert mesh_group("dp=2,tp=4", "tp") == "dp=2 tp=4:tp"
    assert parse_mesh("dp=2,tp=4") == parse_mesh("dp=2 tp=4") == {"dp": 2, "tp": 4}
    assert "no axis of the mesh: it has dp or tp" in usage_error(mesh_group, "dp=2,tp=4", "pp")
    assert "needs an axis" in usage_error(parse_mesh, "")


def tournament(n: int) -> list[tuple[tuple[int, int], ...]]:
    return [round_pairs(n, index) for index in range(num_rounds(n))]


def test_every_pair_meets_exactly_once_and_where_the_number_is_odd_one_rank_rests_in_turn() -> None:
    for n in range(2, 34):
        rounds = tournament(n)
        assert len(rounds) == n - 1 + n % 2
        assert sorted(pair for pairs in rounds for pair in pairs) == list(
            itertools.combinations(range(n), 2)
        )
        resting: list[int] = []
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks) == n - n % 2
            resting += set(range(n)) - set(ranks)
        assert sorted(resting) == (list(range(n)) if n % 2 else [])
    assert tournament(4) == [((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
    assert tournament(1) == [()]


def test_any_three_rounds_in_a_row_tell_nodes_apart() -> None:
    """Rounds in a row whose pairs made a bipartite graph could not tell one side's slowness from the other's."""
    for n in (6, 8, 16, 32):
        for first in range(num_rounds(n) - 2):
            sides = {0: 1}
            pairs = [pair for index in range(first, first + 3) for pair in round_pairs(n, index)]
            for _ in range(n):
                for one, other in [*pairs, *[pair[::-1] for pair in pairs]]:
                    if one in sides:
                        sides.setdefault(other, -sides[one])
            assert len(sides) == n, "every rank is reached"
            assert any(sides[one] == sides[other] for one, other in pairs), (n, first)


def test_pairs_are_read_and_written_and_come_before_a_round() -> None:
    assert parse_pairs("3-0  1-2", 4) == ((0, 3), (1, 2))
    assert format_pairs(((0, 3), (1, 2))) == "0-3 1-2"
    assert parse_pairs("", 4) == ()
    assert pairs_of(4, 0, "0-1") == ((0, 1),)
    assert pairs_of(4, 2, " ") == round_pairs(4, 2)


def test_rounds_and_pairs_that_cannot_be_are_refused_in_words() -> None:
    assert usage_error(round_pairs, 4, 3) == "round 3 is not one of the 3 rounds of 4 ranks, 0 to 2"
    assert "round -1 is not one" in usage_error(round_pairs, 4, -1)
    for text, words in (
        ("0-4", "pairs '0-4': rank 4 is not one of the 4 ranks"),
        ("0-1 1-2", "rank 1 is named twice; a rank meets one other in a round"),
        ("0:1", "'0:1' is no pair; write two ranks as 0-3"),
    ):
        assert words in usage_error(parse_pairs, text, 4), text


def test_a_matrix_is_read_from_a_file_or_as_written(tmp_path: Path) -> None:
    file = tmp_path / "traffic.csv"
    file.write_text("1, 2\n3, 4.5\n\n")
    assert read_matrix(str(file)) == read_matrix("1 2; 3 4.5") == "1 2;3 4.5"
    assert parse_matrix("1 2;3 4.5") == ((1.0, 2.0), (3.0, 4.5))


def test_what_is_no_matrix_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "traffic.bin").write_bytes(b"\xff\xfe\x00")
    for text, told in (
        ("1 2;3", "not square: 2 rows of 2, 1 entries"),
        ("1 -2;3 4", "'-2' in row 1, column 2"),
        ("1 2;nan 4", "'nan' in row 2, column 1"),
        ("0 0;0 0", "only zeros"),
        ("absent.csv", "absent.csv cannot be read"),
        (str(tmp_path / "traffic.bin"), "is no text"),
    ):
        assert told in usage_error(read_matrix, text), text


def test_no_skew_is_even_full_skew_sends_all_to_rank_0_and_each_sends_exactly_its_count() -> None:
    assert whole_counts(skewed(4, 0.0), 8) == ((2, 2, 2, 2),) * 4
    assert whole_counts(skewed(4, 1.0), 8) == ((8, 0, 0, 0),) * 4
    for n, skew, count in itertools.product(
        (2, 3, 7, 9), (0.0, 0.1, 0.37, 1.0), (0, 1, 10, 99_991)
    ):
        assert {sum(row) for row in whole_counts(skewed(n, skew), count)} == {count}, (n, skew)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 6), st.data())
def test_the_busiest_sender_sends_the_count_and_the_others_in_proportion(
    n: int, data: st.DataObject
) -> None:
    entries = st.integers(0, 50).map(float)
    matrix = tuple(tuple(data.draw(entries) for _ in range(n)) for _ in range(n))
    if not any(map(sum, matrix)):
        return
    counts = whole_counts(matrix, 10_000)
    busiest = max(map(sum, matrix))
    assert max(map(sum, counts)) == 10_000
    for row, shares in zip(counts, matrix, strict=True):
        assert all(
            abs(found - share * 10_000 / busiest) <= 1
            for found, share in zip(row, shares, strict=True)
        )
