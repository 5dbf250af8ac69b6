"""Sweeps on a real cluster, each a function that runs inside of one.

Usage: python -m tests.support.slurm.sweep_scenarios NAME FOLDER

Stand-ins replace ``parbench run`` in all scenarios except ``ranks``, so they test the sweep and not
the ranks.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.slurm.sweep.folder import (
    JobAttempt,
    Point,
    create_folder,
    load_attempt,
    load_jobs,
    load_sweep,
    write_sweep,
)
from parbench.slurm.sweep.status import SweepStatus, follow_sweep, get_status
from parbench.slurm.sweep.submit import resume, submit_points
from parbench.slurm.system import Slurm
from tests.support.fakes import wait_until
from tests.support.local_slurm.local import inject_fault
from tests.support.paths import IMPORT_PATH
from tests.support.refusals import usage_error
from tests.support.slurm.clusters import PARBENCH
from tests.support.slurm.standin import assert_measured_once, count_records
from tests.support.slurm.sweeps import make_point, make_sweep
from tests.support.trees import write_tool


def submit_stand_ins(
    workspace: Path,
    points: Sequence[Point],
    *,
    num_cases: int,
    seconds_per_case: float = 0.1,
    **fields: Any,
) -> Path:
    """Submit a sweep of stand-ins and return its folder."""
    pace = workspace / "pace"
    pace.write_text(str(seconds_per_case))
    command = [
        sys.executable,
        "-m",
        "tests.support.slurm.standin_job",
        str(num_cases),
        str(pace),
    ]
    script = f'export PYTHONPATH={IMPORT_PATH}\nexec {shlex.join(command)} "$@"'
    python = write_tool(workspace, "python", script)
    slurm = {"partition": "lab", "time": "2m", **fields.pop("slurm", {})}
    sweep = make_sweep(points, slurm=slurm, **fields)
    sweep = msgspec.structs.replace(sweep, python=str(python), working_directory=str(workspace))
    folder = create_folder(workspace, sweep.name)
    write_sweep(folder, sweep)
    submit_points(sweep, folder, sweep.points, Slurm())
    return folder


def wait_for_end(folder: Path) -> SweepStatus:
    """Follow a sweep until its jobs have ended, and return its status."""
    follow_sweep(folder, pause=lambda seconds: time.sleep(0.2))
    return get_status(folder)


def wait_for_records(folder: Path, num_records: int) -> None:
    wait_until(lambda: sum(count_records(folder).values()) >= num_records, 60)


def list_states(status: SweepStatus) -> list[str]:
    return [point.state for point in status.points]


def assert_done(folder: Path, num_records: int) -> None:
    """Wait for the end of a sweep, and check that every case has one good record."""
    assert set(list_states(wait_for_end(folder))) == {"done"}
    assert {record.status for record in count_records(folder)} == {"ok"}
    assert_measured_once(folder, num_records)


def array(workspace: Path) -> None:
    """The real sbatch accepts options, quotes and prologues, and refuses an unknown license."""
    points = [make_point(0, nodes=4), make_point(1), make_point(2)]
    folder = submit_stand_ins(
        workspace,
        points,
        num_cases=3,
        mode="array",
        prologue=(f"touch '{workspace}/prologue ran'",),
        slurm={"options": {"comment": 'a "b" # c'}},
    )
    assert_done(folder, num_records=9)
    assert (workspace / "prologue ran").exists()
    assert [len(point.nodes) for point in get_status(folder).points] == [4, 2, 2]
    task = Slurm().show_job(load_jobs(folder)[0].id)[0]
    assert task["Comment"] == 'a "b" # c'
    error = usage_error(
        submit_stand_ins,
        workspace,
        points,
        num_cases=1,
        slurm={"options": {"licenses": "none"}},
    )
    assert error.startswith("nothing was submitted: sbatch refused: ")


def time_ends(workspace: Path) -> None:
    """A point that takes longer than its job is stopped, and its job requeues itself."""
    points = [make_point(0, seconds=1.0), make_point(1, seconds=1.0)]
    folder = submit_stand_ins(workspace, points, num_cases=400, slurm={"time": "1m"})
    [job] = load_jobs(folder)
    wait_for_records(folder, 1)
    update_job(job.id, "EndTime=now+20")  # the limit is at least a minute
    wait_until(lambda: load_first_attempt(folder).reason == "the job's time ended", 75)
    num_records = len(count_records(folder))
    assert num_records < 400
    (workspace / "pace").write_text("0")
    wait_until(lambda: is_requeued(job.id), 30)
    time.sleep(1.2)  # Slurm ignores an earlier start in the first second
    update_job(job.id, "StartTime=now")  # a requeued job waits for two minutes
    assert_done(folder, num_records=800)


def load_first_attempt(folder: Path) -> JobAttempt:
    return load_attempt(folder, load_sweep(folder).points[0].id)


def update_job(job_id: str, setting: str) -> None:
    subprocess.run(["scontrol", "update", f"jobid={job_id}", setting], check=True)


def is_requeued(job_id: str) -> bool:
    [job] = Slurm().show_job(job_id)
    return job["JobState"] == "PENDING" and job["Restarts"] == "1"


def node_cut(workspace: Path) -> None:
    """A node whose link is cut is reported, and the job continues with the other nodes."""
    points = [make_point(0, nodes=4), make_point(1, nodes=4), make_point(2, nodes=3)]
    folder = submit_stand_ins(
        workspace,
        points,
        num_cases=300,
        slurm={"on_dead_node": "go-on", "requeue": False},
    )
    wait_for_records(folder, 2)
    (workspace / "pace").write_text("0")
    inject_fault("cut", "n3")
    status = wait_for_end(folder)
    assert list_states(status) == ["absent", "absent", "done"]
    assert status.points[0].reason.startswith("n3 is down: ")
    assert status.points[1].reason == "needs 4 nodes, 3 are left: n3 is down"
    assert status.points[2].nodes == ("n1", "n2", "n4")
    inject_fault("heal", "n3")
    subprocess.run(["scontrol", "update", "nodename=n3", "state=resume"], check=True)
    all_nodes = ("n1", "n2", "n3", "n4")
    wait_until(lambda: set(Slurm().get_node_states(all_nodes).values()) == {"idle"}, 60)
    resume(folder)
    assert list_states(wait_for_end(folder)) == ["done", "done", "done"]


def ranks(workspace: Path) -> None:
    """Real ranks are submitted, cancelled, resumed and collected by the command line."""
    (workspace / "sweep.toml").write_text(
        """
        nodes = [2, 4]
        backend = "gloo"
        device = "cpu"
        budget = "2s"
        repetitions = 1
        timeout = "60s"
        case = [{ name = "collective.all_reduce", set = { size_bytes = ["1K", "2K", "4K"] } }]
        slurm = { partition = "lab", time = "4m" }
        """
    )

    def parbench_slurm(*args: str) -> int:
        return subprocess.run([PARBENCH, "slurm", *args], cwd=workspace, check=False).returncode

    assert parbench_slurm("submit", "sweep.toml", "--out", str(workspace)) == 0
    [path] = workspace.glob("*/sweep.json")
    folder = path.parent
    wait_for_records(folder, 1)
    assert parbench_slurm("cancel", str(folder)) == 0
    assert wait_for_end(folder).code == 4
    assert parbench_slurm("status", str(folder)) == 0
    assert parbench_slurm("collect", str(folder)) == 4
    assert parbench_slurm("resume", str(folder)) == 0
    assert list_states(wait_for_end(folder)) == ["done", "done"]
    assert_measured_once(folder, 6)
    assert [len(point.nodes) for point in get_status(folder).points] == [4, 2]
    assert parbench_slurm("collect", str(folder)) == 0
    assert parbench_slurm("resume", str(folder)) == 2, "nothing is missing"
    assert (folder / "report.html").is_file()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "array": array,
    "time_ends": time_ends,
    "node_cut": node_cut,
    "ranks": ranks,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
