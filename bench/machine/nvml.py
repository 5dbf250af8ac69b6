"""The child process that calls NVML: ``python -m parbench.bench.machine.nvml report|sample|watch``.

It prints a ``GpuReport`` as JSON. ``watch`` prints a sample each second until its standard input ends.
"""

import os
import select
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pynvml  # type: ignore[import-untyped]

from parbench.bench.machine.gpu import IDLE, POWER_CAP, Gpu, GpuFailure, GpuReport

WATCH_SECONDS = 1.0
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
# Fields of one NVLink, by the names that nvidia-smi prints.
_LINK_COUNTERS = {
    "replay errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    "recovery errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    "crc errors": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    # since Blackwell
    "malformed packet errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    "buffer overrun errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    "rx errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    "rx remote errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS,
    "rx general errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS,
    "local link integrity errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
    "tx discards": pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS,
    "link recovery successful events": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
    "link recovery failed events": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    "total link recovery events": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
    "effective errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
    "symbol errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
    # A bin counts codewords with this number of errors. Bin 0 counts codewords without errors.
    **{f"fec errors - {number}": pynvml.NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_0 + number for number in range(16)},
    "raw errors lane 0": pynvml.NVML_FI_DEV_NVLINK_COUNT_RAW_ERRORS_LANE0,
    "raw errors lane 1": pynvml.NVML_FI_DEV_NVLINK_COUNT_RAW_ERRORS_LANE1,
}
_OLD_LINK_COUNTERS = {  # before Hopper, by functions of their own
    "replay errors": (pynvml.NVML_NVLINK_ERROR_DL_REPLAY,),
    "recovery errors": (pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,),
    "crc errors": (pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
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
_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PCIe",
    pynvml.NVML_TOPOLOGY_SINGLE: "PCIe",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe",
    pynvml.NVML_TOPOLOGY_NODE: "PCIe",
    pynvml.NVML_TOPOLOGY_SYSTEM: "other NUMA node",
}


def main(action: str) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _print(GpuReport(failure=GpuFailure(kind="error", text=str(error))))
        return
    if action == "watch":
        while True:
            _print(make_report(has_details=False))
            if _has_ended(sys.stdin.fileno()):
                return
    else:
        _print(make_report(has_details=action == "report"))


def _print(report: GpuReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def _has_ended(input_descriptor: int) -> bool:
    """Wait for the next sample, and return whether the parent has closed the pipe meanwhile."""
    readable, _, _ = select.select([input_descriptor], [], [], WATCH_SECONDS)
    return bool(readable)


def make_report(*, has_details: bool) -> GpuReport:
    gpus = []
    handles = []
    lost = []
    failure = None
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


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """Call NVML, and return None for what a GPU or its driver does not report.

    Raises if the GPU is lost.
    """
    try:
        return function(*args)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def read_gpu(handle: Any, index: int, *, has_details: bool) -> Gpu:
    """Read a GPU.

    ``has_details`` adds remapped rows, NVLinks and processes. Raises NVMLError if it is lost.
    """
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    utilization = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) if has_details else None
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        index=index,
        uuid=_ask(pynvml.nvmlDeviceGetUUID, handle),
        pci_address=None if pci is None else _format_address(pci),
        driver=_ask(pynvml.nvmlSystemGetDriverVersion),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else memory.total,
        persistence=_to_bool(_ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        mig=_to_bool(_ask(pynvml.nvmlDeviceGetMigMode, handle)),
        ecc=_to_bool(_ask(pynvml.nvmlDeviceGetEccMode, handle)),
        power_limit_watts=_to_watts(_ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        power_default_watts=_to_watts(_ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        sm_clock_max=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_max=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        sm_clock_applications=_ask(pynvml.nvmlDeviceGetApplicationsClock, handle, pynvml.NVML_CLOCK_GRAPHICS),
        memory_clock_applications=_ask(pynvml.nvmlDeviceGetApplicationsClock, handle, pynvml.NVML_CLOCK_MEM),
        pcie_generation_max=_ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width_max=_ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlinks=_read_link_rates(handle) if has_details else None,
        sm_clock=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        slowed_by=_read_clock_reasons(handle),
        utilization_percent=None if utilization is None else utilization.gpu,
        temperature_celsius=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        memory_used_bytes=None if memory is None else memory.used,
        pcie_generation=_ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=_ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        errors_corrected=_read_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        errors_uncorrected=_read_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        rows_remapped=None if rows is None else rows[1],
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        processes=_read_processes(handle) if has_details else None,
        nvlink_errors=_read_link_errors(handle) if has_details else {},
    )


def _format_address(pci: Any) -> str:
    """Return a PCI address as the kernel writes it: ``0000:3b:00.0``."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _to_bool(mode: Any) -> bool | None:
    """Return whether a mode is on; of a current and a pending mode the current one counts."""
    if isinstance(mode, list):
        mode = mode[0]
    return None if mode is None else bool(mode)


def _to_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _read_cuda_version() -> str | None:
    version = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def _read_clock_reasons(handle: Any) -> tuple[str, ...] | None:
    mask = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if mask is None:  # the name before driver 535
        mask = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if mask is None:
        return None
    return tuple(reason for bit, reason in _CLOCK_REASONS.items() if mask & bit)


def _read_ecc_errors(handle: Any, error_type: int) -> int | None:
    count: int | None = _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, error_type, pynvml.NVML_VOLATILE_ECC)
    return count


def _read_processes(handle: Any) -> tuple[str, ...] | None:
    """Return the processes that compute on a GPU, except for the parent of this one."""
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
    """Return the values of fields, each an identifier or with a link's number.

    None for an unknown value.
    """
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, fields)
    if values is None:
        return [None] * len(fields)
    return [None if value.nvmlReturn else getattr(value.value, _VALUE_FIELDS[value.valueType]) for value in values]


def _read_link_rates(handle: Any) -> tuple[float | None, ...] | None:
    """Return the rate of each NVLink in GB/s.

    None if the GPU has no NVLink, nothing if all are inactive.
    """
    num_links, common_rate = _read_fields(
        handle, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    )
    if num_links is None:
        return None
    rates: list[float | None] = []
    for link in range(num_links):
        if not _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link):
            rates.append(0.0)
            continue
        [rate] = _read_fields(handle, [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)])
        rate = rate or common_rate
        rates.append(rate / 1000 if rate else None)
    return tuple(rates) if any(rate != 0 for rate in rates) else ()


def _read_link_errors(handle: Any) -> dict[str, int]:
    """Return the sum of each error counter over the NVLinks of a GPU."""
    [num_links] = _read_fields(handle, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
    errors: dict[str, int] = {}
    for link in range(num_links or 0):
        if _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link):
            for name, count in _read_counters(handle, link).items():
                errors[name] = errors.get(name, 0) + count
    return errors


def _read_counters(handle: Any, link: int) -> dict[str, int]:
    values = _read_fields(handle, [(field, link) for field in _LINK_COUNTERS.values()])
    counters = {name: value for name, value in zip(_LINK_COUNTERS, values, strict=True) if value is not None}
    if counters:
        return counters
    for name, kinds in _OLD_LINK_COUNTERS.items():
        counts = [_ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, kind) for kind in kinds]
        known = [count for count in counts if count is not None]
        if known:
            counters[name] = sum(known)
    return counters


def read_links(handles: Sequence[Any], gpus: Sequence[Gpu]) -> tuple[tuple[str, str, str], ...]:
    """Return the connection of each pair of GPUs."""
    links = []
    pairs = combinations(zip(handles, gpus, strict=True), 2)
    for (first_handle, first), (second_handle, second) in pairs:
        status = _ask(
            pynvml.nvmlDeviceGetP2PStatus,
            first_handle,
            second_handle,
            pynvml.NVML_P2P_CAPS_INDEX_NVLINK,
        )
        if status == pynvml.NVML_P2P_STATUS_OK:
            connection = "NVLink"
        else:
            level = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, first_handle, second_handle)
            connection = _PATHS.get(level, "")
        if connection and first.uuid and second.uuid:
            links.append((first.uuid, second.uuid, connection))
    return tuple(links)


if __name__ == "__main__":
    main(sys.argv[1])
