"""How many wrong communications the coded data show, and how fast it is written.

python -m tests.studies.data_coding [--ranks 2 3 8 ...] computes what ranks would hold if an implementation went
wrong in a known way: for each way and number of ranks it prints how many were caught of those tried, in each type and
over all reductions that are not refused. Then it prints how fast a filler restores buffers. Nothing communicates. A
script, not a test: tests/bench/operations/test_operation.py holds that all are caught.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.operations.operation import DataPattern
from parbench.bench.plan.catalogue import DEFINITIONS, DTYPES

Array = npt.NDArray[np.float64]
RANKS = (2, 3, 8, 64, 96, 128, 1024)
CPU = torch.device("cpu")
JOIN = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
ALL_REDUCE = next(
    definition for definition in DEFINITIONS if definition.name == "collective.all_reduce"
)


def refused(dtype: str, n: int, redop: str) -> str | None:
    given = ALL_REDUCE.whole({"size_bytes": 1 << 13, "dtype": dtype, "redop": redop})
    return ALL_REDUCE.refuse(given, WorldSpec(nproc=n, backend="nccl", device="cuda"))


def averages(sums: Array, divisor: int, dtype: torch.dtype) -> Iterator[Array]:
    """Yield what backends make of sums of one term each: they divide last, or multiply by 1/n, rounded or not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total, share = (
        torch.from_numpy(sums).to(dtype).to(wide),
        torch.tensor(1.0, dtype=wide) / divisor,
    )
    for found in (total / divisor, total * share, total * share.to(dtype).to(wide)):
        yield found.to(dtype).double().numpy()


def reductions(dtype: str, n: int, redop: str, count: int) -> Iterator[tuple[str, bool]]:
    """Yield each wrong reduction of ``count`` elements that was tried, by its name, and whether it was seen."""
    code = DataPattern(dtype, n, CPU, redop)
    held = np.stack([code.values(rank, 0, count).double().numpy() for rank in range(n)])
    right, join = code.reduced(0, count).double().numpy(), JOIN[redop]
    if (dtype, redop) == ("bool", "product"):
        join = np.minimum
    ends: Callable[[Array], Array] = lambda joined: joined  # noqa: E731
    if redop == "avg":
        ends = lambda joined: next(averages(joined, n, getattr(torch, dtype)))  # noqa: E731
        for found in averages(held.sum(axis=0), n, getattr(torch, dtype)):
            assert (found == right).all(), (dtype, n)
        for divisor in {n - 1, n + 1, 1, max(n // 2, 1), *({64} - {n})}:
            for found in averages(held.sum(axis=0), divisor, getattr(torch, dtype)):
                yield "wrong divisor", bool((found != right).any())
    before, after = join.accumulate(held, axis=0), join.accumulate(held[::-1], axis=0)[::-1]
    assert (ends(before[-1]) == right).all(), (dtype, n, redop)
    for rank in range(n):
        parts = [*before[rank - 1 : rank or 0], *after[rank + 1 : rank + 2]]
        yield "dropped rank", bool((ends(join.reduce(np.stack(parts))) != right).any())
        if redop not in ("min", "max") and dtype != "bool":
            yield "counted twice", bool((ends(join(before[-1], held[rank])) != right).any())
        other = np.concatenate(
            [held[:rank], held[rank + 1 :], held[(rank + 1) % n : (rank + 1) % n + 1]]
        )
        if n <= 128 and redop not in ("min", "max"):
            yield "one for another", bool((ends(join.reduce(other)) != right).any())
    draw = np.random.default_rng(7)
    for _ in range(20):  # 52 of 96 and the like, also the last ranks alone
        kept = draw.permutation(n)[: max(1, n * 44 // 96)]
        yield "dropped ranks", bool((ends(join.reduce(held[kept])) != right).any())
    yield "dropped ranks", bool((ends(join.reduce(held[: max(1, n * 44 // 96)])) != right).any())
    yield "stale buffer", bool((held != right).any())
    chunks = min(n, 128)  # a bool's first n results are the same
    later = code.reduced(n, chunks * 48).double().numpy()
    yield from (("swapped results", seen) for seen in all_differ(later.reshape(chunks, 48)))


def moves(dtype: str, n: int, length: int) -> Iterator[tuple[str, bool]]:
    """Yield each pair of ranks' first chunks, and each chunk of n on each rank: whether another is the same."""
    code = DataPattern(dtype, n, CPU)
    held = np.stack([code.values(rank, 0, n * length).double().numpy() for rank in range(n)])
    yield from (("wrong root", seen) for seen in all_differ(held))
    yield from (("swapped chunks", seen) for seen in all_differ(held.reshape(n * n, length)))


def all_differ(rows: Array) -> list[bool]:
    """Return for each row whether it differs from all others."""
    keys = [row.tobytes() for row in np.ascontiguousarray(rows)]
    seen = Counter(keys)
    return [seen[key] == 1 for key in keys]


def enough(dtype: str, n: int) -> int:
    """Return how many elements a chunk needs for chance to make two of n^2 alike in one of 1000 trials."""
    bits = {"bool": 1}.get(dtype) or min(DTYPES[dtype].exact_up_to, 1 << 24).bit_length() - 1
    return 1 if bits >= 2 * (n - 1).bit_length() else -(-(4 * (n - 1).bit_length() + 10) // bits)


def caught(dtype: str, n: int) -> dict[str, tuple[int, int]]:
    """Return by the kind of wrong how many were caught and how many tried."""
    found: dict[str, list[bool]] = {}
    for redop in JOIN:
        if refused(dtype, n, redop) is None:
            for name, seen in reductions(dtype, n, redop, max(n, 64)):
                found.setdefault(name, []).append(seen)
    for name, seen in moves(dtype, n, enough(dtype, n)):
        found.setdefault(name, []).append(seen)
    return {name: (sum(seen), len(seen)) for name, seen in found.items()}


def speed(dtype: str, size_bytes: int) -> float:
    code = DataPattern(dtype, 8, CPU, "max")
    out = code.empty(size_bytes // code.itemsize)
    fill, seconds = code.filler(out, 3), []
    for _ in range(7):
        began = time.perf_counter()
        fill()
        seconds.append(time.perf_counter() - began)
    return size_bytes / 1e9 / float(np.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'wrong':<16} {'ranks':>5}  " + "  ".join(f"{dtype:>15}" for dtype in DTYPES))
    for n in given.ranks:
        by_type = {dtype: caught(dtype, n) for dtype in DTYPES}
        for name in dict.fromkeys(name for found in by_type.values() for name in found):
            cells = [
                "/".join(map(str, found[name])) if name in found else "-"
                for found in by_type.values()
            ]
            print(f"{name:<16} {n:>5}  " + "  ".join(f"{cell:>15}" for cell in cells), flush=True)
    print("\nfiller, GB/s on one core")
    for size in (1 << 20, 1 << 24, 1 << 28):
        print(
            f"{size >> 20:>5} MiB  "
            + "  ".join(f"{dtype} {speed(dtype, size):.1f}" for dtype in DTYPES)
        )


if __name__ == "__main__":
    main()
