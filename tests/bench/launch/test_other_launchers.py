"""Ranks that another launcher started: torchrun, mpirun or srun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parbench.bench.launch.external import StoreMailbox, open_store
from parbench.bench.machine.environment import find_interface
from parbench.bench.results.runs import Run, list_runs, load_run
from tests.support.fakes import make_outcome
from tests.support.paths import run_command
from tests.support.slurm.clusters import PARBENCH, run_in_cluster

ALL_REDUCE = ("run", "--preset", "smoke", "all_reduce")
ONE_CASE = (*ALL_REDUCE, "--sizes", "1K")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def load_only_run(out: Path) -> Run:
    [path] = list_runs(out)
    return load_run(path)


def test_store_carries_large_messages_after_one_that_cannot_be_sent() -> None:
    """A value of torch's store has at most 8 MiB."""
    store = open_store("127.0.0.1", 0, is_server=True)
    mailbox = StoreMailbox(store)
    unsendable = make_outcome(details={"value": object()})
    with pytest.raises(TypeError):
        mailbox.post(0, unsendable)
    assert mailbox.receive() == []
    messages = [make_outcome(reason="é" * (9 << 20)), make_outcome()]
    for message in messages:
        mailbox.post(1, message)
    assert mailbox.receive() == [(1, message) for message in messages]


LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "parbench"],
    "mpirun": ["mpirun", "-n", "2", PARBENCH],
}


def run_launched(launcher: str, folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run ``parbench`` as two ranks of a launcher."""
    command = ["env", "--unset=GLOO_SOCKET_IFNAME", *LAUNCHERS[launcher], *args]
    return run_command(command, folder, {**AS_ROOT, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.full)]
)
def test_ranks_of_a_launcher_make_one_run(launcher: str, tmp_path: Path) -> None:
    options = (*ONE_CASE, "--repetitions", "2", "--format=json")
    result = run_launched(launcher, tmp_path, *options)
    assert result.returncode == 0, result.stderr
    run = load_only_run(tmp_path / "runs")
    results = [(record.repetition, record.status, record.world.size) for record in run.records]
    assert results == [(0, "ok", 2), (1, "ok", 2)]
    # Nobody has set the interface, so the ranks choose the one that reaches the driver.
    facts = run.info.environment or {}
    assert facts["variables"]["GLOO_SOCKET_IFNAME"] == find_interface("127.0.0.1")
    assert result.stdout.count('"collective.all_reduce"') == 2, "only rank 0 prints"
    if launcher == "mpirun" and (os.cpu_count() or 1) >= 2:
        # mpirun binds each rank to a core of its own.
        assert facts["process"]["cores"] == 1


@pytest.mark.full
def test_raising_rank_under_torchrun_leaves_a_report(tmp_path: Path) -> None:
    """torchrun exits with 1 and reports the exit code of each rank."""
    target = ("tests.support.faults:raising",)
    result = run_launched("torchrun", tmp_path, "run", "--preset", "smoke", *target)
    run = load_only_run(tmp_path / "runs")
    [record] = run.records
    assert record.reason == "rank 1 raised RuntimeError: the roof is on fire"
    assert "the roof is on fire" in " ".join(result.stdout.split())
    assert (run.path / "report.html").exists(), result.stderr
    assert result.returncode == 1
    assert re.search(r"rank\s*: 0 .*\n\s*exitcode\s*: 4 ", result.stderr), result.stderr


@pytest.mark.full
def test_ranks_of_two_hosts_meet_at_master_addr(tmp_path: Path) -> None:
    args = f"{PARBENCH} {' '.join(ONE_CASE)} --format=json --out {tmp_path}"
    args_of_module = args.replace(PARBENCH, "-m parbench")
    nodes = "--nnodes 2 --nproc-per-node 1"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id it"
    torchrun = f"{' '.join(TORCHRUN)} {nodes} {rendezvous} {args_of_module}"
    commands = {
        "refused": f"mpirun -n 2 {args}/refused",
        "mpirun": f"mpirun -n 2 -x MASTER_ADDR=n1 {args}/mpirun",
        "torchrun": f"srun -N 2 -n 2 --mpi=none {torchrun}/torchrun",
        "pmi2": f"MASTER_ADDR=n1 srun -N 2 -n 2 --mpi=pmi2 {args}/pmi2",
    }
    script = "; ".join(f"({line}) || echo {name} failed" for name, line in commands.items())
    result = run_in_cluster(
        ["salloc", "-N2", "-n2", "sh", "-c", script], nodes=2, timeout=300, variables=AS_ROOT
    )

    failures = re.findall(r"(\w+) failed", result.stdout)
    assert failures == ["refused"], result.stderr
    assert "mpirun -x MASTER_ADDR=" in result.stderr
    for name in ("mpirun", "torchrun", "pmi2"):
        run = load_only_run(tmp_path / name)
        assert [(record.status, record.world.size) for record in run.records] == [("ok", 2)]
        assert (run.info.environment or {})["hosts"] == ["n1", "n2"]
    assert result.stdout.count('"collective.all_reduce"') == 3
