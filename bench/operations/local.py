"""Work of a single rank as benchmarks, and a background load during a measurement."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from parbench.bench.operations.data_pattern import get_dtype
from parbench.bench.operations.operation import Operation, make_pattern
from parbench.bench.plan.catalogue import NO_LOAD
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Benchmark, Description, Work
from parbench.bench.world.world import World

_NUM_ROWS = 5
"""The number of different rows of the first matrix of Gemm."""
_NUM_COLUMNS = 7
"""The number of different columns of the second matrix of Gemm."""
_NUM_UNPAIRED = 8
"""The number of first terms of each dot product in Gemm that no other term cancels."""
_LOAD_PRODUCTS = 10  # between two looks at the clock
_DEVICE_REPEATS = 32
"""The number of products of a load that are queued together on a device."""


class Gemm(Benchmark):
    """A benchmark of the product C = A B of m x m matrices, with 2 m^3 FLOPs per step.

    Every C is compared with the expected matrix. A has five different rows of random integers from
    1 to 4, and B seven different columns of random integers from -6 to 6. So C repeats a table of
    5 x 7 numbers. In each dot product, all terms except eight or nine cancel in pairs. Partial sums
    are integers of at most 240 and exact in any dtype, order and splitting, so a single wrong bit in
    C is detected.

    GPUs need less power for these numbers than for random ones. With ``load_seconds`` above 0, A
    and B are normal random numbers, C is compared with the first result, and products are computed
    for ``load_seconds`` before the first timed step.
    """

    def __init__(
        self, world: World, *, m: int, dtype: str = "float32", load_seconds: float = 0.0
    ) -> None:
        """Allocate the matrices on this rank's device, and compute the expected product.

        Args:
            world: the ranks, of which only the device and the seed of this rank are used.
            m: the number of rows and of columns of each matrix.
            dtype: the element type of the matrices.
            load_seconds: the seconds of GEMMs of random numbers before the first timed step, 0 for
                a GEMM of exact numbers without such a load.
        """
        device = world.device
        torch_dtype = get_dtype(dtype)
        random = np.random.default_rng(world.seed)
        a = random.integers(1, 5, (_NUM_ROWS, m))
        b = random.integers(1, 7, (_NUM_COLUMNS, m))
        first = np.arange(_NUM_UNPAIRED, m - 1, 2)
        a[:, first + 1] = a[:, first]
        b[:, first + 1] = -b[:, first]
        rows = torch.from_numpy(a)
        columns = torch.from_numpy(b).T
        row_index = (torch.arange(m) % _NUM_ROWS).to(device)
        column_index = (torch.arange(m) % _NUM_COLUMNS).to(device)
        self._a = rows.to(device, torch_dtype)[row_index]
        self._b = columns.to(device, torch_dtype)[:, column_index].contiguous()
        table = (rows @ columns).to(device, torch_dtype)
        self._reference = table[row_index][:, column_index].contiguous()
        self._c = torch.empty(m, m, device=device, dtype=torch_dtype)
        self._num_wrong = torch.zeros((), device=device, dtype=torch.int64)
        self._is_unchecked = False  # whether C holds a product that was not compared
        self._dtype = dtype
        if load_seconds > 0:
            self._a.normal_()
            self._b.normal_()
            torch.mm(self._a, self._b, out=self._reference)
            self._load(world, load_seconds)

    def _load(self, world: World, seconds: float) -> None:
        """Multiply the matrices and check C repeatedly for ``seconds``, which heats the GPU."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(_LOAD_PRODUCTS):
                self.step()
                self._compare()
            world.sync()

    def step(self) -> None:
        """Multiply the matrices once."""
        torch.mm(self._a, self._b, out=self._c)
        self._is_unchecked = True

    def reset(self) -> None:
        """Compare the last C with the expected matrix, and fill C with NaN.

        So a step that does not write C is detected.
        """
        self._compare()
        self._c.fill_(float("nan"))

    def _compare(self) -> None:
        """Compare C with the expected matrix, and add the number of wrong elements to a counter.

        The counter is on the device, and the host does not wait for the result. Nothing is done if
        the last C has been compared already.
        """
        if self._is_unchecked:
            self._num_wrong += (self._c != self._reference).sum()
        self._is_unchecked = False

    def check(self) -> int:
        """Return the number of wrong elements of C in all steps since the last check."""
        # C is compared even if no step wrote it, because then a reset has left NaN.
        self._is_unchecked = True
        self._compare()
        num_wrong = int(self._num_wrong)
        self._num_wrong.zero_()
        return num_wrong

    def corrupt(self) -> None:
        """Add 1 to the last element of C, which makes this element wrong."""
        self._c[-1, -1] += 1

    def describe(self) -> Description:
        """Return the floating-point operations of a step, the matrix size ``m`` and the dtype."""
        m = len(self._c)
        flops = Work(name="flops", amount=2 * m**3)
        return Description(work=(flops,), details={"m": m, "dtype": self._dtype})


