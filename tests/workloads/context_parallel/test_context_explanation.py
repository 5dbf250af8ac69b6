"""An explanation of a step has the bytes of attention, the balance of its pairs, and its memory."""

import pytest

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import Params, build_trained_step

Metrics = dict[str, float | None]


def explain(world: World, method: str) -> Metrics:
    """Return the metrics of a small step's explanation."""
    params: Params = {
        "layers": 1,
        "microbatch": 1,
        "kv_heads": 4,
        "hidden": 16,
        "sequence": 128,
    }
    step = build_trained_step(world, "cp", cp_method=method, **params)
    explanation = step.explain_step(step.reset, 0.0)
    step.close()
    return {name: metric.value for name, metric in explanation.metrics.items()}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in ("zigzag", "usp") else pytest.mark.full)
        for method in CONTEXT_METHODS
    ],
)
def test_explanation_of_context_parallel_step(four_ranks: Ranks, method: str) -> None:
    target = "tests.workloads.context_parallel.test_context_explanation:explain"
    metrics: Metrics = four_ranks.call(target, method=method)[0]
    for axis in ("ring", "ulysses") if method == "usp" else ("cp",):
        assert metrics[f"bytes_ratio.{axis}"] == 1
        assert f"exposed_comm.{axis}" in metrics
    assert metrics["bytes_ratio.dp"] == 1
    assert "exposed_comm.other" not in metrics
    counted = metrics["memory_counted.activations"]
    assert metrics["memory_formula.activations"] == pytest.approx(counted, rel=0.02)
