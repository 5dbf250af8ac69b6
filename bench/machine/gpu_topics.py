"""Aspects of a GPU's state that ``parbench doctor`` and ``parbench check`` examine.

Each aspect, such as clocks or ECC errors, is a ``GpuTopic``.
"""

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
    """One aspect of a GPU's state that is examined, such as its clocks or its PCIe link."""

    name: str
    """The name in tables, such as ``clocks``."""
    describe: Callable[[Gpu], str | None]
    """Returns the state of a GPU in this aspect as text, None if it is unknown."""
    is_disturbing: Callable[[Gpu], bool]
    """Returns True if the state of a GPU in this aspect disturbs measurements."""
    fix: str
    """Advice to the user if the state of a GPU disturbs, such as a command to type."""


def list_gpu_topics(gpus: Sequence[Gpu]) -> tuple[GpuTopic, ...]:
    """Return the topics to examine on GPUs of one model, such as clocks, power, PCIe and NVLink.

    ``gpus`` are all GPUs of a host that should have equally many active NVLinks. A GPU with fewer
    active links than the maximum over ``gpus`` is disturbing in the topic ``nvlink``.
    """
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
    """Return NVML's reasons for reduced clocks of a GPU, such as ``hardware thermal slowdown``.

    The clocks of an idle GPU are low on purpose, so for an idle GPU only the reasons that begin
    with ``hardware`` are returned. Empty if the clocks are not reduced or the reasons are unknown.
    """
    reasons = gpu.slowed_by or ()
    if IDLE in reasons:
        return [reason for reason in reasons if reason.startswith("hardware")]
    return list(reasons)


def describe_clock_drop(before: Gpu, after: Gpu) -> str:
    """Return a text about a fall of a GPU's SM clock between two readings, with NVML's reasons.

    ``before`` and ``after`` are the readings. The text is empty if a clock is unknown, or if the
    later clock is at least 90 % of the earlier one.
    """
    if not _is_less(after.sm_clock, before.sm_clock, _MIN_CLOCK_SHARE):
        return ""
    cause = " and ".join(list_slowdowns(after)) or "no reason reported"
    return f"SM clock fell from {before.sm_clock} to {after.sm_clock} MHz ({cause})"


def format_gibibytes(num_bytes: int | None, suffix: str) -> str | None:
    """Return a number of bytes as text such as ``1.50 GiB in use``, where ``suffix`` is ``in use``.

    None if ``num_bytes`` is None, which means unknown.
    """
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB {suffix}"


def _has_much_memory_in_use(gpu: Gpu) -> bool:
    """Return True if more than 2 GiB of GPU memory are in use, more than the driver itself uses."""
    return (gpu.memory_used_bytes or 0) > _BUSY_BYTES


def _describe_processes(gpu: Gpu) -> str | None:
    """Return the other processes on a GPU joined by commas, or ``none``. None if unknown.

    If none is visible but much GPU memory is in use, the text states the memory in use.
    """
    # A container does not show processes of others.
    if not gpu.processes and _has_much_memory_in_use(gpu):
        return f"none shown, but {format_gibibytes(gpu.memory_used_bytes, 'in use')}"
    if gpu.processes is None:
        return None
    return ", ".join(gpu.processes) or "none"


def _is_clocked_down(gpu: Gpu) -> bool:
    """Return True if a GPU has at least 50 % utilization and an SM clock below 90 % of the maximum.

    False if a value is unknown.
    """
    is_busy = (gpu.utilization_percent or 0) >= _BUSY_PERCENT
    return is_busy and _is_less(gpu.sm_clock, gpu.sm_clock_max, _MIN_CLOCK_SHARE)


def _describe_clocks(gpu: Gpu) -> str | None:
    """Return SM and memory clocks, ``idle`` or the reasons for low clocks, joined by commas.

    For example ``SM 1755 of 1980 MHz, memory 2619 of 2619 MHz, idle``. None if all are unknown.
    """
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
    """Return the ECC mode, the memory errors and the remapped rows of a GPU, joined by commas.

    None if all are unknown.
    """
    return _join_known(
        None if gpu.ecc is None else f"ECC {format_switch(gpu.ecc)}",
        _format_share(gpu.errors_uncorrected, None, " uncorrected errors"),
        _format_share(gpu.errors_corrected, None, " corrected errors"),
        _format_share(gpu.rows_remapped, None, " rows remapped"),
        "a remap pending" if gpu.remap_pending else None,
        "a remap failed" if gpu.remap_failed else None,
    )


def _describe_pcie(gpu: Gpu) -> str | None:
    """Return the PCIe link of a GPU, such as ``8 of 16 lanes, generation 5 of 5``.

    None if it is unknown.
    """
    return _join_known(
        _format_share(gpu.pcie_width, gpu.pcie_width_max, " lanes"),
        _format_share(gpu.pcie_generation, gpu.pcie_generation_max, "", "generation "),
    )


def _join_known(*parts: str | None) -> str | None:
    """Return the texts that are neither None (unknown) nor empty, joined by commas.

    None if no such text is left.
    """
    return ", ".join(part for part in parts if part) or None


def format_switch(is_on: bool | None) -> str | None:
    """Return ``on`` for True, ``off`` for False, and None for None, which means unknown."""
    if is_on is None:
        return None
    return "on" if is_on else "off"


def _is_less(value: float | None, limit: float | None, share: float = 1.0) -> bool:
    """Return True if ``value`` is less than the fraction ``share`` of ``limit``.

    ``value`` is a quantity of a GPU, such as its SM clock, and ``limit`` the expected quantity in
    the same unit. The result is False if either is None, which means unknown.
    """
    return value is not None and limit is not None and value < share * limit


def _format_share(
    value: float | None, total: float | None, unit: str, prefix: str = ""
) -> str | None:
    """Return ``value`` and its maximum ``total`` as text, such as ``SM 1755 of 1980 MHz``.

    Here ``prefix`` is ``SM`` with a blank, and ``unit`` is a blank with ``MHz``. If ``total`` is
    None, the maximum is left out. None if ``value`` is None, which means unknown.
    """
    if value is None:
        return None
    share = f"{value:g}" if total is None else f"{value:g} of {total:g}"
    return f"{prefix}{share}{unit}"
