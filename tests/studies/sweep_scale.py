"""Time submit, status and collect of a sweep of 100 points on 512 nodes.

Usage: python -m tests.studies.sweep_scale

Slurm's answers are simulated. Each run has 4096 ranks and a record for each of 20 sizes.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.results.runs import create_run, open_writer, write_run_info
from parbench.bench.text import format_table
from parbench.cli import _report
from parbench.slurm.sweep.folder import load_sweep
from parbench.slurm.sweep.status import collect, print_status
from parbench.slurm.sweep.submit import submit
from tests.support.fakes import make_plan
from tests.support.reports.reports_fixtures import collective_case, ok_record
from tests.support.slurm.sweeps import FakeSlurm, queue_job

NUM_NODES = 512
RANKS_PER_NODE = 8
SWEEP = f"""
nodes = {NUM_NODES}
ntasks_per_node = {RANKS_PER_NODE}
repeat = 5
budget = "60s"
device = "cuda"
[matrix]
dtype = ["float32", "bfloat16"]
placement = ["in_place", "out_of_place"]
[environment]
NCCL_ALGO = ["Ring", "Tree", "NVLS", "CollnetDirect", "PAT"]
[[case]]
name = "all_reduce"
set = {{ size_bytes = "1K:512M" }}
"""
MODULES = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")


def write_runs(folder: Path) -> None:
    """Write the complete run of every point."""
    hosts = [f"node{rank // RANKS_PER_NODE}" for rank in range(NUM_NODES * RANKS_PER_NODE)]
    cases = [collective_case("all_reduce", 1024 << exponent) for exponent in range(20)]
    for point in load_sweep(folder).points:
        plan = make_plan(cases, nproc=len(hosts))
        run, info = create_run(folder / "runs" / point.id, plan, "0")
        write_run_info(run, replace(info, environment={"hosts": hosts}))
        with open_writer(run) as writer:
            for case in cases:
                writer.write(ok_record(case))


def measure_seconds(action: Callable[[], object]) -> str:
    start = time.perf_counter()
    action()
    return f"{time.perf_counter() - start:.1f} s"


def main() -> None:
    slurm = FakeSlurm(queued=[queue_job("101")])
    with tempfile.TemporaryDirectory() as parent:
        file = Path(parent) / "sweep.toml"
        file.write_text(SWEEP)
        out = Path(parent) / "sweeps"

        def submit_sweep() -> None:
            submit(file, MODULES, dry_run=False, wait=False, out=out, slurm=slurm)

        rows = [("command", "time"), ("submit", measure_seconds(submit_sweep))]
        [folder] = out.iterdir()
        write_runs(folder)
        status_time = measure_seconds(lambda: print_status(folder, slurm=slurm))
        rows.append(("status", status_time))
        rows.append(
            (
                "collect, without the report",
                measure_seconds(lambda: collect(folder, None, slurm)),
            )
        )
        sys.stdout.write("\n" + format_table(rows) + "\n")
        report_time = measure_seconds(lambda: collect(folder, _report, slurm))
        sys.stdout.write(f"\ncollect, with the report: {report_time}\n")


if __name__ == "__main__":
    main()
