"""The interface of a benchmark: ``prepare(world, **params) -> Benchmark``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Timeline


@dataclass(frozen=True, kw_only=True)
class Work:
    """An amount of work that one step does, such as bytes or tokens, for a metric that is a rate.

    The metric ``name`` has the value ``amount`` divided by the seconds of a step.
    """

    name: str
    """The name of the metric, such as ``algbw`` or ``tokens_per_second``."""
    amount: float
    """The work of all ranks or of one rank, as the metric defines it, such as bytes or tokens."""
    unit: str = ""
    """The unit of the rate, such as ``images/s``, if the metric is not declared in METRICS."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The facts about a benchmark's step that its records contain next to its times."""

    headline: str = "time"
    """The name of the metric that is the duration of a step: ``time`` or ``step_time``."""
    work: tuple[Work, ...] = ()
    """The amounts of work of a step, from which rates follow."""
    details: dict[str, Any] = field(default_factory=dict)
    """Facts that are not metrics, by name, such as ``size_bytes`` and analytical values."""
    notes: tuple[str, ...] = ()
    """Sentences about limits of the measurement."""
    hops: int = 1
    """The number by which the duration of a step is divided, for example 2 for a round trip."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of profiling a training step: its time, communication and memory in parts."""

    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """The parts of time and memory, by the name of the metric, such as ``exposed_comm.dp``."""
    details: dict[str, Any] = field(default_factory=dict)
    """Facts that are not metrics, by name."""
    notes: tuple[str, ...] = ()
    """Sentences about limits of the profile."""
    timeline: Timeline | None = None
    """The work of all ranks in one step, None if no step was profiled."""


@runtime_checkable
class Benchmark(Protocol):
    """The interface of a benchmark: a timed step, and methods to prepare and check the step.

    Each rank has its own object. All ranks call the same methods in the same order, so that methods
    may communicate. A subclass must define ``step``. The other methods have defaults.
    """

    def step(self) -> None:
        """Do the work that is timed, such as one all-reduce or one training step.

        On CUDA the method may return before the device has finished.
        """

    def reset(self) -> None:
        """Prepare the next step, for example poison outputs, restore inputs or draw a batch.

        This is not timed.
        """
        return

    def check(self) -> int:
        """Return the number of wrong results of the last step on this rank, 0 if all are right.

        A result is an element of a buffer, or another unit that the benchmark can compare.
        """
        return 0

    def describe(self) -> Description:
        """Return the facts about a step for its record, which must be equal on every rank."""
        return Description()

    def close(self) -> None:
        """Release resources at the end of the case, such as process groups."""
        return


@runtime_checkable
class SupportsDifferences(Protocol):
    """A benchmark that can describe in words the wrong results that its last check found."""

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong result that the last ``check`` found on this rank.

        An example is ``norm.weight: gradient is 0.5 of ...``.
        """


@runtime_checkable
class SupportsExplanation(Protocol):
    """A benchmark that can profile its steps and break down their time, as training steps can."""

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Profile further steps and return their time, communication and memory in parts.

        Every rank calls this method, and only the result of rank 0 is recorded. It takes at most
        ``budget_seconds``. It is called last, after all checks, and may leave the benchmark
        unusable.

        The method must call ``begin()`` before each step. ``begin`` resets the benchmark and waits
        for all ranks, so that they start the step together. With the fault ``late``, it also delays
        the affected rank.
        """
