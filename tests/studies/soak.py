"""Check that memory, open files and threads stay constant during a long run.

    python -m tests.studies.soak [--cases 500]

One repetition prepares, measures, explains and closes many cases on the same two ranks. The script
compares medians over an early and a late part of the cases, for the driver and each rank. It exits
with 1 if files or threads grew, or memory by more than 4 kB per case.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from parbench.bench.text import format_table
from tests.support.paths import environment

EARLY_PART = (0.05, 0.25)
LATE_PART = (0.8, 1.0)
MAX_GROWTH_BYTES_PER_CASE = 4_000
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources of a process after a number of cases."""

    num_cases: int
    memory_bytes: float
    num_files: float
    num_threads: float


def find_processes(driver: psutil.Process) -> dict[str, psutil.Process]:
    """Return the driver and its ranks, which a fork server starts."""
    processes = {"driver": driver}
    for server in driver.children():
        ranks = sorted(server.children(), key=lambda process: process.pid)
        processes |= {f"rank {number}": process for number, process in enumerate(ranks)}
    return processes


def sample_until_end(driver: psutil.Process, folder: Path) -> dict[str, list[Sample]]:
    """Return samples of each process until the driver ends."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        time.sleep(SAMPLE_SECONDS)
        files = folder.glob("*/records.jsonl")
        num_cases = sum(file.read_bytes().count(b"\n") for file in files)
        if num_cases == 0:
            continue
        try:
            for name, process in find_processes(driver).items():
                sample = Sample(
                    num_cases=num_cases,
                    memory_bytes=process.memory_info().rss,
                    num_files=process.num_fds(),
                    num_threads=process.num_threads(),
                )
                samples[name].append(sample)
        except psutil.Error:
            # A process ended between two calls.
            continue
    return samples


def compute_median(samples: list[Sample], resource: str, part: tuple[float, float]) -> float:
    """Return the median of a resource over a part of the cases."""
    total = samples[-1].num_cases
    low, high = part
    values = [
        getattr(sample, resource)
        for sample in samples
        if low * total <= sample.num_cases <= high * total
    ]
    return float(median(values))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--budget", default="30m")
    options = parser.parse_args()
    numbers = ",".join(str(number) for number in range(options.cases))
    program = str(Path(sys.executable).with_name("parbench"))
    target = ["tests.support.faults:tangled", "--set", f"number={numbers}"]
    limits = [
        "--preset",
        "smoke",
        "--nproc",
        "2",
        "--repetitions",
        "1",
        "--budget",
        options.budget,
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "run", *target, *limits, "--out", folder]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
            samples = sample_until_end(psutil.Process(process.pid), Path(folder))
            exit_code = process.wait()
    limits_by_resource = {
        "memory_bytes": MAX_GROWTH_BYTES_PER_CASE * options.cases,
        "num_files": 0,
        "num_threads": 0,
    }
    rows = [("process", "resource", "early", "late")]
    has_grown = False
    for name, process_samples in samples.items():
        for resource, limit in limits_by_resource.items():
            early = compute_median(process_samples, resource, EARLY_PART)
            late = compute_median(process_samples, resource, LATE_PART)
            rows.append((name, resource, f"{early:.0f}", f"{late:.0f}"))
            has_grown = has_grown or late - early > limit
    print(format_table(rows, right_aligned=(2, 3)))
    print(f"exit code {exit_code}")
    return int(has_grown or exit_code != 0)


if __name__ == "__main__":
    sys.exit(main())
