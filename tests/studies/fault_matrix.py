"""What each fault does at each moment of a run, by real processes: prints the table of ``tests/README.md``.

python -m tests.studies.fault_matrix                                  # all cells, about 20 minutes on two cores
python -m tests.studies.fault_matrix --faults disk-full rank-stop --moments timed --verbose

A run of two cases on two ranks meets one fault at one moment. A cell says the exit code and the statuses that the run
holds then. It is bold, and the exit code 1, where these, the sentence that is printed, processes or shared memory that
are left, or a folder that cannot be read are not as expected. Needs util-linux, iproute2 and a namespace to be root in.
"""

import argparse
import os
import re
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
IN_A_CASE = ("preparing", "warm-up", "timed", "between")
FAULT, MOMENT, FOLDER, MARK = "CELL_FAULT", "CELL_MOMENT", "CELL_FOLDER", "CELL_ID"
FAREWELL_SECONDS = 20.0
NONE_YET, NO_MORE, NOTHING_TO_BE_WRONG = (
    "no rank is there",
    "no rank is there any more",
    "nothing is computed",
)


@dataclass(frozen=True)
class Expected:
    """A run's end: its exit code, the statuses it holds, and a part of what it prints."""

    code: int
    kept: str
    told: str = ""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where the script itself does it to a process; a rank that is at its moment does the others."""

    title: str
    expected: Callable[[str], Expected | str]  # by moment; text says why there is no such cell
    signal: int = 0
    victim: str = ""  # driver, launcher or rank
    beside: str = ""  # a shell command in the run's namespaces


def _kept(moment: str) -> str:
    return {"between": "ok", "reporting": "ok ok"}.get(moment, "-")


def stopped(code: int, reporting: int, told: str = "") -> Callable[[str], Expected]:
    """A driver that a signal ends: what was measured stays."""
    return lambda moment: Expected(
        reporting if moment == "reporting" else code, _kept(moment), told
    )


def in_a_case(
    told: str, status: str = "failed", code: int = 4, never: str = ""
) -> Callable[[str], Expected | str]:
    """A case that a rank ends: it has its record, and new ranks measure the other."""

    def expected(moment: str) -> Expected | str:
        if moment not in IN_A_CASE:
            return NONE_YET if moment == "importing" else NO_MORE
        if never and moment in ("preparing", "between"):
            return never
        return Expected(code, f"ok {status}" if moment == "between" else f"{status} ok", told)

    return expected


def launcher_killed(moment: str) -> Expected | str:
    if moment == "importing":
        return Expected(0, "ok ok")  # another is started
    return NO_MORE if moment == "reporting" else in_a_case("its connection closed")(moment)


def went_on(moment: str) -> Expected:
    return Expected(0, "ok ok")


def disk_full(moment: str) -> Expected:
    return Expected(4, _kept(moment), "No space left on device")


def read_only(moment: str) -> Expected:
    """No file can be made: the record of the case that is in flight still goes to one that is open."""
    kept = {"importing": "-", "between": "ok ok", "reporting": "ok ok"}.get(moment, "ok")
    return Expected(4, kept, "Permission denied")


def network_lost(moment: str) -> Expected:
    if moment == "importing":
        return Expected(4, "failed failed", "timed out")
    if moment == "reporting":
        return Expected(0, "ok ok")
    return Expected(4, "ok hang" if moment == "between" else "hang failed", "no end within 6 s")


FAULTS = {
    "driver-int": Fault(
        "SIGINT (Ctrl-C) to the driver", stopped(4, 4, "interrupted"), signal.SIGINT, "driver"
    ),
    "driver-term": Fault(
        "SIGTERM to the driver", stopped(4, 4, "interrupted"), signal.SIGTERM, "driver"
    ),
    "driver-hup": Fault("SIGHUP to the driver", stopped(-1, -1), signal.SIGHUP, "driver"),
    "driver-kill": Fault("SIGKILL to the driver", stopped(-9, -9), signal.SIGKILL, "driver"),
    "driver-stop": Fault("the driver is stopped for 2 s", went_on, signal.SIGSTOP, "driver"),
    "launcher-kill": Fault(
        "SIGKILL to what forks ranks", launcher_killed, signal.SIGKILL, "launcher"
    ),
    "rank-kill": Fault(
        "SIGKILL to a rank", in_a_case("rank 1 died: ended by SIGKILL"), signal.SIGKILL, "rank"
    ),
    "rank-stop": Fault(
        "SIGSTOP to a rank", in_a_case("rank 1 did not arrive", "hang"), signal.SIGSTOP, "rank"
    ),
    "rank-raises": Fault(
        "a rank raises", in_a_case("rank 1 raised RuntimeError: the roof is on fire")
    ),
    "rank-hangs": Fault("a rank sleeps for ever", in_a_case("rank 1 did not arrive", "hang")),
    "rank-exits": Fault("a rank exits with 0", in_a_case("rank 1 died: exit code 0")),
    "rank-memory": Fault("a rank's memory is full", in_a_case("rank 1 raised RuntimeError")),
    "rank-wrong": Fault("a wrong result", in_a_case("differ", "wrong", 1, NOTHING_TO_BE_WRONG)),
    "disk-full": Fault(
        "the disk is full", disk_full, beside="dd if=/dev/zero of=$OUT/ballast bs=4k"
    ),
    "read-only": Fault(
        "the run's folder is read-only", read_only, beside="chmod -R a-w $OUT/runs/2*"
    ),
    "network": Fault("the loopback interface is down", network_lost, beside="ip link set lo down"),
}


def prepare(world: "World", *, number: int = 0) -> "Benchmark":
    """Return the step of a case, whose rank 1 meets this cell's fault at its moment: in a rank, by ``--target``."""
    import torch
    import torch.distributed as dist

    from parbench.bench.world.benchmark import Benchmark

    class Step(Benchmark):
        def __init__(self) -> None:
            self.sum, self.wrong = torch.zeros(1), False
            self.at("between" if number else "preparing")

        def at(self, moment: str) -> None:
            if world.rank == 1 and moment == os.environ[MOMENT]:
                self.wrong |= meet(os.environ[FAULT], Path(os.environ[FOLDER]))

        def step(self) -> None:
            if number == 0:
                self.at(phase())
            time.sleep(0.001)
            dist.all_reduce(self.sum, group=world.group)

        def reset(self) -> None:
            self.sum.fill_(1.0)

        def check(self) -> int:
            return int(self.sum.item() != world.size) + self.wrong

    return Step()


