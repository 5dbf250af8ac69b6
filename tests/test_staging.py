"""Communication that tests stage through copies gives what it gives without, so it shows the product and not itself."""

from tests.support.ranks import Ranks
from tests.support.staged_steps import NCCL_ALONE, Asked

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
COLLECTIVES: list[Asked] = [
    (f"collective.{name}", {"size_bytes": 4096, "mode": mode})
    for name in KINDS
    for mode in ("blocking", "async")
]


def test_staged_calls_give_what_they_give_without(two_ranks: Ranks) -> None:
    asked = [
        *COLLECTIVES,
        *NCCL_ALONE,
        ("collective.all_to_all_v", {"size_bytes": 4096, "skew": 0.5}),
    ]
    assert two_ranks.call("tests.support.staged_steps:not_well", asked=asked, by_mode=True) == [
        [],
        [],
    ]
