"""The surroundings of a run in tests: a machine of four cores, launchers' variables, fake ranks."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from parbench.bench.launch import driver
from parbench.bench.launch import measure as measuring
from parbench.bench.launch.driver import StartRanks
from parbench.bench.launch.messages import Job
from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.machine import Machine
from parbench.bench.plan import options
from parbench.bench.results.runs import Run
from tests.support.fakes import ScriptedRanks, make_hello, make_outcome, make_single_blocks

MODULES = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")
MACHINE = Machine(
    cores=4,
    memory_bytes=16 << 30,
    torch_version="2.13.0",
    torch_has_cuda=False,
)
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
FOUR_NODES = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURMD_NODENAME": "n1",
}


def isolate_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process be a driver in an empty folder, on ``MACHINE``, without variables set."""
    for name in (*TORCHRUN, "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PARBENCH_EMULATED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_machine, "inspect_machine", lambda environ: MACHINE)
    monkeypatch.setattr(driver, "make_blocks", make_single_blocks)
    monkeypatch.chdir(folder)


class FakeRanks:
    """Starts fake ranks that measure nothing: the case number ``n`` ends with ``said[n]``.

    ``begun`` lists the ids of the cases that rank 0 began.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.starts: list[ScriptedRanks] = []
        self.on_case: Callable[[int], None] = lambda count: None
        self.said = [make_outcome()]

    def choose_launcher(self, run: Run, *arguments: object) -> StartRanks:
        """Replace ``measure.choose_launcher``."""
        size = run.info.plan.nproc

        def start(folder: Path, variables: Mapping[str, str]) -> ScriptedRanks:
            hellos = [make_hello(rank) for rank in range(size)]
            self.starts.append(ScriptedRanks(size, folder, hellos, self._act))
            return self.starts[-1]

        return start

    def interrupt(self, case: int) -> None:
        """Send this process SIGINT in the case of this number."""

        def stop(count: int) -> None:
            if count == case:
                os.kill(os.getpid(), signal.SIGINT)

        self.on_case = stop

    def _act(self, ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        for index, case in enumerate(job.plan.cases):
            self.begun.append(case.id)
            self.on_case(len(self.begun))
            ranks.finish(self.said[min(index, len(self.said) - 1)])
            yield
        ranks.complete(*range(job.plan.nproc))
        ranks.has_ended = True


def use_slurm_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be on the first of four nodes of an allocation where srun exists."""
    for name, value in FOUR_NODES.items():
        monkeypatch.setenv(name, value)
    for module in (options, measuring):
        monkeypatch.setattr(module, "check_srun", lambda: None)
