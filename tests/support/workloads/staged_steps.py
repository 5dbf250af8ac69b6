"""Run cases on ranks, each checked and timed as in a run."""

from collections.abc import Iterable
from typing import Any

from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun
from parbench.bench.world.world import World
from parbench.cli import DEFINITIONS

NamedCase = tuple[str, dict[str, Any]]
"""The name of a case and its parameters."""

SECONDS_PER_CASE = 0.5
NCCL_ONLY_CASES: list[NamedCase] = [
    ("p2p.sendrecv", {"size_bytes": 4096}),
    ("p2p.unidirectional", {"size_bytes": 4096}),
    ("p2p.bidirectional", {"size_bytes": 4096}),
    ("p2p.pingpong", {"size_bytes": 4096}),
    ("p2p.sendrecv", {"size_bytes": 4096, "mode": "async"}),
    ("p2p.pairwise", {"size_bytes": 4096, "mode": "async"}),
]
"""Cases that gloo does not carry between CUDA tensors."""


def find_failures(world: World, cases: Iterable[NamedCase]) -> list[str]:
    """Run each case and return status and reason of those that are not ok."""
    definitions = {definition.name: definition for definition in load_catalogue(DEFINITIONS)}
    failures = []
    for name, params in cases:
        case = definitions[name].build_case(params)
        run = CaseRun(case, world, Measure(max_iterations=20), Progress(), None)
        outcome = run.run_block(SECONDS_PER_CASE, is_only=False)
        if outcome.status != "ok":
            failures.append(f"{case.label}: {outcome.status}: {outcome.reason}")
    return failures
