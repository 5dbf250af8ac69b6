"""What a rank does by itself: a matrix product and a copy in memory, and load in a thread beside what is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bench.launch.control_channel import Work
from bench.operations.operation import DataPattern, Operation
from bench.world.subject import Description, Subject
from bench.world.torch_compat import all_gather_single
from bench.world.world import World

NOTHING = "nothing"
_ROUND_MS, _MOST_TIMES = 5.0, 1 << 10  # of a load on a device, beside which ranks' agreement to go on is short


class Gemm(Subject):
    """C = A B of square float32 matrices: 2 m^3 floating-point operations a step."""

    def __init__(self, world: World, *, m: int) -> None:
        device = world.device
        # small whole numbers, whose products and sums are exact in float32 in any order
        rows = torch.arange(m, device=device)
        self._a = ((rows[:, None] * 7 + rows[None, :] * 3) % 5).float()
        self._b = ((rows[:, None] * 2 + rows[None, :] * 11) % 7).float()
        self._c = torch.empty(m, m, device=device)

    def step(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def reset(self) -> None:
        self._c.fill_(float("nan"))

    def check(self) -> int:
        """Compare one row and one column with whole-number arithmetic on the CPU."""
        a, b, c = self._a.cpu().long(), self._b.cpu().long(), self._c.cpu()
        row = (a[0][:, None] * b).sum(dim=0)
        column = (a * b[:, -1][None, :]).sum(dim=1)
        return int((c[0] != row).sum() + (c[:, -1] != column).sum())

    def describe(self) -> Description:
        m = len(self._c)
        return Description(work=(Work(name="flops", amount=2 * m**3),), details={"m": m, "dtype": "float32"})


gemm = Gemm


def copy(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy a buffer of ``size_bytes`` into another on every rank, each for itself; algbw counts each byte once."""
    code = DataPattern(dtype, world.size, world.device)
    source = code.values(world.rank, 0, size_bytes // code.itemsize)
    target = source.clone()
    return Operation(
        call=lambda: target.copy_(source),
        asynchronous=False,
        output=target,
        expected=lambda: code.values(world.rank, 0, len(target)),
        description=Description(
            work=(Work(name="algbw", amount=size_bytes),),
            details={"size_bytes": size_bytes, "read_bytes": size_bytes, "written_bytes": size_bytes},
        ),
    )


@contextmanager
def background_load(kind: str, world: World) -> Iterator[list[float]]:
    """Keep a load going on every rank while the block runs, which every rank of the world enters together.

    Yield the rounds of it, in ms on the device; on a CPU they are not timed.
    """
    rounds = list[float]()
    if kind == NOTHING:
        yield rounds
        return
    group, flags = dist.new_group(backend=world.backend), dist.new_group(backend="gloo")
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
        dist.destroy_process_group(group)
        dist.destroy_process_group(flags)


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
