"""The plan: which cases, on how many ranks, measured how."""

from typing import Literal

import msgspec

from bench.plan.cases import Case
from bench.plan.injection import Injection


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A case of the plan that cannot run here, and why."""

    case: Case
    reason: str


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How srun spreads ranks over nodes: ``block`` fills a node first, ``cyclic`` deals to all in turn."""

    nodes: int
    ntasks_per_node: int
    placement: Literal["block", "cyclic"] = "block"

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ntasks_per_node


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """When a case has been measured enough: the interval's half-width relative to the median, or a count."""

    warmup: int = 5
    min_iterations: int = 6
    max_iterations: int = 1000
    precision: float = 0.025
    seed: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run was asked to do; ``budget_seconds`` is for the whole run, ``timeout_seconds`` for one case.

    ``notes`` say what no row of the run can claim; ranks import targets from ``path`` too, after everything else.
    Without a ``spread`` all ranks are on the driver's node, or were started by another launcher.
    """

    preset: str
    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]
    nproc: int
    backend: str
    device: str
    launches: int
    budget_seconds: float
    timeout_seconds: float
    measure: Measure = Measure()
    notes: tuple[str, ...] = ()
    injection: Injection | None = None
    link_bytes_per_second: float | None = None
    path: str | None = None
    spread: Spread | None = None
