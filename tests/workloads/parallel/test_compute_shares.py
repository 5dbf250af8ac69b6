"""Shares of simulated compute are shares of multiply-adds."""

import pytest

from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.parallel.compute_shares import compute_shares


def test_compute_shares_are_multiply_adds() -> None:
    assert compute_shares(SHAPES["tiny"], keys_per_query=0).linear == 1.0
    attention = compute_shares(SHAPES["tiny"], keys_per_query=65 / 2).attention
    weights = 4 * 128 * 128 + 2 * 128 * 512
    pairs = 128 * 65  # h (s + 1)
    assert attention == pytest.approx(pairs / (weights + pairs))
