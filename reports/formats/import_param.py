"""PARAM's comms.py (github.com/facebookresearch/param, train/comms/pt) as results of ours.

Its size is the whole message and its GB/s are 1e9 B/s, both as in nccl-tests. Its percentiles are not over iterations:
each rank gives the mean of its own, and p50 is the median of those means.
"""

import re
from collections.abc import Sequence

from bench.plan.catalogue import names_of
from bench.plan.params import Value
from reports.formats.foreign import (
    GIGA,
    MICRO,
    UNKNOWN,
    Foreign,
    Found,
    fields,
    number,
    only,
    time_and_rates,
    whole,
    world_size,
)

TOOL = "param"
METHOD = "p50 over ranks of each rank's mean over iterations, PARAM of unknown version"

_STEP = 0.001 * GIGA  # what the last printed decimal of a rate is worth
_NOTE = "PARAM's time is the median over ranks of per-rank means: it says nothing of single iterations"
_OPERATIONS = names_of("param")
_ROW = re.compile(r"COMMS-RES-(\S+)\s+(.*)$")
_HEADING = re.compile(r"COMMS-RES(?!-)\s+(.*size \(B\).*)$")
_WORLD = re.compile(r"world_size\W{1,4}(\d+)")
_NAMES = {"size(b)": "size", "latency(us):p50": "p50", "algbw(gb/s)": "algbw", "busbw(gb/s)": "busbw"}


def parse_param(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what PARAM printed; ``UserError`` if it is cut short or nobody tells the number of ranks."""
    ranks = world_size(only(int(size) for size in _WORLD.findall(text)), nproc, where)
    names: list[str] = []
    found, left_out = list[Found](), dict[str, None]()
    for at, line in enumerate(text.splitlines(), start=1):
        if match := _HEADING.search(line):
            names = [_NAMES.get(name, name) for name in match[1].replace(" (B)", "(B)").lower().split()]
        elif match := _ROW.search(line):
            if reason := _why_not(match[1], names):
                left_out[reason] = None
            else:
                found.append(_found(match[1], match[2].split(), names, ranks, f"{where}, line {at}"))
    return Foreign(
        tool=TOOL,
        version=None,
        ranks=ranks,
        nodes=len(_hosts(text)) or None,
        backend=UNKNOWN,
        device=UNKNOWN,
        found=tuple(found),
        hosts=_hosts(text),
        left_out=tuple(left_out),
    )


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\[Rank\s+\d+\] host (\S+?),", text)))


def _why_not(label: str, names: Sequence[str]) -> str | None:
    operation = label.split("-")[0]
    if operation == "QUANT":
        return "quantised collectives: their time holds quantisation too"
    if operation not in _OPERATIONS:
        return f"{operation}: no case of ours measures the same"
    if any("pair" in name for name in names):
        return f"{operation} with another collective at the same time: the row is both together"
    return None


def _found(label: str, words: Sequence[str], names: Sequence[str], ranks: int, where: str) -> Found:
    last = names.index("busbw") + 1 if "busbw" in names else 0
    cells = fields(words, names[:last], ("size", "p50", "algbw", "busbw"), where)
    operation, dtype, *tag = [*label.split("-"), ""]
    size, p50 = whole(cells["size"], where), number(cells["p50"], where)
    params: dict[str, Value] = {"size_bytes": size}
    if dtype:
        params["dtype"] = dtype.removeprefix("torch.")
    if tagged := "-".join(word for word in tag if word):
        params["tag"] = tagged
    spec = _OPERATIONS[operation]
    metrics = time_and_rates(
        spec.short_name,
        ranks,
        size,
        p50 * MICRO or None,
        method=METHOD,
        algbw=number(cells["algbw"], where) * GIGA,
        busbw=number(cells["busbw"], where) * GIGA,
        last_decimal=_STEP,
    )
    return Found(name=spec.name, params=params, metrics=metrics, printed=dict(cells), notes=(_NOTE,))
