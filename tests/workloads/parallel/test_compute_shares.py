"""Shares of simulated compute are shares of multiply-adds."""

import pytest

from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.parallel.compute_shares import compute_shares


def test_compute_shares_are_multiply_adds() -> None:
    """Attention over ranks and routed experts have shares of their own."""
    assert compute_shares(SHAPES["tiny"], None, keys_per_query=0).linear == 1.0
    attention = compute_shares(SHAPES["tiny"], None, keys_per_query=65 / 2).attention
    weights = 4 * 128 * 128 + 2 * 128 * 512
    pairs = 128 * 65  # h (s + 1)
    assert attention == pytest.approx(pairs / (weights + pairs))
    moe = make_moe({"ep": 1, "experts": 8, "top_k": 2}, SHAPES["tiny"], 1)
    experts = compute_shares(SHAPES["tiny"], moe, keys_per_query=0).experts
    expert = 2 * 128 * 256  # a token meets two of them and the shared one
    assert experts == pytest.approx(2 * expert / (4 * 128 * 128 + 3 * expert))
