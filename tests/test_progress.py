"""What a watcher is told of a rank is true while it is in its phase, its steps and its wait."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

from bench.messages import Where
from bench.progress import Progress
from bench.world import World


def seen_meanwhile(progress: Progress, do: Callable[[], object]) -> Where:
    """Return what another thread sees 50 ms into ``do``."""
    seen: list[Where] = []

    def look() -> None:
        time.sleep(0.05)
        seen.append(progress.where())

    watcher = threading.Thread(target=look)
    watcher.start()
    do()
    watcher.join()
    return seen[0]


def dawdle() -> None:
    time.sleep(0.2)


def wait_for_the_late_one(world: World, late: int) -> Where:
    """Let one rank dawdle while the others wait for it in a collective; return what each one's watcher sees."""
    world.barrier()

    def arrive() -> None:
        if world.rank == late:
            dawdle()
        dist.all_reduce(torch.zeros(1), group=world.group)

    return seen_meanwhile(Progress(), arrive)


def wait_in_backward(world: World, late: int) -> Where:
    """Let one rank dawdle before its DDP step while the others wait in their backward pass for its gradients."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=world.group)
    world.barrier()

    def train() -> None:
        if world.rank == late:
            dawdle()
        model(torch.ones(1, 2)).sum().backward()

    return seen_meanwhile(Progress(), train)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_waits_for_gradients_is_told_from_one_that_is_elsewhere(two_ranks: Ranks, late: int) -> None:
    """The engine of autograd waits for DDP's buckets below any Python frame of torch.distributed."""
    seen = two_ranks.call("test_progress:wait_in_backward", late=late)
    assert "in backward" in seen[1 - late].stack
    assert seen[1 - late].communicates
    assert not seen[late].communicates


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_waits_in_a_collective_is_told_from_one_that_is_elsewhere(two_ranks: Ranks, late: int) -> None:
    seen = two_ranks.call("test_progress:wait_for_the_late_one", late=late)
    assert seen[1 - late].communicates
    assert "all_reduce" in seen[1 - late].stack
    assert not seen[late].communicates
    assert "in dawdle" in seen[late].stack
    assert "all_reduce" not in seen[late].stack.rpartition("in dawdle")[2]


def test_a_rank_that_computes_with_torch_does_not_communicate() -> None:
    class Slow(torch.nn.Module):
        def forward(self) -> None:
            dawdle()

    where = seen_meanwhile(Progress(), Slow())
    assert "torch/nn/modules/module.py" in where.stack
    assert not where.communicates


def test_a_rank_that_has_begun_nothing_is_starting() -> None:
    where = Progress().where()
    assert (where.phase, where.steps, where.communicates) == ("starting", 0, False)


def test_the_phase_is_the_last_one_entered_and_steps_are_those_of_the_case() -> None:
    progress = Progress()
    for phase, steps in (("prepare", 0), ("check", 1), ("warm-up", 4), ("timed", 10), ("check", 10)):
        progress.enter(phase)
        progress.steps = max(progress.steps, steps)
        assert (progress.where().phase, progress.where().steps) == (phase, steps)
    progress.enter("prepare")
    assert progress.where().steps == 0


def test_the_stack_is_that_of_the_thread_that_measures_and_not_of_the_one_that_asks() -> None:
    where = seen_meanwhile(Progress(), dawdle)
    assert "in dawdle" in where.stack
    assert "in look" not in where.stack
    assert where.stack.startswith("  File ")


def test_a_thread_that_is_gone_has_no_stack() -> None:
    made: list[Progress] = []
    thread = threading.Thread(target=lambda: made.append(Progress()))
    thread.start()
    thread.join()
    done = Where(phase="starting", steps=0, communicates=False, stack="")
    assert made[0].where() == done
