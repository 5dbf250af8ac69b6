"""A load beside what is measured runs on every rank, ends with it, and leaves it right."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from unittest import mock

import pytest
from ranks import Ranks

from bench import beside
from bench.definitions import BESIDE
from bench.operation import Operation
from bench.runner import load_target
from bench.world import World

KINDS = [str(kind) for kind in BESIDE.choices if kind != beside.NOTHING]


def measured_beside(world: World, kind: str) -> tuple[bool, int, int]:
    """Return whether the load ran again and again, how much was wrong beside it, and how many threads it left."""
    prepare = load_target("bench.collectives:all_reduce")
    operation = cast(Operation, prepare(world, size_bytes=1 << 16, dtype="float32"))
    threads, done, wrong = threading.active_count(), [0], 0
    made = beside._loads

    def counted(*arguments: Any) -> Callable[[], object]:
        load = made(*arguments)

        def once() -> None:
            load()
            done[0] += 1

        return once

    with mock.patch.object(beside, "_loads", counted), beside.load_beside(kind, world):
        while world.sum(done[0] < 3):  # on any rank
            wrong += checked_step(operation)
        wrong += checked_step(operation)
        time.sleep(0.05 * world.rank)  # ranks do not come to the end at once
    ran = done[0]
    time.sleep(0.02)
    return ran >= 3 and done[0] == ran, wrong + checked_step(operation), threading.active_count() - threads


def checked_step(operation: Operation) -> int:
    operation.reset()
    operation.step()
    return operation.check()


def nothing_beside(world: World) -> tuple[int, int]:
    """Return how many process groups and threads nothing makes."""
    threads = threading.active_count()
    with mock.patch("torch.distributed.new_group") as new_group, beside.load_beside("nothing", world):
        started = threading.active_count() - threads
    return new_group.call_count, started


def broken_beside(world: World) -> tuple[int, int]:
    """Return how many threads run while the block does, and how many are left after it broke."""
    threads, running = threading.active_count(), 0
    with suppress(ZeroDivisionError), beside.load_beside("gemm", world):
        running = threading.active_count() - threads
        raise ZeroDivisionError
    return running, threading.active_count() - threads


def test_nothing_is_free(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_beside:nothing_beside") == [(0, 0), (0, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_runs_and_ends_on_every_rank_and_what_is_measured_stays_right(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks.call("test_beside:measured_beside", kind=kind) == [(True, 0, 0)] * 2


def test_a_load_ends_where_what_is_measured_breaks(two_ranks: Ranks) -> None:
    (first, left), (second, left_there) = two_ranks.call("test_beside:broken_beside")
    assert min(first, second) >= 1
    assert left == left_there == 0
