"""Faults of a communication whose results must differ from the right one, without ranks."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.operations.data_pattern import DataPattern, get_dtype
from parbench.bench.plan.catalogue import DEFINITIONS

Array = npt.NDArray[np.float64]
Trials = Iterator[tuple[str, bool]]
"""Kind of each fault that was tried, and whether the result differs from the right one."""
CHUNK_LENGTH = 16
"""Elements of a chunk, so that chunks of different ranks are not equal by chance."""

CPU = torch.device("cpu")
JOIN: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}
[ALL_REDUCE] = [entry for entry in DEFINITIONS if entry.name == "collective.all_reduce"]


def is_supported(dtype: str, num_ranks: int, redop: str) -> bool:
    params = ALL_REDUCE.complete({"size_bytes": 8192, "dtype": dtype, "redop": redop})
    spec = WorldSpec(nproc=num_ranks, backend="nccl", device="cuda")
    return ALL_REDUCE.refuse(params, spec) is None


def stack_values(pattern: DataPattern, num_ranks: int, count: int) -> Array:
    """Return the first elements of every rank, one row for each rank."""
    return np.stack(
        [pattern.compute_values(rank, 0, count).double().numpy() for rank in range(num_ranks)]
    )


def are_rows_unique(rows: Array) -> bool:
    contents = {row.tobytes() for row in np.ascontiguousarray(rows)}
    return len(contents) == len(rows)


def compute_averages(sums: Array, divisor: int, dtype: torch.dtype) -> list[Array]:
    """Divide sums like backends: by the divisor, or times its reciprocal, rounded or not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.from_numpy(sums).to(dtype).to(wide)
    share = torch.tensor(1.0, dtype=wide) / divisor
    averages = (total / divisor, total * share, total * share.to(dtype).to(wide))
    return [average.to(dtype).double().numpy() for average in averages]


class Reduction:
    """A reduction over the coded terms of all ranks."""

    def __init__(self, dtype: str, num_ranks: int, redop: str) -> None:
        self.dtype = get_dtype(dtype)
        self.num_ranks = num_ranks
        self.redop = redop
        self._pattern = DataPattern(dtype, num_ranks, CPU, redop)
        self._count = max(num_ranks, 64)
        self._terms = stack_values(self._pattern, num_ranks, self._count)
        self._result = self._pattern.compute_reduction(0, self._count).double().numpy()
        self._join = JOIN[redop]
        assert not self._differs(list(range(num_ranks)))

    def _differs(self, ranks: list[int]) -> bool:
        """Return True if the terms of these ranks give a wrong result."""
        joined = self._join.reduce(self._terms[ranks])
        if self.redop == "avg":
            joined = compute_averages(joined, self.num_ranks, self.dtype)[0]
        return bool((joined != self._result).any())

    def try_ranks(self) -> Trials:
        """Drop, repeat or replace the terms of ranks."""
        ranks = list(range(self.num_ranks))
        is_extreme = self.redop in ("min", "max")
        for rank in ranks:
            others = ranks[:rank] + ranks[rank + 1 :]
            yield "dropped rank", self._differs(others)
            if not is_extreme:
                yield "rank counted twice", self._differs([*ranks, rank])
            if not is_extreme and self.num_ranks <= 128:
                next_rank = (rank + 1) % self.num_ranks
                yield "rank replaced by next", self._differs([*others, next_rank])
        num_remaining = max(1, self.num_ranks * 44 // 96)
        draw = np.random.default_rng(7)
        for _ in range(20):
            remaining = draw.permutation(self.num_ranks)[:num_remaining]
            yield "dropped ranks", self._differs(remaining.tolist())

    def try_divisors(self) -> Trials:
        """Divide by a wrong number; every backend's way to divide by the right one is exact."""
        sums = self._terms.sum(axis=0)
        for average in compute_averages(sums, self.num_ranks, self.dtype):
            assert (average == self._result).all()
        divisors = {1, self.num_ranks // 2, self.num_ranks - 1, self.num_ranks + 1, 64}
        for divisor in divisors - {self.num_ranks}:
            for average in compute_averages(sums, divisor, self.dtype):
                yield "wrong divisor", bool((average != self._result).any())

    def try_results(self) -> Trials:
        """Leave the input as it is, or swap chunks of the result."""
        yield "stale buffer", bool((self._terms != self._result).any())
        num_chunks = min(self.num_ranks, 128)
        results = self._pattern.compute_reduction(self.num_ranks, num_chunks * 48)
        chunks = results.double().numpy().reshape(num_chunks, 48)
        yield "swapped results", are_rows_unique(chunks)


def try_moves(dtype: str, num_ranks: int) -> Trials:
    """Confuse ranks, or the chunks that each rank sends to all ranks."""
    pattern = DataPattern(dtype, num_ranks, CPU)
    values = stack_values(pattern, num_ranks, num_ranks * CHUNK_LENGTH)
    yield "wrong root", are_rows_unique(values)
    yield "swapped chunks", are_rows_unique(values.reshape(num_ranks**2, CHUNK_LENGTH))


def try_all(dtype: str, num_ranks: int) -> Trials:
    yield from try_moves(dtype, num_ranks)
    for redop in JOIN:
        if is_supported(dtype, num_ranks, redop):
            reduction = Reduction(dtype, num_ranks, redop)
            yield from reduction.try_ranks()
            yield from reduction.try_results()
            if redop == "avg":
                yield from reduction.try_divisors()
