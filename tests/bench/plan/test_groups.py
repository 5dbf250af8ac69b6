"""Groups, meshes, rounds of pairs and uneven traffic are computed and validated."""

import itertools
from pathlib import Path

import pytest
import torch

from parbench.bench.plan.groups import (
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

BLOCK = ["a", "a", "b", "b"]
CYCLIC = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("text", "hosts", "groups"),
    [
        ("world", BLOCK, ((0, 1, 2, 3),)),
        ("node", BLOCK, ((0, 1), (2, 3))),
        ("node", CYCLIC, ((0, 2), (1, 3))),
        ("across", BLOCK, ((0, 2), (1, 3))),
        ("contiguous:2", BLOCK, ((0, 1), (2, 3))),
        ("strided:2", BLOCK, ((0, 2), (1, 3))),
        ("dp=2 tp=2:tp", BLOCK, ((0, 1), (2, 3))),
        ("dp=2 tp=2:dp", BLOCK, ((0, 2), (1, 3))),
    ],
)
def test_groups_of_four_ranks(
    text: str, hosts: list[str], groups: tuple[tuple[int, ...], ...]
) -> None:
    assert groups_of(text, 4, hosts) == groups


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mesh_is_laid_out_as_by_torch(axis: int) -> None:
    """The last axis is the innermost."""
    ranks = torch.arange(24).view(2, 3, 4)
    rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
    groups = groups_of(f"a0=2 a1=3 a2=4:a{axis}", 24)
    assert groups == tuple(sorted(tuple(row) for row in rows.tolist()))


@pytest.mark.parametrize(
    ("text", "num_ranks", "fact"),
    [
        ("dp=2 tp=4:tp", 6, "dp(2) * tp(4) != world size(6)"),
        ("dp=2 tp=2:pp", 4, "'pp'"),
        ("contiguous:3", 4, "world size(4) % 3 != 0"),
        ("pairs", 3, "world size(3) % 2 != 0"),
        ("contiguous:0", 4, "contiguous:K"),
        (f"strided:{'9' * 5000}", 4, "strided:K"),
        ("dp=two:dp", 4, "'dp=two'"),
        ("across", 4, "at least 2 nodes"),
    ],
)
def test_impossible_groups_are_refused(text: str, num_ranks: int, fact: str) -> None:
    assert fact in usage_error(groups_of, text, num_ranks)


def test_groups_across_unequal_nodes_are_refused() -> None:
    assert "1, 2" in usage_error(groups_of, "across", 3, ["a", "a", "b"])


def test_mesh_and_axis_are_read_from_options() -> None:
    assert parse_mesh("dp=2,tp=4") == {"dp": 2, "tp": 4}
    assert mesh_group("dp=2,tp=4", "tp") == "dp=2 tp=4:tp"
    assert "'pp'" in usage_error(mesh_group, "dp=2,tp=4", "pp")
    assert "axis" in usage_error(parse_mesh, "")


def list_rounds(num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    return [round_pairs(num_ranks, index) for index in range(num_rounds(num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16, 33])
def test_every_pair_meets_once(num_ranks: int) -> None:
    rounds = list_rounds(num_ranks)
    assert len(rounds) == num_ranks - 1 + num_ranks % 2
    meetings = sorted(itertools.chain(*rounds))
    assert meetings == list(itertools.combinations(range(num_ranks), 2))
    for pairs in rounds:
        ranks = list(itertools.chain(*pairs))
        assert len(set(ranks)) == len(ranks) == num_ranks - num_ranks % 2


@pytest.mark.parametrize("num_ranks", [6, 8, 16])
def test_three_rounds_distinguish_nodes(num_ranks: int) -> None:
    """Their pairs form no bipartite graph, in which one side could not be told from the other."""
    rounds = list_rounds(num_ranks)
    for first in range(len(rounds) - 2):
        pairs = list(itertools.chain(*rounds[first : first + 3]))
        colors = {0: 1}
        for _ in range(num_ranks):
            for left, right in pairs:
                if left in colors:
                    colors.setdefault(right, -colors[left])
                if right in colors:
                    colors.setdefault(left, -colors[right])
        assert len(colors) == num_ranks
        assert any(colors[left] == colors[right] for left, right in pairs)


def test_pairs_replace_a_round() -> None:
    assert parse_pairs("3-0  1-2", 4) == ((0, 3), (1, 2))
    assert pairs_of(4, 0, "0-1") == ((0, 1),)
    assert pairs_of(4, 2, " ") == round_pairs(4, 2)


@pytest.mark.parametrize("index", [-1, 3])
def test_impossible_round_is_refused(index: int) -> None:
    assert f"round {index}" in usage_error(round_pairs, 4, index)


@pytest.mark.parametrize(
    ("text", "fact"), [("0-4", "rank 4"), ("0-1 1-2", "rank 1"), ("0:1", "'0:1'")]
)
def test_impossible_pairs_are_refused(text: str, fact: str) -> None:
    assert fact in usage_error(parse_pairs, text, 4)


def test_matrix_is_read_from_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "traffic.csv"
    file.write_text("1, 2\n3, 4.5\n\n")
    assert read_matrix(str(file)) == read_matrix("1 2; 3 4.5") == "1 2;3 4.5"
    assert parse_matrix("1 2;3 4.5") == ((1.0, 2.0), (3.0, 4.5))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("1 2;3", "2, 1 entries"),
        ("1 -2;3 4", "row 1, column 2"),
        ("1 2;nan 4", "row 2, column 1"),
        ("0 0;0 0", "zeros"),
        ("absent.csv", "absent.csv"),
    ],
)
def test_invalid_matrix_is_refused(text: str, fact: str) -> None:
    assert fact in usage_error(read_matrix, text)


def test_skew_moves_counts_to_rank_0() -> None:
    assert whole_counts(skewed(4, 0.0), 8)[0] == (2, 2, 2, 2)
    assert whole_counts(skewed(4, 1.0), 8)[0] == (8, 0, 0, 0)


@pytest.mark.parametrize(("num_ranks", "skew", "count"), [(3, 0.1, 10), (7, 0.37, 99_991)])
def test_skewed_counts_have_exact_sums(num_ranks: int, skew: float, count: int) -> None:
    for row in whole_counts(skewed(num_ranks, skew), count):
        assert sum(row) == count


def test_busiest_sender_sends_the_count() -> None:
    counts = whole_counts(((1.0, 2.0, 0.0), (3.0, 1.0, 3.0), (0.0, 0.0, 0.0)), 1000)
    assert [sum(row) for row in counts] == [429, 1000, 0]
    assert counts[1] == pytest.approx((3000 / 7, 1000 / 7, 3000 / 7), abs=1)
