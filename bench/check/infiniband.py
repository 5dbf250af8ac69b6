"""InfiniBand's ports as the kernel tells them: state, rate, counters of errors before and after."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from parbench.bench.machine.machine import contents, whole_number

# of the kernel's documentation, sysfs-class-infiniband: what a link that is well does not count
_COUNTERS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors"),
    *("excessive_buffer_overrun_errors", "port_xmit_discards"),
)
_REMEDY = (
    "see ibstat, iblinkinfo and mlxlink -d DEVICE; reseat or replace the cable; a port that is not meant: disable it"
)


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port: states and rate in the kernel's words, ``-`` where unknown; those of one ``board`` should be alike."""

    name: str
    layer: str
    state: str
    physical: str
    rate: str
    board: str
    errors: dict[str, int]
    complaint: str = ""
    is_bad: bool = False
    remedy: str = ""


def ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Return the ports that there are, none where there is no such device."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = folder.parents[1]
        counts = {name: whole_number(contents(folder / "counters" / name)) for name in _COUNTERS}
        found.append(
            Port(
                name=f"{device.name}/{folder.name}",
                layer=contents(folder / "link_layer") or "-",
                state=_word(contents(folder / "state")),
                physical=_word(contents(folder / "phys_state")),
                rate=contents(folder / "rate") or "-",
                board=contents(device / "board_id") or contents(device / "hca_type") or "-",
                errors={name: count for name, count in counts.items() if count is not None},
            )
        )
    return tuple(found)


def _word(told: str | None) -> str:
    """Return ``ACTIVE`` of ``4: ACTIVE``."""
    return (told or "-").rpartition(": ")[2]


def judged(before: Sequence[Port], after: Sequence[Port]) -> tuple[Port, ...]:
    """Return the ports with what is wrong: inactive or slower than those of the same board, errors that were counted.

    A port that was disabled is not meant to be used, nor one whose board has no active port.
    """
    was = {port.name: port.errors for port in before}
    found = []
    for port in after:
        alike = [one for one in after if (one.board, one.layer) == (port.board, port.layer) and one.state == "ACTIVE"]
        rates = [_gigabits(one.rate) for one in alike]
        grown = Counter(port.errors) - Counter({**port.errors, **was.get(port.name, {})})
        told = []
        if alike and port.state != "ACTIVE" and port.physical != "Disabled":
            told.append(f"{port.state} ({port.physical}), {len(alike)} of the same board are ACTIVE")
        elif alike and port.state == "ACTIVE" and _gigabits(port.rate) < max(rates):
            told.append(f"{port.rate}, others of the same board {max(rates):g} Gb/s")
        bad = bool(told) or "link_downed" in grown
        told += [f"{count} more {name} meanwhile" for name, count in grown.items()]
        words, remedy = ", ".join(told), _REMEDY if told else ""
        found.append(msgspec.structs.replace(port, complaint=words, is_bad=bad, remedy=remedy))
    return tuple(found)


def _gigabits(rate: str) -> float:
    try:
        return float(rate.split()[0])
    except (ValueError, IndexError):
        return 0.0
