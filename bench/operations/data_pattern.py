"""Test data that reveals wrong communication: exact numbers that depend on rank and index.

Data of ones cannot reveal swapped chunks, a wrong root or a stale buffer. Here each rank has a
table of numbers of its own, a hash of rank and index, and repeats it. The table is short, so that
restoring a large buffer does not evict the processor's caches. Its period is prime and each
repetition begins a little later in the table, so that chunks of a buffer differ at any length
and offset. The result of a reduction is such a table as well.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from parbench.bench.plan.catalogue import DTYPES

PERIOD = 65_521
"""The number of elements after which the data of a rank repeats.

``PERIOD`` and ``PERIOD - _SHIFT`` are prime numbers.
"""
_SHIFT = 72
"""The number of table elements by which each repetition begins later than the one before."""
_NUM_SHIFTS = 1024
"""The number of repetitions after which the beginning returns to the first element.

Repetition r begins at element (r mod 1024) * 72 of the table.
"""
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
Mask = npt.NDArray[np.bool_]
"""One bool for each index of the test data."""
Table = npt.NDArray[np.int64 | np.float64]
"""The numbers that the data of a rank, or the result of a reduction, repeats."""


class DataPattern:
    """The generator of the test data of ``num_ranks`` ranks, and of the expected results.

    The data is for an operation that only moves data (empty ``redop``), or for a reduction by
    ``redop``. Moved data differs between any two ranks at every index, and the first n elements of
    n ranks are all different, as far as the dtype has enough values. Results of reductions are
    exact in any order:

    * sum: terms are positive, and the largest sum is an integer that the dtype represents.
    * product: factors are 1 or 2.
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
        return self._repeat(
            self._compute_codes(rank, _compute_table_length(start + count)), start, count
        )

    def compute_shards(self, start: int, counts: Sequence[int]) -> torch.Tensor:
        """Return the concatenated shards of all ranks, such as the result of an all-gather.

        The shard of a rank is elements ``start`` to ``start + counts[rank]`` of its data.
        """
        shards = [self.compute_values(rank, start, count) for rank, count in enumerate(counts)]
        return torch.cat(shards)

    def make_filler(self, buffer: torch.Tensor, rank: int) -> Callable[[], None]:
        """Return a function that fills ``buffer`` with the data of a rank, from element 0 on."""
        table = self._compute_codes(rank, _compute_table_length(len(buffer)))
        return self._make_copier(buffer, table, 0)

    def compute_reduction(self, start: int, count: int) -> torch.Tensor:
        """Return the expected result of reducing the data of all ranks by ``redop``.

        The result has elements ``start`` to ``start + count`` (exclusive) of the data.
        """
        joins: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum, "product": np.multiply}
        join = joins.get(self._redop, np.add)
        length = _compute_table_length(start + count)
        # A product of factors 2 can exceed the integers.
        accumulator = np.float64 if self._dtype.is_floating_point else np.int64
        table: Table = self._compute_codes(0, length).astype(accumulator)
        for rank in range(1, self._num_ranks):
            table = join(table, self._compute_codes(rank, length))
        if self._redop == "avg":
            table = table / self._num_ranks
        return self._repeat(table, start, count)

    def _repeat(self, table: Table, start: int, count: int) -> torch.Tensor:
        """Return elements ``start`` to ``start + count`` (exclusive) of data that repeats a table.

        ``table`` holds the numbers that are repeated.
        """
        buffer = self.allocate(count)
        self._make_copier(buffer, table, start)()
        return buffer

    def _make_copier(self, buffer: torch.Tensor, table: Table, start: int) -> Callable[[], None]:
        """Return a function that fills ``buffer`` with the data that repeats a table.

        ``start`` is the index in the data of the first element of the buffer.
        """
        codes = torch.from_numpy(table).to(self._device, self._dtype)
        pairs = []
        position = 0
        while position < len(buffer):
            repetition, column = divmod(start + position, PERIOD)
            shift = repetition % _NUM_SHIFTS
            remaining = len(buffer) - position
            source = codes[shift * _SHIFT + column :]
            num_rows = min(remaining // PERIOD, _NUM_SHIFTS - shift) if column == 0 else 0
            if num_rows > 0:
                # Each row of the target begins _SHIFT elements later in the table.
                length = num_rows * PERIOD
                target = buffer[position:][:length].view(num_rows, PERIOD)
                source = source.as_strided((num_rows, PERIOD), (_SHIFT, 1))
            else:
                length = min(remaining, PERIOD - column)
                target = buffer[position:][:length]
                source = source[:length]
            pairs.append((target, source))
            position += length

        def copy() -> None:
            """Copy each part of the data from the table to the buffer."""
            for target, source in pairs:
                target.copy_(source)

        return copy

    def _compute_codes(self, rank: int, length: int) -> Codes:
        """Return the first ``length`` numbers of a rank's table, which depend on ``redop``."""
        index = np.arange(length, dtype=np.int64)
        match self._redop:
            case "":
                return self._compute_moved_values(rank, index)
            case "sum":
                return self._compute_terms(rank, index)
            case "product":
                return self._compute_product_inputs(rank, index)
            case "avg":
                exponents = _hash(rank, index) % min(self._largest_power, _MAX_EXPONENT)
                return np.where(self._is_own(rank, index), 1 << exponents, 0)
            case "max":
                return self._compute_maxima(rank, index)
            case _:
                return 2 * self._half_range + 1 - self._compute_maxima(rank, index)

    def _compute_moved_values(self, rank: int, index: Codes) -> Codes:
        """Return the data of a rank for an operation that only moves data, at these indices.

        The numbers are a permutation of the pairs of rank and index, so that all are different.
        Where the dtype has too few numbers, each block of as many indices as possible has its own
        permutation.
        """
        num_bits = min(self._exact_up_to, _MAX_VALUE).bit_length() - 1
        rank_bits = (self._num_ranks - 1).bit_length()
        index_bits = max(num_bits - rank_bits, 0)
        number = (rank << index_bits) + index % (1 << index_bits)
        key = _hash(rank >> num_bits, index >> index_bits)
        return _permute(number, num_bits, key) + 1

    def _compute_terms(self, rank: int, index: Codes) -> Codes:
        """Return the terms that a rank contributes to a sum at these indices.

        They are positive. If the dtype has too few values for the sum of all ranks, only some ranks
        contribute at an index, and the terms of the others are 0.
        """
        limit = min(self._exact_up_to, _MAX_VALUE * self._num_ranks)
        num_turns = max(1, _divide_up(self._num_ranks * _MIN_TERMS, limit))
        max_term = max(1, limit // _divide_up(self._num_ranks, num_turns))
        terms = 1 + _hash(rank, index) % max_term
        return np.where(self._is_on_turn(rank, index, num_turns), terms, 0)

    def _compute_product_inputs(self, rank: int, index: Codes) -> Codes:
        """Return the factors, 1 or 2, that a rank contributes to a product at these indices."""
        num_turns = _divide_up(self._num_ranks, self._largest_power)
        # Every rank has a factor of 2 among the first elements.
        is_two = (index < self._num_ranks) & self._is_own(rank, index)
        is_two |= _hash(rank, index) % 2 == 1
        return np.where(self._is_on_turn(rank, index, num_turns) & is_two, 2, 1)

    def _compute_maxima(self, rank: int, index: Codes) -> Codes:
        """Return the numbers that a rank contributes to a maximum at these indices.

        At each index the numbers of all ranks except one are in the lower half of the range.
        """
        is_extreme = self._is_own(rank, index)
        half = self._half_range
        return 1 + _hash(rank, index) % half + np.where(is_extreme, half, 0)

    @property
    def _half_range(self) -> int:
        """Half of the largest number that a rank contributes to a minimum or maximum."""
        return min(self._exact_up_to, _MAX_VALUE) // 2

    @property
    def _largest_power(self) -> int:
        """The exponent of the largest power of 2 that the dtype represents."""
        if self._dtype.is_floating_point:
            return int(torch.finfo(self._dtype).max).bit_length() - 1
        return self._exact_up_to.bit_length() - 1

    def _is_own(self, rank: int, index: Codes) -> Mask:
        """Return True for each index that belongs to this rank, which is each n-th for n ranks.

        There the rank holds the extreme of a minimum or maximum, the only number of an average
        other than 0, or a factor 2 of a product.
        """
        is_own: Mask = index % self._num_ranks == rank
        return is_own

    def _is_on_turn(self, rank: int, index: Codes, num_turns: int) -> Mask:
        """Return True for each index at which this rank contributes to a sum or product.

        At each index, one of every ``num_turns`` successive ranks contributes. The other ranks hold
        the neutral element. At the next index, other ranks contribute.
        """
        is_on_turn: Mask = (index % self._num_ranks - rank) % num_turns == 0
        return is_on_turn


def get_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as ``bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _divide_up(dividend: int, divisor: int) -> int:
    """Return ``dividend`` / ``divisor``, rounded up to a whole number."""
    return -(-dividend // divisor)


def _hash(seed: int, index: Codes) -> Codes:
    """Return a pseudorandom number of 62 bits for each index, which depends on index and seed.

    The function is the output function of SplitMix64 (Steele 2014).
    """
    bits = index.astype(np.uint64) + np.uint64(seed << 32)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(2)).astype(np.int64)


def _permute(number: Codes, num_bits: int, key: Codes) -> Codes:
    """Map each number below 2^num_bits to another one, by a permutation that depends on its key.

    ``number`` and ``key`` have equal shapes. Larger numbers are first taken modulo 2^num_bits.
    """
    mask = (1 << num_bits) - 1
    first_factor = (key & mask) | 1
    second_factor = ((key >> 24) & mask) | 1
    mixed = ((number & mask) * first_factor + (key >> 12)) & mask
    mixed ^= mixed >> max(num_bits // 2, 1)
    permuted: Codes = (mixed * second_factor + (key >> 36)) & mask
    return permuted


def _compute_table_length(count: int) -> int:
    """Return the number of table elements that the first ``count`` elements of data are made of."""
    if count <= PERIOD:
        return count
    num_repetitions = _divide_up(count, PERIOD)
    return PERIOD + min(num_repetitions - 1, _NUM_SHIFTS - 1) * _SHIFT


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
