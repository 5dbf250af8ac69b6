"""What a watcher is told of a rank is true while it is in its phase, its steps and its wait."""

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parbench.bench.launch.control_channel import StatusReply
from parbench.bench.rank.timing import Progress
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

Dawdle = Callable[[], None]


def seen_meanwhile(
    do: Callable[[Dawdle], object],
    ready: Callable[[StatusReply], bool],
    meet: Callable[[], None] = lambda: None,
) -> StatusReply:
    """Return what another thread sees of ``do`` once it is ``ready``; dawdling ends when every watcher has looked."""
    progress, seen, looked = Progress(), list[StatusReply](), threading.Event()

    def look() -> None:
        deadline = time.monotonic() + 10
        while not ready(where := progress.where()) and time.monotonic() < deadline:
            time.sleep(0.005)
        meet()
        seen.append(where)
        looked.set()

    def dawdle() -> None:
        looked.wait(60)

    watcher = threading.Thread(target=look)
    watcher.start()
    do(dawdle)
    watcher.join()
    return seen[0]


def dawdles(where: StatusReply) -> bool:
    return "in dawdle" in where.stack


def wait_for_the_late_one(world: World, late: int, *, in_backward: bool) -> StatusReply:
    """Let one rank dawdle while the others wait for it; return what each one's watcher sees.

    They wait in a collective, or in their backward pass for the late one's gradients.
    """
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=world.group)

    def do(dawdle: Dawdle) -> None:
        if world.rank == late:
            dawdle()
        if in_backward:
            model(torch.ones(1, 2)).sum().backward()
        else:
            dist.all_reduce(torch.zeros(1), group=world.group)

    return seen_meanwhile(
        do, dawdles if world.rank == late else lambda where: where.communicates, world.barrier
    )


def test_a_rank_that_waits_for_others_is_told_from_one_that_is_elsewhere(two_ranks: Ranks) -> None:
    """The engine of autograd waits for DDP's buckets below any Python frame of torch.distributed."""
    for late, in_backward in ((0, False), (1, False), (0, True), (1, True)):
        seen = two_ranks.call(
            "tests.bench.rank.test_timing_progress:wait_for_the_late_one",
            late=late,
            in_backward=in_backward,
        )
        assert (seen[1 - late].communicates, seen[late].communicates) == (True, False)
        assert ("in backward" if in_backward else "all_reduce") in seen[1 - late].stack
        assert "all_reduce" not in seen[late].stack.rpartition("in dawdle")[2]


def test_a_rank_that_computes_with_torch_does_not_communicate_and_its_stack_is_not_the_watchers() -> (
    None
):
    class Slow(torch.nn.Module):
        def forward(self, dawdle: Dawdle) -> None:
            dawdle()

    where = seen_meanwhile(Slow(), dawdles)
    assert "torch/nn/modules/module.py" in where.stack
    assert not where.communicates
    assert where.stack.startswith("  File ")
    assert "in dawdle" in where.stack
    assert "in look" not in where.stack


def test_a_thread_that_is_gone_has_no_stack() -> None:
    made: list[Progress] = []
    thread = threading.Thread(target=lambda: made.append(Progress()))
    thread.start()
    thread.join()
    assert made[0].where() == StatusReply(phase="starting", steps=0, communicates=False, stack="")
