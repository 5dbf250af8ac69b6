"""The interface of a benchmark: ``prepare(world, **params) -> Benchmark``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Timeline


@dataclass(frozen=True, kw_only=True)
class Work:
    """An amount of work done by one step: ``amount / seconds`` is the metric ``name``."""

    name: str
    amount: float
    unit: str = ""
    """The unit of a rate that parbench.bench.results.metrics does not declare."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The work of one step, as its record states it."""

    headline: str = "time"  # the name of the metric of a step's duration
    work: tuple[Work, ...] = ()  # amounts of work, from which rates follow
    details: dict[str, Any] = field(default_factory=dict)
    """Facts for the record: bytes, sizes, analytical values."""
    notes: tuple[str, ...] = ()  # sentences about limits of the measurement
    hops: int = 1  # the number by which the time of a step is divided, 2 for a round trip


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The breakdown of a step: parts of its time, its communication and its memory."""

    metrics: dict[str, MetricValue] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None  # one step of all ranks, if it was traced


class Benchmark(Protocol):
    """A workload that takes steps on every rank of a world.

    A subclass must define only ``step``.
    """

    def step(self) -> None:
        """Do the work that is timed. On CUDA it may return before the device has finished."""

    def reset(self) -> None:
        """Prepare the next step, for example poison outputs, restore inputs or draw a batch.

        Not timed.
        """
        return

    def check(self) -> int:
        """Return the number of wrong results of the last step on this rank, 0 if all are right."""
        return 0

    def describe(self) -> Description:
        """Return the description of a step, which must be equal on every rank."""
        return Description()

    def close(self) -> None:
        """Release the resources that ``prepare`` acquired."""
        return


@runtime_checkable
class SupportsDifferences(Protocol):
    """A benchmark that can describe the wrong results of its last check."""

    def differences(self) -> Sequence[str]:
        """Return a phrase for each result on this rank that the last check found wrong.

        An example is ``norm.weight: gradient is 0.5 of ...``.
        """


@runtime_checkable
class SupportsExplanation(Protocol):
    """A benchmark that can explain where the time of a step goes, such as a training step."""

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Profile further steps on every rank and explain them. Rank 0's result counts.

        This takes at most ``budget_seconds``. ``begin`` must be called before each step. It resets
        the benchmark and then lets all ranks start together, except a rank that an injected fault
        delays. This method is called last, after all checks, and may leave the benchmark unusable.
        """
