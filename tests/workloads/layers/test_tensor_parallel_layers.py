"""Tensor-parallel layers match one process, and send and save the analytical bytes."""

from typing import Any

from parbench.bench.world.world import World
from parbench.workloads.layers.tensor_parallel_layers import TpLayerBenchmark
from tests.support.ranks import Ranks

CASES = [
    {"style": "column"},
    {"style": "row"},
    {"style": "megatron"},
    {"style": "megatron", "recipe": "llama", "precision": "bfloat16"},
    {"style": "naive"},
    {"style": "naive", "recipe": "llama"},
]
SIZES: dict[str, Any] = {
    "shape": "tiny",
    "hidden": 32,
    "ffn": 64,
    "sequence": 8,
    "microbatch": 2,
    "precision": "float32",
}


def measure(world: World, params: dict[str, Any]) -> tuple[list[int], Any]:
    """Return the counts of checks, of which the last is of a wrong gradient, and metrics."""
    benchmark = TpLayerBenchmark(world, **SIZES | params)
    benchmark.step()
    wrong = [benchmark.check()]
    benchmark.reset()
    benchmark.step()
    wrong.append(benchmark.check())
    assert benchmark.x.grad is not None
    benchmark.x.grad.mul_(1.1)
    wrong.append(benchmark.check())
    explanation = benchmark.explain_step(benchmark.reset, 0.0)
    benchmark.close()
    return wrong, {name: metric.value for name, metric in explanation.metrics.items()}


def measure_all(world: World) -> list[tuple[list[int], Any]]:
    return [measure(world, params) for params in CASES]


def test_tp_layers_match_one_process(two_ranks: Ranks) -> None:
    for results in two_ranks.call(f"{__name__}:measure_all"):
        for case, (wrong, metrics) in zip(CASES, results, strict=True):
            assert wrong[:2] == [0, 0], case
            assert wrong[2] > 0, case
            assert metrics["bytes_ratio.tp"] == 1.0, case
            saved = metrics["memory_counted.activations"]
            assert metrics["memory_formula.activations"] == saved, case
