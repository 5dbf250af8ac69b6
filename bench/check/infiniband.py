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
_FIX = "see ibstat, iblinkinfo and mlxlink -d DEVICE; reseat or replace the cable; disable a port that is not used"


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a port of an RDMA NIC, as texts that the kernel reports.

    An unknown text is ``-``.
    """

    name: str
    """The NIC and the number of the port on the NIC, such as ``mlx5_0/1``."""
    layer: str
    """The link layer, such as ``InfiniBand``."""
    state: str
    """The logical state, such as ``ACTIVE``."""
    physical: str
    """The physical state, such as ``LinkUp``."""
    rate: str
    """The link speed, such as ``400 Gb/sec (4X NDR)``."""
    board: str
    """The id of the NIC's model, such as ``MT_0000000838``, ``-`` if it is unknown."""
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
        ports.append(
            Port(
                name=f"{device.name}/{folder.name}",
                layer=read_text(folder / "link_layer") or "-",
                state=_read_state(folder / "state"),
                physical=_read_state(folder / "phys_state"),
                rate=read_text(folder / "rate") or "-",
                board=read_text(device / "board_id") or read_text(device / "hca_type") or "-",
                errors={name: count for name, count in counts.items() if count is not None},
            )
        )
    return tuple(ports)


def _read_state(path: Path) -> str:
    """Return the name of a state from a file with ``NUMBER: NAME``, such as ``4: ACTIVE``.

    The result is ``-`` if the file cannot be read.
    """
    return (read_text(path) or "-").rpartition(": ")[2]


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
       verdict is ``watch``.
    """
    earlier_errors = {port.name: port.errors for port in before}
    faults = []
    for port in after:
        texts = _list_faults(port, after)
        # A counter without an earlier value has not increased.
        earlier = {**port.errors, **earlier_errors.get(port.name, {})}
        increases = Counter(port.errors) - Counter(earlier)
        is_bad = bool(texts) or "link_downed" in increases
        texts += [f"{count} more {name} meanwhile" for name, count in increases.items()]
        if texts:
            text = f"port {port.name}: {', '.join(texts)}"
            faults.append(Fault(text=text, fix=_FIX, is_bad=is_bad))
    return tuple(faults)


def _list_faults(port: Port, ports: Sequence[Port]) -> list[str]:
    """Return a text if a port is slower than its peers, or inactive although it has peers.

    The peers are the active ports among ``ports`` (all ports of the host) that belong to NICs of
    the same model and have the same link layer. The list has one text, or is empty if the port is
    as fast as its peers, is disabled, or has no peers.
    """
    active_peers = [
        peer
        for peer in ports
        if (peer.board, peer.layer, peer.state) == (port.board, port.layer, "ACTIVE")
    ]
    max_rate = max((_parse_gigabits(peer.rate) for peer in active_peers), default=0.0)
    if port.state == "ACTIVE" and _parse_gigabits(port.rate) < max_rate:
        return [f"{port.rate}, others of the same board {max_rate:g} Gb/s"]
    if port.state != "ACTIVE" and active_peers and port.physical != "Disabled":
        num_active = len(active_peers)
        return [f"{port.state} ({port.physical}), {num_active} of the same board are ACTIVE"]
    return []


def _parse_gigabits(rate: str) -> float:
    """Return the rate in Gb/s from a text such as ``400 Gb/sec (4X NDR)``, 0 if it is unknown."""
    match = re.match(r"[\d.]+", rate)
    return float(match[0]) if match else 0.0
