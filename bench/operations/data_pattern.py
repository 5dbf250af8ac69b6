"""Test data that reveals wrong communication: exact numbers that depend on rank and index.

Data of ones cannot reveal swapped chunks, a wrong root or a stale buffer. Here each rank has a
table of numbers of its own, a hash of rank and index, and repeats it. The table is short, so that
restoring a large buffer does not evict the processor's caches. Its length is prime, so that chunks
of a buffer differ unless their distance is a multiple of this length. The result of a reduction is
such a table as well.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from parbench.bench.plan.catalogue import DTYPES

PERIOD = 65_521
"""The number of elements after which the data of a rank repeats, a prime number."""
_MAX_VALUE = 1 << 24
"""The largest number in the data that is moved or reduced by min or max."""
_MIN_TERMS = 4
"""The least number of different terms that a rank contributes to a sum."""
_MAX_EXPONENT = 16
"""The limit of the exponents of 2 in the data of an average."""
_COMPARED_ELEMENTS = 1 << 22
"""The approximate number of elements that are compared at once."""

Codes = npt.NDArray[np.int64]
"""Test data or indices as integers, before the conversion to a dtype of torch."""
Table = npt.NDArray[np.int64 | np.float64]
"""The numbers that the data of a rank, or the result of a reduction, repeats."""


class DataPattern:
    """The generator of the test data of ``num_ranks`` ranks, and of the expected results.

    The data is for an operation that only moves data (empty ``redop``), or for a reduction by
    ``redop``. Moved data differs between any two ranks at every index, as far as the dtype has
    enough values. Results of reductions are exact in any order:

    * sum: terms are positive, and the largest sum is an integer that the dtype represents.
    * product: at index i the factor of rank i mod n is 2, and those of the others are 1.
    * min, max: at index i only rank i mod n holds the extreme.
    * avg: at index i only rank i mod n holds a number other than 0. It is a power of 2, whose
      share has the same bits whether a backend divides it or multiplies it by a rounded 1/n.

    Where the dtype has too few values for a sum or product of all ranks, only some of the ranks
    contribute at an index, and the others hold the neutral element. With fewer elements than ranks,
    min, max and avg cannot show whether the last ranks took part.
    """

    def __init__(
        self,
        dtype: str,
        num_ranks: int,
        device: torch.device,
        redop: str = "",
    ) -> None:
        """Store the properties of the data, without computing any.

        Args:
            dtype: the name of the element type, such as ``float32``.
            num_ranks: the number of ranks in the process group of the operation.
            device: the device of the buffers.
            redop: the reduction, such as ``sum``, empty for an operation that only moves data.
        """
        self._dtype = get_dtype(dtype)
        self._exact_up_to = DTYPES[dtype].exact_up_to
        self._num_ranks = num_ranks
        self._device = device
        self._redop = redop
        self.itemsize = self._dtype.itemsize

    def allocate(self, count: int) -> torch.Tensor:
        """Return an uninitialized buffer of ``count`` elements on the device."""
        return torch.empty(count, dtype=self._dtype, device=self._device)

    def compute_values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return elements ``start`` to ``start + count`` (exclusive) of a rank's data."""
        return self._repeat(self._compute_codes(rank, start, count), count)

    def compute_shards(self, start: int, counts: Sequence[int]) -> torch.Tensor:
        """Return the concatenated shards of all ranks, such as the result of an all-gather.

        The shard of a rank is elements ``start`` to ``start + counts[rank]`` of its data.
        """
        shards = [self.compute_values(rank, start, count) for rank, count in enumerate(counts)]
        return torch.cat(shards)

    def compute_reduction(self, start: int, count: int) -> torch.Tensor:
        """Return the expected result of reducing the data of all ranks by ``redop``.

        The result has elements ``start`` to ``start + count`` (exclusive) of the data.
        """
        joins: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum, "product": np.multiply}
        join = joins.get(self._redop, np.add)
        # A product of factors 2 can exceed the integers.
        accumulator = np.float64 if self._dtype.is_floating_point else np.int64
        table: Table = self._compute_codes(0, start, count).astype(accumulator)
        for rank in range(1, self._num_ranks):
            table = join(table, self._compute_codes(rank, start, count))
        if self._redop == "avg":
            table = table / self._num_ranks
        return self._repeat(table, count)

    def make_filler(self, buffer: torch.Tensor, rank: int) -> Callable[[], None]:
        """Return a function that fills ``buffer`` with the data of a rank, from element 0 on."""
        return self._make_copier(buffer, self._compute_codes(rank, 0, len(buffer)))

    def _repeat(self, table: Table, count: int) -> torch.Tensor:
        """Return a new tensor of ``count`` elements that repeats the numbers of ``table``.

        A table has the numbers of one period of the data, or fewer if ``count`` is less.
        """
        buffer = self.allocate(count)
        self._make_copier(buffer, table)()
        return buffer

    def _make_copier(self, buffer: torch.Tensor, table: Table) -> Callable[[], None]:
        """Return a function that fills ``buffer`` with repetitions of ``table``.

        The table has the numbers of one period of the data, or as many as ``buffer`` if that is
        shorter.
        """
        source = torch.from_numpy(table).to(self._device, self._dtype)
        num_repetitions = len(buffer) // PERIOD
        repetitions = buffer[: num_repetitions * PERIOD].view(num_repetitions, PERIOD)
        remainder = buffer[num_repetitions * PERIOD :]

        def copy() -> None:
            """Fill the buffer with repetitions of the table, of which the last may be cut off."""
            if num_repetitions > 0:
                repetitions.copy_(source)
            remainder.copy_(source[: len(remainder)])

        return copy

    def _compute_codes(self, rank: int, start: int, count: int) -> Codes:
        """Return elements ``start`` to ``start + count`` (exclusive) of a rank's data as integers.

        At most one period of 65,521 elements is returned, because the data repeats after it.
        """
        index = np.arange(start, start + min(count, PERIOD), dtype=np.int64) % PERIOD
        is_own = index % self._num_ranks == rank
        limit = min(self._exact_up_to, _MAX_VALUE)
        match self._redop:
            case "":
                # The ranks of a block have different numbers at each index.
                block, rank_in_block = divmod(rank, limit)
                return 1 + (_hash(block, index) + rank_in_block) % limit
            case "sum":
                return self._compute_terms(rank, index)
            case "product":
                num_turns = math.ceil(self._num_ranks / self._max_exponent)
                is_two = is_own | (_hash(rank, index) % 2 == 1)
                return np.where(is_two & self._is_on_turn(rank, index, num_turns), 2, 1)
            case "avg":
                exponents = _hash(rank, index) % min(self._max_exponent, _MAX_EXPONENT)
                return np.where(is_own, 1 << exponents, 0)
        # At each index the numbers of all ranks except one are in the lower half of the range.
        half = limit // 2
        maxima = 1 + _hash(rank, index) % half + np.where(is_own, half, 0)
        return maxima if self._redop == "max" else 2 * half + 1 - maxima

    def _compute_terms(self, rank: int, index: Codes) -> Codes:
        """Return the terms that a rank contributes to a sum, one for each index in ``index``.

        The terms are positive. If the dtype has too few values for the sum of all ranks, only some
        ranks contribute at an index, and the terms of the others are 0.
        """
        limit = min(self._exact_up_to, _MAX_VALUE * self._num_ranks)
        num_turns = math.ceil(self._num_ranks * _MIN_TERMS / limit)
        max_term = max(1, limit // math.ceil(self._num_ranks / num_turns))
        terms = 1 + _hash(rank, index) % max_term
        return np.where(self._is_on_turn(rank, index, num_turns), terms, 0)

    def _is_on_turn(self, rank: int, index: Codes, num_turns: int) -> npt.NDArray[np.bool_]:
        """Return an array with True for each index at which a rank contributes to a sum or product.

        ``index`` holds the indices of the elements, and the array is in the order of ``index``. At
        each index, one of every ``num_turns`` successive ranks contributes. The other ranks hold
        the neutral element (0 or 1). At the next index, other ranks contribute.
        """
        is_on_turn: npt.NDArray[np.bool_] = (index % self._num_ranks - rank) % num_turns == 0
        return is_on_turn

    @property
    def _max_exponent(self) -> int:
        """The exponent of the largest power of 2 that the dtype represents."""
        if self._dtype.is_floating_point:
            return int(torch.finfo(self._dtype).max).bit_length() - 1
        return self._exact_up_to.bit_length() - 1


def get_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as ``bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _hash(seed: int, index: Codes) -> Codes:
    """Return a pseudorandom number of 62 bits for each element of ``index``.

    A number depends on the index and on ``seed``. The function is the output function of SplitMix64
    (Steele 2014).
    """
    bits = index.astype(np.uint64) + np.uint64(seed << 32)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(2)).astype(np.int64)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with a number that no result contains, and return the tensor.

    The number is NaN for floating-point types and the smallest integer for integers.
    """
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the number of elements in which two tensors of one shape and dtype differ.

    NaN differs from every number.
    """
    # Few devices compare float8.
    is_float8 = result.itemsize == 1 and result.dtype.is_floating_point
    # Counting takes ten times as long as comparing.
    if not is_float8 and torch.equal(result, expected):
        return 0
    # In one piece, the comparison would take up to eight times the tensor's memory.
    num_pieces = len(result) // _COMPARED_ELEMENTS + 1
    pieces = zip(result.chunk(num_pieces), expected.chunk(num_pieces), strict=True)
    num_wrong = 0
    for piece, expected_piece in pieces:
        if is_float8:
            num_wrong += int((piece.float() != expected_piece.float()).sum())
        else:
            num_wrong += int((piece != expected_piece).sum())
    return num_wrong
