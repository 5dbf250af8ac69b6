"""How long one call takes: its launch, its hops, and its bytes over the slowest link that it must pass. Pure.

Rings go hand in hand: one within each node, one over nodes, so that the hops are (m-1) inside and (N-1) across for m
ranks on each of N nodes; an all_reduce may take trees instead, 2 log2. Bytes are ``workloads.costs.sent_bytes``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from workloads.costs.communication_pattern import sent_bytes
from workloads.planner.hardware import Hardware
from workloads.planner.placement import Place


@dataclass(frozen=True, kw_only=True)
class Call:
    """Calls of one step that are alike: ``num_bytes`` as nccl-tests counts one call's size.

    ``axes`` names what is shown as one axis; ``why`` says what the call is for.
    """

    axis: str
    op: str
    num_bytes: float
    count: float
    place: Place
    why: str

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in all of them, ring-optimal."""
        return self.count * sent_bytes(self.op, self.num_bytes, self.place.ranks)


Seconds = Callable[[Call], float]
"""How long one of the calls takes."""


def by_hardware(hardware: Hardware) -> Seconds:
    """Return the rule that takes latency and bandwidth from declared hardware."""

    def seconds(call: Call) -> float:
        if call.place.ranks == 1:
            return 0.0
        latency = hardware.launch_seconds + _hop_seconds(hardware, call)
        return latency + _wire_seconds(hardware, call)

    return seconds


def _hop_seconds(hardware: Hardware, call: Call) -> float:
    place = call.place
    if call.op in ("send", "all_to_all"):
        return hardware.inside_hop_seconds if place.inside else hardware.across_hop_seconds
    inside = (place.on_node - 1) * hardware.inside_hop_seconds
    ring = inside + (place.nodes - 1) * hardware.across_hop_seconds
    if call.op != "all_reduce":
        return ring
    tree = inside + math.ceil(math.log2(place.nodes)) * hardware.across_hop_seconds
    return 2 * min(ring, tree)


def _wire_seconds(hardware: Hardware, call: Call) -> float:
    sent = sent_bytes(call.op, call.num_bytes, call.place.ranks)
    if call.op == "all_to_all" and not call.place.inside:
        remote = call.num_bytes * (call.place.ranks - call.place.on_node) / call.place.ranks
        own = hardware.across_bytes_per_second * hardware.efficiency.links_across
        return max(remote / own, (sent - remote) / inside_rate(hardware))
    return sent / rate_of(hardware, call.op, call.place)


def rate_of(hardware: Hardware, op: str, place: Place) -> float:
    """Return the bytes per second that one rank's share of a call moves at.

    Across nodes a collective drives as many of a node's cards as it has ranks there, ``rails`` at most; a message
    between two ranks has one card.
    """
    if place.inside:
        return inside_rate(hardware)
    cards = 1 if op == "send" else min(place.on_node, hardware.rails or place.on_node)
    return min(inside_rate(hardware), cards * hardware.across_bytes_per_second * hardware.efficiency.links_across)


def inside_rate(hardware: Hardware) -> float:
    """Return the bytes per second between GPUs of a node."""
    return hardware.inside_bytes_per_second * hardware.efficiency.links_inside
