"""The child process that calls NVML: ``python -m parbench.bench.machine.nvml``.

It prints a ``GpuReport`` as JSON.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import msgspec
import pynvml  # type: ignore[import-untyped]

from parbench.bench.machine.gpu import (
    FABRIC_READY,
    IDLE,
    OTHER_NUMA_NODE,
    POWER_CAP,
    SAME_BRIDGE,
    SAME_NUMA_NODE,
    SAME_SWITCH,
    Gpu,
    GpuReport,
)

_CLOCK_REASONS = {
    pynvml.nvmlClocksEventReasonGpuIdle: IDLE,
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications clocks setting",
    pynvml.nvmlClocksEventReasonSwPowerCap: POWER_CAP,
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hardware power brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clock setting",
}
# The nearest common ancestor of two GPUs. nvidia-smi abbreviates these levels in topo -m.
_TOPOLOGY = {
    pynvml.NVML_TOPOLOGY_INTERNAL: SAME_SWITCH,  # on one board
    pynvml.NVML_TOPOLOGY_SINGLE: SAME_SWITCH,  # PIX
    pynvml.NVML_TOPOLOGY_MULTIPLE: SAME_SWITCH,  # PXB
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: SAME_BRIDGE,  # PHB
    pynvml.NVML_TOPOLOGY_NODE: SAME_NUMA_NODE,  # NODE: it crosses PCIe host bridges
    pynvml.NVML_TOPOLOGY_SYSTEM: OTHER_NUMA_NODE,  # SYS
}
_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: FABRIC_READY,
}


def main() -> None:
    """Call NVML in this process and print a ``GpuReport`` of this host's GPUs as JSON."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        report = GpuReport(failure=f"NVML reported {str(error)!r}")
    else:
        report = make_report()
    sys.stdout.buffer.write(msgspec.json.encode(report))


def make_report() -> GpuReport:
    """Return NVML's report of all GPUs that this process may use."""
    gpus = []
    handles = []
    lost = []
    failure = ""
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(read_gpu(handle, index))
            handles.append(handle)
        except pynvml.NVMLError_NoPermission:
            continue  # The GPU belongs to another job or container.
        except pynvml.NVMLError as error:
            lost.append(index)
            failure = f"NVML reported '{error} (GPU {index})'"
    return GpuReport(
        gpus=tuple(gpus),
        lost=tuple(lost),
        links=read_links(handles, gpus),
        failure=failure,
    )


def _ask(query: Callable[..., Any], *args: Any) -> Any:
    """Call a function that calls NVML, and return its result, or None if NVML reports an error.

    An error usually means that the GPU or its driver lacks the function. Only
    ``NVMLError_GpuIsLost`` is raised, because a lost GPU answers no other function either.
    """
    try:
        return query(*args)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def read_gpu(handle: Any, index: int) -> Gpu:
    """Return the facts about a GPU that NVML reports.

    ``handle`` is NVML's handle of the GPU, and ``index`` its index among all GPUs of the host.
    Raises ``NVMLError`` if the GPU is lost.
    """
    facts = {name: _ask(query, handle) for name, query in _QUERIES.items()}
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        index=index,
        driver=_ask(pynvml.nvmlSystemGetDriverVersion),
        **facts,
        **_read_nvlinks(handle),
    )


def _read_nvlinks(handle: Any) -> dict[str, Any]:
    """Return ``nvlinks``, ``active_nvlinks`` and ``nvlink_bytes_per_second`` of a GPU by these names.

    Empty if the GPU has no NVLinks. ``handle`` is NVML's handle of the GPU.
    """
    fields = [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, fields) or ()
    numbers = [0 if value.nvmlReturn else value.value.uiVal for value in values]
    if not any(numbers[:1]):
        return {}
    num_links, link_speed = numbers
    states = [_ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(num_links)]
    return {
        "nvlinks": num_links,
        "nvlink_bytes_per_second": 10**6 * link_speed or None,
        "active_nvlinks": sum(bool(state) for state in states),
    }


