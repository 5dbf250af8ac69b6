"""Routing texts, and how popular the experts of a generator are."""

import pytest

from parbench.bench.text import UserError
from parbench.workloads.expert_parallel.routing import compute_popularity, parse_routing


@pytest.mark.parametrize(
    ("text", "strength"), [("zipf:1.5", 1.5), ("hot_rank", 3.0), ("router", 0.0)]
)
def test_parse_routing_reads_strength(text: str, strength: float) -> None:
    assert parse_routing(text)[1] == strength


@pytest.mark.parametrize("text", ["zipf:", "zipf:0", "zipf:nan", "hot_rank:-1", "balanced:1"])
def test_parse_routing_refuses_strength(text: str) -> None:
    with pytest.raises(UserError, match=text.partition(":")[0]):
        parse_routing(text)


def test_popularity_of_generators() -> None:
    zipf = compute_popularity("zipf", 2.0, 8, ranks=4, seed=0)
    assert sorted(zipf, reverse=True) == pytest.approx([rank**-2 for rank in range(1, 9)])
    assert zipf != compute_popularity("zipf", 2.0, 8, ranks=4, seed=1)
    assert compute_popularity("hot_rank", 3.0, 8, ranks=4, seed=0) == [3.0] * 2 + [1.0] * 6
