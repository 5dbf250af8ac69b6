"""What a rank does by itself: matrix products, copies in memory and to its host; and load beside what is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from parbench.bench.launch.control_channel import Work
from parbench.bench.operations.operation import DataPattern, Operation, dtype_of
from parbench.bench.world.benchmark import Benchmark, Description
from parbench.bench.world.torch_compat import all_gather_single
from parbench.bench.world.world import World

NOTHING = "nothing"
_ROUND_MS, _MOST_TIMES = 5.0, 1 << 10  # of a load on a device, beside which ranks' agreement to go on is short


class Gemm(Benchmark):
    """C = A B of square matrices: 2 m^3 floating-point operations a step, every product held against the reference.

    A has five different rows and B seven columns of random whole numbers up to 4 and 6, so C is a small table that
    repeats itself. But for the first eight, terms cancel in pairs: every sum along the way is a whole number of at most
    240, exact in any type, order and splitting. So a single wrong bit shows, in whichever of the products it is.
    """

    def __init__(self, world: World, *, m: int, dtype: str = "float32") -> None:
        device, kind = world.device, dtype_of(dtype)
        chance = np.random.default_rng(world.seed)
        a, b = (chance.integers(1, most, (rows, m), endpoint=True) for most, rows in ((4, 5), (6, 7)))
        pairs = (m - min(m, 8)) // 2
        last = m - 2 * pairs + np.arange(2 * pairs).reshape(pairs, 2)
        a[:, last[:, 1]], b[:, last[:, 1]] = a[:, last[:, 0]], -b[:, last[:, 0]]
        few_rows, few_columns = torch.from_numpy(a), torch.from_numpy(b).T
        rows, columns = (torch.arange(m) % one for one in (5, 7))
        self._a = few_rows.to(device, kind)[rows.to(device)]
        self._b = few_columns.to(device, kind)[:, columns.to(device)].contiguous()
        self._reference = (few_rows @ few_columns).to(device, kind)[rows.to(device)][:, columns.to(device)].contiguous()
        self._c = torch.empty(m, m, device=device, dtype=kind)
        self._wrong = torch.zeros((), device=device, dtype=torch.int64)
        self._fresh = False  # whether there is a product that nobody has looked at
        self._dtype = dtype

    def step(self) -> None:
        torch.mm(self._a, self._b, out=self._c)
        self._fresh = True

    def reset(self) -> None:
        self._look()
        self._c.fill_(float("nan"))

    def _look(self) -> None:
        if self._fresh:
            self._wrong += (self._c != self._reference).sum()  # added up on the device, which is not waited for
        self._fresh = False

    def check(self) -> int:
        """Return how many elements are wrong, in all products since the last check."""
        self._fresh = True  # a step that did nothing left what no product gives
        self._look()
        wrong = int(self._wrong)
        self._wrong.zero_()
        return wrong

    def corrupt(self) -> None:
        self._c[-1, -1] += 1

    def describe(self) -> Description:
        m = len(self._c)
        return Description(work=(Work(name="flops", amount=2 * m**3),), details={"m": m, "dtype": self._dtype})


gemm = Gemm


def copy(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy a buffer of ``size_bytes`` into another on every rank, each for itself; algbw counts each byte once."""
    code = DataPattern(dtype, world.size, world.device)
    source = code.values(world.rank, 0, size_bytes // code.itemsize)
    target = source.clone()
    return Operation(
        call=lambda: target.copy_(source),
        output=target,
        expected=lambda: code.values(world.rank, 0, len(target)),
        description=Description(
            work=(Work(name="algbw", amount=size_bytes),),
            details={"size_bytes": size_bytes, "read_bytes": size_bytes, "written_bytes": size_bytes},
        ),
    )


def to_device(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy ``size_bytes`` from page-locked memory of the host to the device, every rank for itself."""
    return _host_copy(world, size_bytes, dtype, to_device=True)


def from_device(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy ``size_bytes`` from the device to page-locked memory of the host, every rank for itself."""
    return _host_copy(world, size_bytes, dtype, to_device=False)


def _host_copy(world: World, size_bytes: int, dtype: str, *, to_device: bool) -> Operation:
    code = DataPattern(dtype, world.size, world.device)
    there = code.values(world.rank, 0, size_bytes // code.itemsize)
    here = there.cpu()
    if world.device.type == "cuda":
        here = here.pin_memory()
    source, target = (
        (here, torch.empty_like(there)) if to_device else (there, torch.empty_like(here, pin_memory=here.is_pinned()))
    )
    expected = source.to(target.device, copy=True)
    notes = () if here.is_pinned() else ("the device is the CPU: a copy within its memory",)
    return Operation(
        call=lambda: target.copy_(source, non_blocking=True),
        output=target,
        expected=lambda: expected,
        description=Description(
            work=(Work(name="algbw", amount=size_bytes),),
            details={"size_bytes": size_bytes, "moved_bytes": size_bytes},
            notes=notes,
        ),
    )


@contextmanager
def background_load(kind: str, world: World) -> Iterator[list[float]]:
    """Keep a load going on every rank while the block runs, which every rank of the world enters together.

    Yield the rounds of it, in ms on the device; on a CPU they are not timed.
    """
    rounds: list[float] = []
    if kind == NOTHING:
        yield rounds
        return
    all_ranks = (tuple(range(len(world.hosts))),)
    group = world.get_process_group(all_ranks, "background load")
    flags = world.get_process_group(all_ranks, "end of background load", backend="gloo")
    on_device = world.device.type == "cuda"
    load, stop = _load(kind, world, group, on_device), threading.Event()
    if on_device:  # a communicator is not made beside work that may wait for it
        load()
        world.sync()

    def keep_going() -> None:
        take = _on_own_stream(load, world.device) if on_device else None
        times, told = 1, torch.zeros(2)  # ranks that stopped one by one would leave others in a collective
        while not told[0]:
            if take is None:
                load()
            else:
                rounds.append(take(times))
            told.copy_(torch.tensor([stop.is_set(), rounds[-1] if rounds else _ROUND_MS]))
            dist.all_reduce(told, op=dist.ReduceOp.MIN, group=flags)
            times = min(2 * times, _MOST_TIMES) if told[1] < _ROUND_MS else times

    thread = threading.Thread(target=keep_going, daemon=True)
    thread.start()
    try:
        yield rounds
    finally:
        stop.set()
        thread.join()


def _on_own_stream(load: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """Return what does a load so often on a stream of this thread's own, and says how long the device took, in ms."""
    torch.cuda.set_device(device)  # a new thread's is the first
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def take(times: int) -> float:
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(times):
                load()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return take


def _load(kind: str, world: World, group: dist.ProcessGroup, on_device: bool) -> Callable[[], object]:
    """Return a load of about a millisecond; a device is so much faster, and launching is not to take longer."""
    if kind == "gemm":
        return Gemm(world, m=4096 if on_device else 384).step
    n = len(world.hosts)
    data = torch.ones((1 << (25 if on_device else 18)) // n * n, device=world.device)
    other, shard = torch.empty_like(data), data[: len(data) // n]
    return {
        "all_reduce": lambda: dist.all_reduce(data.fill_(1), group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, data, group=group),
        "all_gather": lambda: all_gather_single(other, shard, group),
    }[kind]
