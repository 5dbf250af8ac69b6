"""Probes share the budget, see all ranks' observations, and take as many turns as there is time for."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from parbench.bench.results.metrics import value
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.step import probe
from parbench.workloads.step.probe import moment, run_probes, seconds_of, take_turns
from tests.support.fake_time import HeldTime
from tests.support.ranks import Ranks


class Listed:
    """Observes its budget, and tells of all ranks' budgets."""

    def __init__(self, world: World, name: str, share: float) -> None:
        self.world, self.name, self.share = world, name, share

    def observe(
        self, step: Callable[[], object], begin: Callable[[], None], budget_seconds: float
    ) -> float:
        begin()
        step()
        return budget_seconds + self.world.rank

    def summarise(self, told: Sequence[float]) -> Explanation:
        return Explanation(
            metrics={"ect": value("ect", sum(told))},
            details={self.name: list(told)},
            notes=(self.name,),
        )


def probed(world: World) -> tuple[Explanation, list[str]]:
    order: list[str] = []
    probes = [
        Listed(world, name, share) for name, share in (("none", 0.0), ("one", 1.0), ("three", 3.0))
    ]
    found = run_probes(
        world, probes, lambda: order.append("step"), lambda: order.append("begin"), 8.0
    )
    return found, order


def turns(world: World, seconds: float, nap: float, few: float) -> int:
    """Return how many turns were taken, where only rank 0 has the time that it takes."""
    taken: list[int] = []

    def turn() -> None:
        taken.append(1)
        time.sleep(nap if world.rank == 0 else 0.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probe, "_FEW_TURNS_SECONDS", few)
        take_turns(world, seconds, turn, most=5)
    return len(taken)


def test_probes_share_the_budget_and_the_later_ones_metric_counts(two_ranks: Ranks) -> None:
    for found, order in two_ranks.call("tests.workloads.step.test_probe:probed"):
        assert order == ["begin", "step"] * 3
        assert found.details == {"none": [0.0, 1.0], "one": [2.0, 3.0], "three": [6.0, 7.0]}
        assert found.notes == ("none", "one", "three")
        assert {name: metric.value for name, metric in found.metrics.items()} == {"ect": 13.0}


def test_all_ranks_take_as_many_turns_as_rank_0_has_time_for(two_ranks: Ranks) -> None:
    for seconds, nap, few, expected in (
        (0.0, 0.0, 30, 1),
        (1e-6, 0.01, 30, 3),
        (60, 0.0, 30, 5),
        (1e-6, 0.01, 0, 1),
    ):
        taken = two_ranks.call(
            "tests.workloads.step.test_probe:turns", seconds=seconds, nap=nap, few=few
        )
        assert taken == [expected] * 2, (seconds, nap, few)


def test_a_devices_moments_lie_on_the_hosts_clock_as_far_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event is recorded 2 us after it is asked for, and the host wakes 30 us after that, but once 4 us."""
    clock, wakes = HeldTime(), itertools.chain([30_000] * 9, [4_000], itertools.repeat(30_000))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            clock.sleep_ns(2_000)
            self.at_ns = clock.now_ns

        def synchronize(self) -> None:
            clock.sleep_ns(next(wakes))

        def elapsed_time(self, later: Any) -> float:
            return float(later.at_ns - self.at_ns) / 1e6

    monkeypatch.setattr("parbench.workloads.step.probe.time", clock)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.sleep_ns(1_000))
    device = torch.device("cuda", 0)
    then: Any = moment(device)
    clock.sleep_ns(5_000_000)
    told, uncertainty = seconds_of(device)
    assert uncertainty == pytest.approx(3e-6)
    assert told(then) - then.at_ns / 1e9 == pytest.approx(1e-6)
    host, exact = seconds_of(torch.device("cpu"))
    assert (host(7.0), exact) == (7.0, 0.0)
