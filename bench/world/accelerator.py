"""Calls of torch that depend on the kind of accelerator. This module calls ``torch.cuda``.

No other module calls ``torch.cuda``. To add an accelerator, write these functions for it. torch's
build for ROCm offers the same calls, and ``torch.xpu`` most of them. ``bench.machine.nvml`` is the
counterpart that reports a host's devices without torch.
"""

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from parbench.bench.text import UserError

Event = torch.cuda.Event
WAITING_MODULE = "torch.cuda"
"""The module in which a thread waits for a device."""
PROFILER_ACTIVITY = ProfilerActivity.CUDA
PROFILER_DEVICE = DeviceType.CUDA


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """The facts about a device that torch reports."""

    name: str
    uuid: str  # the UUID in NVML's form, GPU-...
    pci_address: str  # as the kernel writes it
    l2_cache_bytes: int


def has_lost_devices() -> bool:
    """Return True if this process was forked after CUDA was initialized and cannot use it.

    Private: ``torch.cuda._is_in_bad_fork``.
    """
    return bool(torch.cuda._is_in_bad_fork())


def is_available() -> bool:
    """Return True if this process can use at least one device."""
    return torch.cuda.is_available()


def count_devices() -> int:
    """Return the number of devices that this process may use."""
    return torch.cuda.device_count()


def select_device(index: int) -> torch.device:
    """Let this thread use a device, and return it."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def get_selected_device() -> torch.device | None:
    """Return the device that this thread uses, None if this process has not initialized CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def get_properties(device: torch.device | int) -> DeviceProperties:
    """Return the facts about a device, which may be given by its index."""
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return DeviceProperties(
        name=properties.name,
        uuid=f"GPU-{str(properties.uuid).removeprefix('GPU-')}",
        pci_address=f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0",
        l2_cache_bytes=properties.L2_cache_size,
    )


def get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (major, minor), which decides about data types and kernels."""
    return torch.cuda.get_device_capability(device)


def find_library_version() -> str:
    """Return the version of the loaded NCCL, otherwise the version that torch was compiled with.

    torch itself reports only the version that it was compiled with. Private: the name of torch's
    CUDA library.
    """
    number = ctypes.c_int()
    try:
        error = ctypes.CDLL("libtorch_cuda.so").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        error = -1
    if error != 0:
        compiled = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"{compiled} when torch was compiled"
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait for the work of this thread's stream only."""
    torch.cuda.current_stream(device).synchronize()


def make_event(*, blocking: bool = False) -> Event:
    """Return an event that records a time on the device.

    While the host thread waits for the event, it sleeps if ``blocking`` is True, otherwise it
    spins.
    """
    return Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]


def make_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the work of this thread is queued on a new stream."""
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def spin(cycles: int) -> None:
    """Keep the current stream busy for this many cycles of the device's clock.

    Private: ``torch.cuda._sleep``.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def capture_graph(warm_up: Callable[[], object], repeat: Callable[[], None]) -> Callable[[], None]:
    """Capture the calls of ``repeat`` in a CUDA graph and return a function that replays it.

    ``warm_up`` runs on a side stream before the capture, as graphs require.
    """
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's threads query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        repeat()
    return graph.replay


def profile_kernels(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Profile a step and return the kernel events of its trace file, in torch's format.

    Only trace files contain the grid of a kernel in all versions of torch.
    """
    with profile(activities=[PROFILER_ACTIVITY]) as profiler:
        step()
        synchronize(device)
    with TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_bytes())
    return [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def count_free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can allocate, including torch's unused cache."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def count_allocated_bytes(device: torch.device) -> int:
    """Return the bytes of the device that tensors of this process occupy."""
    return torch.cuda.memory_allocated(device)


def measure_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run a step and return the peak of the memory (bytes) that it allocates.

    Memory that was allocated before the step does not count.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


@contextmanager
def allocate_registered(
    group: dist.ProcessGroup, device: torch.device, resources: ExitStack
) -> Iterator[None]:
    """Allocate the block's CUDA tensors from NCCL's memory pool and register it with the group.

    NCCL registers the pool at the end of the block and deregisters it when ``resources`` closes.
    Every rank of the group calls this function. Raises ``UserError`` where torch has no allocator
    of NCCL. Private: ``ProcessGroup._get_backend`` and the memory pool of its NCCL backend.
    """
    backend = cast(Any, group._get_backend(device))
    # Buffers are registered with a communicator, which the first collective makes.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        problem = "torch has NCCL's memory allocator only on GPUs with multicast (NVLS)"
        raise UserError(f"register=true: {problem}") from error
    with torch.cuda.use_mem_pool(pool):
        yield
    backend.register_mem_pool(pool)
    resources.callback(backend.deregister_mem_pool, pool)
