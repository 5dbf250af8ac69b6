"""The state of a GPU in each topic that ``parbench doctor`` and ``parbench check`` examine."""

from collections.abc import Sequence

from parbench.bench.machine.disturbance import (
    Disturbance,
    format_gibibytes,
    format_switch,
    make_finding,
)
from parbench.bench.machine.gpu import FABRIC_READY, IDLE, Gpu

_FIXES = {
    "processes": "end them, or leave these GPUs out (CUDA_VISIBLE_DEVICES): they share time, memory and links",
    "clocks": "power: sudo nvidia-smi -pl WATTS; heat: cooling; set clocks: sudo nvidia-smi -rgc, -rac",
    "power": "sudo nvidia-smi -pl WATTS sets it, as far as the rack's power allows",
    "mig": "a slice is measured, and nccl joins none: sudo nvidia-smi -mig 0, and reset the GPU",
    "memory": "reset it (sudo nvidia-smi -r -i GPU) or reboot; have it replaced if they come again",
    "pcie": "reseat it, and see lspci -vv (LnkCap, LnkSta): data to and from the host takes longer",
    "nvlink": "see nvidia-smi nvlink -e, dmesg (Xid) and the fabric manager's log; then reset or replace it",
    "fabric": "sudo systemctl restart nvidia-fabricmanager, and see its log: CUDA cannot start without it",
    "persistence": "sudo nvidia-smi -pm 1: otherwise the driver is unloaded between launches, which then start late",
}
_BUSY_BYTES = 2 << 30  # more than a driver uses itself
_BUSY_PERCENT = 50
_MIN_CLOCK_SHARE = 0.9  # of the highest clock, on a busy GPU


def examine_gpu(gpu: Gpu, peers: Sequence[Gpu]) -> tuple[Disturbance, ...]:
    """Return one finding for each topic of a GPU, such as clocks, power, PCIe and NVLink.

    A finding holds the state of the GPU in the topic, also if the state does not disturb. ``peers``
    are the GPUs of the host that should have as many active NVLinks as ``gpu``, which is one of
    them. The finding ``nvlink`` disturbs if a peer has more active links.
    """
    max_links = max(peer.active_nvlinks or 0 for peer in peers)
    is_busy = (gpu.utilization_percent or 0) >= _BUSY_PERCENT
    is_clocked_down = is_busy and _is_less(gpu.sm_clock, gpu.sm_clock_max, _MIN_CLOCK_SHARE)
    has_memory_errors = bool(gpu.errors_uncorrected or gpu.remap_pending or gpu.remap_failed)
    power = _format_share(gpu.power_limit_watts, gpu.power_default_watts, "W")
    states = {
        "driver": (gpu.driver, False),
        "processes": _examine_processes(gpu),
        "clocks": (_describe_clocks(gpu), bool(list_slowdowns(gpu)) or is_clocked_down),
        "power": (power, _is_less(gpu.power_limit_watts, gpu.power_default_watts)),
        "mig": (format_switch(gpu.mig), gpu.mig is True),
        "memory": (_describe_memory_errors(gpu), has_memory_errors),
        "pcie": (
            _format_share(gpu.pcie_width, gpu.pcie_width_max, "lanes"),
            _is_less(gpu.pcie_width, gpu.pcie_width_max),
        ),
        "nvlink": (
            _format_share(gpu.active_nvlinks, gpu.nvlinks, "active"),
            _is_less(gpu.active_nvlinks, max_links),
        ),
        "fabric": (gpu.fabric, gpu.fabric != FABRIC_READY),
        "persistence": (format_switch(gpu.persistence), gpu.persistence is False),
    }
    return tuple(
        make_finding(topic, facts, disturbs, _FIXES.get(topic, ""))
        for topic, (facts, disturbs) in states.items()
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


def _examine_processes(gpu: Gpu) -> tuple[str | None, bool]:
    """Return a text about the other processes on a GPU, and True if they disturb measurements.

    The text names the processes. It is ``none`` without any, and None if they are unknown. If none
    is visible but more than 2 GiB of GPU memory are in use, the text states the memory in use.
    """
    # A container does not show processes of others.
    if not gpu.processes and (gpu.memory_used_bytes or 0) > _BUSY_BYTES:
        return f"none shown, but {format_gibibytes(gpu.memory_used_bytes)} in use", True
    if gpu.processes is None:
        return None, False
    return ", ".join(gpu.processes) or "none", bool(gpu.processes)


def _describe_clocks(gpu: Gpu) -> str | None:
    """Return text with the SM clock of a GPU, and ``idle`` or the reasons for a reduced clock.

    For example ``SM 1755 of 1980 MHz, idle``. None if both are unknown.
    """
    clock = _format_share(gpu.sm_clock, gpu.sm_clock_max, "MHz")
    slowdowns = list_slowdowns(gpu)
    cause = IDLE if IDLE in (gpu.slowed_by or ()) else None
    if slowdowns:
        cause = f"slowed by {' and '.join(slowdowns)}"
    return _join_known(clock and f"SM {clock}", cause)


def _describe_memory_errors(gpu: Gpu) -> str | None:
    """Return the ECC mode, the memory errors and the row remapping of a GPU, joined by commas.

    None if all are unknown.
    """
    return _join_known(
        None if gpu.ecc is None else f"ECC {format_switch(gpu.ecc)}",
        _format_share(gpu.errors_uncorrected, None, "uncorrected errors"),
        "a remap pending" if gpu.remap_pending else None,
        "a remap failed" if gpu.remap_failed else None,
    )


def _join_known(*parts: str | None) -> str | None:
    """Return the texts that are neither None (unknown) nor empty, joined by commas.

    None if no such text is left.
    """
    return ", ".join(part for part in parts if part) or None


def _is_less(value: float | None, limit: float | None, share: float = 1.0) -> bool:
    """Return True if ``value`` is less than the fraction ``share`` of ``limit``.

    ``value`` is a quantity of a GPU, such as its SM clock, and ``limit`` the expected quantity in
    the same unit. The result is False if either is None, which means unknown.
    """
    return value is not None and limit is not None and value < share * limit


def _format_share(value: float | None, total: float | None, unit: str) -> str | None:
    """Return ``value`` and its maximum ``total`` as text, such as ``1755 of 1980 MHz``.

    If ``total`` is None, the maximum is left out. None if ``value`` is None, which means unknown.
    """
    if value is None:
        return None
    share = f"{value:g}" if total is None else f"{value:g} of {total:g}"
    return f"{share} {unit}"
