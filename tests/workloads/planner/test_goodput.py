"""Goodput follows Young and Daly, and the critical batch Kaplan et al."""

import pytest

from parbench.workloads.planner.goodput import compute_critical_batch, compute_goodput


def test_best_interval_is_that_of_young() -> None:
    """16,384 GPUs with 419 failures in 54 days fail every 11,135 s, checkpoints take 30 s."""
    goodput = compute_goodput(16_384)
    assert goodput.symbols["interval"] == pytest.approx((2 * 30 * 11_135) ** 0.5, rel=1e-4)


def test_goodput_of_llama3_is_above_90_percent() -> None:
    """Llama 3 405B trained for more than 90 % of the time (arXiv 2407.21783, section 3.3.4)."""
    assert compute_goodput(16_384).value == pytest.approx(0.91, abs=0.02)


def test_critical_batch_grows_with_tokens() -> None:
    """The loss after 300 B tokens is 1.64, and 2e8 / 1.64^(1 / 0.21) tokens are 19 million."""
    assert compute_critical_batch(3e11).value == pytest.approx(19.1e6, rel=0.01)
    assert compute_critical_batch(3e12).value > compute_critical_batch(3e11).value
