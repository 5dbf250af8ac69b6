"""Work for ranks: operations and steps, each checked and timed as in a run."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress
from parbench.bench.world.world import Subgroups, World
from parbench.cli import DEFINITIONS
from tests.support.staging import staged

Asked = tuple[str, dict[str, Any]]  # a case's name, and its parameters
NCCL_ALONE: list[Asked] = [
    *(
        (f"p2p.{name}", {"size_bytes": 4096})
        for name in ("sendrecv", "unidirectional", "bidirectional", "pingpong")
    ),
    *((f"p2p.{name}", {"size_bytes": 4096, "mode": "async"}) for name in ("sendrecv", "pairwise")),
    *(
        (f"collective.{name}", {"size_bytes": 4096, "mode": "coalesced"})
        for name in ("all_reduce", "all_gather")
    ),
]
"""What gloo does not carry between GPUs by itself."""


class Staged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, every call of c10d from this thread is staged, on whatever device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name().startswith("c10d::"):
            return staged(func, torch.Tensor.clone)(*args)
        return func(*args, **(kwargs or {}))


def not_well(world: World, asked: Iterable[Asked], *, by_mode: bool = False) -> list[str]:
    """Return of each case that did not end well its status and why; ``by_mode`` stages on the CPU."""
    named, told = {one.name: one for one in load_catalogue(DEFINITIONS)}, []
    for name, params in asked:
        case = named[name].case(params)
        with Staged() if by_mode else nullcontext():  # type: ignore[no-untyped-call]
            outcome = CaseRun(
                case, Subgroups(world), Measure(max_iterations=20), Progress(), None
            ).visit(0.5, alone=False)
        if outcome.status != "ok":
            told.append(f"{case.label}: {outcome.status}: {outcome.reason}")
    return told
