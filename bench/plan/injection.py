"""Disturbing one rank on purpose, to prove that the suite finds it and blames the right one.

``late:RANK:3ms`` arrives late, ``slow:RANK:10%`` takes longer over each step, ``corrupt:RANK`` has a wrong result.
"""

import re
from typing import Literal

import msgspec

from bench.errors import UserError
from bench.text import parse_duration

Kind = Literal["late", "slow", "corrupt"]

_FORM = re.compile(r"(late|slow|corrupt):(\d+)(?::(.+))?", re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)
_HELP = "write late:RANK:3ms, slow:RANK:10% or corrupt:RANK"


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A disturbance of one rank: ``amount`` is seconds for late, a fraction of the step for slow, 0 for corrupt."""

    kind: Kind
    rank: int
    amount: float = 0.0
    text: str


def parse_injection(text: str, nproc: int) -> Injection:
    """Return what ``text`` means in a world of ``nproc`` ranks; ``UserError`` if it means nothing."""
    match = _FORM.fullmatch(text.strip())
    if match is None or (match[3] is None) != (match[1] == "corrupt"):
        raise UserError(f"--inject {text!r} is not understood: {_HELP}")
    rank = int(match[2])
    if rank >= nproc:
        raise UserError(f"--inject {text!r}: rank {rank} is not one of the {nproc} ranks, 0 to {nproc - 1}")
    if match[1] == "late":
        return Injection(kind="late", rank=rank, amount=parse_duration(match[3]), text=text)
    if match[1] == "slow":
        return Injection(kind="slow", rank=rank, amount=_percent(match[3], text), text=text)
    return Injection(kind="corrupt", rank=rank, text=text)


def _percent(amount: str, text: str) -> float:
    match = _PERCENT.fullmatch(amount)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--inject {text!r}: {amount!r} is no share of a step; write such as 10%")
    return float(match[1]) / 100
