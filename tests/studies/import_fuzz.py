"""Mutates logs of nccl-tests, rccl-tests and OSU, and checks that no wrong number is imported.

Each mutation must be read correctly, or refused with the line and the reason. A contradiction that
is named in a note is neither, and is counted separately.

    python -m tests.studies.import_fuzz --mutations 2000
"""

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parbench.bench.text import UserError
from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.import_osu import parse_osu
from parbench.reports.formats.imported import OPERATIONS_BY_NAME, ImportedRun
from parbench.reports.formats.nccl_tests import PROGRAMS

NUM_RANKS = 4
SIZES = tuple(4096 << shift for shift in range(0, 18, 3))
RATE_TOLERANCE = 0.02
TIME_TOLERANCE = 1e-3
PREFIXES = (
    "[1,0]<stdout>:",
    "12: ",
    "2026-03-04T05:06:07.123Z ",
    "[pod/bench/main] ",
    "node7: ",
    "INFO ",
    "(Worker pid=3) ",
    "~~ ",
)
CROSS_CHECKS = {
    "algbw and time": "algbw .* contradicts",
    "busbw and factor": "busbw .* contradicts",
    "size and count": "the size is ",
    "redop and operation": "redop .* contradicts",
    "average and rows": "average busbw",
    "wrong values and rows": "values are wrong",
    "ranks twice or missing": "occurs twice|no line lists|groups of",
    "number of ranks unknown": "--nproc",
    "number of ranks not confirmed": "confirms their count",
    "operation unknown": "does not name the program",
    "operation inferred": "does not name its program",
    "tables of other ranks": "has tables of",
    "number of values": "values for|of \\d+ values|placements have different columns",
    "cells": "is not a number|is not a whole number|is negative",
    "columns": "has no column|is a latency|is a bandwidth|no heading|no line names its columns",
    "titles and order of OSU": "no title|does not ascend",
    "latencies and rates of OSU": "contradict each other|messages/s of",
    "JSON": "JSON|is not what nccl-tests writes|cut short",
    "no table, no row": "without rows|contains no",
}
Mutate = Callable[[str, random.Random], str]
Key = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A log with the time in seconds of each operation, size and placement."""

    name: str
    text: str
    times: dict[Key, float]
    parse: Callable[[str, str, int | None], ImportedRun] = parse_nccl
    nproc: int | None = None
    num_ranks: int = NUM_RANKS
    group_size: int = NUM_RANKS


def compute_time(size: int, placement: str) -> float:
    """Return the time in seconds of a message, as a log prints it in us with two decimals."""
    factor = 1.0 if placement == "out_of_place" else 1.13
    return round((20 + size / 5e4) * factor, 2) / 1e6


def compute_busbw(operation: str, size: int, seconds: float, num_ranks: int) -> float:
    factor = OPERATIONS_BY_NAME[operation].busbw
    assert factor is not None
    return size / seconds / 1e9 * factor.compute(num_ranks)


def make_nccl_layout(
    name: str,
    operation: str,
    *,
    columns: str = "size count type redop root",
    last: str = "#wrong",
    header: str = "# Collective test starting: {program}\n",
    rank_line: str = "#  Rank {rank:2d} Group {group} Pid {rank} on node1 device {rank} GPU\n",
    num_groups: int = 1,
    is_old_algbw: bool = False,
) -> Layout:
    spec = OPERATIONS_BY_NAME[operation]
    group_size = NUM_RANKS // num_groups
    text = header.format(program=PROGRAMS[operation])
    for rank in range(NUM_RANKS):
        text += rank_line.format(rank=rank, group=rank % num_groups)
    text += f"#  {columns}" + f"   time   algbw   busbw  {last}" * 2 + "\n#  (B)  (elements)\n"
    times = {}
    rates = []
    for size in SIZES:
        count = size // 4 // (group_size if spec.sharded else 1)
        root = 2 if operation == "broadcast" else -1
        redop = "sum" if spec.is_reduction else "none"
        leading = {"size": size, "count": count, "type": "float", "redop": redop, "root": root}
        cells = [f"{leading[column]:>10}" for column in columns.split()]
        for placement in ("out_of_place", "in_place"):
            seconds = compute_time(size, placement)
            times[operation, size, placement] = seconds
            busbw = compute_busbw(operation, size, seconds, group_size)
            algbw = busbw if is_old_algbw else size / seconds / 1e9
            rates.append(busbw)
            numbers = f"{seconds * 1e6:.2f} {algbw:.2f} {busbw:.2f}"
            cells += [*numbers.split(), "0e+00" if last == "error" else "0"]
        text += "  ".join(cells) + "\n"
    text += "# Out of bounds values : 0 OK\n"
    text += f"# Avg bus bandwidth    : {sum(rates) / len(rates):.6g}\n#\n"
    return Layout(name=name, text=text, times=times, group_size=group_size)


def make_osu_layout(name: str, title: str, operation: str, num_ranks: int, row: str) -> Layout:
    """Return a layout of OSU. ``row`` names its columns: time, low, high, rate or messages."""
    headings = {
        "size": "Size",
        "time": "Avg Latency(us)",
        "low": "Min Latency(us)",
        "high": "Max Latency(us)",
        "rate": "MB/s",
        "messages": "Messages/s",
    }
    text = (
        f"# OSU MPI {title} v7.4\n# "
        + "   ".join(headings[part] for part in row.split())
        + "\n"
    )
    times = {}
    for size in SIZES:
        seconds = compute_time(size, "out_of_place")
        total = size * num_ranks if operation == "all_gather" else size
        times[operation, total, ""] = seconds
        cells = {
            "size": f"{size}",
            "time": f"{seconds * 1e6:.2f}",
            "low": f"{seconds * 0.9e6:.2f}",
            "high": f"{seconds * 1.2e6:.2f}",
            "rate": f"{size / seconds / 1e6:.2f}",
            "messages": f"{1 / seconds:.2f}",
        }
        text += "    ".join(cells[part] for part in row.split()) + "\n"
    nproc = None if num_ranks == 2 else num_ranks
    return Layout(
        name=name,
        text=text,
        times=times,
        parse=parse_osu,
        nproc=nproc,
        num_ranks=num_ranks,
        group_size=num_ranks,
    )


def make_json_layout() -> Layout:
    results = []
    times = {}
    for size in SIZES:
        row: dict[str, object] = {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
        }
        for placement in ("out_of_place", "in_place"):
            seconds = compute_time(size, placement)
            times["all_reduce", size, placement] = seconds
            row[placement] = {
                "time": seconds * 1e6,
                "alg_bw": size / seconds / 1e9,
                "bus_bw": compute_busbw("all_reduce", size, seconds, NUM_RANKS),
                "nwrong": 0.0,
            }
        results.append(row)
    devices = [{"rank": rank, "hostname": "node1"} for rank in range(NUM_RANKS)]
    document = {
        "version": 4,
        "args": ["all_reduce_perf"],
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": results,
    }
    return Layout(
        name="nccl-tests 2.20, JSON", text=json.dumps(document, indent=1), times=times
    )


def make_layouts() -> list[Layout]:
    version = "# nccl-tests version 2.18.3 nccl-headers=22809 nccl-library=22809\n"
    start = "# Collective test starting: {program}\n"
    command = "$ mpirun -np 4 ./build/{program} -b 4K\n"
    rccl_rank = "#   Rank {rank:2d} Pid {rank} on node1 device {rank} [0000:0c:00.0] GPU\n"
    first = make_nccl_layout("first", "all_reduce", header=version + start)
    second = make_nccl_layout("second", "all_gather", header=version + start)
    return [
        make_nccl_layout("nccl-tests 2.18, all_reduce", "all_reduce", header=version + start),
        make_nccl_layout("nccl-tests 2.18, broadcast", "broadcast", header=version + start),
        make_nccl_layout("nccl-tests 2.13, alltoall", "all_to_all", header=command),
        make_nccl_layout(
            "nccl-tests 2.12, all_reduce",
            "all_reduce",
            columns="size count type redop",
            last="error",
            header=command,
            rank_line=rccl_rank,
        ),
        make_nccl_layout(
            "nccl-tests 2019, all_gather",
            "all_gather",
            columns="size count type",
            last="error",
            header=command,
            rank_line=rccl_rank,
            is_old_algbw=True,
        ),
        make_nccl_layout(
            "rccl-tests, reduce_scatter", "reduce_scatter", header="", rank_line=rccl_rank
        ),
        make_nccl_layout("split groups", "all_reduce", num_groups=2),
        Layout(
            name="two operations",
            text=first.text + second.text,
            times={**first.times, **second.times},
        ),
        make_json_layout(),
        make_osu_layout(
            "OSU allreduce", "Allreduce Latency Test", "all_reduce", 4, "size time low high"
        ),
        make_osu_layout(
            "OSU allgather", "Allgather Latency Test", "all_gather", 4, "size time"
        ),
        make_osu_layout(
            "OSU mbw_mr",
            "Multiple Bandwidth / Message Rate Test",
            "unidirectional",
            2,
            "size rate messages",
        ),
    ]


def remove_column(text: str, source: random.Random) -> str:
    return _edit_columns(
        text, source, lambda cells, first, _: cells[:first] + cells[first + 1 :]
    )


def swap_columns(text: str, source: random.Random) -> str:
    return _edit_columns(text, source, _swap)


def _swap(cells: list[str], first: int, second: int) -> list[str]:
    cells = list(cells)
    cells[first], cells[second] = cells[second], cells[first]
    return cells


def _edit_columns(
    text: str, source: random.Random, edit: Callable[[list[str], int, int], list[str]]
) -> str:
    """Edit the cells of the heading, of the rows, or of both."""
    is_osu = "# OSU" in text
    heading_edited, rows_edited = source.choice([(True, True), (True, False), (False, True)])
    lines = text.splitlines()
    rows = [line for line in lines if line.strip()[:1].isdigit()]
    if not rows:
        return text
    first, second = source.sample(range(len(rows[0].split())), 2)
    edited_lines = []
    for line in lines:
        is_heading = line.startswith("# Size" if is_osu else "#  size")
        if is_heading and heading_edited:
            words = re.split(r"\s{2,}", line[1:].strip()) if is_osu else line[1:].split()
            prefix = "# " if is_osu else "#  "
            line = prefix + "   ".join(edit(words, first, second))
        elif line.strip()[:1].isdigit() and rows_edited:
            line = "   ".join(edit(line.split(), first, second))
        edited_lines.append(line)
    return "\n".join(edited_lines) + "\n"


def rename_word(text: str, source: random.Random) -> str:
    words = [
        "size",
        "count",
        "type",
        "redop",
        "root",
        "time",
        "algbw",
        "busbw",
        "#wrong",
        "error",
    ]
    words += ["Avg Latency", "MB/s", "Size", "alg_bw", "bus_bw", "in_place", "devices", "Rank"]
    present = [word for word in words if word in text]
    return text.replace(source.choice(present), source.choice([*present, "value"]))


def lose_lines(text: str, source: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(source.choice([1, 1, 2, 4])):
        del lines[source.randrange(len(lines))]
    return "".join(lines)


def add_prefix(text: str, source: random.Random) -> str:
    prefix = source.choice(PREFIXES)
    return "".join(prefix + line for line in text.splitlines(keepends=True))


def cut_short(text: str, source: random.Random) -> str:
    return text[: source.randrange(len(text))]


def duplicate_line(text: str, source: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    index = source.randrange(len(lines))
    return "".join([*lines[: index + 1], *lines[index:]])


MUTATIONS: dict[str, Mutate] = {
    "column removed": remove_column,
    "columns swapped": swap_columns,
    "word renamed": rename_word,
    "lines lost": lose_lines,
    "prefix added": add_prefix,
    "cut short": cut_short,
    "line twice": duplicate_line,
}


def find_wrong_number(run: ImportedRun, layout: Layout) -> str:
    """Return a description of the first wrong number of a run, empty if all are right."""
    if run.num_ranks != layout.num_ranks:
        return f"{run.num_ranks} ranks instead of {layout.num_ranks}"
    for result in run.results:
        operation = result.name.partition(".")[2]
        size = int(result.params["size_bytes"])
        placement = str(result.params.get("placement", ""))
        seconds = layout.times.get((operation, size, placement))
        if seconds is None:
            return f"{operation} {size} B {placement} is not in the log"
        algbw = size / seconds
        busbw = compute_busbw(operation, size, seconds, layout.group_size) * 1e9
        for name, right, tolerance in (
            ("time", seconds, TIME_TOLERANCE),
            ("algbw", algbw, RATE_TOLERANCE),
            ("busbw", busbw, RATE_TOLERANCE),
        ):
            value = result.metrics[name].value
            # Small times of OSU follow from rates with few digits.
            allowed = RATE_TOLERANCE if layout.parse is parse_osu else tolerance
            if value is not None and not math.isclose(value, right, rel_tol=allowed):
                return f"{name} {value:g} instead of {right:g}"
    return ""


def name_checks(sentences: Sequence[str]) -> list[str]:
    """Return the cross-checks that wrote these sentences."""
    text = " ".join(sentences)
    return [name for name, pattern in CROSS_CHECKS.items() if re.search(pattern, text)] or [
        text
    ]


def classify(text: str, layout: Layout) -> tuple[str, list[str], str]:
    """Return the outcome of an import, the checks that fired, and a detail."""
    try:
        run = layout.parse(text, "f", layout.nproc)
    except UserError as error:
        return "refused", name_checks([str(error)]), str(error)
    wrong = find_wrong_number(run, layout)
    checks = name_checks(run.notes) if run.notes else []
    if not run.results:
        return "refused", checks or ["no table, no row"], "no results"
    if not wrong:
        return "read correctly", checks, ""
    return ("named in a note" if run.notes else "WRONG"), checks, wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=52)
    options = parser.parse_args()
    source = random.Random(options.seed)
    layouts = make_layouts()
    for layout in layouts:
        outcome, _, detail = classify(layout.text, layout)
        print(f"{layout.name}: unchanged: {outcome} {detail}")
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in MUTATIONS}
    checks = Counter[str]()
    failures = []
    num_without_line = 0
    for number in range(options.mutations):
        layout = layouts[number % len(layouts)]
        name = source.choice(list(MUTATIONS))
        text = MUTATIONS[name](layout.text, source)
        outcome, fired, detail = classify(text, layout)
        outcomes[name][outcome] += 1
        checks.update(fired)
        num_without_line += outcome == "refused" and not re.search(r"line \d|result \d", detail)
        if outcome in ("WRONG", "named in a note"):
            failures.append(f"{outcome}: {layout.name}, {name}: {detail}")
    for name, counts in outcomes.items():
        print(f"{name:16} {dict(counts)}")
    print(f"refusals without a line (no table, cut JSON): {num_without_line}")
    for name, count in checks.most_common():
        print(f"{count:5}  {name}")
    for failure, count in Counter(failures).most_common():
        print(f"{count:5}  {failure}")
    return any(failure.startswith("WRONG") for failure in failures)


if __name__ == "__main__":
    raise SystemExit(main())
