"""A cluster that is only played on one machine says so in an environment variable, and every record repeats it."""

from collections.abc import Mapping

VARIABLE = "PARBENCH_EMULATED"
EMULATED = "emulated"
"""How a note begins that says that nodes or links are not real."""


def emulation(environ: Mapping[str, str]) -> str | None:
    """Return in words what is emulated here, None where everything is real."""
    return environ.get(VARIABLE) or None


def emulation_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the note that every record of this place bears, if any."""
    told = emulation(environ)
    return () if told is None else (f"{EMULATED}: {told}",)