gemm = Gemm


def copy(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Return the benchmark of copying ``size_bytes`` within the device's memory, on every rank.

    Its algbw counts each copied byte once, although it is read and written.
    """
    return _make_copy(world, size_bytes, dtype)


def to_device(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Return the benchmark of copying ``size_bytes`` from pinned host memory to the device.

    Every rank copies at the same time. On a CPU the copy is within the memory of the host.
    """
    return _make_copy(world, size_bytes, dtype, from_host=True)


def from_device(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Return the benchmark of copying ``size_bytes`` from the device to pinned host memory.

    Every rank copies at the same time. On a CPU the copy is within the memory of the host.
    """
    return _make_copy(world, size_bytes, dtype, to_host=True)


def _make_copy(
    world: World,
    size_bytes: int,
    dtype: str,
    *,
    from_host: bool = False,
    to_host: bool = False,
) -> Operation:
    """Return the benchmark of copying ``size_bytes`` of this rank's test data.

    The copy is within the memory of the rank's device. With ``from_host`` the source is in
    pinned memory of the host instead, and with ``to_host`` the target.
    """
    pattern = make_pattern(world, dtype)
    count = size_bytes // pattern.itemsize
    is_gpu = world.device.type == "cuda"
    source = pattern.compute_values(world.rank, 0, count)
    if from_host and is_gpu:
        source = source.cpu().pin_memory()
    target = pattern.allocate(count)
    if to_host:
        target = torch.empty_like(target, device="cpu", pin_memory=is_gpu)
    algbw = Work(name="algbw", amount=target.nbytes)
    return Operation(
        call=lambda: target.copy_(source, non_blocking=True),
        output=target,
        expected=lambda: pattern.compute_values(world.rank, 0, count).to(target.device),
        description=Description(work=(algbw,), details={"size_bytes": target.nbytes}),
    )


@contextmanager
def background_load(kind: str, world: World) -> Iterator[None]:
    """Run a background load on every rank while the ``with`` block runs.

    ``kind`` is ``nothing`` or ``gemm``, which multiplies matrices. The load runs in a thread and,
    on a GPU, on a CUDA stream of its own.
    """
    if kind == NO_LOAD:
        yield
        return
    on_device = world.device.type == "cuda"
    # A product takes about a millisecond.
    load = Gemm(world, m=4096 if on_device else 384).step
    stop = threading.Event()

    def repeat_load() -> None:
        """Repeat the load until this rank has reached the end of its ``with`` block."""
        while not stop.is_set():
            load()

    def repeat_load_on_device() -> None:
        """Repeat the load on a stream, of which the host queues several steps at once."""
        accelerator.select_device(world.device.index)  # a new thread starts with the first device
        end = accelerator.make_event(blocking=True)
        with accelerator.make_stream(world.device):
            while not stop.is_set():
                for _ in range(_DEVICE_REPEATS):
                    load()
                end.record()
                end.synchronize()

    thread = threading.Thread(
        target=repeat_load_on_device if on_device else repeat_load, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
