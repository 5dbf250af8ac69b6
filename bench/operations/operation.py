"""One communication as a subject: what it calls, what it should give, what it moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.launch.control_channel import Work
from bench.operations.test_pattern import count_wrong, poison
from bench.plan.catalogue import busbw_factor
from bench.text import UserError
from bench.world.subject import Description, Subject


@dataclass(frozen=True, kw_only=True)
class Operation(Subject):
    """One communication: before each ``call`` its output is poison, or what ``restore`` makes of its buffers."""

    call: Callable[..., Any]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]
    description: Description
    restore: Callable[[], object] | None = None
    tolerance: float = 0.0  # relative, above 0 only where the backend may round otherwise than the reference
    asynchronous: bool = True  # the call takes ``async_op=True`` and then returns what to wait for

    def step(self) -> None:
        self.call()

    def issue(self) -> Sequence[dist.Work]:
        """Start to communicate, and return what to wait for; ``UserError`` if this operation cannot be issued."""
        if not self.asynchronous:
            raise UserError("mode async: this operation is several calls, or has no asynchronous form")
        works = self.call(async_op=True)
        return works if isinstance(works, list) else [works] if works is not None else []

    def reset(self) -> None:
        poison(self.output) if self.restore is None else self.restore()

    def check(self) -> int:
        return count_wrong(self.output, self.expected(), self.tolerance)

    def corrupt(self) -> None:
        self.output[-1:] = 0

    def describe(self) -> Description:
        return self.description


def describe(name: str, n: int, size: int, sent: int, received: int, **more: Any) -> Description:
    """Return what an operation of S = ``size`` bytes moves on ``n`` ranks: algbw = S / t, busbw = algbw * factor."""
    factor = busbw_factor(name, n)
    assert factor is not None, name
    rates = (Work(name="algbw", amount=size), Work(name="busbw", amount=size * factor))
    moved = {"size_bytes": size, "send_bytes": sent, "recv_bytes": received}
    details = {**moved, "busbw_factor": factor, "convention": "nccl-tests"}
    return Description(work=rates, details=details, **more)
