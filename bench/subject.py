"""What one writes to measure something new.

``prepare(world, **params) -> Subject``: a subject knows nothing of timing, records or tables.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.messages import Work


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


class Subject(Protocol):
    """Something that takes steps on every rank of a world."""

    def step(self) -> None:
        """Do the thing that is timed; on CUDA it may return before the device is done."""

    def reset(self) -> None:
        """Prepare the next step, untimed: poison outputs, restore inputs, draw a batch."""

    def check(self) -> int:
        """Return how many results of the last step are wrong on this rank, against a reference; 0 is right."""

    def describe(self) -> Description:
        """Say what a step does; the same on every rank."""

    def close(self) -> None:
        """Give back what ``prepare`` took."""
