"""One communication as a subject: what it calls, what it should give, what it moves; and the data that it is given.

Data shows what went wrong: exact integers coded by rank and index, and poison. All-ones data cannot see swapped chunks,
a wrong root or a stale buffer. A value here depends on the rank and, through a pattern of prime period, on the index,
so that chunks differ wherever they are not whole periods apart; what a reduction makes of all ranks' values stays exact
in the dtype. The pattern fits a core's cache, so that to restore a large buffer does not drive it out of there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.launch.control_channel import Work
from bench.plan.catalogue import DTYPES, busbw_factor
from bench.text import UserError
from bench.world.subject import Description, Subject

_PERIOD, _RANK_STRIDE = 65521, 7919
_MAX_VALUE = 1 << 20
_JOIN: dict[str, Callable[..., torch.Tensor]] = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class DataPattern:
    """Values for tensors of one dtype whose reduction over ``num_ranks`` ranks by ``redop`` is exact.

    For sums every value lies in 1..m, and the largest sum within the integers exact in the dtype; averages are of
    multiples of n; factors are 1 or 2. Where that leaves too few values, ranks take turns by index: the others hold
    what changes nothing, 0 or 1.
    """

    def __init__(self, dtype: str, num_ranks: int, device: torch.device, redop: str = "sum") -> None:
        self._dtype, self._num_ranks, self._device, self._redop = dtype_of(dtype), num_ranks, device, redop
        self.itemsize = self._dtype.itemsize
        self._turns, modulus = _turns_and_modulus(dtype, num_ranks, redop)
        generator = torch.Generator().manual_seed(20250101)
        numbers = torch.randint(0, _MAX_VALUE, (_PERIOD,), generator=generator, dtype=torch.int32).to(device)
        scale = num_ranks if redop == "avg" else 1
        self._pattern = numbers.remainder_(modulus).add_(int(dtype != "bool")).mul_(scale)

    @property
    def tolerance(self) -> float:
        """The relative error that an average may have: some backends multiply by a rounded 1/n before they add."""
        n, kind = self._num_ranks, self._dtype
        exact = self._redop != "avg" or not kind.is_floating_point or n & (n - 1) == 0
        return 0.0 if exact else n * torch.finfo(kind).eps

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._device)

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return rank's elements ``start`` to ``start + count`` of its coded vector, in the dtype."""
        self.filler(out := self.empty(count), rank, start)()
        return out

    def filler(self, out: torch.Tensor, rank: int, start: int = 0) -> Callable[[], object]:
        """Return what writes rank's elements from ``start`` on into all of ``out``, made ready to do so often."""
        if self._turns > 1:
            values = self._integers(rank, start, len(out)).to(self._dtype)
            return lambda: out.copy_(values)
        period = self._period(rank, start).to(self._dtype)
        periods = out[: len(out) // _PERIOD * _PERIOD].view(-1, _PERIOD)
        rest = out[periods.numel() :]
        end = period[: len(rest)].clone()
        return lambda: (periods.copy_(period), rest.copy_(end))

    def reduced(self, start: int, count: int) -> torch.Tensor:
        """Return what the reduction over all ranks makes of elements ``start`` to ``start + count``, in the dtype."""
        total = self._integers(0, start, count).to(torch.int64)
        for rank in range(1, self._num_ranks):
            total = _JOIN.get(self._redop, torch.add)(total, self._integers(rank, start, count))
        return (total // self._num_ranks if self._redop == "avg" else total).to(self._dtype)

    def _period(self, rank: int, start: int) -> torch.Tensor:
        return self._pattern.roll(-((start + rank * _RANK_STRIDE) % _PERIOD))

    def _integers(self, rank: int, start: int, count: int) -> torch.Tensor:
        values = self._period(rank, start).repeat(-(-count // _PERIOD))[:count]
        if self._turns > 1:
            index = torch.arange(start, start + count, device=self._device)
            values[(index + rank) % self._turns != 0] = int(self._redop == "product")
        return values


def _turns_and_modulus(dtype: str, n: int, redop: str) -> tuple[int, int]:
    """Return how many ranks share a turn's slot, and the number of values; see ``DataPattern``."""
    kind, exact_up_to = dtype_of(dtype), DTYPES[dtype].exact_up_to
    if dtype == "bool":
        return 1, 2
    if redop == "product":  # of powers of 2, which floats hold far beyond the integers
        largest = int(torch.finfo(kind).max) if kind.is_floating_point else exact_up_to
        return -(-n // (largest.bit_length() - 1)), 2
    terms = {"min": 1, "max": 1, "avg": n * n}.get(redop, n)  # the largest result is terms times the largest code
    limit = min(exact_up_to, _MAX_VALUE * terms)
    if redop in ("min", "max"):
        return 1, limit
    turns = max(1, -(-terms * 4 // limit))  # so that a turn has at least 4 values
    return turns, max(1, limit // (terms // n * -(-n // turns)))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no coded value or result is: NaN, or the smallest integer; a bool has no such value."""
    kind = tensor.dtype
    return tensor.fill_(float("nan") if kind.is_floating_point else 1 if kind is torch.bool else torch.iinfo(kind).min)


def count_wrong(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> int:
    """Return how many elements differ by more than a relative ``tolerance``; NaN differs from everything."""
    if found.itemsize == 1 and found.dtype.is_floating_point:  # float8 compares on few devices
        found, expected = found.float(), expected.float()
    if tolerance:
        return int((~((found - expected).abs() <= tolerance * expected.abs())).sum())
    return int((found != expected).sum())


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
