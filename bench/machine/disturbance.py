"""The state of a machine in one topic, such as its load average, and whether it disturbs."""

from dataclasses import dataclass

UNKNOWN = "-"
"""The text for a state that is unknown."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A finding of ``parbench doctor``: the state of a machine in one topic, such as clocks.

    The finding also states whether the state disturbs measurements. There is a finding for each
    topic, also if its state does not disturb.
    """

    topic: str
    """The name of the topic, such as ``load average`` or ``iommu``."""
    facts: str
    """The state of the machine in this topic as text, ``-`` if it is unknown."""
    disturbs: bool = False
    """True if the state disturbs measurements."""
    fix: str = ""
    """Advice to the user to change the state, empty if nothing needs a change."""


def make_finding(
    topic: str, facts: str | None, disturbs: bool = False, fix: str = ""
) -> Disturbance:
    """Return a finding about the state of a machine in one topic, such as ``load average``.

    ``facts`` is the state as text. None or an empty text means unknown. An unknown state never
    disturbs, even if ``disturbs`` is True. The advice ``fix`` is kept only if the state disturbs.
    """
    if not facts:
        return Disturbance(topic=topic, facts=UNKNOWN)
    return Disturbance(topic=topic, facts=facts, disturbs=disturbs, fix=fix if disturbs else "")


def format_switch(is_on: bool | None) -> str | None:
    """Return ``on`` for True, ``off`` for False, and None for None, which means unknown."""
    if is_on is None:
        return None
    return "on" if is_on else "off"


def format_gibibytes(num_bytes: int | None) -> str | None:
    """Return a number of bytes as text such as ``1.50 GiB``, None for None, which means unknown."""
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB"
