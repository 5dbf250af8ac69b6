"""A graph's replays do what was captured."""

from typing import cast

import pytest
import torch

from parbench.bench.rank.timing import sampler
from parbench.bench.world.world import World
from tests.support.fakes import NotingBenchmark

pytestmark = pytest.mark.gpu


def test_a_graph_replays_as_many_steps_as_were_captured() -> None:
    class Adds(NotingBenchmark):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(1, device="cuda")

        def step(self) -> None:
            super().step()
            self.total.add_(1)

    benchmark = Adds()
    sample = sampler("graph", benchmark, cast(World, None), 5)
    captured = len(benchmark.calls)
    benchmark.total.zero_()
    sample()
    sample()
    torch.cuda.synchronize()
    assert float(benchmark.total) == 10
    assert len(benchmark.calls) == captured
