"""What one writes to measure something new: ``prepare(world, **params) -> Benchmark``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from parbench.bench.launch.control_channel import Work
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Timeline


@dataclass(frozen=True, kw_only=True)
class Description:
    """What one step does: ``work`` gives the rates, ``headline`` names the metric of its duration.

    ``details`` are facts for the record (bytes, sizes, closed forms); ``notes`` say what the row cannot claim; a
    duration counts as ``hops`` of what is measured (2 for a round trip).
    """

    headline: str = "time"
    work: tuple[Work, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hops: int = 1


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where a step's time goes, what it sends and holds; ``timeline`` is one step of all ranks, where it was seen."""

    metrics: dict[str, MetricValue] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None


class Benchmark(Protocol):
    """Something that takes steps on every rank of a world; what inherits from it need not say what it does not do."""

    def step(self) -> None:
        """Do the thing that is timed; on CUDA it may return before the device is done."""

    def reset(self) -> None:
        """Prepare the next step, untimed: poison outputs, restore inputs, draw a batch."""
        return

    def check(self) -> int:
        """Return how many results of the last step are wrong on this rank, against a reference; 0 is right."""
        return 0

    def describe(self) -> Description:
        """Say what a step does; the same on every rank."""
        return Description()

    def close(self) -> None:
        """Give back what ``prepare`` took."""
        return


@runtime_checkable
class Differing(Protocol):
    """A benchmark that can name what its last check found wrong."""

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong result on this rank, such as ``norm.weight: gradient is 0.5 of ...``."""


@runtime_checkable
class Explained(Protocol):
    """A benchmark that can say where its time goes."""

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Look into some more steps, on every rank; rank 0's answer counts.

        ``begin`` before each step resets the benchmark and brings all ranks to the line, one of them late where
        that was asked for. Called last, after all checks: it may leave the benchmark worth nothing.
        """