def phase() -> str:
    """Return what the runner that calls this step is doing."""
    frame = sys._getframe(2)
    while not hasattr(owner := frame.f_locals.get("self"), "progress") and frame.f_back:
        frame = frame.f_back
    return str(getattr(getattr(owner, "progress", None), "phase", ""))


def meet(fault: str, folder: Path) -> bool:
    """Do a rank's fault, or wait for what is done to others, once; return whether results are wrong from now on."""
    import resource

    import torch

    if (folder / "rank").exists():
        return False
    (folder / ".rank").write_text(str(os.getpid()))
    (folder / ".rank").rename(folder / "rank")
    if fault == "rank-raises":
        raise RuntimeError("the roof is on fire")
    if fault == "rank-exits":
        os._exit(0)
    if fault == "rank-memory":
        resource.setrlimit(
            resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20),) * 2
        )
        torch.ones(1 << 30)
    while fault != "rank-wrong" and not (folder / "go").exists():
        time.sleep(0.01)
    return fault == "rank-wrong"


class Cell:
    """One run that meets one fault at one moment."""

    def __init__(self, name: str, moment: str, folder: Path) -> None:
        self.fault, self.moment, self.folder = FAULTS[name], moment, folder
        self.id = uuid.uuid4().hex
        self.out = folder / "out"
        self.out.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(self.out)], check=True
        )
        own = {
            FAULT: name,
            MOMENT: moment,
            FOLDER: str(folder),
            MARK: self.id,
            "OUT": str(self.out),
        }
        words = [
            str(Path(sys.executable).with_name("parbench")),
            "run",
            "--preset",
            "smoke",
            "--nproc",
            "2",
        ]
        words += [
            "--launches",
            "1",
            "--budget",
            "5m",
            "--timeout",
            "6s",
            "--out",
            str(self.out / "runs"),
        ]
        words += ["--target", "tests.studies.fault_matrix:prepare", "--set", "number=0,1"]
        # without the right to write what is read-only, as anyone; the loopback interface is this run's own
        drop = "setpriv --inh-caps=-dac_override --bounding-set=-dac_override"
        wait = f"until [ -e {folder}/trigger ]; do sleep 0.02; done; {self.fault.beside or 'true'}; touch {folder}/done"
        script = f'ip link set lo up; ( {wait} ) >/dev/null 2>&1 & exec {drop} "$@"'
        self.stderr = (folder / "stderr").open("w+b")
        self.stdout = (folder / "stdout").open("w+b")
        self.driver = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", script, "sh", *words],
            cwd=folder,
            env={**environment(), **own},
            stdout=self.stdout,
            stderr=self.stderr,
        )

    def play(self) -> str | None:
        """Let the fault happen and the run end; return what is left behind, None where the moment never came."""
        if not self._wait(self._there):
            return None
        pid = self._victim()
        (self.folder / "trigger").touch()
        if self.fault.beside:
            self._wait((self.folder / "done").exists)
        if pid and self.fault.signal:
            os.kill(pid, self.fault.signal)
        if self.fault.signal == signal.SIGSTOP and self.fault.victim == "driver":
            time.sleep(2)
            os.kill(pid, signal.SIGCONT)
        if (
            self.fault.victim == "driver" and self.fault.signal == signal.SIGSTOP
        ) or self.fault.beside:
            (self.folder / "go").touch()
        self._wait(lambda: self.driver.poll() is not None)
        self._wait(lambda: not self._processes(), FAREWELL_SECONDS)
        return ", ".join(self._processes())

    def _there(self) -> bool:
        runs = [*self.out.glob("runs/*/run.json")]
        if self.moment == "importing":
            return bool(runs and self._launcher() and not [*self.out.glob("runs/*/logs/gang-0")])
        if self.moment == "reporting":
            records = [*self.out.glob("runs/*/records.jsonl")]
            return (
                bool(records) and records[0].read_bytes().count(b"\n") >= 2 and not self._launcher()
            )
        return (self.folder / "rank").exists()

    def _victim(self) -> int:
        match self.fault.victim:
            case "driver":
                return self.driver.pid
            case "launcher":
                return self._launcher()
            case "rank":
                return int((self.folder / "rank").read_text())
        return 0

    def _launcher(self) -> int:
        try:
            children = psutil.Process(self.driver.pid).children()
            return next(
                (one.pid for one in children if "parbench.bench.rank.fork_server" in one.cmdline()),
                0,
            )
        except psutil.Error:
            return 0

    def _processes(self) -> list[str]:
        found = []
        for one in psutil.process_iter():
            try:
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self.id:
                    found.append(" ".join(one.cmdline())[:60])
            except psutil.Error:
                continue
        return found

    def _wait(self, true: Callable[[], object], seconds: float = 300.0) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or (self.driver.poll() is not None and seconds == 300.0):
                return bool(true())
            time.sleep(0.005)
        return True

    def seen(self) -> tuple[int, str, str]:
        """Return the exit code, the statuses in order of cases, and what was printed."""
        runs = [*self.out.glob("runs/*/run.json")]
        kept = "-"
        if runs:
            records = sorted(
                load_run(runs[0].parent).records, key=lambda record: str(record.case.params)
            )
            kept = " ".join(record.status for record in records) or "-"
        return int(self.driver.poll() or 0), kept, self.read("stderr") + self.read("stdout")

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def close(self) -> None:
        for one in (
            psutil.Process(self.driver.pid).children(recursive=True)
            if self.driver.poll() is None
            else ()
        ):
            one.kill()
        self.driver.kill()
        self.driver.wait()
        self.stdout.close()
        self.stderr.close()
        subprocess.run(["umount", "-l", str(self.out)], check=True)


