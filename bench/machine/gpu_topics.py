"""Topics of GPUs that the doctor and a check look at: the facts, and whether they disturb."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parbench.bench.machine.gpu import IDLE, Gpu

UNKNOWN = "-"
FIXES = {
    "gpu driver": "see nvidia-smi and CUDA_VISIBLE_DEVICES: a driver older than its libraries, a GPU off the bus",
    "gpu processes": "end them, or leave these GPUs out (CUDA_VISIBLE_DEVICES): they share time, memory and links",
    "gpu clocks": "power: sudo nvidia-smi -pl WATTS; heat: cooling; set clocks: sudo nvidia-smi -rgc, -rac",
    "gpu power": "sudo nvidia-smi -pl WATTS sets it, as far as the rack's power allows",
    "gpu mig": "a slice is measured, and nccl joins none: sudo nvidia-smi -mig 0, and reset the GPU",
    "gpu memory": "reset it (sudo nvidia-smi -r -i GPU) or reboot; have it replaced if they come again",
    "gpu pcie": "reseat it, and see lspci -vv (LnkCap, LnkSta): data to and from the host takes longer",
    "gpu nvlink": "see nvidia-smi nvlink -e, dmesg (Xid) and the fabric manager's log; then reset or replace it",
    "gpu persistence": "sudo nvidia-smi -pm 1: otherwise the driver is unloaded between launches, "
    "which then start late",
}
_BUSY_BYTES = 2 << 30  # more than a driver uses itself
_BUSY_PERCENT = 50
_MIN_CLOCK_SHARE = 0.9  # of the highest clock, on a busy GPU


@dataclass(frozen=True)
class GpuTopic:
    """A topic that is looked at on each GPU."""

    name: str
    describe: Callable[[Gpu], str | None]  # the facts, None if unknown
    is_disturbing: Callable[[Gpu], bool]

    @property
    def short_name(self) -> str:
        return self.name.removeprefix("gpu ")


def list_gpu_topics(gpus: Sequence[Gpu]) -> tuple[GpuTopic, ...]:
    """Return the topics of GPUs that should be equal."""
    max_links = max((_count_active_links(gpu) or 0 for gpu in gpus), default=0)
    return (
        GpuTopic("gpu driver", lambda gpu: gpu.driver, lambda gpu: False),
        GpuTopic("gpu processes", _describe_processes, _is_in_use),
        GpuTopic("gpu clocks", _describe_clocks, lambda gpu: bool(list_slowdowns(gpu)) or _is_slow(gpu)),
        GpuTopic(
            "gpu power",
            lambda gpu: _format_share(gpu.power_limit_watts, gpu.power_default_watts, " W"),
            lambda gpu: _is_less(gpu.power_limit_watts, gpu.power_default_watts),
        ),
        GpuTopic("gpu mig", lambda gpu: _format_switch(gpu.mig), lambda gpu: bool(gpu.mig)),
        GpuTopic("gpu memory", _describe_memory_errors, _has_memory_errors),
        GpuTopic("gpu pcie", _describe_pcie, lambda gpu: _is_less(gpu.pcie_width, gpu.pcie_width_max)),
        GpuTopic(
            "gpu nvlink",
            _describe_links,
            lambda gpu: _is_less(_count_active_links(gpu), max_links),
        ),
        GpuTopic(
            "gpu persistence",
            lambda gpu: _format_switch(gpu.persistence),
            lambda gpu: gpu.persistence is False,
        ),
    )


def list_slowdowns(gpu: Gpu) -> list[str]:
    """Return the reasons that slow the clocks.

    The clocks of an idle GPU are low on purpose, except for the reasons that the hardware gives.
    """
    reasons = gpu.slowed_by or ()
    is_idle = IDLE in reasons
    return [reason for reason in reasons if reason != IDLE and (not is_idle or reason.startswith("hardware"))]


def format_gibibytes(num_bytes: int, suffix: str) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB {suffix}"


def _count_active_links(gpu: Gpu) -> int | None:
    return None if gpu.nvlinks is None else sum(rate != 0 for rate in gpu.nvlinks)


def _describe_links(gpu: Gpu) -> str | None:
    num_links = len(gpu.nvlinks or ()) or None
    return _format_share(_count_active_links(gpu), num_links, " active")


def _describe_processes(gpu: Gpu) -> str | None:
    used_bytes = gpu.memory_used_bytes or 0
    # A container does not show processes of others.
    if not gpu.processes and used_bytes > _BUSY_BYTES:
        return f"none shown, but {format_gibibytes(used_bytes, 'in use')}"
    if gpu.processes is None:
        return None
    return ", ".join(gpu.processes) or "none"


def _is_in_use(gpu: Gpu) -> bool:
    return bool(gpu.processes) or (gpu.memory_used_bytes or 0) > _BUSY_BYTES


def _is_slow(gpu: Gpu) -> bool:
    is_busy = (gpu.utilization_percent or 0) >= _BUSY_PERCENT
    return is_busy and _is_less(gpu.sm_clock, gpu.sm_clock_max, _MIN_CLOCK_SHARE)


def _describe_clocks(gpu: Gpu) -> str | None:
    parts = []
    sm_clock = _format_share(gpu.sm_clock, gpu.sm_clock_max, " MHz")
    if sm_clock is not None:
        parts.append(f"SM {sm_clock}")
    memory_clock = _format_share(gpu.memory_clock, gpu.memory_clock_max, " MHz")
    if memory_clock is not None:
        parts.append(f"memory {memory_clock}")
    slowdowns = list_slowdowns(gpu)
    if slowdowns:
        temperature = gpu.temperature_celsius
        heat = "" if temperature is None else f" at {temperature} degrees C"
        parts.append(f"slowed by {' and '.join(slowdowns)}{heat}")
    elif IDLE in (gpu.slowed_by or ()):
        parts.append(IDLE)
    return ", ".join(parts) or None


def _has_memory_errors(gpu: Gpu) -> bool:
    return bool(gpu.errors_uncorrected or gpu.remap_pending or gpu.remap_failed)


def _describe_memory_errors(gpu: Gpu) -> str | None:
    parts = []
    if gpu.ecc is not None:
        parts.append(f"ECC {_format_switch(gpu.ecc)}")
    if gpu.errors_uncorrected is not None:
        parts.append(f"{gpu.errors_uncorrected} uncorrected errors")
    if gpu.errors_corrected is not None:
        parts.append(f"{gpu.errors_corrected} corrected errors")
    if gpu.rows_remapped is not None:
        parts.append(f"{gpu.rows_remapped} rows remapped")
    if gpu.remap_pending:
        parts.append("a remap pending")
    if gpu.remap_failed:
        parts.append("a remap failed")
    return ", ".join(parts) or None


def _describe_pcie(gpu: Gpu) -> str | None:
    parts = []
    lanes = _format_share(gpu.pcie_width, gpu.pcie_width_max, " lanes")
    if lanes is not None:
        parts.append(lanes)
    generation = _format_share(gpu.pcie_generation, gpu.pcie_generation_max)
    if generation is not None:
        parts.append(f"generation {generation}")
    return ", ".join(parts) or None


def _format_switch(is_on: bool | None) -> str | None:
    if is_on is None:
        return None
    return "on" if is_on else "off"


def _is_less(value: float | None, limit: float | None, share: float = 1.0) -> bool:
    return value is not None and limit is not None and value < share * limit


def _format_share(value: float | None, total: float | None, unit: str = "") -> str | None:
    """Return ``8 of 16 lanes``; None if the value is unknown."""
    if value is None:
        return None
    return f"{value:g}{unit}" if total is None else f"{value:g} of {total:g}{unit}"
