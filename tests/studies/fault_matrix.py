"""Inject each fault at each moment of a run, and print the table of tests/README.md.

    python -m tests.studies.fault_matrix     # all cells, about 20 minutes on two cores
    python -m tests.studies.fault_matrix --faults disk-full rank-stop --moments timed --verbose

A run of two cases on two ranks meets one fault at one moment. A cell has the exit code and the
statuses in the run folder. It is bold, and the exit code of the script is 1, if these, the message,
remaining processes or shared memory, or a folder that cannot be read differ from the expectation.
Requires util-linux, iproute2 and a namespace to be root in.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from tests.support.paths import environment

if TYPE_CHECKING:
    from parbench.bench.world.benchmark import Benchmark
    from parbench.bench.world.world import World

MOMENTS = {
    "importing": "before ranks start",
    "preparing": "first case is prepared",
    "warm-up": "warm-up",
    "timed": "timed pass",
    "between": "between cases",
    "reporting": "report is written",
}
MOMENTS_IN_A_CASE = ("preparing", "warm-up", "timed", "between")
FAULT_VARIABLE = "CELL_FAULT"
MOMENT_VARIABLE = "CELL_MOMENT"
FOLDER_VARIABLE = "CELL_FOLDER"
ID_VARIABLE = "CELL_ID"
NAMESPACE_VARIABLE = "CELL_NAMESPACE"
MAX_SECONDS = 300.0
MAX_EXIT_SECONDS = 20.0
STOPPED_SECONDS = 2.0
FREE_BYTES_OF_RANK = 64 << 20
NO_RANK_YET = "no rank has started"
NO_RANK_LEFT = "all ranks have ended"
NO_RESULT = "nothing is computed"
RUN_OPTIONS = (
    "--preset smoke --nproc 2 --repetitions 1 --budget 5m --timeout 6s --set number=0,1"
)


@dataclass(frozen=True)
class Expectation:
    """The exit code of a run, the statuses in its folder, and a part of its message."""

    exit_code: int
    statuses: str
    message: str = ""


Outcome = Expectation | str
"""An expectation, or the reason why a fault cannot happen at a moment."""


@dataclass(frozen=True)
class Fault:
    """A fault; without signal and command, a rank injects it at its moment."""

    title: str
    expect: Callable[[str], Outcome]  # by moment
    signal: int = 0
    victim: str = ""  # driver, fork server or rank
    command: str = ""  # a shell command in the namespaces of the run

    @property
    def resumes(self) -> bool:
        """True if the waiting rank continues after the fault."""
        return bool(self.command) or self.stops_driver

    @property
    def stops_driver(self) -> bool:
        return self.victim == "driver" and self.signal == signal.SIGSTOP


def statuses_at(moment: str) -> str:
    """Return the statuses of cases that are complete at a moment."""
    return {"between": "ok", "reporting": "ok ok"}.get(moment, "-")


def driver_ends(exit_code: int, message: str = "") -> Callable[[str], Outcome]:
    """The driver ends, and complete cases remain."""

    def expect(moment: str) -> Outcome:
        return Expectation(exit_code, statuses_at(moment), message)

    return expect


def case_ends(
    message: str, status: str = "failed", exit_code: int = 4, *, needs_result: bool = False
) -> Callable[[str], Outcome]:
    """The case of a rank ends with a status, and new ranks measure the other case."""

    def expect(moment: str) -> Outcome:
        if moment == "importing":
            return NO_RANK_YET
        if moment not in MOMENTS_IN_A_CASE:
            return NO_RANK_LEFT
        if needs_result and moment in ("preparing", "between"):
            return NO_RESULT
        statuses = f"ok {status}" if moment == "between" else f"{status} ok"
        return Expectation(exit_code, statuses, message)

    return expect


def expect_fork_server_killed(moment: str) -> Outcome:
    if moment == "importing":
        # The driver starts another one.
        return Expectation(0, "ok ok")
    return case_ends("the fork server was ended by SIGKILL")(moment)


def expect_network_lost(moment: str) -> Outcome:
    if moment == "importing":
        return Expectation(4, "failed failed", "did not start within 120 s")
    if moment == "reporting":
        return Expectation(0, "ok ok")
    statuses = "ok hang" if moment == "between" else "hang failed"
    return Expectation(4, statuses, "timed out after 6 s")


FAULTS = {
    "driver-int": Fault(
        "SIGINT (Ctrl-C) to the driver", driver_ends(4, "interrupted"), signal.SIGINT, "driver"
    ),
    "driver-term": Fault(
        "SIGTERM to the driver", driver_ends(4, "interrupted"), signal.SIGTERM, "driver"
    ),
    "driver-hup": Fault("SIGHUP to the driver", driver_ends(-1), signal.SIGHUP, "driver"),
    "driver-kill": Fault("SIGKILL to the driver", driver_ends(-9), signal.SIGKILL, "driver"),
    "driver-stop": Fault(
        "the driver is stopped for 2 s",
        lambda moment: Expectation(0, "ok ok"),
        signal.SIGSTOP,
        "driver",
    ),
    "launcher-kill": Fault(
        "SIGKILL to the fork server", expect_fork_server_killed, signal.SIGKILL, "fork server"
    ),
    "rank-kill": Fault(
        "SIGKILL to a rank", case_ends("rank 1 died: ended by SIGKILL"), signal.SIGKILL, "rank"
    ),
    "rank-stop": Fault(
        "SIGSTOP to a rank", case_ends("rank 1 did not arrive", "hang"), signal.SIGSTOP, "rank"
    ),
    "rank-raises": Fault(
        "a rank raises", case_ends("rank 1 raised RuntimeError: injected fault")
    ),
    "rank-hangs": Fault("a rank sleeps forever", case_ends("rank 1 did not arrive", "hang")),
    "rank-exits": Fault("a rank exits with 0", case_ends("rank 1 died: exit code 0")),
    "rank-memory": Fault(
        "the memory of a rank is full", case_ends("rank 1 raised RuntimeError")
    ),
    "rank-wrong": Fault("a wrong result", case_ends("differ", "wrong", 1, needs_result=True)),
    "disk-full": Fault(
        "the disk is full",
        driver_ends(4, "No space left on device"),
        command="dd if=/dev/zero of=$OUT/ballast bs=4k",
    ),
    "read-only": Fault(
        "the run folder is read-only",
        driver_ends(4, "Permission denied"),
        command="chmod -R a-w $OUT/runs/2*",
    ),
    "network": Fault(
        "the loopback interface is down", expect_network_lost, command="ip link set lo down"
    ),
}


def prepare(world: "World", *, number: int = 0) -> "Benchmark":
    """Return the benchmark of a case whose rank 1 meets the fault of this cell at its moment."""
    import torch
    import torch.distributed as dist

    from parbench.bench.world.benchmark import Benchmark

    class Sum(Benchmark):
        def __init__(self) -> None:
            self.sum = torch.zeros(1)
            self.is_wrong = False
            self.reach("between" if number else "preparing")

        def reach(self, moment: str) -> None:
            if world.rank == 1 and moment == os.environ[MOMENT_VARIABLE]:
                fault = os.environ[FAULT_VARIABLE]
                meet_fault(fault, Path(os.environ[FOLDER_VARIABLE]))
                self.is_wrong = fault == "rank-wrong"

        def step(self) -> None:
            if number == 0:
                self.reach(find_phase())
            time.sleep(0.001)
            dist.all_reduce(self.sum, group=world.group)

        def reset(self) -> None:
            self.sum.fill_(1.0)

        def check(self) -> int:
            return int(self.sum.item() != world.size or self.is_wrong)

    return Sum()


def find_phase() -> str:
    """Return the phase of the runner that called the step."""
    frame = sys._getframe(2)
    while frame.f_back and not hasattr(frame.f_locals.get("self"), "_progress"):
        frame = frame.f_back
    progress = getattr(frame.f_locals.get("self"), "_progress", None)
    return str(getattr(progress, "phase", ""))


def meet_fault(fault: str, folder: Path) -> None:
    """Inject a fault in this rank, or wait for that of another process; only the first time."""
    import torch

    if (folder / "rank").exists():
        return
    (folder / ".rank").write_text(str(os.getpid()))
    (folder / ".rank").rename(folder / "rank")
    if fault == "rank-raises":
        raise RuntimeError("injected fault")
    if fault == "rank-exits":
        os._exit(0)
    if fault == "rank-memory":
        limit = psutil.Process().memory_info().vms + FREE_BYTES_OF_RANK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(1 << 30)
    while fault != "rank-wrong" and not (folder / "go").exists():
        time.sleep(0.01)


class Cell:
    """A run that meets one fault at one moment."""

    def __init__(self, name: str, moment: str, folder: Path) -> None:
        self.fault = FAULTS[name]
        self.moment = moment
        self.folder = folder
        self.id = uuid.uuid4().hex
        self.out = folder / "out"
        self.out.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(self.out)]
        subprocess.run(mount, check=True)
        variables = {
            FAULT_VARIABLE: name,
            MOMENT_VARIABLE: moment,
            FOLDER_VARIABLE: str(folder),
            ID_VARIABLE: self.id,
            "OUT": str(self.out),
        }
        program = str(Path(sys.executable).with_name("parbench"))
        target = ["tests.studies.fault_matrix:prepare", "--out", f"{self.out}/runs"]
        # Root could write to a read-only folder, so that capability is dropped. The loopback
        # interface belongs to the network namespace of this run.
        drop = "setpriv --inh-caps=-dac_override --bounding-set=-dac_override"
        wait = f"until [ -e {folder}/trigger ]; do sleep 0.02; done"
        inject = f"{self.fault.command or 'true'}; touch {folder}/done"
        script = f'ip link set lo up; ( {wait}; {inject} ) >/dev/null 2>&1 & exec {drop} "$@"'
        run = [program, "run", *RUN_OPTIONS.split(), *target]
        with (folder / "output").open("wb") as output:
            self.driver = subprocess.Popen(
                ["unshare", "-n", "sh", "-c", script, "sh", *run],
                cwd=folder,
                env={**environment(), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def play(self) -> list[str]:
        """Let the fault happen and the run end; return what differs from a clean end."""
        if not self._wait_until(self._is_moment):
            return ["its moment did not come"]
        pid = self._find_victim()
        (self.folder / "trigger").touch()
        if self.fault.command:
            self._wait_until((self.folder / "done").exists)
        if pid and self.fault.signal:
            os.kill(pid, self.fault.signal)
        if self.fault.stops_driver:
            time.sleep(STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
        if self.fault.resumes:
            (self.folder / "go").touch()
        self._wait_until(lambda: self.driver.poll() is not None)
        deadline = time.monotonic() + MAX_EXIT_SECONDS
        while self._list_processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"remaining process: {process}" for process in self._list_processes()]

    def _is_moment(self) -> bool:
        if self.moment == "importing":
            has_folder = any(self.out.glob("runs/*/run.json"))
            has_ranks = any(self.out.glob("runs/*/logs/attempt-0/rank-*.log"))
            return has_folder and self._find_fork_server() != 0 and not has_ranks
        if self.moment == "reporting":
            for file in self.out.glob("runs/*/records.jsonl"):
                is_complete = file.read_bytes().count(b"\n") >= 2
                return is_complete and self._find_fork_server() == 0
            return False
        if self.moment == "between" and not any(self._list_record_files()):
            return False
        return (self.folder / "rank").exists()

    def _list_record_files(self) -> list[Path]:
        """Return the file of records, if it has one already."""
        files = self.out.glob("runs/*/records.jsonl")
        return [file for file in files if file.stat().st_size]

    def _find_victim(self) -> int:
        if self.fault.victim == "driver":
            return self.driver.pid
        if self.fault.victim == "fork server":
            return self._find_fork_server()
        if self.fault.victim == "rank":
            return int((self.folder / "rank").read_text())
        return 0

    def _find_fork_server(self) -> int:
        """Return the process id of the fork server, or 0."""
        try:
            for child in psutil.Process(self.driver.pid).children():
                if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                    return child.pid
        except psutil.Error:
            pass
        return 0

    def _list_processes(self) -> list[str]:
        """Return the command lines of processes of this run."""
        commands = []
        for process in psutil.process_iter():
            try:
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                if not is_zombie and process.environ().get(ID_VARIABLE) == self.id:
                    commands.append(" ".join(process.cmdline())[:60])
            except psutil.Error:
                continue
        return commands

    def _wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait for a condition, at most until the driver ends or the time is over."""
        deadline = time.monotonic() + MAX_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.driver.poll() is not None:
                return bool(condition())
            time.sleep(0.005)
        return True

    def read_output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def read_statuses(self) -> str:
        """Return the statuses in the run folder in the order of cases; raises UserError."""
        for info in self.out.glob("runs/*/run.json"):
            records = load_run(info.parent).records
            by_case = sorted(records, key=lambda record: str(record.case.params))
            return " ".join(record.status for record in by_case) or "-"
        return "-"

    def close(self) -> None:
        if self.driver.poll() is None:
            for process in psutil.Process(self.driver.pid).children(recursive=True):
                process.kill()
        self.driver.kill()
        self.driver.wait()
        subprocess.run(["umount", "-l", str(self.out)], check=True)


