"""The experts of a generator are more or less popular."""

import pytest

from parbench.workloads.expert_parallel.routing import compute_popularity


def test_popularity_of_routings() -> None:
    zipf = compute_popularity("zipf", 8, ranks=4, seed=0)
    assert sorted(zipf, reverse=True) == pytest.approx([1 / rank for rank in range(1, 9)])
    assert zipf != compute_popularity("zipf", 8, ranks=4, seed=1)
    assert compute_popularity("hot_rank", 8, ranks=4, seed=0) == [3.0] * 2 + [1.0] * 6
