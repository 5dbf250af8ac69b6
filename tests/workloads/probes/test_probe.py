"""Probes share the time budget, and repeat steps within their parts of it."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parbench.bench.results.metrics import make_value
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.probes.probe import (
    make_moment_clock,
    record_moment,
    repeat_within_budget,
    run_probes,
)
from tests.support.fake_time import HeldTime
from tests.support.ranks import Ranks


@dataclass
class BudgetProbe:
    """Reports the budgets of all ranks."""

    world: World
    name: str
    share: float

    def observe(
        self, step: Callable[[], object], reset: Callable[[], None], budget_seconds: float
    ) -> float:
        reset()
        step()
        return budget_seconds + self.world.rank

    def summarize(self, budgets: Sequence[float]) -> Explanation:
        return Explanation(
            metrics={"ect": make_value("ect", sum(budgets))},
            details={self.name: list(budgets)},
            notes=(self.name,),
        )


def run_three_probes(world: World) -> tuple[Explanation, list[str]]:
    """Return the explanation of probes with shares 0, 1 and 3 of 8 s, and the calls made."""
    log: list[str] = []
    probes = [
        BudgetProbe(world, "none", 0.0),
        BudgetProbe(world, "quarter", 1.0),
        BudgetProbe(world, "rest", 3.0),
    ]
    explanation = run_probes(
        world, probes, lambda: log.append("step"), lambda: log.append("reset"), 8.0
    )
    return explanation, log


def test_probes_share_budget(two_ranks: Ranks) -> None:
    for explanation, log in two_ranks.call(f"{__name__}:run_three_probes"):
        assert log == ["reset", "step"] * 3
        assert explanation.details == {
            "none": [0.0, 1.0],
            "quarter": [2.0, 3.0],
            "rest": [6.0, 7.0],
        }
        assert explanation.notes == ("none", "quarter", "rest")
        # The last of several metrics with the same name counts.
        assert explanation.metrics["ect"].value == 13.0


def count_repeats(world: World, budget_seconds: float, step_seconds: float) -> int:
    """Return the number of repeats, which take time only on rank 0."""
    repeats = itertools.count()

    def step() -> None:
        next(repeats)
        time.sleep(step_seconds if world.rank == 0 else 0.0)

    repeat_within_budget(world, budget_seconds, step, max_repeats=5)
    return next(repeats)


@pytest.mark.parametrize(
    ("budget_seconds", "step_seconds", "expected"),
    [(0.0, 0.0, 1), (1e-6, 0.01, 3), (60.0, 0.0, 5)],
)
def test_all_ranks_repeat_as_rank_0(
    two_ranks: Ranks, budget_seconds: float, step_seconds: float, expected: int
) -> None:
    arguments = {"budget_seconds": budget_seconds, "step_seconds": step_seconds}
    assert two_ranks.call(f"{__name__}:count_repeats", **arguments) == [expected] * 2


def test_moment_of_device_on_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded after 2 us, and the host wakes 30 us later, but once after 4 us."""
    clock = HeldTime()
    wake_ns = itertools.chain([30_000] * 9, [4_000], itertools.repeat(30_000))

    class Event:
        def record(self) -> None:
            clock.sleep_ns(2_000)
            self.recorded_ns = clock.now_ns

        def synchronize(self) -> None:
            clock.sleep_ns(next(wake_ns))

        def elapsed_time(self, later: Any) -> float:
            return float(later.recorded_ns - self.recorded_ns) / 1e6

    monkeypatch.setattr("parbench.workloads.probes.probe.time", clock)
    monkeypatch.setattr(accelerator, "make_event", Event)
    monkeypatch.setattr(accelerator, "synchronize", lambda device: clock.sleep_ns(1_000))
    device = torch.device("cuda", 0)
    event: Any = record_moment(device)
    clock.sleep_ns(5_000_000)
    to_seconds = make_moment_clock(device)
    assert to_seconds(event) - event.recorded_ns / 1e9 == pytest.approx(1e-6)