def _read_pci_address(handle: Any) -> str:
    """Return the PCI address of a GPU as the kernel writes it, such as ``0000:1b:00.0``."""
    pci = pynvml.nvmlDeviceGetPciInfo_v3(handle)
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _read_fabric(handle: Any) -> str | None:
    """Return the state of a GPU's NVLink fabric, None if the GPU has no fabric.

    The state is ``not started``, ``in progress``, ``completed`` or ``failed (REASON)``.
    """
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    state = _FABRIC_STATES.get(info.state)
    if state == FABRIC_READY and info.status:
        return f"failed ({pynvml.NVMLError(info.status)})"
    return state


def _read_clock_reasons(handle: Any) -> tuple[str, ...]:
    """Return NVML's reasons why the clocks of a GPU are low now, such as ``software power cap``.

    The other texts are ``idle``, ``hardware slowdown``, ``hardware thermal slowdown`` and so on.
    The result is empty if no reason is active.
    """
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return tuple(reason for bit, reason in _CLOCK_REASONS.items() if mask & bit)


# How each field of a GPU is read: a function of NVML's handle of the GPU.
_QUERIES: dict[str, Callable[[Any], Any]] = {
    "uuid": pynvml.nvmlDeviceGetUUID,
    "pci_address": _read_pci_address,
    "memory_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).total,
    "memory_used_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used,
    "persistence": lambda gpu: bool(pynvml.nvmlDeviceGetPersistenceMode(gpu)),
    # Of the current and the pending mode, the current one.
    "mig": lambda gpu: bool(pynvml.nvmlDeviceGetMigMode(gpu)[0]),
    "ecc": lambda gpu: bool(pynvml.nvmlDeviceGetEccMode(gpu)[0]),
    "power_limit_watts": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "power_default_watts": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "sm_clock_max": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "slowed_by": _read_clock_reasons,
    # The time since the driver was loaded in which heat lowered the clocks.
    "heat_seconds": lambda gpu: (
        pynvml.nvmlDeviceGetViolationStatus(gpu, pynvml.NVML_PERF_POLICY_THERMAL).violationTime
        / 1e9
    ),
    "pcie_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
    "pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "errors_uncorrected": lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(
        gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "fabric": _read_fabric,
    # The elements of NVML's row remapping: rows after corrected errors and after uncorrected
    # errors, True if a remapping is pending, True if one failed.
    "remap_pending": lambda gpu: bool(pynvml.nvmlDeviceGetRemappedRows(gpu)[2]),
    "remap_failed": lambda gpu: bool(pynvml.nvmlDeviceGetRemappedRows(gpu)[3]),
}


def read_links(handles: Sequence[Any], gpus: Sequence[Gpu]) -> tuple[tuple[str, str, str], ...]:
    """Return the connection of each pair of GPUs as a tuple (first UUID, second UUID, connection).

    The connection is ``NVLink`` or, without NVLink, the nearest common ancestor of the pair, such
    as ``same PCIe switch`` (a value of ``_TOPOLOGY``). A pair with an unknown connection or UUID is
    left out. ``handles`` are NVML's handles of ``gpus`` in the same order.
    """
    links = []
    for (handle_a, gpu_a), (handle_b, gpu_b) in combinations(zip(handles, gpus, strict=True), 2):
        index = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = _ask(pynvml.nvmlDeviceGetP2PStatus, handle_a, handle_b, index)
        level = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle_a, handle_b)
        connection = _TOPOLOGY.get(level)
        if status == pynvml.NVML_P2P_STATUS_OK:
            connection = "NVLink"
        if connection and gpu_a.uuid and gpu_b.uuid:
            links.append((gpu_a.uuid, gpu_b.uuid, connection))
    return tuple(links)


if __name__ == "__main__":
    main()
