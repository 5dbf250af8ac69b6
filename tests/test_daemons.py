"""Real nodes: a name, an address and shared memory each, jobs that run and come back, and failures in words."""

import os
import stat
from pathlib import Path

import pytest
from clusters import in_cluster

LOOK = "$(hostname) $(hostname -I) $(ip -o link | grep -c eth) $(ls /dev/shm | wc -l)"


def test_every_node_has_its_name_its_address_and_its_shared_memory() -> None:
    script = f'hostname; touch /dev/shm/parbench-ctl; srun --nodes 4 sh -c "echo {LOOK}"; rm /dev/shm/parbench-ctl'
    done = in_cluster(["sh", "-c", script.replace("$(", r"\$(")], nodes=4)
    first, *lines = done.stdout.splitlines()
    assert first == "ctl", done.stderr
    assert sorted(lines) == [f"n{number} 10.77.0.{number} 1 0" for number in (1, 2, 3, 4)]
    assert done.returncode == 0


def test_slurm_sees_two_leaves_and_the_cpus_asked_for() -> None:
    script = (
        "sinfo --noheader --format='%P %D %c'; srun --nodes 4 printenv SLURM_TOPOLOGY_ADDR | sort; env | grep ^PARB"
    )
    done = in_cluster(["sh", "-c", script], nodes=4, cpus=3, link="1gbit", slow=["n2:500mbit"])
    lines = done.stdout.splitlines()
    addresses = ["spine.leaf1.n1", "spine.leaf1.n2", "spine.leaf2.n3", "spine.leaf2.n4"]
    assert lines[:5] == ["lab* 4 3", *addresses], done.stderr
    assert any(line.endswith(", links of 1gbit, n2 of 500mbit") for line in lines[5:])


@pytest.mark.slow
def test_a_batch_job_runs_and_comes_back_when_it_is_requeued(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nhostname >> {tmp_path}/ran.$SLURM_RESTART_COUNT\n[ $SLURM_RESTART_COUNT ] || sleep 60\n"
    )
    steps = """
    set -e
    sbatch --parsable --output=/dev/null --nodelist n2 job.sh
    until [ -s ran. ]; do sleep 0.1; done
    sleep 1; scontrol requeue 1
    until scontrol show job 1 | grep -q PENDING; do sleep 0.1; done
    sleep 1.5; scontrol update jobid=1 StartTime=now
    until [ -s ran.1 ]; do sleep 0.1; done
    """
    done = in_cluster(["timeout", "60", "sh", "-c", steps], nodes=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran.1").read_text() == "n2\n"


def broken(folder: Path, program: str, script: str) -> dict[str, str]:
    """Return variables under which a program of the cluster does what ``script`` says instead."""
    path = folder / program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("slurmd", "slurmd of n1 ended with 5: it broke"),
        ("munged", "munged ended with 5: it broke"),
        ("slurmctld", "slurmctld ended with 5: it broke"),
        ("hostname", "n1 got no namespaces of its own: it broke"),
        ("ip", "ip: it broke"),
        ("tc", "tc: it broke"),
    ],
)
def test_a_cluster_that_does_not_come_up_says_why_and_runs_nothing(tmp_path: Path, program: str, sentence: str) -> None:
    variables = broken(tmp_path, program, "echo it broke >&2; exit 5")
    done = in_cluster(["echo", "ran"], nodes=1, link="1gbit", variables=variables)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"parbench: the cluster did not come up: {sentence}\n"
