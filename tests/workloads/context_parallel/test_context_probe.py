"""A row has attention's bytes each way, the balance of its pairs, and what its axis exposes."""

import pytest

from parbench.workloads.context_parallel.context_case import METHODS, balance_limit
from tests.support.ranks import Ranks

LONG = {"sequence": 256, "microbatch": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "layers": 1}


def test_bytes_and_balance_are_the_analytical_ones(four_ranks: Ranks) -> None:
    for method in METHODS:
        metrics = four_ranks.call(
            "tests.support.cp_ranks:explained", params={"method": method, **LONG}
        )[0]
        axes = ("ring", "ulysses") if method == "usp" else ("cp",)
        for axis in axes:
            for name in ("", ".forward", ".backward"):
                assert metrics[f"bytes_ratio.{axis}{name}"] == 1, (method, axis, name)
        assert metrics["bytes_ratio.dp"] == 1, method
        assert metrics["load_balance"] == pytest.approx(balance_limit(method, 4), abs=0.02), method
        assert metrics["memory_formula.activations"] == pytest.approx(
            metrics["memory_counted.activations"], rel=0.02
        ), method
        assert "exposed_comm.other" not in metrics, method
        assert {f"exposed_comm.{axis}" for axis in (*axes, "dp")} <= metrics.keys(), method
