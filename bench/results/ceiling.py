"""How much of what could be carried is carried: a link's declared speed or a copy in memory, and the share of it."""

import re
from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError

CeilingName = Literal["link", "copy"]
LINK: CeilingName = "link"
COPY: CeilingName = "copy"
_LINK = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?([kKmMgGtT]?)([Bb]it(?:/s)?|bps|b/s|Bps|B/s)", re.ASCII)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LINK_HELP = "write a number above 0 with its unit, 1e9-based, such as 400Gbit, 200Gbps, 100mbit or 50GB/s"
_ABOVE = {
    LINK: "above the link's speed: reduction in the network, caches or too slow a declared link can read so",
    COPY: "above the copy in memory: caches that hold the data, or memory that ranks share, can read so",
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What cannot be exceeded, one way: the declared speed of a link, or a copy in memory on the same host."""

    name: CeilingName
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a ceiling that was reached, never clipped; None is unknown, and ``against`` names the ceiling."""

    fraction: float | None
    against: CeilingName | None
    note: str = ""


def parse_link(text: str) -> float:
    """Return the bytes per second, one way, of a link such as ``400Gbit``, ``200Gbps``, ``100mbit`` or ``50GB/s``."""
    match = _LINK.fullmatch(text.strip())
    rate = float(match[1]) * _FACTORS[match[2].upper()] if match else 0.0
    if match is None or rate == 0:
        raise UserError(f"link speed {text!r} is not understood: {_LINK_HELP}")
    prefix, unit = match[2], match[3]
    if unit == "b/s" and prefix.islower():
        raise UserError(f"link speed {text!r} could mean bits or bytes, which differ by eight: {_LINK_HELP}")
    return rate if unit in ("B/s", "Bps") else rate / 8


def efficiency(bytes_per_second: float | None, ceiling: Ceiling | None) -> Efficiency:
    """Return a bus bandwidth as a share of the ceiling, with a note where it is above; unknown if either is."""
    if bytes_per_second is None or ceiling is None:
        return Efficiency(fraction=None, against=None if ceiling is None else ceiling.name)
    fraction = bytes_per_second / ceiling.bytes_per_second
    return Efficiency(fraction=fraction, against=ceiling.name, note=_ABOVE[ceiling.name] if fraction > 1 else "")
