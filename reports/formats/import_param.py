"""PARAM's comms.py (github.com/facebookresearch/param, train/comms/pt) as results of ours.

Its size is the whole message and its GB/s are 1e9 B/s, both as in nccl-tests. Its percentiles are not over iterations:
each rank gives the mean of its own, and p50 is the median of those means.
"""

import re

from bench.plan.catalogue import names_of
from bench.plan.params import Value
from reports.formats.foreign import GIGA, MICRO, NO_CASE, Foreign, Found, Row, lines, time_and_rates, world_size

_METHOD = "p50 over ranks of each rank's mean over iterations, PARAM of unknown version"
_NOTE = "PARAM's time is the median over ranks of per-rank means: it says nothing of single iterations"
_STEP = 0.001 * GIGA  # what the last printed decimal of a rate is worth
_OPERATIONS = names_of("param")
_ROW = re.compile(r"COMMS-RES-(\S+)\s+(.*)$")
_HEADING = re.compile(r"COMMS-RES(?!-)\s+(.*size \(B\).*)$")
_NAMES = {"size(b)": "size", "latency(us):p50": "p50", "algbw(gb/s)": "algbw", "busbw(gb/s)": "busbw"}


def parse_param(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what PARAM printed; ``UserError`` if it is cut short or nobody tells the number of ranks."""
    worlds = {int(size) for size in re.findall(r"world_size\W{1,4}(\d+)", text)}
    ranks = world_size(worlds.pop() if len(worlds) == 1 else None, nproc, where)
    hosts = tuple(dict.fromkeys(re.findall(r"\[Rank\s+\d+\] host (\S+?),", text)))
    names, found, left_out = list[str](), list[Found](), dict[str, None]()
    for line, place in lines(text, where):
        if match := _HEADING.search(line):
            names = [_NAMES.get(name, name) for name in match[1].replace(" (B)", "(B)").lower().split()]
        elif match := _ROW.search(line):
            operation = match[1].split("-")[0]
            if operation == "QUANT":
                left_out["quantised collectives: their time holds quantisation too"] = None
            elif operation not in _OPERATIONS:
                left_out[f"{operation}: {NO_CASE}"] = None
            elif any("pair" in name for name in names):
                left_out[f"{operation} with another collective at the same time: the row is both together"] = None
            else:
                told = names[: names.index("busbw") + 1] if "busbw" in names else []
                row = Row(match[2].split(), told, ("size", "p50", "algbw", "busbw"), place)
                found.append(_found(match[1], row, ranks))
    return Foreign(
        tool="param", ranks=ranks, nodes=len(hosts) or None, found=tuple(found), hosts=hosts, left_out=tuple(left_out)
    )


def _found(label: str, row: Row, ranks: int) -> Found:
    name, dtype, *tag = [*label.split("-"), ""]
    params: dict[str, Value] = {"size_bytes": row.whole("size")}
    seconds, operation = row.number("p50") * MICRO or None, _OPERATIONS[name]
    if dtype:
        params["dtype"] = dtype.removeprefix("torch.")
    if tagged := "-".join(word for word in tag if word):
        params["tag"] = tagged
    rates = row.number("algbw") * GIGA, row.number("busbw") * GIGA
    metrics = time_and_rates(operation, ranks, int(params["size_bytes"]), seconds, _METHOD, rates, _STEP)
    return Found(name=operation.name, params=params, metrics=metrics, printed=dict(row), notes=(_NOTE,))
