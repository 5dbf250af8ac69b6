"""Whether a step really computes or waits instead, as one writes it."""

from bench.plan.params import Param
from bench.text import UserError, parse_duration

REAL, TIMED = "real", "timed:"

COMPUTE = Param(
    name="compute",
    kind="str",
    default=REAL,
    help="real, or timed:DURATION: waits instead of matrix products, so long for a rank's forward of a microbatch",
    optional=True,
)


def parse_compute(text: str) -> float | None:
    """Return the seconds of a rank's forward that is only waited for, None for real; ``UserError`` for other words."""
    if text == REAL:
        return None
    if not text.startswith(TIMED):
        raise UserError(f"compute = {text!r} is not allowed: compute is real or timed:DURATION, such as timed:20ms")
    return parse_duration(text.removeprefix(TIMED))
