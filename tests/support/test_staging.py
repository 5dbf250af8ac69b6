"""Staged communication gives the results of unstaged communication."""

from tests.support.ranks import Ranks
from tests.support.staged_steps import NCCL_ONLY_CASES, NamedCase

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)


def test_staged_calls_are_correct(two_ranks: Ranks) -> None:
    cases: list[NamedCase] = [*NCCL_ONLY_CASES]
    for name in COLLECTIVES:
        for mode in ("blocking", "async"):
            cases.append((f"collective.{name}", {"size_bytes": 4096, "mode": mode}))
    cases.append(("collective.all_to_all_v", {"size_bytes": 4096, "skew": 0.5}))
    failures = two_ranks.call(
        "tests.support.staged_steps:find_failures", cases=cases, staged_on_cpu=True
    )
    assert failures == [[], []]
