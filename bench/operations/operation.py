"""One communication as a subject: what it calls, what it should give, what it moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.launch.control_channel import Work
from bench.operations.test_pattern import count_wrong
from bench.plan.catalogue import busbw_factor
from bench.text import UserError
from bench.world.subject import Description, Subject

CONVENTION = "nccl-tests"


@dataclass(frozen=True, kw_only=True)
class Operation(Subject):
    """One communication: ``restore`` makes inputs right and outputs poison before each ``call``.

    An ``asynchronous`` call takes ``async_op=True`` and then returns what to wait for. ``tolerance`` is relative, above
    0 only where the backend may round otherwise than the reference.
    """

    call: Callable[..., Any]
    restore: Callable[[], object]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]
    description: Description
    tolerance: float = 0.0
    asynchronous: bool = False

    def step(self) -> None:
        self.call()

    def issue(self) -> Sequence[dist.Work]:
        """Start to communicate, and return what to wait for; ``UserError`` if this operation cannot be issued."""
        if not self.asynchronous:
            raise UserError("mode async: this operation is several calls, or has no asynchronous form")
        works = self.call(async_op=True)
        return works if isinstance(works, list) else [works] if works is not None else []

    def reset(self) -> None:
        self.restore()

    def check(self) -> int:
        return count_wrong(self.output, self.expected(), self.tolerance)

    def corrupt(self) -> None:
        if self.output.numel():
            self.output[-1] = 0

    def describe(self) -> Description:
        return self.description


def describe(
    name: str, n: int, size_bytes: int, sent: int, received: int, *, notes: tuple[str, ...] = (), hops: int = 1
) -> Description:
    """Return what an operation of S = ``size_bytes`` moves on ``n`` ranks: algbw = S / t, busbw = algbw * factor."""
    factor = busbw_factor(name, n)
    assert factor is not None, name
    return Description(
        work=(Work(name="algbw", amount=size_bytes), Work(name="busbw", amount=size_bytes * factor)),
        details={
            "size_bytes": size_bytes,
            "send_bytes": sent,
            "recv_bytes": received,
            "busbw_factor": factor,
            "convention": CONVENTION,
        },
        notes=notes,
        hops=hops,
    )