def list_shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("*"))


def format_exit_code(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else str(exit_code)


def find_differences(cell: Cell, expectation: Expectation) -> tuple[str, list[str]]:
    """Play a cell and return its text, and what differs from the expectation."""
    differences = cell.play()
    try:
        statuses = cell.read_statuses()
    except UserError as error:
        return "-", [*differences, f"the folder cannot be read: {error}"]
    exit_code = int(cell.driver.poll() or 0)
    output = " ".join(cell.read_output().split())
    if exit_code != expectation.exit_code:
        differences.append(f"expected exit code {expectation.exit_code}")
    if statuses != expectation.statuses:
        differences.append(f"expected statuses {expectation.statuses}")
    if expectation.message not in output:
        differences.append(f"missing message: {expectation.message}")
    if "Traceback" in output:
        differences.append("Traceback")
    return f"{format_exit_code(exit_code)}: {statuses}", differences


def play_cell(name: str, moment: str, *, verbose: bool) -> tuple[str, bool]:
    """Return the text of a cell, and whether it is as expected."""
    expectation = FAULTS[name].expect(moment)
    if isinstance(expectation, str):
        return expectation, True
    folder = Path(tempfile.mkdtemp(prefix="cell-"))
    shared_memory = list_shared_memory()
    cell = Cell(name, moment, folder)
    try:
        text, differences = find_differences(cell, expectation)
    finally:
        cell.close()
    for path in list_shared_memory() - shared_memory:
        differences.append(f"remaining shared memory: {path}")
    if differences or verbose:
        print(f"--- {name} {moment}: {text}: {differences}", file=sys.stderr)
        print(cell.read_output(), file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if differences:
        return f"**{text} ({'; '.join(differences)})**", False
    return text, True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS])
    parser.add_argument("--moments", nargs="*", default=[*MOMENTS], choices=[*MOMENTS])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    # Background jobs ignore SIGINT, and nohup ignores SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if NAMESPACE_VARIABLE not in os.environ:
        module = [sys.executable, "-m", "tests.studies.fault_matrix", *sys.argv[1:]]
        variables = {**environment(), NAMESPACE_VARIABLE: "1"}
        return subprocess.run(
            ["unshare", "-rm", *module], env=variables, check=False
        ).returncode
    titles = [MOMENTS[moment] for moment in options.moments]
    print(f"| fault | {' | '.join(titles)} |")
    print("|" + "---|" * (1 + len(titles)))
    all_expected = True
    for name in options.faults:
        cells = []
        for moment in options.moments:
            text, is_expected = play_cell(name, moment, verbose=options.verbose)
            print(f"{name} {moment}: {text}", file=sys.stderr, flush=True)
            all_expected = all_expected and is_expected
            cells.append(text)
        print(f"| {FAULTS[name].title} | {' | '.join(cells)} |", flush=True)
    return 0 if all_expected else 1


if __name__ == "__main__":
    sys.exit(main())
