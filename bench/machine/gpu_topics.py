"""Topics of GPUs that the doctor and a check look at: the facts, and whether they disturb."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parbench.bench.machine.gpu import FABRIC_READY, IDLE, Gpu

UNKNOWN = "-"
DRIVER_FIX = (
    "see nvidia-smi and CUDA_VISIBLE_DEVICES: a driver older than its libraries, a GPU off the bus"
)
NVLINK_FIX = (
    "see nvidia-smi nvlink -e, dmesg (Xid) and the fabric manager's log; then reset or replace it"
)
_BUSY_BYTES = 2 << 30  # more than a driver uses itself
_BUSY_PERCENT = 50
_MIN_CLOCK_SHARE = 0.9  # of the highest clock, on a busy GPU


@dataclass(frozen=True)
class GpuTopic:
    """A topic that is examined on each GPU, such as its clocks or its PCIe link."""

    name: str
    describe: Callable[[Gpu], str | None]
    """Returns the facts about a GPU as text, None if they are unknown."""
    is_disturbing: Callable[[Gpu], bool]
    """Returns True if the state of a GPU disturbs measurements."""
    fix: str
    """Advice to the user if the state of a GPU disturbs."""


def list_gpu_topics(gpus: Sequence[Gpu]) -> tuple[GpuTopic, ...]:
    """Return the topics to examine on these GPUs, which should all be in the same state."""
    max_links = max((gpu.active_nvlinks or 0 for gpu in gpus), default=0)
    return (
        GpuTopic("driver", lambda gpu: gpu.driver, lambda gpu: False, DRIVER_FIX),
        GpuTopic(
            "processes",
            _describe_processes,
            lambda gpu: bool(gpu.processes) or _has_much_memory_in_use(gpu),
            "end them, or leave these GPUs out (CUDA_VISIBLE_DEVICES): they share time, memory and links",
        ),
        GpuTopic(
            "clocks",
            _describe_clocks,
            lambda gpu: bool(list_slowdowns(gpu)) or _is_clocked_down(gpu),
            "power: sudo nvidia-smi -pl WATTS; heat: cooling; set clocks: sudo nvidia-smi -rgc, -rac",
        ),
        GpuTopic(
            "power",
            lambda gpu: _format_share(gpu.power_limit_watts, gpu.power_default_watts, " W"),
            lambda gpu: _is_less(gpu.power_limit_watts, gpu.power_default_watts),
            "sudo nvidia-smi -pl WATTS sets it, as far as the rack's power allows",
        ),
        GpuTopic(
            "mig",
            lambda gpu: format_switch(gpu.mig),
            lambda gpu: gpu.mig is True,
            "a slice is measured, and nccl joins none: sudo nvidia-smi -mig 0, and reset the GPU",
        ),
        GpuTopic(
            "memory",
            _describe_memory_errors,
            lambda gpu: bool(gpu.errors_uncorrected or gpu.remap_pending or gpu.remap_failed),
            "reset it (sudo nvidia-smi -r -i GPU) or reboot; have it replaced if they come again",
        ),
        GpuTopic(
            "pcie",
            _describe_pcie,
            lambda gpu: _is_less(gpu.pcie_width, gpu.pcie_width_max),
            "reseat it, and see lspci -vv (LnkCap, LnkSta): data to and from the host takes longer",
        ),
        GpuTopic(
            "nvlink",
            lambda gpu: _format_share(gpu.active_nvlinks, gpu.nvlinks, " active"),
            lambda gpu: _is_less(gpu.active_nvlinks, max_links),
            NVLINK_FIX,
        ),
        GpuTopic(
            "fabric",
            lambda gpu: gpu.fabric,
            lambda gpu: gpu.fabric not in (None, FABRIC_READY),
            "sudo systemctl restart nvidia-fabricmanager, and see its log: CUDA cannot start without it",
        ),
        GpuTopic(
            "persistence",
            lambda gpu: format_switch(gpu.persistence),
            lambda gpu: gpu.persistence is False,
            "sudo nvidia-smi -pm 1: otherwise the driver is unloaded between launches, which then start late",
        ),
    )


def list_slowdowns(gpu: Gpu) -> list[str]:
    """Return the reasons why the clocks of a GPU are reduced.

    The clocks of an idle GPU are low on purpose, so only reasons of its hardware count then.
    """
    reasons = gpu.slowed_by or ()
    if IDLE in reasons:
        return [reason for reason in reasons if reason.startswith("hardware")]
    return list(reasons)


def describe_clock_drop(before: Gpu, after: Gpu) -> str:
    """Return a text about the fall of a GPU's clock and its reasons, empty if it did not fall."""
    if not _is_less(after.sm_clock, before.sm_clock, _MIN_CLOCK_SHARE):
        return ""
    cause = " and ".join(list_slowdowns(after)) or "no reason reported"
    return f"SM clock fell from {before.sm_clock} to {after.sm_clock} MHz ({cause})"


