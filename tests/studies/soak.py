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
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil

from tests.support.paths import environment

EARLY_PART = (0.05, 0.25)
LATE_PART = (0.8, 1.0)
MAX_GROWTH = {"files": 0, "threads": 0, "bytes": 4_000}
"""The largest growth from the early to the late part; of bytes, for each case."""

SAMPLE_SECONDS = 0.5


def find_processes(driver: psutil.Process) -> dict[str, psutil.Process]:
    """Return the driver and its ranks, which a fork server starts."""
    processes = {"driver": driver}
    for server in driver.children():
        ranks = sorted(server.children(), key=lambda process: process.pid)
        processes |= {f"rank {number}": process for number, process in enumerate(ranks)}
    return processes


def sample_until_end(driver: psutil.Process, folder: Path) -> pd.DataFrame:
    """Return a row for each process and sample until the driver ends."""
    rows: list[dict[str, object]] = []
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        time.sleep(SAMPLE_SECONDS)
        files = folder.glob("*/records.jsonl")
        num_cases = sum(file.read_bytes().count(b"\n") for file in files)
        with suppress(psutil.Error):  # A process ended between two calls.
            for name, process in find_processes(driver).items():
                row = {
                    "process": name,
                    "cases": num_cases,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "bytes": process.memory_info().rss,
                }
                rows.append(row)
    return pd.DataFrame(rows)


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
    limits = f"--preset smoke --nproc 2 --repetitions 1 --budget {options.budget}"
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "run", *target, *limits.split(), "--out", folder]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
            samples = sample_until_end(psutil.Process(process.pid), Path(folder))
            exit_code = process.wait()
    progress = samples["cases"] / samples["cases"].max()
    medians = [
        samples[progress.between(*part)].groupby("process")[list(MAX_GROWTH)].median()
        for part in (EARLY_PART, LATE_PART)
    ]
    growth = medians[1] - medians[0]
    growth["bytes"] /= options.cases
    print(pd.concat(medians, axis=1, keys=("early", "late")).to_string())
    print(f"exit code {exit_code}")
    has_grown = bool((growth > pd.Series(MAX_GROWTH)).to_numpy().any())
    return int(has_grown or exit_code != 0)


if __name__ == "__main__":
    sys.exit(main())
