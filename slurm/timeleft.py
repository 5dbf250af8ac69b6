"""How long a job may still run, and whether a point fits into it. Pure: the facts and the clock are given."""

import math
from collections.abc import Iterable, Mapping
from datetime import datetime

MARGIN_SECONDS = 8.0
"""What must be left when a point is stopped for the time's sake: its ranks end, its records are on disk."""

_MOST_SCALE = 5.0


def end_time(job: Mapping[str, str], environ: Mapping[str, str]) -> float:
    """Return when a job ends, in seconds of the epoch; infinity where nothing limits it.

    ``job`` holds the facts of ``scontrol show job -o``, empty where it gave none; SLURM_JOB_END_TIME then tells.
    """
    if job.get("TimeLimit") == "UNLIMITED":
        return math.inf
    end = job.get("EndTime", "Unknown")
    if end not in ("Unknown", "N/A", "None"):
        return datetime.fromisoformat(end).timestamp()  # scontrol prints the local time of where it runs
    told = environ.get("SLURM_JOB_END_TIME", "")
    return float(told) if told.isdecimal() and int(told) > 0 else math.inf


def scale(measured: Iterable[tuple[float, float]]) -> float:
    """Return how much longer points take than was expected, from pairs of seconds (taken, expected); 1 from none.

    It stays between 1/5 and 5, so that one strange point does not put off all others.
    """
    pairs = list(measured)
    expected = sum(pair[1] for pair in pairs)
    if not expected:
        return 1.0
    return min(max(sum(pair[0] for pair in pairs) / expected, 1 / _MOST_SCALE), _MOST_SCALE)


def too_long(needed_seconds: float, left_seconds: float) -> str:
    """Return why a point does not fit into what is left, ``needs about 95 s, 60 s are left``; nothing if it does."""
    if needed_seconds <= left_seconds:
        return ""
    return f"needs about {math.ceil(needed_seconds)} s, {max(math.floor(left_seconds), 0)} s are left"
