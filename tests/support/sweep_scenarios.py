"""Sweeps on a real cluster, each a function run inside one: ``sweep_scenarios.py NAME FOLDER``.

All but one measure by stand-ins, so that what is tested is the sweep, not the ranks.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.slurm.job.state import SavedState, read_states
from parbench.slurm.sweep.folder import Point, create_folder, load_jobs, write_sweep
from parbench.slurm.sweep.status import Picture, follow, look
from parbench.slurm.sweep.submit import batches, resume, send
from parbench.slurm.system import Slurm
from tests.support.fakes import wait_until
from tests.support.local_slurm.local import inject_fault
from tests.support.paths import IMPORT_PATH
from tests.support.standin import counted
from tests.support.sweeps import make_point, make_sweep

S = Slurm()


def submitted(
    out: Path, points: Sequence[Point], *, cases: int = 3, each: float = 0.1, **more: Any
) -> Path:
    """Submit a sweep whose points write so many records, one each so many seconds."""
    out.mkdir(exist_ok=True)
    python = out / "python"
    words = [sys.executable, "-m", "tests.support.standin_job", str(cases), str(out / "pace")]
    python.write_text(
        f'#!/bin/bash\nexport PYTHONPATH={IMPORT_PATH}\nexec {shlex.join(words)} "$@"\n'
    )
    python.chmod(0o755)
    pace(out, each)
    where = {"python": str(python), "working_directory": str(out), "partition": "lab"}
    sweep = make_sweep(points, **{**where, "time_seconds": 120, **more})
    folder = create_folder(out, sweep.name)
    write_sweep(folder, sweep)
    send(sweep, folder, batches(sweep), S)
    return folder


def pace(out: Path, each: float) -> None:
    (out / "pace").write_text(str(each))


def ended(folder: Path) -> Picture:
    follow(folder, pause=lambda seconds: time.sleep(0.2))
    return look(folder)


def begun(folder: Path, records: int = 1) -> None:
    wait_until(lambda: sum(counted(folder).values()) >= records, 60)


def states(picture: Picture) -> list[str]:
    return [one.state for one in picture.points]


def saved(folder: Path, points: Sequence[Point]) -> list[SavedState]:
    return [*read_states(folder, points).values()]


def assert_done(folder: Path, points: Sequence[Point], cases: int = 3) -> None:
    """The sweep ends with all done, and every case of every point has one record that is fine."""
    assert states(ended(folder)) == ["done"] * len(points)
    found = counted(folder)
    assert set(found.values()) == {1}, found
    assert {status for *_, status in found} == {"ok"}, found
    assert len(found) == cases * len(points), found


def start_now(job: str) -> None:
    """Skip the two minutes that Slurm waits before a requeued job starts again; not in its first second."""
    wait_until(
        lambda: any(
            (one["JobState"], one["Restarts"]) == ("PENDING", "1") for one in S.show_job(job)
        ),
        30,
    )
    time.sleep(1.2)
    subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=True)


def array(out: Path) -> None:
    """A real sbatch takes the options, quotes and prologues as they were meant, and refuses what it does not know."""
    points = [make_point(0, nodes=4), make_point(1), make_point(2)]
    said: dict[str, Any] = {
        "prologue": (f"touch '{out}/it is'",),
        "options": {"comment": 'a "b" # c'},
    }
    folder = submitted(out, points, mode="array", **said)
    assert_done(folder, points)
    assert len({state.job for state in saved(folder, points)}) == 3, "each task is a job of its own"
    assert [len(one.nodes) for one in look(folder).points] == [4, 2, 2]
    assert (out / "it is").exists()
    assert [task["Comment"] for one in load_jobs(folder) for task in S.show_job(one.id)] == [
        'a "b" # c'
    ] * 3
    with pytest.raises(UserError, match=r"^nothing was submitted: sbatch refused: "):
        submitted(out, points, options={"licenses": "none"})


def time_ends(out: Path) -> None:
    """A point that takes longer than its job: stopped in time, its job requeued by itself, gone on with."""
    points = [make_point(0, seconds=1.0), make_point(1, seconds=1.0)]
    folder = submitted(out, points, cases=500, each=0.1, time_seconds=60)
    (job,) = load_jobs(folder)
    begun(folder)
    subprocess.run(
        ["scontrol", "update", f"jobid={job.id}", "EndTime=now+38"], check=True
    )  # not a minute's wait
    wait_until(lambda: any(state.state == "interrupted" for state in saved(folder, points)), 75)
    assert "the job's time ended" in {state.reason for state in saved(folder, points)}
    kept = len(counted(folder))
    assert 20 < kept < 500, kept
    pace(out, 0.0)
    start_now(job.id)
    assert_done(folder, points, 500)


def requeued(out: Path) -> None:
    points = [make_point(number) for number in range(3)]
    folder = submitted(out, points, cases=10, each=0.2)
    (job,) = load_jobs(folder)
    begun(folder, 3)
    S.requeue(job.id)
    start_now(job.id)
    assert_done(folder, points, 10)


def killed(out: Path) -> None:
    """SIGKILL of the process in the job, and then of a point's driver: both are named, and resumed."""
    points = [make_point(0), make_point(1)]
    folder = submitted(out, points, cases=15, each=0.1, requeue=False)
    begun(folder, 2)
    os.kill(worker_of(folder), signal.SIGKILL)
    picture = ended(folder)
    (job,) = load_jobs(folder)
    assert states(picture) == ["lost", "missing"], states(picture)
    assert picture.points[0].reason.startswith(f"job {job.id} ended while it was measured"), (
        picture.points[0]
    )
    resume(folder)
    before = len(counted(folder))
    wait_until(lambda: len(counted(folder)) > before, 30)
    os.kill(child_of(worker_of(folder)), signal.SIGKILL)
    picture = ended(folder)
    assert states(picture) == ["interrupted", "done"], states(picture)
    assert "ended with SIGKILL" in picture.points[0].reason
    resume(folder)
    assert_done(folder, points, 15)