def format_gibibytes(num_bytes: int | None, suffix: str) -> str | None:
    """Return ``1.50 GiB SUFFIX``, None if the number is unknown."""
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB {suffix}"


def _has_much_memory_in_use(gpu: Gpu) -> bool:
    return (gpu.memory_used_bytes or 0) > _BUSY_BYTES


def _describe_processes(gpu: Gpu) -> str | None:
    # A container does not show processes of others.
    if not gpu.processes and _has_much_memory_in_use(gpu):
        return f"none shown, but {format_gibibytes(gpu.memory_used_bytes, 'in use')}"
    if gpu.processes is None:
        return None
    return ", ".join(gpu.processes) or "none"


def _is_clocked_down(gpu: Gpu) -> bool:
    """Return True if the GPU is busy and its SM clock is far below the maximum."""
    is_busy = (gpu.utilization_percent or 0) >= _BUSY_PERCENT
    return is_busy and _is_less(gpu.sm_clock, gpu.sm_clock_max, _MIN_CLOCK_SHARE)


def _describe_clocks(gpu: Gpu) -> str | None:
    slowdowns = list_slowdowns(gpu)
    cause = IDLE if IDLE in (gpu.slowed_by or ()) else None
    if slowdowns:
        cause = f"slowed by {' and '.join(slowdowns)}"
        if gpu.temperature_celsius is not None:
            cause += f" at {gpu.temperature_celsius} degrees C"
    return _join_known(
        _format_share(gpu.sm_clock, gpu.sm_clock_max, " MHz", "SM "),
        _format_share(gpu.memory_clock, gpu.memory_clock_max, " MHz", "memory "),
        cause,
    )


def _describe_memory_errors(gpu: Gpu) -> str | None:
    return _join_known(
        None if gpu.ecc is None else f"ECC {format_switch(gpu.ecc)}",
        _format_share(gpu.errors_uncorrected, None, " uncorrected errors"),
        _format_share(gpu.errors_corrected, None, " corrected errors"),
        _format_share(gpu.rows_remapped, None, " rows remapped"),
        "a remap pending" if gpu.remap_pending else None,
        "a remap failed" if gpu.remap_failed else None,
    )


def _describe_pcie(gpu: Gpu) -> str | None:
    return _join_known(
        _format_share(gpu.pcie_width, gpu.pcie_width_max, " lanes"),
        _format_share(gpu.pcie_generation, gpu.pcie_generation_max, "", "generation "),
    )


def _join_known(*parts: str | None) -> str | None:
    """Return the known parts joined by commas, None if all are unknown."""
    return ", ".join(part for part in parts if part) or None


def format_switch(is_on: bool | None) -> str | None:
    """Return ``on`` or ``off``, None if it is unknown."""
    if is_on is None:
        return None
    return "on" if is_on else "off"


def _is_less(value: float | None, limit: float | None, share: float = 1.0) -> bool:
    """Return True if both numbers are known and the value is less than ``share`` of the limit."""
    return value is not None and limit is not None and value < share * limit


def _format_share(
    value: float | None, total: float | None, unit: str, prefix: str = ""
) -> str | None:
    """Return a text such as ``8 of 16 lanes``, None if the value is unknown."""
    if value is None:
        return None
    share = f"{value:g}" if total is None else f"{value:g} of {total:g}"
    return f"{prefix}{share}{unit}"
