"""The child process that calls NVML: ``python -m parbench.bench.machine.nvml report|sample|watch``.

It prints a ``GpuReport`` as JSON. ``watch`` samples the GPUs each second until its standard input
ends, and reports the maxima.
"""

import ctypes
import functools
import os
import select
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pynvml  # type: ignore[import-untyped]
from msgspec.structs import replace

from parbench.bench.machine.gpu import (
    FABRIC_READY,
    IDLE,
    NO_FAILURE,
    OTHER_NUMA_NODE,
    POWER_CAP,
    SAME_BRIDGE,
    SAME_NUMA_NODE,
    SAME_SWITCH,
    Gpu,
    GpuFailure,
    GpuReport,
)

WATCH_SECONDS = 1.0
# The fields of a GPU whose values NVML returns as they are: a function and its arguments.
_QUERIES: dict[str, tuple[Any, ...]] = {
    "uuid": (pynvml.nvmlDeviceGetUUID,),
    "minor": (pynvml.nvmlDeviceGetMinorNumber,),
    "sm_clock_max": (pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
    "memory_clock_max": (pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_MEM),
    "pcie_generation_max": (pynvml.nvmlDeviceGetMaxPcieLinkGeneration,),
    "pcie_width_max": (pynvml.nvmlDeviceGetMaxPcieLinkWidth,),
    "sm_clock": (pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
    "memory_clock": (pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
    "temperature_celsius": (pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    "pcie_generation": (pynvml.nvmlDeviceGetCurrPcieLinkGeneration,),
    "pcie_width": (pynvml.nvmlDeviceGetCurrPcieLinkWidth,),
    "errors_corrected": (
        pynvml.nvmlDeviceGetTotalEccErrors,
        pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    ),
    "errors_uncorrected": (
        pynvml.nvmlDeviceGetTotalEccErrors,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    ),
}
_SWITCHES = {
    "persistence": pynvml.nvmlDeviceGetPersistenceMode,
    "mig": pynvml.nvmlDeviceGetMigMode,
    "ecc": pynvml.nvmlDeviceGetEccMode,
}
_POWERS = {
    "power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit,
    "power_default_watts": pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
}
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
# Error counters of one NVLink, by the names that nvidia-smi prints. Left out are counters that
# increase on good links: codewords without errors, corrected bits and successful recoveries.
_LINK_COUNTERS = {
    "replay errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    "recovery errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    "crc errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    # since Blackwell
    "malformed packet errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    "buffer overrun errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    "rx remote errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS,
    "link recovery failed events": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    "effective errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
    "symbol errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
}
# A bin counts codewords with this number of errors.
for _number in range(8, 16):
    _field = pynvml.NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_0 + _number
    _LINK_COUNTERS[f"fec errors - {_number}"] = _field
_OLD_LINK_COUNTERS = (  # before Hopper, by a function of their own
    ("replay errors", pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
    ("recovery errors", pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    ("crc errors", pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
    ("crc errors", pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
)
_MAXIMA = (
    "sm_clock",
    "memory_clock",
    "utilization_percent",
    "temperature_celsius",
    "pcie_generation",
    "pcie_width",
)
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
_VALUE_FIELDS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def main(action: str) -> None:
    """Call NVML in this process and print a ``GpuReport`` of this host's GPUs as JSON.

    ``action`` is ``report`` for all facts, or ``sample`` for facts without the details of links and
    processes. With ``watch``, the GPUs are sampled every second until standard input ends. Then all
    facts are reported, in which clocks and load are the maxima of the samples.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        report = GpuReport(failure=GpuFailure(kind="error", text=str(error)))
    else:
        report = _watch() if action == "watch" else make_report(has_details=action == "report")
    sys.stdout.buffer.write(msgspec.json.encode(report))


def _watch() -> GpuReport:
    """Sample the GPUs every second until standard input ends, and return a report of all facts.

    Clocks, load and temperature of each GPU are the maxima over the samples in which it was busy.
    """
    samples: list[Gpu] = []
    has_ended = False
    while not has_ended:
        samples += make_report(has_details=False).gpus
        readable, _, _ = select.select([sys.stdin], [], [], WATCH_SECONDS)
        has_ended = bool(readable)
    report = make_report(has_details=True)
    return replace(report, gpus=tuple(summarize_load(gpu, samples) for gpu in report.gpus))


def summarize_load(gpu: Gpu, samples: Iterable[Gpu]) -> Gpu:
    """Return a copy of ``gpu`` with the maxima of its clocks, load, temperature and PCIe link.

    The maxima are over those ``samples`` that have the UUID of ``gpu`` and a utilization above 0.
    ``slowed_by`` has all reasons for reduced clocks in these samples, except idleness. Without such
    samples, ``gpu`` is returned unchanged.
    """
    busy = [sample for sample in samples if sample.uuid == gpu.uuid and sample.utilization_percent]
    if not busy:
        return gpu
    maxima: dict[str, Any] = {}
    for name in _MAXIMA:
        values = [getattr(sample, name) for sample in busy]
        maxima[name] = max((value for value in values if value is not None), default=None)
    reasons = [reason for sample in busy for reason in sample.slowed_by or () if reason != IDLE]
    return replace(gpu, slowed_by=tuple(dict.fromkeys(reasons)), **maxima)


def make_report(*, has_details: bool) -> GpuReport:
    """Return NVML's report of all GPUs that this process may use.

    With ``has_details`` the report also has the fabric, NVLinks, processes and remapped rows of
    each GPU, the connection of each pair of GPUs, and the CUDA version of the driver.
    """
    gpus = []
    handles = []
    lost = []
    failure = NO_FAILURE
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(read_gpu(handle, index, has_details=has_details))
            handles.append(handle)
        except pynvml.NVMLError_NoPermission:
            continue  # The GPU belongs to another job or container.
        except pynvml.NVMLError as error:
            lost.append(index)
            failure = GpuFailure(kind="error", text=f"{error} (GPU {index})")
    return GpuReport(
        gpus=tuple(gpus),
        lost=tuple(lost),
        links=read_links(handles, gpus) if has_details else (),
        cuda_version=_read_cuda_version() if has_details else None,
        failure=failure,
    )


def read_clocks(uuid: str) -> Gpu:
    """Read the current SM clock of a GPU, and the reasons for a reduced clock.

    They are the fields ``sm_clock`` (MHz) and ``slowed_by`` of the result, whose other fields are
    None except the UUID. If NVML reports an error, all fields are None. NVML is called in this
    process, not in a child process.
    """
    try:
        handle = _open_gpu(uuid)
        sm_clock = _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
        return Gpu(uuid=uuid, sm_clock=sm_clock, slowed_by=_read_clock_reasons(handle))
    except pynvml.NVMLError:
        return Gpu()


@functools.cache
def _open_gpu(uuid: str) -> Any:
    """Initialize NVML and return its handle of the GPU with this UUID, cached in this process."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """Call an NVML function with ``args`` and return its result, None if NVML reports an error.

    An error usually means that the GPU or its driver lacks the function. ``NVMLError_GpuIsLost`` is
    raised, because a lost GPU answers no other function either.
    """
    try:
        return function(*args)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def read_gpu(handle: Any, index: int, *, has_details: bool) -> Gpu:
    """Return the facts about a GPU that NVML reports.

    ``handle`` is NVML's handle of the GPU, and ``index`` its index among all GPUs of the host. With
    ``has_details`` the result also has the fabric, NVLinks, processes and remapped rows. Raises
    ``NVMLError`` if the GPU is lost.
    """
    facts = {name: _ask(function, handle, *args) for name, (function, *args) in _QUERIES.items()}
    for name, function in _SWITCHES.items():
        facts[name] = _to_bool(_ask(function, handle))
    for name, function in _POWERS.items():
        milliwatts = _ask(function, handle)
        facts[name] = None if milliwatts is None else milliwatts / 1000
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None:
        facts |= {"memory_bytes": memory.total, "memory_used_bytes": memory.used}
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    if capability is not None:
        facts["compute_capability"] = "{}.{}".format(*capability)
    utilization = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    if utilization is not None:
        facts["utilization_percent"] = utilization.gpu
    pci = _ask(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    if pci is not None:
        facts["pci_address"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    if has_details:
        facts |= _read_details(handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        index=index,
        driver=_ask(pynvml.nvmlSystemGetDriverVersion),
        slowed_by=_read_clock_reasons(handle),
        **facts,
    )


def _read_details(handle: Any) -> dict[str, Any]:
    """Return the fabric, NVLinks, processes and remapped rows of a GPU, by field name of ``Gpu``.

    ``handle`` is NVML's handle of the GPU. Fields that NVML does not know may be missing.
    """
    fields = [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    num_links, link_speed = _read_fields(handle, fields)
    fabric, nvlink_domain = _read_fabric(handle)
    details: dict[str, Any] = {
        "fabric": fabric,
        "nvlink_domain": nvlink_domain,
        "processes": _read_processes(handle),
    }
    if num_links:
        links = range(num_links)
        active = [link for link in links if _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)]
        details |= {
            "nvlinks": num_links,
            "nvlink_bytes_per_second": 10**6 * link_speed if link_speed else None,
            "active_nvlinks": len(active),
            "nvlink_errors": _read_link_errors(handle, active),
        }
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        _, uncorrected, is_pending, has_failed = rows
        details |= {
            "rows_remapped": uncorrected,
            "remap_pending": bool(is_pending),
            "remap_failed": bool(has_failed),
        }
    return details


def _read_fabric(handle: Any) -> tuple[str | None, str | None]:
    """Return the state of a GPU's NVLink fabric and the id of its NVLink domain.

    The state is ``not started``, ``in progress``, ``completed`` or ``failed (REASON)``, and None if
    the GPU has no fabric. The domain is ``CLUSTER.CLIQUE``, and None if the GPU is in no domain.
    ``handle`` is NVML's handle of the GPU.
    """
    info = pynvml.c_nvmlGpuFabricInfo_t()
    if _ask(pynvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(info)) is None:
        return None, None
    state = _FABRIC_STATES.get(info.state)
    if state == FABRIC_READY and info.status:
        return f"failed ({pynvml.NVMLError(info.status)})", None
    cluster = bytes(info.clusterUuid)
    return state, f"{cluster.hex()}.{info.cliqueId}" if any(cluster) else None


def _to_bool(mode: Any) -> bool | None:
    """Return True if a mode of the GPU, such as ECC, is on now. None if ``mode`` is None (unknown).

    ``mode`` is NVML's result: the current mode, or a list of the current and the pending mode.
    """
    if isinstance(mode, list):
        mode = mode[0]
    return None if mode is None else bool(mode)


def _read_cuda_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as ``12.8``.

    None if it is unknown.
    """
    version = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def _read_clock_reasons(handle: Any) -> tuple[str, ...] | None:
    """Return NVML's reasons why the clocks of a GPU are low now, such as ``software power cap``.

    The other texts are ``idle``, ``hardware slowdown``, ``hardware thermal slowdown`` and so on.
    The result is empty if no reason is active, and None if the reasons are unknown.
    ``handle`` is NVML's handle of the GPU.
    """
    mask = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if mask is None:  # the name before driver 535
        mask = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if mask is None:
        return None
    return tuple(reason for bit, reason in _CLOCK_REASONS.items() if mask & bit)


def _read_processes(handle: Any) -> tuple[str, ...] | None:
    """Return the processes that compute on a GPU, each as ``NAME (pid PID)``. None if unknown.

    The parent of this process, which is parbench itself, is left out. ``handle`` is NVML's handle
    of the GPU.
    """
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if processes is None:
        return None
    names = []
    for process in processes:
        if process.pid != os.getppid():
            path = _ask(pynvml.nvmlSystemGetProcessName, process.pid)
            names.append(f"{Path(path or '?').name} (pid {process.pid})")
    return tuple(names)


def _read_fields(handle: Any, fields: Sequence[int | tuple[int, int]]) -> list[Any]:
    """Return the values of NVML fields of a GPU in the order of ``fields``, None if unknown.

    A field is the constant ``NVML_FI_...``, or a pair of this constant and the number of an NVLink.
    ``handle`` is NVML's handle of the GPU.
    """
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, fields)
    if values is None:
        return [None] * len(fields)
    return [
        None if value.nvmlReturn else getattr(value.value, _VALUE_FIELDS[value.valueType])
        for value in values
    ]


def _read_link_errors(handle: Any, links: Sequence[int]) -> dict[str, int]:
    """Return the error counters of a GPU's NVLinks by name, each summed over ``links``.

    ``links`` are the numbers of the active NVLinks. The names are as in nvidia-smi, such as ``crc
    errors``. Counters that the GPU does not have are left out. ``handle`` is NVML's handle of the
    GPU.
    """
    errors: Counter[str] = Counter()
    for link in links:
        values = _read_fields(handle, [(field, link) for field in _LINK_COUNTERS.values()])
        counts = list(zip(_LINK_COUNTERS, values, strict=True))
        if values.count(None) == len(values):
            counts = [
                (name, _ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, kind))
                for name, kind in _OLD_LINK_COUNTERS
            ]
        for name, count in counts:
            if count is not None:
                errors[name] += count
    return dict(errors)


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
    main(sys.argv[1])
