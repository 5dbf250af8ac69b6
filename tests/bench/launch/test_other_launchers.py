"""Real launchers before ours: mpirun on one host and over two, and torchrun with a place to meet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parbench.bench.machine.world_spec import FUNCTIONAL_ONLY
from parbench.bench.results.runs import Run, load_run, runs_in
from tests.support.clusters import PARBENCH, run_in_cluster
from tests.support.paths import environment

pytestmark = pytest.mark.full

BIN = Path(sys.executable).parent
RUN = [
    PARBENCH,
    "run",
    "--only",
    "all_reduce",
    "--sizes",
    "64K",
    "--budget",
    "10s",
    "--timeout",
    "60s",
    "--json",
]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def only_run(done: "subprocess.CompletedProcess[str]", out: Path) -> Run:
    assert done.returncode == 0, done.stderr
    [path] = runs_in(out)
    run = load_run(path)
    assert {(record.status, record.world.size) for record in run.records} == {("ok", 2)}
    assert done.stdout.count('"collective.all_reduce"') == len(run.records), "rank 0 alone prints"
    return run


def test_mpirun_starts_ranks_of_one_host_which_meet_by_themselves(tmp_path: Path) -> None:
    command = ["mpirun", "-n", "2", *RUN, "--out", str(tmp_path)]
    environ = {**environment(), **AS_ROOT}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    run = only_run(done, tmp_path)
    assert run.info.plan.launches == 1
    bound = (run.info.environment or {})["process"]["cores"] == 1
    shared = [note for note in run.info.plan.notes if note.startswith(FUNCTIONAL_ONLY)]
    assert not shared or (os.cpu_count() or 1) < 2, (
        "each rank has a core of its own, though it sees no other's"
    )
    assert bound or (os.cpu_count() or 1) < 2, "which mpirun gives to each of two"


def test_ranks_of_two_hosts_meet_where_mpirun_or_torchrun_says(tmp_path: Path) -> None:
    run = f"{' '.join(RUN)} --out {tmp_path}"
    meets = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id it --no-python"
    script = [
        f"mpirun -n 2 {PARBENCH} run --only all_reduce",
        f"mpirun -n 2 -x MASTER_ADDR=n1 {run}/mpirun",
        f"srun -N 2 -n 2 --mpi=none {BIN / 'torchrun'} {meets} {run}/torchrun",
        f"MASTER_ADDR=n1 srun -N 2 -n 2 --mpi=pmi2 {run}/pmi2",
    ]
    lines = "; echo next; ".join(f"({line}) || echo failed" for line in script)
    done = run_in_cluster(
        ["salloc", "-N2", "-n2", "sh", "-c", lines], nodes=2, timeout=300, variables=AS_ROOT
    )
    refused, *outputs = done.stdout.split("next\n")
    assert refused.count("failed") == 1, done.stderr
    assert (
        "Open MPI started 2 ranks on several hosts: name rank 0's, as mpirun -x MASTER_ADDR="
        in done.stderr
    )
    for name, output in zip(("mpirun", "torchrun", "pmi2"), outputs, strict=True):
        ended = subprocess.CompletedProcess(name, int("failed" in output), output, done.stderr)
        found = only_run(ended, tmp_path / name)
        assert (found.info.environment or {})["hosts"] == ["n1", "n2"]
