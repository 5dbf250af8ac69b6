"""The measured peak is the best of the sizes, in operations per second of a clock."""

import time
from collections.abc import Callable

import pytest
import torch

from workloads.gemm_peak import measured_peak

pytestmark = pytest.mark.measures

CPU = torch.device("cpu")


class FakeClock:
    """A clock that only products move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def timed_products(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Make every product of size m take as long as a function says."""

    def install(duration: Callable[[int], float]) -> None:
        clock = FakeClock()

        def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            clock.now += duration(a.shape[0])
            return out

        monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
        monkeypatch.setattr(torch, "mm", product)

    return install


def test_a_machine_of_one_teraflop_is_measured_as_one(
    timed_products: Callable[[Callable[[int], float]], None],
) -> None:
    timed_products(lambda m: 2 * m**3 / 1e12)
    assert measured_peak(CPU, torch.float32, sizes=(64,)) == pytest.approx(1e12)


def test_the_best_size_counts(timed_products: Callable[[Callable[[int], float]], None]) -> None:
    timed_products(lambda m: 2 * m**3 / (3e9 if m == 32 else 1e9))
    assert measured_peak(CPU, torch.float32, sizes=(16, 32, 64)) == pytest.approx(3e9)


def test_a_slow_first_product_does_not_count(timed_products: Callable[[Callable[[int], float]], None]) -> None:
    calls: list[int] = []

    def duration(m: int) -> float:
        calls.append(m)
        return 100.0 if len(calls) == 1 else 2 * m**3 / 1e9

    timed_products(duration)
    assert measured_peak(CPU, torch.float32, sizes=(64,)) == pytest.approx(1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_peak_is_a_rate_that_this_machine_can_have(dtype: torch.dtype) -> None:
    start = time.perf_counter()
    peak = measured_peak(CPU, dtype, seconds=0.02, sizes=(64, 128))
    assert 1e6 < peak < 1e15
    assert time.perf_counter() - start < 20


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds\(0\) <= 0"):
        measured_peak(CPU, torch.float32, seconds=0)


@pytest.mark.gpu
def test_a_gpu_beats_ten_teraflops_in_bfloat16() -> None:
    assert measured_peak(torch.device("cuda"), torch.bfloat16) > 1e13
