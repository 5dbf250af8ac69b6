"""The ports of RDMA NICs as the kernel reports them: state, rate, and error counters."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from parbench.bench.check.health import Fault
from parbench.bench.machine.machine import parse_count, read_text

# From the kernel's documentation (sysfs-class-infiniband): counters that do not increase on a good
# link.
_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
_FIX = (
    "run ibstat, iblinkinfo and mlxlink -d DEVICE; reseat or replace the cable; "
    "disable a port that is not used"
)


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a port of an RDMA NIC, as the kernel reports it."""

    name: str
    """The NIC and the number of the port on the NIC, such as ``mlx5_0/1``."""
    model: str
    """The id of the NIC's model and the link layer, such as ``MT_0000000838 InfiniBand``."""
    state: str
    """The logical state, such as ``ACTIVE``, ``-`` if it is unknown."""
    is_disabled: bool
    """True if the administrator has disabled the port."""
    gigabits: float
    """The link speed in Gb/s, 0 if it is unknown."""
    errors: dict[str, int]
    """The error counters by the kernel's name, such as ``symbol_error``, since the last reset.

    Counters that the kernel does not have are left out.
    """


def read_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Read the state of the ports of all RDMA NICs of this host, sorted by NIC and port.

    The result is empty if the host has no such NIC. ``root`` is the folder with the ``sys`` to
    read.
    """
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = folder.parents[1]
        counts = {name: parse_count(read_text(folder / "counters" / name)) for name in _COUNTERS}
        rate = re.match(r"[\d.]+", read_text(folder / "rate") or "")
        ports.append(
            Port(
                name=f"{device.name}/{folder.name}",
                model=f"{read_text(device / 'board_id')} {read_text(folder / 'link_layer')}",
                # The kernel writes a number before the name of a state: 4: ACTIVE.
                state=(read_text(folder / "state") or "-").rpartition(": ")[2],
                is_disabled=(read_text(folder / "phys_state") or "").endswith("Disabled"),
                gigabits=float(rate[0]) if rate else 0.0,
                errors={name: count for name, count in counts.items() if count is not None},
            )
        )
    return tuple(ports)


def find_port_faults(before: Sequence[Port], after: Sequence[Port]) -> tuple[Fault, ...]:
    """Return one fault for each port with any of the conditions below, which form one text.

    ``before`` and ``after`` are the ports of this host before and after the measurement. A port is
    compared with its peers: the active ports on NICs of the same model with the same link layer.
    The conditions are:

    1. The port is active, and its rate is lower than the highest rate of its peers. The fault is
       bad.
    2. The port is neither active nor disabled, and has at least one peer. The fault is bad.
    3. The error counter ``link_downed`` increased during the measurement. The fault is bad.
    4. Another error counter increased during the measurement. This alone is not bad, and the
       verdict is ``warning``.
    """
    earlier_errors = {port.name: port.errors for port in before}
    faults = []
    for port in after:
        peers = [peer for peer in after if peer.model == port.model and peer.state == "ACTIVE"]
        max_gigabits = max((peer.gigabits for peer in peers), default=0.0)
        texts = []
        if port.state == "ACTIVE" and port.gigabits < max_gigabits:
            text = f"other ports of this NIC model {max_gigabits:g} Gb/s"
            texts.append(f"{port.gigabits:g} Gb/s, {text}")
        if port.state != "ACTIVE" and peers and not port.is_disabled:
            texts.append(f"{port.state}, {len(peers)} other ports of this NIC model are ACTIVE")
        increases = Counter(port.errors) - Counter(earlier_errors.get(port.name, port.errors))
        is_bad = bool(texts) or "link_downed" in increases
        for name, count in increases.items():
            texts.append(f"{name} increased by {count} during the check")
        if texts:
            text = f"port {port.name}: {', '.join(texts)}"
            faults.append(Fault(text=text, fix=_FIX, is_bad=is_bad))
    return tuple(faults)
