"""What the driver and the ranks say to each other: msgpack over an authenticated connection.

Ranks announce each case before they begin it, so the driver, which needs no torch, always knows who arrived where.
"""

from typing import Any

import msgspec

from bench.machine.topology import Place
from bench.plan.cases import Case
from bench.plan.injection import Injection
from bench.plan.plan import Measure
from bench.results.arrival import Arrival
from bench.results.records import Check, Metric, Status, Stop

LEFT_OUT = "left out: the run's time was spent"
"""Why a case has no measurement in a launch that came to it too late."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has connected; ``environment`` is its own, before what all share is hoisted.

    ``meeting`` is the address of the store that rank 0 has bound for all, where no launcher gave them one; ``step`` is
    the rank's job step under Slurm.
    """

    rank: int
    size: int
    host: str
    pid: int
    environment: dict[str, Any]
    place: Place | None = None
    meeting: str = ""
    step: str = ""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank begins the case at ``index`` of its job."""

    index: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of work done by one sample: ``amount / seconds`` is the metric ``name``."""

    name: str
    amount: float
    unit: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks saw of one case; ``seconds`` holds one sample per iteration, ``raw`` every rank's (an npz).

    ``timeline`` is one step of all ranks as ``bench.results.timeline`` writes it; empty if none was seen.
    """

    status: Status
    reason: str = ""
    stop: Stop | None = None
    check: Check = Check()
    headline: str = "time"
    seconds: list[float] = []
    skew_seconds: list[float] = []
    transfer_seconds: list[float] = []
    issue_seconds: list[float] = []
    arrival: Arrival | None = None
    injected: str = ""
    explained: dict[str, Metric] = {}
    work: list[Work] = []
    details: dict[str, Any] = {}
    notes: list[str] = []
    raw: bytes = b""
    timeline: bytes = b""
    wall_seconds: float = 0.0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 tells the outcome of the case at ``index``."""

    index: int
    outcome: Outcome


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank cannot go on: an exception in the case at ``index``, or before any case if None."""

    index: int | None
    error: str
    stack: str


class Where(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Ask``: the phase a rank is in, the steps it has begun, whether it is in torch.distributed."""

    phase: str
    steps: int
    communicates: bool
    stack: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has done its whole job."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver's order: cases in turn, each with its share, by weight, of this launch's budget.

    When the whole run's time is spent, what is left is left out. ``path`` is added at the end of the import path.
    ``hosts`` names each rank's, as they told; ``meeting`` is where rank 0 has bound a store for them.
    """

    cases: list[Case]
    weights: list[float]
    measure: Measure
    backend: str
    device: str
    budget_seconds: float
    run_seconds: float
    timeout_seconds: float
    path: str | None = None
    injection: Injection | None = None
    hosts: tuple[str, ...] = ()
    meeting: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver asks where a rank is."""


FromRank = Hello | Started | Finished | Broken | Where | Bye
FromDriver = Job | Ask
