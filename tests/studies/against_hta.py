"""What HolisticTraceAnalysis and parbench explain say of the same traces, side by side: overlap, computing and idle.

python -m venv hta && hta/bin/pip install HolisticTraceAnalysis
python -m tests.studies.against_hta --hta hta/bin/python FOLDER...   # of traces of jobs, one file a rank

HolisticTraceAnalysis cuts every start and duration to whole microseconds before it adds them up. So each folder is read
twice: as it is, and with all times in whole microseconds, where both count the same.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parbench.bench.results.spans import Span, intersection, length
from parbench.reports.traces.kineto import RankTrace, files_of, read_rank

ASKED = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {int(rank): path for rank, path in json.loads(sys.argv[1]).items()}
job = TraceAnalysis(trace_files=files, trace_dir="", include_last_profiler_step=True)
overlap = job.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
parts = job.get_temporal_breakdown(visualize=False).set_index("rank")
told = {int(r): [overlap[r], parts.compute_time_pctg[r], parts.idle_time_pctg[r]] for r in parts.index}
print("TOLD" + json.dumps(told))
"""
FIELDS = ("overlap", "compute", "idle")


def by_hta(python: str, files: dict[int, Path]) -> dict[int, list[float]]:
    """Return its percentages by rank: communication that is hidden, computing and idle of the kernels' whole span."""
    asked = json.dumps({str(rank): str(path) for rank, path in files.items()})
    done = subprocess.run([python, "-c", ASKED, asked], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    return {int(rank): told for rank, told in json.loads(line.removeprefix("TOLD")).items()}


def by_parbench(found: RankTrace) -> list[float]:
    """Return the same by what parbench explain reads, over the same time: from the first kernel to the last."""
    trace = found.trace
    busy: list[Span] = [*trace.compute, *trace.copies, *trace.comm]
    whole = max(stop for _, stop in busy) - min(start for start, _ in busy)
    hidden = length(intersection(trace.comm, trace.compute)) / max(length(trace.comm), 1)
    return [100 * hidden, 100 * length(trace.compute) / whole, 100 - 100 * length(busy) / whole]


def whole_microseconds(path: Path, folder: Path) -> Path:
    """Write a trace with starts and durations cut to whole microseconds."""
    raw = path.read_bytes()
    told: dict[str, Any] = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    for event in told["traceEvents"]:
        for name in {"ts", "dur"} & event.keys():
            event[name] = int(event[name])
    target = folder / path.name.removesuffix(".gz")
    target.write_text(json.dumps(told))
    return target


def rows_of(python: str, files: list[Path]) -> tuple[list[str], float]:
    """Return a line for each rank, and the largest difference in points."""
    found = {one.source.rank: one for one in map(read_rank, files, range(len(files)))}
    theirs = by_hta(python, {rank: one.source.path for rank, one in found.items()})
    lines, largest = [], 0.0
    for rank, one in sorted(found.items()):
        ours = by_parbench(one)
        largest = max([largest, *(abs(a - b) for a, b in zip(ours, theirs[rank], strict=True))])
        told = (
            f"{name} {b:6.2f} {a:6.2f}"
            for name, a, b in zip(FIELDS, ours, theirs[rank], strict=True)
        )
        lines.append(f"  rank {rank}: " + "   ".join(told))
    return lines, largest


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hta", default=sys.executable, metavar="PYTHON", help="one that has HolisticTraceAnalysis"
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    asked = parser.parse_args(arguments)
    worst = 0.0
    print("percent: HolisticTraceAnalysis, parbench")
    for folder in asked.folders:
        files = files_of([folder])
        with tempfile.TemporaryDirectory() as cut:
            for words, read in (
                ("as it is", files),
                ("whole microseconds", [whole_microseconds(one, Path(cut)) for one in files]),
            ):
                lines, largest = rows_of(asked.hta, read)
                print(
                    f"{folder.name}, {words}: at most {largest:.2f} points apart", *lines, sep="\n"
                )
        worst = max(worst, largest)
    print(f"in whole microseconds at most {worst:.2f} points apart")
    return int(worst > 2.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
