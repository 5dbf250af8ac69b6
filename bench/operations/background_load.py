"""Load beside what is measured, in a thread of each rank: matrix products, or a collective on a group of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bench.operations.local import Gemm
from bench.world.torch_compat import all_gather_single
from bench.world.world import World

NOTHING = "nothing"
_ELEMENTS = 1 << 18
_GEMM_SIZE = 384


@contextmanager
def background_load(kind: str, world: World) -> Iterator[None]:
    """Keep a load going on every rank while the block runs; every rank of the world enters it together."""
    if kind == NOTHING:
        yield
        return
    group = dist.new_group(backend=world.backend)
    flags = dist.new_group(backend="gloo")
    stop = threading.Event()
    thread = threading.Thread(target=_loop, args=(_loads(kind, world, group), flags, stop, world), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        dist.destroy_process_group(group)
        dist.destroy_process_group(flags)


def _loop(load: Callable[[], object], flags: dist.ProcessGroup, stop: threading.Event, world: World) -> None:
    """Load until every rank is told to stop: ranks that stopped one by one would leave others in a collective."""
    stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    flag = torch.zeros(1)
    while True:
        with torch.cuda.stream(stream):
            load()
        if stream is not None:
            stream.synchronize()
        flag.fill_(float(stop.is_set()))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=flags)
        if flag.item():
            return


def _loads(kind: str, world: World, group: dist.ProcessGroup) -> Callable[[], object]:
    if kind == "gemm":
        return Gemm(_GEMM_SIZE, world.device).step
    n = len(world.hosts)
    one = torch.ones(_ELEMENTS // n * n, device=world.device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(one.fill_(1), group=group)
    other = torch.empty_like(one)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, one, group=group)
    shard = one[: len(one) // n]
    return lambda: all_gather_single(other, shard, group)
