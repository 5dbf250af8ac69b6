"""CUDA graphs replay the captured steps."""

from typing import cast

import pytest
import torch

from parbench.bench.rank.timing import make_sampler
from parbench.bench.world.world import World
from tests.support.fakes import NotingBenchmark

pytestmark = pytest.mark.gpu


class AddBenchmark(NotingBenchmark):
    """Adds one per step."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1, device="cuda")

    def step(self) -> None:
        super().step()
        self.total.add_(1)


def test_graph_replays_captured_steps() -> None:
    benchmark = AddBenchmark()
    sample = make_sampler("graph", benchmark, cast(World, None), 5)
    num_calls = len(benchmark.calls)
    benchmark.total.zero_()
    sample()
    sample()
    torch.cuda.synchronize()
    assert float(benchmark.total) == 10
    assert len(benchmark.calls) == num_calls
