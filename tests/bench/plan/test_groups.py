"""Groups, meshes, rounds of pairs and uneven traffic are computed and validated."""

from itertools import chain, combinations

import pytest
import torch

from parbench.bench.plan.groups import (
    choose_pairs,
    count_rounds,
    form_groups,
    join_mesh_axes,
    list_round_pairs,
    parse_mesh,
    parse_pairs,
    split_with_skew,
)
from tests.support.refusals import usage_error

NEIGHBORS = ((0, 1), (2, 3))
STRIDED = ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("world", ((0, 1, 2, 3),)),
        ("node", NEIGHBORS),
        ("across", STRIDED),
        ("pairs", NEIGHBORS),
        ("dp=2 tp=2:tp", NEIGHBORS),
        ("dp=2 tp=2:dp", STRIDED),
    ],
)
def test_groups_of_four_ranks(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert form_groups(text, 4, ["a", "a", "b", "b"]) == groups


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mesh_is_laid_out_as_by_torch(axis: int) -> None:
    """The last axis is the innermost."""
    ranks = torch.arange(24).view(2, 3, 4)
    rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
    groups = [list(group) for group in form_groups(f"a0=2 a1=3 a2=4:a{axis}", 24)]
    assert groups == sorted(rows.tolist())


@pytest.mark.parametrize(
    ("text", "num_ranks", "fact"),
    [
        ("dp=2 tp=4:tp", 6, "dp(2) * tp(4) != world size(6)"),
        ("dp=2 tp=2:pp", 4, ":pp"),
        ("pairs", 3, "rank(2) != world size(3)"),
        ("twos", 4, "node, across, pairs"),
        ("dp=two:dp", 4, "'dp=two'"),
        ("across", 4, "at least 2 nodes"),
    ],
)
def test_impossible_groups_are_refused(text: str, num_ranks: int, fact: str) -> None:
    assert fact in usage_error(form_groups, text, num_ranks)


def test_groups_of_nodes_follow_hosts() -> None:
    assert form_groups("node", 4, ["a", "b", "a", "b"]) == STRIDED
    assert "equal numbers" in usage_error(form_groups, "across", 3, ["a", "a", "b"])


def test_mesh_and_axis_are_read_from_options() -> None:
    assert parse_mesh("dp=2,tp=4") == {"dp": 2, "tp": 4}
    assert join_mesh_axes("node,dp=2,tp=4:tp,pairs") == "node,dp=2 tp=4:tp,pairs"


def list_rounds(num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    return [list_round_pairs(num_ranks, index) for index in range(count_rounds(num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16])
def test_every_pair_meets_once(num_ranks: int) -> None:
    rounds = list_rounds(num_ranks)
    meetings = sorted(chain(*rounds))
    assert meetings == list(combinations(range(num_ranks), 2))
    for pairs in rounds:
        ranks = set(chain(*pairs))
        assert len(ranks) == 2 * len(pairs) == num_ranks - num_ranks % 2


def test_pairs_replace_a_round() -> None:
    assert parse_pairs("3-0  1-2", 4) == ((0, 3), (1, 2))
    assert choose_pairs(4, 0, "0-1") == ((0, 1),)
    assert choose_pairs(4, 2, " ") == list_round_pairs(4, 2)


def test_impossible_rounds_and_pairs_are_refused() -> None:
    assert "round 3" in usage_error(list_round_pairs, 4, 3)
    assert "rank 4" in usage_error(parse_pairs, "0-4", 4)
    assert "rank 1" in usage_error(parse_pairs, "0-1 1-2", 4)
    assert "'0:1'" in usage_error(parse_pairs, "0:1", 4)


def test_skew_moves_counts_to_rank_0() -> None:
    assert split_with_skew(4, 0.0, 8) == (2, 2, 2, 2)
    assert split_with_skew(4, 1.0, 8) == (8, 0, 0, 0)
    assert sum(split_with_skew(7, 0.37, 99_991)) == 99_991
