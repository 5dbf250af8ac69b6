"""Data that shows what went wrong: exact integers coded by rank and index, and poison.

All-ones data cannot see swapped chunks, a wrong root or a stale buffer. A value here depends on the rank and, through
a pattern of prime period, on the index, so that chunks differ wherever they are not whole periods apart; what a
reduction makes of all ranks' values stays exact in the dtype. The pattern fits a core's cache, so that to restore a
large buffer does not drive it out of there.
"""

import math
from collections.abc import Callable

import torch

from bench.plan.operation_spec import DTYPES

_PERIOD = 65521
_RANK_STRIDE = 7919
_SEED = 20250101
_MAX_VALUE = 1 << 20
_MIN_CODES = 4


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
        self._scale = num_ranks if redop == "avg" else 1
        self._idle = 1 if redop == "product" else 0
        self._least = 0 if dtype == "bool" else 1
        self._turns, self._modulus = _turns_and_modulus(dtype, num_ranks, redop)
        generator = torch.Generator().manual_seed(_SEED)
        numbers = torch.randint(0, _MAX_VALUE, (_PERIOD,), generator=generator, dtype=torch.int32).to(device)
        self._pattern = numbers.remainder_(self._modulus).add_(self._least).mul_(self._scale)

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return rank's elements ``start`` to ``start + count`` of its coded vector, in the dtype."""
        out = torch.empty(count, dtype=self._dtype, device=self._device)
        self.fill(out, rank, start)
        return out

    def fill(self, out: torch.Tensor, rank: int, start: int = 0) -> None:
        self.filler(out, rank, start)()

    def filler(self, out: torch.Tensor, rank: int, start: int = 0) -> Callable[[], object]:
        """Return what writes rank's elements from ``start`` on into all of ``out``, made ready to do so often."""
        if self._turns > 1:
            values = self._integers(rank, start, len(out)).to(self._dtype)
            return lambda: out.copy_(values)
        period = self._period(rank, start).to(self._dtype)
        periods = out[: len(out) // _PERIOD * _PERIOD].view(-1, _PERIOD)
        rest = out[periods.numel() :]
        end = period[: len(rest)].clone()
        if not len(periods):
            return lambda: rest.copy_(end)

        def fill() -> None:
            periods.copy_(period)
            rest.copy_(end)

        return fill

    def reduced(self, start: int, count: int) -> torch.Tensor:
        """Return what the reduction over all ranks makes of elements ``start`` to ``start + count``, in the dtype."""
        total = self._integers(0, start, count).to(torch.int64)
        for rank in range(1, self._num_ranks):
            total = _combine(self._redop, total, self._integers(rank, start, count))
        return (total // self._num_ranks if self._redop == "avg" else total).to(self._dtype)

    def _period(self, rank: int, start: int) -> torch.Tensor:
        return self._pattern.roll(-((start + rank * _RANK_STRIDE) % _PERIOD))

    def _integers(self, rank: int, start: int, count: int) -> torch.Tensor:
        values = self._period(rank, start).repeat(-(-count // _PERIOD))[:count]
        if self._turns > 1:
            index = torch.arange(start, start + count, device=self._device)
            values[(index + rank) % self._turns != 0] = self._idle
        return values


def _turns_and_modulus(dtype: str, n: int, redop: str) -> tuple[int, int]:
    """Return how many ranks share a turn's slot, and the number of values; see ``DataPattern``."""
    if dtype == "bool":
        return 1, 2
    if redop == "product":
        doublings = _exponent_limit(dtype)
        return max(1, math.ceil(n / doublings)), 2
    terms = {"min": 1, "max": 1, "avg": n * n}.get(redop, n)  # the largest result is terms times the largest code
    limit = min(DTYPES[dtype].exact_up_to, _MAX_VALUE * terms)
    if redop in ("min", "max"):
        return 1, limit
    turns = max(1, -(-terms * _MIN_CODES // limit))
    scale = n if redop == "avg" else 1
    return turns, max(1, limit // (scale * -(-n // turns)))


def _exponent_limit(dtype: str) -> int:
    """Return the largest k for which 2**k is exact in the dtype."""
    kind = dtype_of(dtype)
    return math.floor(math.log2(torch.finfo(kind).max if kind.is_floating_point else torch.iinfo(kind).max))


def _combine(redop: str, total: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if redop == "min":
        return torch.minimum(total, values)
    if redop == "max":
        return torch.maximum(total, values)
    return total * values if redop == "product" else total + values


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no coded value or result is: NaN, or the smallest integer; a bool has no such value."""
    if tensor.dtype is torch.bool:
        tensor.fill_(value=True)
    else:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min)


def count_wrong(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> int:
    """Return how many elements differ by more than a relative ``tolerance``; NaN differs from everything."""
    if found.itemsize == 1 and found.dtype.is_floating_point:  # float8 compares on few devices
        found, expected = found.float(), expected.float()
    if tolerance:
        return int((~((found - expected).abs() <= tolerance * expected.abs())).sum())
    return int((found != expected).sum())
