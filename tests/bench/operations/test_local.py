"""Work of one rank is checked in full, and a background load runs until the block ends."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

from parbench.bench.operations import local
from parbench.bench.operations.local import Gemm, background_load, copy, from_device, to_device
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.catalogue import BACKGROUND, DTYPES, GEMM_DTYPES, NO_LOAD
from parbench.bench.world.world import World
from tests.bench.operations.test_collectives import prepare
from tests.support.ranks import Ranks

THIS_MODULE = "tests.bench.operations.test_local"
SINGLE_RANK = mock.Mock(device=torch.device("cpu"), seed=0, rank=0, size=1)
SIZE = 4 * 65_521
LOADS = [str(kind) for kind in BACKGROUND.choices if kind != NO_LOAD]


@pytest.mark.parametrize("prepare_copy", [copy, to_device, from_device])
def test_copy_is_checked(prepare_copy: Callable[..., Operation]) -> None:
    benchmark = prepare_copy(SINGLE_RANK, size_bytes=SIZE, dtype="float32")
    benchmark.reset()
    assert benchmark.check() > 0
    benchmark.step()
    assert benchmark.check() == 0
    benchmark.output[-1] = 1 - benchmark.output[-1].float()
    assert benchmark.check() == 1
    [work] = benchmark.describe().work
    assert work.name == "algbw"
    assert work.amount == SIZE


@pytest.mark.parametrize("dtype", GEMM_DTYPES)
@pytest.mark.parametrize("m", [1, 33])
def test_gemm_is_right_after_step(dtype: str, m: int) -> None:
    benchmark = Gemm(SINGLE_RANK, m=m, dtype=dtype)
    for _ in range(2):
        benchmark.reset()
        assert benchmark.check() == m * m
        benchmark.step()
        assert benchmark.check() == 0
    [work] = benchmark.describe().work
    assert work.name == "flops"
    assert work.amount == 2 * m**3


def test_gemm_after_a_load_compares_random_products() -> None:
    benchmark = Gemm(SINGLE_RANK, m=64, load_seconds=0.01)
    assert not torch.equal(benchmark._a, benchmark._a.round())
    benchmark.step()
    assert benchmark.check() == 0


def test_gemm_partial_sums_are_exact_in_bfloat16() -> None:
    benchmark = Gemm(SINGLE_RANK, m=512)
    rows = benchmark._a[:5, :, None]
    columns = benchmark._b[:, :7]
    partial_sums = (rows * columns).cumsum(dim=1)
    assert float(partial_sums.abs().max()) <= DTYPES["bfloat16"].exact_up_to


def test_gemm_detects_wrong_earlier_product() -> None:
    benchmark = Gemm(SINGLE_RANK, m=16)
    benchmark.reset()
    benchmark.step()
    benchmark.corrupt()
    benchmark.reset()
    benchmark.step()
    assert benchmark.check() == 1
    assert benchmark.check() == 0


def step_next_to_load(world: World, kind: str) -> tuple[int, bool, int]:
    """Return wrong elements during a load, whether it stopped, and how many threads it left."""
    operation = prepare(world, "collective.all_reduce", size_bytes=1 << 16)
    num_threads = threading.active_count()
    rounds: list[int] = []
    wrong = 0
    make_load = local._make_load

    def make_counted_load(*args: Any) -> Callable[[], None]:
        load = make_load(*args)

        def run() -> None:
            load()
            rounds.append(1)

        return run

    with (
        mock.patch.object(local, "_make_load", make_counted_load),
        background_load(kind, world),
    ):
        while any(world.gather(len(rounds) < 3)):
            operation.reset()
            operation.step()
            wrong += operation.check()
        # The ranks leave the block at different times.
        time.sleep(0.02 * world.rank)
    num_rounds = len(rounds)
    time.sleep(0.01)
    stopped = len(rounds) == num_rounds
    return wrong, stopped, threading.active_count() - num_threads


@pytest.mark.parametrize("kind", LOADS)
def test_background_load_runs_until_block_ends(two_ranks: Ranks, kind: str) -> None:
    results = two_ranks.call(f"{THIS_MODULE}:step_next_to_load", kind=kind)
    assert results == [(0, True, 0), (0, True, 0)]


def count_threads_after_failing_block(world: World) -> int:
    """Return the load's threads after the block raised an error."""
    initial = threading.active_count()
    with suppress(ZeroDivisionError), background_load("gemm", world):
        raise ZeroDivisionError
    return threading.active_count() - initial


def test_background_load_ends_with_failed_block(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{THIS_MODULE}:count_threads_after_failing_block") == [0, 0]
