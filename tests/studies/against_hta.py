"""Compare what HolisticTraceAnalysis and parbench compute from the same traces.

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis
    python -m tests.studies.against_hta --hta hta/bin/python FOLDER...

Each folder contains the traces of a job, one file per rank. HolisticTraceAnalysis cuts every start
and duration to whole microseconds before it adds them. So each folder is compared twice: unchanged,
and with all times in whole microseconds. The exit code is 1 if the second differ by over 2 points.
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
from parbench.reports.traces.rank_trace import RankTrace, list_trace_files, read_rank

MAX_DIFFERENCE_POINTS = 2.0
QUANTITIES = ("overlap", "compute", "idle")
RESULT_PREFIX = "RESULT"
HTA_SCRIPT = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {int(rank): path for rank, path in json.loads(sys.argv[1]).items()}
job = TraceAnalysis(trace_files=files, trace_dir="", include_last_profiler_step=True)
overlap = job.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
parts = job.get_temporal_breakdown(visualize=False).set_index("rank")
result = {
    int(rank): [overlap[rank], parts.compute_time_pctg[rank], parts.idle_time_pctg[rank]]
    for rank in parts.index
}
print("RESULT" + json.dumps(result))
"""


def analyze_with_hta(python: str, files: dict[int, Path]) -> dict[int, list[float]]:
    """Return percentages by rank: hidden communication, compute, and idle time."""
    argument = json.dumps({str(rank): str(path) for rank, path in files.items()})
    completed = subprocess.run(
        [python, "-c", HTA_SCRIPT, argument], capture_output=True, text=True, check=True
    )
    for line in completed.stdout.splitlines():
        if line.startswith(RESULT_PREFIX):
            result = json.loads(line.removeprefix(RESULT_PREFIX))
            return {int(rank): percentages for rank, percentages in result.items()}
    raise RuntimeError(f"HolisticTraceAnalysis printed no result: {completed.stderr}")


def analyze_with_parbench(rank_trace: RankTrace) -> list[float]:
    """Return the same percentages, over the time from the first kernel to the last."""
    trace = rank_trace.trace
    busy: list[Span] = [*trace.compute, *trace.copies, *trace.comm]
    total = max(stop for _, stop in busy) - min(start for start, _ in busy)
    hidden = length(intersection(trace.comm, trace.compute)) / max(length(trace.comm), 1)
    compute = length(trace.compute) / total
    idle = 1 - length(busy) / total
    return [100 * hidden, 100 * compute, 100 * idle]


def round_times(path: Path, folder: Path) -> Path:
    """Write a copy of a trace with starts and durations cut to whole microseconds."""
    content = path.read_bytes()
    is_compressed = content.startswith(b"\x1f\x8b")
    trace: dict[str, Any] = json.loads(gzip.decompress(content) if is_compressed else content)
    for event in trace["traceEvents"]:
        for name in ("ts", "dur"):
            if name in event:
                event[name] = int(event[name])
    copy = folder / path.name.removesuffix(".gz")
    copy.write_text(json.dumps(trace))
    return copy


def print_comparison(python: str, title: str, files: list[Path]) -> float:
    """Print a line for each rank and return the largest difference in points."""
    ranks = {trace.source.rank: trace for trace in map(read_rank, files)}
    hta = analyze_with_hta(python, {rank: trace.source.path for rank, trace in ranks.items()})
    print(title)
    largest = 0.0
    for rank, trace in sorted(ranks.items()):
        parts = []
        for name, ours, theirs in zip(
            QUANTITIES, analyze_with_parbench(trace), hta[rank], strict=True
        ):
            largest = max(largest, abs(ours - theirs))
            parts.append(f"{name} {theirs:6.2f} {ours:6.2f}")
        print(f"  rank {rank}: " + "   ".join(parts))
    print(f"  largest difference {largest:.2f} points")
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "an interpreter that has HolisticTraceAnalysis"
    parser.add_argument("--hta", default=sys.executable, metavar="PYTHON", help=help_text)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    largest = 0.0
    print("percent: HolisticTraceAnalysis, parbench")
    for folder in options.folders:
        files = list_trace_files([folder])
        print_comparison(options.hta, f"{folder.name}, unchanged", files)
        with tempfile.TemporaryDirectory() as scratch:
            rounded = [round_times(file, Path(scratch)) for file in files]
            title = f"{folder.name}, whole microseconds"
            largest = max(largest, print_comparison(options.hta, title, rounded))
    return int(largest > MAX_DIFFERENCE_POINTS)


if __name__ == "__main__":
    sys.exit(main())
