"""The surroundings of a run in tests: a machine of four cores, launchers' variables, fake ranks."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from parbench.bench.launch import driver
from parbench.bench.launch import measure as measuring
from parbench.bench.launch.control_channel import ADDRESS_VARIABLE, Done
from parbench.bench.launch.driver import StartRanks
from parbench.bench.machine import doctor
from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan import options
from parbench.bench.results.runs import Run
from tests.support.fakes import FakeLauncher, FakeRank, case_order, make_outcome, wait_until

MODULES = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")
MACHINE = Machine(
    cores=4,
    physical_cores=4,
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
    monkeypatch.setattr(driver, "order_of_visits", case_order)
    monkeypatch.setattr(doctor, "_SAMPLE_SECONDS", 0.01)
    monkeypatch.chdir(folder)


class FakeRanks:
    """Starts fake ranks that measure nothing: the case number ``n`` ends with ``said[n]``.

    ``begun`` lists the ids of the cases that rank 0 began. ``shown`` is the number of records
    shown so far, which the test counts.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.shown = 0
        self.launchers: list[FakeLauncher] = []
        self.driver_addresses: list[str] = []
        self.on_case: Callable[[int], None] = lambda count: None
        self.said = [make_outcome()]

    def starter(
        self,
        run: Run,
        joined: Joined | None,
        nodelist: str | None,
        stack: ExitStack,
        *cpus: object,
    ) -> StartRanks:
        """Replace ``measure._starter``."""
        size = run.info.plan.nproc

        def start(number: int, variables: Mapping[str, str]) -> FakeLauncher:
            launcher = FakeLauncher()
            self.launchers.append(launcher)
            self.driver_addresses.append(variables[ADDRESS_VARIABLE])
            launcher.run([FakeRank(variables, rank, size) for rank in range(size)], self._act)
            return launcher

        return start

    def interrupt(self, case: int, records: int, sign: signal.Signals = signal.SIGINT) -> None:
        """Send this process a signal in the case of this number, once so many records are shown."""

        def stop(count: int) -> None:
            if count == case:
                wait_until(lambda: self.shown == records)
                os.kill(os.getpid(), sign)
                threading.Event().wait(1)

        self.on_case = stop

    def _act(self, launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        for index, case in enumerate(rank.receive_job().plan.cases):
            rank.start(index)
            if rank.rank == 0:
                self.begun.append(case.id)
                self.on_case(len(self.begun))
                rank.finish(index, self.said[min(index, len(self.said) - 1)])
        rank.say(Done())


def use_slurm_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be on the first of four nodes of an allocation where srun exists."""
    for name, value in FOUR_NODES.items():
        monkeypatch.setenv(name, value)
    for module in (options, measuring):
        monkeypatch.setattr(module, "check_srun", lambda: None)
