"""Under which addresses of this host the ranks of other hosts may find its driver."""

import socket
from collections.abc import Mapping

import psutil

from bench.machine.environment import host_address

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def reachable(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this host's IPv4 addresses, the likeliest first: the chosen interface's, the host name's, all others.

    The loopback's are left out unless there are no others: Debian lets a host name mean 127.0.1.1.
    """
    by_interface = _addresses()
    chosen = by_interface.get(environ.get(INTERFACE_VARIABLE, ""), [])
    named = host_address()
    others = [address for addresses in by_interface.values() for address in addresses]
    found = dict.fromkeys([*chosen, *([named] if named in others else []), *others])
    return tuple(address for address in found if not address.startswith("127.")) or ("127.0.0.1",)


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of the interfaces that are up."""
    states = psutil.net_if_stats()
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