def play(name: str, moment: str, verbose: bool) -> tuple[str, bool]:
    """Return a cell's text, and whether it is as expected."""
    expected = FAULTS[name].expected(moment)
    if isinstance(expected, str):
        return expected, True
    folder, shared = Path(tempfile.mkdtemp(prefix="cell-")), set(Path("/dev/shm").iterdir())
    cell = Cell(name, moment, folder)
    try:
        left = cell.play()
        code, kept, text = cell.seen()
        wrong = (
            ["its moment never came"] if left is None else [f"left behind: {left}"] if left else []
        )
        wrong += [f"expected {expected.code}"] if code != expected.code else []
        wrong += [f"expected kept {expected.kept}"] if kept != expected.kept else []
        wrong += (
            [f"not told: {expected.told}"] if expected.told not in " ".join(text.split()) else []
        )
        wrong += ["Traceback"] if "Traceback" in text else []
        if more := {
            one
            for one in set(Path("/dev/shm").iterdir()) - shared
            if not one.name.startswith("parbench-tool")
        }:
            wrong.append(f"shared memory: {more}")
    except UserError as error:
        code, kept, text, wrong = -1, "-", cell.read("stderr"), [f"cannot be read: {error}"]
    finally:
        cell.close()
    if wrong or verbose:
        print(
            f"--- {name} {moment}: {code} {kept}: {'; '.join(wrong)}\n{text}",
            file=sys.stderr,
            flush=True,
        )
    shutil.rmtree(folder, ignore_errors=True)
    shown = re.sub(r"^-(\d+)", lambda found: signal.Signals(int(found[1])).name, f"{code}")
    told = f"{shown}: {kept}"
    return (f"**{told} ({'; '.join(wrong)})**" if wrong else told), not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS])
    parser.add_argument("--moments", nargs="*", default=[*MOMENTS], choices=[*MOMENTS])
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    for sign, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        signal.signal(sign, usual)  # a shell's background ignores the first, nohup the second
    if os.environ.get("CELL_NAMESPACE") is None:
        command = ["unshare", "-rm", sys.executable, *sys.argv]
        return subprocess.run(
            command, env={**os.environ, "CELL_NAMESPACE": "1"}, check=False
        ).returncode
    print("| fault | " + " | ".join(MOMENTS[moment] for moment in asked.moments) + " |")
    print("|" + "---|" * (1 + len(asked.moments)))
    as_expected = True
    for name in asked.faults:
        cells = []
        for moment in asked.moments:
            told, right = play(name, moment, asked.verbose)
            print(f"{name} {moment}: {told}", file=sys.stderr, flush=True)
            as_expected &= right
            cells.append(told)
        print(f"| {FAULTS[name].title} | " + " | ".join(cells) + " |", flush=True)
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
