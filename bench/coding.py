"""Data that shows what went wrong: exact integers coded by rank and index, and poison.

All-ones data cannot see swapped chunks, a wrong root or a stale buffer. A value here depends on the rank and, through
two patterns of prime period, on the index, so that any two chunks differ; sums over all ranks stay exact in the dtype.
"""

import torch

from bench.dtypes import DTYPES

_PERIODS = (65521, 4093)
_RANK_STRIDES = (7919, 1031)
_SEED = 20250101
_MAX_VALUE = 1 << 20
_MIN_CODES = 4


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name from ``bench.dtypes``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class Code:
    """Values for tensors of one dtype whose sum over ``num_summed`` ranks is exact.

    Every value lies in 1..m with m * num_summed within the integers exact in the dtype. Where that leaves fewer than
    four values, ranks take turns by index and the others hold 0.
    """

    def __init__(self, dtype: str, num_summed: int, device: torch.device) -> None:
        limit = min(DTYPES[dtype].exact_up_to, _MAX_VALUE * num_summed)
        self._turns = max(1, -(-num_summed * _MIN_CODES // limit))
        self._modulus = limit // -(-num_summed // self._turns)
        self._dtype = dtype_of(dtype)
        self._num_summed = num_summed
        self._device = device
        generator = torch.Generator().manual_seed(_SEED)
        self._patterns = [
            torch.randint(0, _MAX_VALUE, (period,), generator=generator, dtype=torch.int32).to(device)
            for period in _PERIODS
        ]

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return rank's elements ``start`` to ``start + count`` of its coded vector, in the dtype."""
        return self._integers(rank, start, count).to(self._dtype)

    def sums(self, start: int, count: int) -> torch.Tensor:
        """Return the sum over all ranks of the elements ``start`` to ``start + count``, in the dtype."""
        total = torch.zeros(count, dtype=torch.int64, device=self._device)
        for rank in range(self._num_summed):
            total += self._integers(rank, start, count)
        return total.to(self._dtype)

    def _integers(self, rank: int, start: int, count: int) -> torch.Tensor:
        mixed = torch.zeros(count, dtype=torch.int32, device=self._device)
        for pattern, stride in zip(self._patterns, _RANK_STRIDES, strict=True):
            mixed += _cycle(pattern, start + rank * stride, count)
        values = mixed.remainder_(self._modulus).add_(1)
        if self._turns > 1:
            index = torch.arange(start, start + count, device=self._device)
            values *= (index + rank) % self._turns == 0
        return values


def _cycle(pattern: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return ``pattern`` repeated without end, from ``start``, ``count`` elements."""
    rolled = pattern.roll(-(start % len(pattern)))
    return rolled.repeat(-(-count // len(pattern)))[:count] if count > len(pattern) else rolled[:count]


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no coded value or sum is: NaN, or the smallest integer."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min)


def count_wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many elements differ; NaN differs from everything."""
    if found.itemsize == 1 and found.dtype.is_floating_point:  # float8 compares on few devices
        found, expected = found.float(), expected.float()
    return int((found != expected).sum())
