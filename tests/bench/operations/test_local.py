"""Work of one rank is checked in full, and a background load runs until the block ends."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest
import torch

from parbench.bench.operations.local import Gemm, background_load, copy, from_device, to_device
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.catalogue import DTYPES, GEMM_DTYPE

SINGLE_RANK = mock.Mock(device=torch.device("cpu"), seed=0, rank=0, size=1)
SIZE = 4 * 65_521


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


@pytest.mark.parametrize("dtype", GEMM_DTYPE.choices)
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


def test_background_load_runs_until_block_ends() -> None:
    num_threads = threading.active_count()
    with mock.patch.object(Gemm, "step") as step:
        with suppress(ZeroDivisionError), background_load("gemm", SINGLE_RANK):
            while step.call_count < 3:
                time.sleep(0.001)
            raise ZeroDivisionError
        num_rounds = step.call_count
        time.sleep(0.01)
    assert step.call_count == num_rounds
    assert threading.active_count() == num_threads
