"""Calls of torch that depend on the kind of accelerator. This module calls ``torch.cuda``.

No other module calls ``torch.cuda``. To add an accelerator, write these functions for it. torch's
build for ROCm offers the same calls, and ``torch.xpu`` most of them. ``bench.machine.nvml`` is the
counterpart that reports a host's devices without torch.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

Event = torch.cuda.Event
"""A point in a stream, whose time the device records."""
WAITING_MODULE = "torch.cuda"
"""The name of the module in whose functions a Python thread waits for a device."""
PROFILER_ACTIVITY = ProfilerActivity.CUDA
"""The activity with which torch's profiler records the work of a device."""
PROFILER_DEVICE = DeviceType.CUDA
"""The type of device that torch's profiler states for events on a device."""


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """The properties of a GPU, as torch reports them."""

    name: str
    """The product name, such as ``NVIDIA H100 80GB HBM3``."""
    uuid: str
    """The UUID in NVML's form, ``GPU-...``."""
    pci_address: str
    """The PCI address as Linux writes it, such as ``0000:1b:00.0``."""
    l2_cache_bytes: int
    """The size of the L2 cache in bytes."""


def has_lost_devices() -> bool:
    """Return True if this process cannot use CUDA, because CUDA was initialized before its fork.

    Private: ``torch.cuda._is_in_bad_fork``.
    """
    return bool(torch.cuda._is_in_bad_fork())


def count_devices() -> int:
    """Return the number of devices that this process may use."""
    return torch.cuda.device_count()


def select_device(index: int) -> torch.device:
    """Make the device with this index the current one of this thread, and return it."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def get_selected_device() -> torch.device | None:
    """Return the current device of this thread, None if this process has not initialized CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def get_properties(device: torch.device | int) -> DeviceProperties:
    """Return the properties of a device. An integer is the index of a device."""
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return DeviceProperties(
        name=properties.name,
        uuid=f"GPU-{str(properties.uuid).removeprefix('GPU-')}",
        pci_address=f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0",
        l2_cache_bytes=properties.L2_cache_size,
    )


def get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device as (major, minor), such as (9, 0) for an H100."""
    return torch.cuda.get_device_capability(device)


def find_library_version() -> str:
    """Return the version of the loaded NCCL library as text, such as ``2.27.3``.

    If the loaded version cannot be found, the text is ``unknown``. torch itself reports only the
    version with which it was compiled. Private: the name of torch's CUDA library.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libtorch_cuda.so").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown"
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def synchronize(device: torch.device) -> None:
    """Wait on the host until all work on the device is done."""
    torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait on the host until the work on this thread's stream of the device is done."""
    torch.cuda.current_stream(device).synchronize()


def make_event(*, blocking: bool = False) -> Event:
    """Return a new CUDA event that can record the time at which a stream reaches it.

    ``blocking`` decides how a host thread waits for the event: it sleeps if ``blocking`` is True,
    otherwise it polls without a pause.
    """
    return Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]


def make_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which work is queued on a new stream, without effect on the CPU."""
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def spin(cycles: int) -> None:
    """Queue a kernel on the current stream that runs for this many cycles of the device's clock.

    Private: ``torch.cuda._sleep``.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def capture_graph(warm_up: Callable[[], object], repeat: Callable[[], None]) -> Callable[[], None]:
    """Capture the work that ``repeat`` launches in a CUDA graph, and return its replay function.

    ``warm_up`` is called once on a side stream before the capture, as graphs require.
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


def count_free_bytes(device: torch.device) -> int:
    """Return the bytes of the device that tensors of this process can still occupy.

    They are the free memory of the device and the unused part of torch's cache.
    """
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def measure_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run ``step`` and return the peak of the bytes that tensors occupy during it.

    Memory that was already occupied before the step does not count.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start