def worker_of(folder: Path) -> int:
    """Return the process that a batch script of the sweep started."""
    (pid,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"tests.support.standin_job" in (words := path.read_bytes())
        and str(folder).encode() in words
    )
    return pid


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def node_down(out: Path) -> None:
    """With go-on the rest is measured on the nodes left; what was lost is measured by the next job, afresh."""
    points = [
        make_point(0, nodes=4),
        make_point(1, nodes=4),
        make_point(2, nodes=3),
        make_point(3, nodes=2),
    ]
    folder = submitted(out, points, cases=150, each=0.1, on_dead_node="go-on", requeue=False)
    begun(folder, 2)
    pace(out, 0.01)
    subprocess.run(["scontrol", "update", "nodename=n3", "state=down", "reason=test"], check=True)
    picture = ended(folder)
    assert states(picture) == ["lost-node", "lost-node", "done", "done"], picture.points
    assert picture.points[0].reason.startswith("n3 is down: "), picture.points[0]
    assert picture.points[1].reason == "needs 4 nodes; n3 is down, 3 are left"
    assert picture.points[2].nodes == ("n1", "n2", "n4")
    wait_until(lambda: set(S.node_states().values()) == {"idle"}, 30)
    resume(folder)
    picture = ended(folder)
    assert states(picture) == ["done"] * 4
    lost_runs = {run for state in saved(folder, points) for run in state.lost_runs}
    found = counted(folder, lost_runs)
    assert (set(found.values()), len(found)) == ({1}, 4 * 150)


def node_cut(out: Path) -> None:
    """A node whose link is cut is found out though its ranks say nothing; with fail it ends the job, and is named."""
    points = [make_point(0, nodes=4), make_point(1, nodes=2)]
    folder = submitted(out, points, cases=900, each=0.1, requeue=False)
    begun(folder, 2)
    inject_fault("cut", "n3")
    picture = ended(folder)
    assert states(picture) == ["lost-node", "lost-node"], picture.points
    assert picture.points[0].reason.startswith("n3 is down: "), picture.points[0]
    assert picture.points[1].reason == 'n3 is down, and on_dead_node = "fail" ends the job'
    assert 2 <= len(counted(folder)) < 900


def ranks(out: Path) -> None:
    """Ranks on four nodes: submitted by the command line, cancelled on the way, resumed, collected."""
    (out / "sweep.toml").write_text(
        'name = "real"\nnodes = [2, 4]\nbackend = "gloo"\ndevice = "cpu"\n'
        'budget = "2s"\nlaunches = 1\ntimeout = "60s"\n'
        '[[case]]\nname = "collective.all_reduce"\nset = { size_bytes = ["1K", "2K", "4K"] }\n'
        '[slurm]\npartition = "lab"\ntime = "4m"\n'
    )

    def parbench(*words: str) -> int:
        program = str(Path(sys.executable).with_name("parbench"))
        return subprocess.run([program, "slurm", *words], cwd=out, check=False).returncode

    assert parbench("submit", "sweep.toml", "--out", str(out)) == 0
    (folder,) = (path.parent for path in out.glob("*/sweep.json"))
    begun(folder)
    assert parbench("cancel", str(folder)) == 0
    picture = ended(folder)
    assert all(one.state == "done" or one.reason for one in picture.points), picture.points
    assert picture.code == 4
    assert [parbench(word, str(folder)) for word in ("status", "collect", "resume")] == [0, 4, 0]
    picture = ended(folder)
    assert states(picture) == ["done", "done"], picture.points
    assert [one.nodes for one in picture.points] == [("n1", "n2", "n3", "n4"), ("n1", "n2")]
    assert (set(counted(folder).values()), len(counted(folder))) == ({1}, 6)
    assert [parbench(word, str(folder)) for word in ("collect", "resume")] == [0, 2]
    assert (folder / "report.html").is_file()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    scenario.__name__: scenario
    for scenario in (array, time_ends, requeued, killed, node_down, node_cut, ranks)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
