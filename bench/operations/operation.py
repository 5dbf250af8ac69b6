"""One communication as a benchmark: what it calls, what it should give, what it moves; and the data that it is given.

Data shows what went wrong: exact numbers coded by rank and index, and poison. All-ones data cannot see swapped chunks,
a wrong root or a stale buffer. Each rank has a random table of its own, which is repeated; it fits a core's cache, so
that to restore a large buffer does not drive it out of there. The table's length is prime, so that chunks of one length
begin at different places of it, unless they are whole tables: those differ by the number of the repetition, written
into it by swapping groups of elements. What is reduced is a table, too, repeated in the same way. Two chunks of L
elements of m values are thus alike with probability m^-L, among any 2000 neighbours of each rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parbench.bench.launch.control_channel import Work
from parbench.bench.plan.catalogue import DTYPES, busbw_factor
from parbench.bench.world.benchmark import Benchmark, Description

_PERIOD = 65521
_GROUP, _BITS = 32, 18  # elements that are swapped for a bit of a repetition's number; 2^18 repetitions are told apart
_MAX_VALUE, _SEED = 1 << 24, 2025
_JOIN: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum, "product": np.multiply}


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class DataPattern:
    """Values for tensors of one dtype that ``num_ranks`` ranks move, or join by ``redop`` into what is exact.

    What is moved differs between any two ranks at every index, and all that n ranks hold in their first n elements
    differs, while the dtype has as many values. Terms of sums lie in 1..m, and the largest sum within the integers
    exact in the dtype; factors are 1 or 2. Where that leaves too few values, ranks take turns by index: the others hold
    what changes nothing. At index i of a table rank i mod n alone holds the extreme, or what is averaged: a power of 2,
    whose share is the same bits whether a backend divides it or multiplies it by a rounded 1/n. With fewer elements
    than ranks, minima, maxima and averages thus cannot show whether the last ranks took part. So that each rank shows
    in bools, the first n that are joined give the same.
    """

    def __init__(self, dtype: str, num_ranks: int, device: torch.device, redop: str = "") -> None:
        self._dtype, self._num_ranks, self._device = dtype_of(dtype), num_ranks, device
        self._redop = "min" if (dtype, redop) == ("bool", "product") else redop
        self.itemsize = self._dtype.itemsize
        self._turns, self._modulus = _turns_and_modulus(dtype, num_ranks, self._redop)
        self._joined: npt.NDArray[Any] = np.empty(0)

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._device)

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return rank's elements ``start`` to ``start + count`` of its coded vector, in the dtype."""
        return self._window(self._codes(rank, min(start + count, _PERIOD)), start, count)

    def filler(self, out: torch.Tensor, rank: int) -> Callable[[], object]:
        """Return what writes rank's elements into all of ``out``, made ready to do so often."""
        return self._writer(out, self._codes(rank, min(len(out), _PERIOD)))

    def reduced(self, start: int, count: int) -> torch.Tensor:
        """Return what the reduction over all ranks makes of elements ``start`` to ``start + count``, in the dtype."""
        length = min(start + count, _PERIOD)
        if len(self._joined) < length:
            kind = np.float64 if self._dtype.is_floating_point else np.int64  # products of factors 2 exceed integers
            self._joined = self._codes(0, length).astype(kind)
            for rank in range(1, self._num_ranks):
                self._joined = _JOIN.get(self._redop, np.add)(self._joined, self._codes(rank, length))
        return self._window(self._joined[:length] / (self._num_ranks if self._redop == "avg" else 1), start, count)

    def _window(self, table: npt.NDArray[Any], start: int, count: int) -> torch.Tensor:
        row, begin = divmod(start, _PERIOD)
        self._writer(whole := self.empty(begin + count), table, row)()
        return whole[begin:].clone() if begin else whole

    def _writer(self, out: torch.Tensor, table: npt.NDArray[Any], first_row: int = 0) -> Callable[[], object]:
        """Return what repeats a table in ``out``, each time with the number of its row written into it."""
        period = torch.from_numpy(table).to(self._device, self._dtype)
        rows = out[: len(out) // _PERIOD * _PERIOD].view(-1, _PERIOD)
        rest = out[rows.numel() :]
        if not first_row and not len(rows):
            return lambda: rest.copy_(period[: len(rest)])
        numbers = torch.arange(first_row, first_row + len(rows) + 1, device=self._device)
        bits = numbers[:, None] >> torch.arange(_BITS, device=self._device) & 1
        pairs = period[: 2 * _GROUP * _BITS].view(torch.uint8).view(_BITS, 2, -1)
        marks = torch.where(bits.bool()[:, :, None, None], pairs.flip(1), pairs).view(len(numbers), -1)
        marks = marks.view(self._dtype)
        marked = rows[:, : marks.shape[1]]
        period[: marks.shape[1]] = marks[-1]
        end = period[: len(rest)]
        return lambda: (rows.copy_(period), marked.copy_(marks[:-1]), rest.copy_(end))

    def _codes(self, rank: int, count: int) -> npt.NDArray[np.int64]:
        """Return the first elements of a rank's table, as numbers; a longer table begins in the same way."""
        n, modulus, least = self._num_ranks, self._modulus, int(self._dtype != torch.bool)
        index = np.arange(count, dtype=np.int64)
        if not self._redop:
            return least + _permuted(rank, n, modulus.bit_length() - 1, index)
        codes: npt.NDArray[np.int64] = np.random.default_rng((_SEED, rank)).integers(0, modulus, count)
        first, mine = index < n, index % n == rank
        if self._redop == "avg":
            return np.where(mine, 1 << codes, 0)
        if self._redop in ("min", "max"):
            if not least:  # else every result were the same
                mine &= first | (np.random.default_rng(_SEED).integers(0, 2, count) == 1)
            half = modulus // 2
            codes = least + codes % half + half * mine
            return codes if self._redop == "max" else 2 * (half + least) - 1 - codes
        if self._redop == "product":
            codes |= mine & first
        neutral = int(self._redop == "product")
        return np.where((index % n - rank) % self._turns == 0, 1 + codes, neutral)


@lru_cache(maxsize=1)
def _keys(seed: int, count: int) -> npt.NDArray[Any]:
    return np.random.default_rng((_SEED, seed)).integers(0, 1 << 31, (count, 4)).T


def _permuted(rank: int, n: int, bits: int, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers of ``bits`` bits: all ranks' at an index, and at as many indices as fit, are a permutation."""
    low = max(bits - (n - 1).bit_length(), 0)
    mask, block = (1 << bits) - 1, index >> low
    a, b, c, d = _keys(rank >> bits, len(index))[:, block]
    mixed = (((rank << low) + (index & (1 << low) - 1)) * (a | 1) + b) & mask
    mixed ^= mixed >> max(bits // 2, 1)
    permuted: npt.NDArray[np.int64] = (mixed * (c | 1) + d) & mask
    return permuted


def _turns_and_modulus(dtype: str, n: int, redop: str) -> tuple[int, int]:
    """Return how many ranks share a turn's slot, and the number of values; see ``DataPattern``."""
    kind, exact_up_to = dtype_of(dtype), DTYPES[dtype].exact_up_to
    if dtype == "bool":
        return 1, 2
    largest = int(torch.finfo(kind).max) if kind.is_floating_point else exact_up_to
    powers = largest.bit_length() - 1  # of 2, which floats hold far beyond the integers
    if redop == "avg":
        return n, min(powers, 16)
    if redop == "product":
        return -(-n // powers), 2
    if redop != "sum":
        most = min(exact_up_to, _MAX_VALUE)
        return 1, most if redop else 1 << (most.bit_length() - 1)
    limit = min(exact_up_to, _MAX_VALUE * n)
    turns = max(1, -(-n * 4 // limit))  # so that a turn has at least 4 values
    return turns, max(1, limit // -(-n // turns))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no coded value or result is: NaN, or the smallest integer; a bool has no such value."""
    kind = tensor.dtype
    return tensor.fill_(float("nan") if kind.is_floating_point else 1 if kind is torch.bool else torch.iinfo(kind).min)


def count_wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many elements differ; NaN differs from everything."""
    float8 = found.itemsize == 1 and found.dtype.is_floating_point  # which compares on few devices
    if not float8 and torch.equal(found, expected):  # to count takes ten times as long
        return 0
    count = len(found) // (1 << 22) + 1  # pieces, as whole float32 or int64 tensors would take eight times as much
    pairs = zip(found.chunk(count), expected.chunk(count), strict=True)
    return sum(int((a.float() != b.float() if float8 else a != b).sum()) for a, b in pairs)


@dataclass(frozen=True, kw_only=True)
class Operation(Benchmark):
    """One communication: before each ``call`` its output is poison, or what ``restore`` makes of its buffers.

    Calls in one launch are ``gathered`` by torch itself where a backend has a form of them for many tensors.
    """

    call: Callable[..., Any]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]
    description: Description
    restore: Callable[[], object] | None = None
    gathered: bool = False

    def step(self) -> None:
        self.call()

    def issue(self) -> Sequence[dist.Work]:
        """Start to communicate and return the works to wait for.

        The catalogue refuses mode async for an operation whose call does not take ``async_op``.
        """
        works = self.call(async_op=True)
        return works if isinstance(works, list) else [works] if works is not None else []

    def reset(self) -> None:
        poison(self.output) if self.restore is None else self.restore()

    def check(self) -> int:
        return count_wrong(self.output, self._reference)

    @cached_property
    def _reference(self) -> torch.Tensor:
        return self.expected()  # kept, as it is held against the output after every visit

    def corrupt(self) -> None:
        """Make the last element wrong: no coded value is 0, except among bools."""
        last = self.output[-1:]
        if last.dtype is torch.bool:
            last.logical_not_()
        else:
            last.zero_()

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
