"""An explanation of a step has the bytes of attention, the balance of its pairs, and its memory."""

from typing import Any

import pytest

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.context_case import METHODS, balance_limit
from parbench.workloads.step.probe import run_probes
from tests.support.ranks import Ranks
from tests.support.training_steps import build_small_step


def explain(world: World, method: str) -> dict[str, float | None]:
    """Return the metrics of a small step's explanation."""
    params: dict[str, Any] = {"method": method, "layers": 1, "microbatch": 1, "kv_heads": 4}
    step = build_small_step(world, "cp", {**params, "hidden": 16, "sequence": 128})

    def begin() -> None:
        step.reset()
        world.barrier()

    begin()
    step.step()
    explanation = run_probes(world, step.probes(), step.step, begin, 0.0)
    step.close()
    return {name: metric.value for name, metric in explanation.metrics.items()}


@pytest.mark.parametrize("method", METHODS)
def test_explanation_of_context_parallel_step(four_ranks: Ranks, method: str) -> None:
    [metrics, *_] = four_ranks.call(
        "tests.workloads.context_parallel.test_context_probe:explain", method=method
    )
    axes = ("ring", "ulysses") if method == "usp" else ("cp",)
    for axis in axes:
        assert metrics[f"bytes_ratio.{axis}.forward"] == 1
        assert metrics[f"bytes_ratio.{axis}.backward"] == 1
        assert f"exposed_comm.{axis}" in metrics
    assert metrics["bytes_ratio.dp"] == 1
    assert "exposed_comm.other" not in metrics
    assert metrics["load_balance"] == pytest.approx(balance_limit(method, 4), abs=0.04)
    counted = metrics["memory_counted.activations"]
    assert metrics["memory_formula.activations"] == pytest.approx(counted, rel=0.02)
