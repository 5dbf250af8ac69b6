"""The state of a GPU in each topic that ``parbench doctor`` and ``parbench check`` examine."""

from collections.abc import Sequence

from parbench.bench.machine.disturbance import (
    Disturbance,
    format_gibibytes,
    format_switch,
    make_finding,
)
from parbench.bench.machine.gpu import FABRIC_READY, IDLE, POWER_CAP, Gpu

_FIXES = {
    "memory in use": "end its processes (nvidia-smi), or leave the GPU out (CUDA_VISIBLE_DEVICES)",
    "clocks": "power limit: sudo nvidia-smi -pl WATTS; if too hot: check cooling; "
    "locked clocks: reset with sudo nvidia-smi -rgc and -rac",
    "power": "set it with sudo nvidia-smi -pl WATTS, as far as the rack's power allows",
    "mig": "MIG is on: only a slice is measured, and NCCL does not connect slices. "
    "Turn it off: sudo nvidia-smi -mig 0, and reset the GPU",
    "memory errors": "reset it (sudo nvidia-smi -r -i GPU) or reboot; have it replaced if they come again",
    "pcie": "reseat the GPU, and check LnkCap and LnkSta of lspci -vv: "
    "transfers to and from the host are slower",
    "nvlink": "run nvidia-smi nvlink -e, check dmesg (Xid) and the fabric manager's log; "
    "then reset or replace the GPU",
    "fabric": "sudo systemctl restart nvidia-fabricmanager, and check its log: "
    "CUDA cannot start without it",
    "persistence": "sudo nvidia-smi -pm 1: otherwise the driver is unloaded between repetitions, "
    "which then start late",
}
_MAX_USED_BYTES = 1 << 30  # A GPU without processes uses less.


def examine_gpu(gpu: Gpu, peers: Sequence[Gpu]) -> tuple[Disturbance, ...]:
    """Return one finding for each topic of a GPU, such as clocks, power, PCIe and NVLink.

    A finding holds the state of the GPU in the topic, also if the state does not disturb. ``peers``
    are the GPUs of the host that should have as many active NVLinks as ``gpu``, which is one of
    them. The finding ``nvlink`` disturbs if a peer has more active links. Clocks that are low
    because the GPU is idle or at its power limit do not disturb.
    """
    reasons = gpu.slowed_by or ()
    max_links = max(peer.active_nvlinks or 0 for peer in peers)
    has_memory_errors = bool(gpu.errors_uncorrected or gpu.remap_pending or gpu.remap_failed)
    memory_errors = [
        _format_share(gpu.errors_uncorrected, None, "uncorrected"),
        "a remap pending" if gpu.remap_pending else None,
        "a remap failed" if gpu.remap_failed else None,
    ]
    power = _format_share(gpu.power_limit_watts, gpu.power_default_watts, "W")
    states = {
        "driver": (gpu.driver, False),
        "memory in use": (
            format_gibibytes(gpu.memory_used_bytes),
            (gpu.memory_used_bytes or 0) > _MAX_USED_BYTES,
        ),
        "clocks": (
            _join_known(_format_share(gpu.sm_clock, gpu.sm_clock_max, "MHz (SM)"), *reasons),
            not {IDLE, POWER_CAP}.issuperset(reasons),
        ),
        "power": (power, _is_less(gpu.power_limit_watts, gpu.power_default_watts)),
        "mig": (format_switch(gpu.mig), gpu.mig is True),
        "memory errors": (_join_known(*memory_errors), has_memory_errors),
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


def _join_known(*parts: str | None) -> str | None:
    """Return the texts that are not None (unknown), joined by commas, None if all are unknown."""
    return ", ".join(part for part in parts if part) or None


def _is_less(value: float | None, limit: float | None) -> bool:
    """Return True if ``value``, a quantity of a GPU, is less than ``limit`` in the same unit.

    The result is False if either is None, which means unknown.
    """
    return value is not None and limit is not None and value < limit


def _format_share(value: float | None, total: float | None, unit: str) -> str | None:
    """Return ``value`` and its maximum ``total`` as text, such as ``1755 of 1980 MHz``.

    If ``total`` is None, the maximum is left out. None if ``value`` is None, which means unknown.
    """
    if value is None:
        return None
    share = f"{value:g}" if total is None else f"{value:g} of {total:g}"
    return f"{share} {unit}"
