"""Inside a cluster on one machine: what a command knows of it, and how it ends."""

from pathlib import Path

import pytest
from clusters import in_cluster

from slurm.cluster import inner_environment
from slurm.cluster_conf import cluster_spec


def test_what_runs_inside_knows_its_cluster_and_no_other() -> None:
    spec = cluster_spec(nodes=4, cpus=2, link="200mbit")
    outside = {
        "SLURM_JOB_ID": "7",
        "SRUN_CPUS_PER_TASK": "1",
        "SBATCH_PARTITION": "x",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
        "HOME": "/h",
        "NCCL_ALGO": "Ring",
    }
    inside = inner_environment(outside, Path("/tmp/parbench-x"), spec)
    assert inside.pop("PARBENCH_EMULATED").startswith("4 nodes on one machine of ")
    assert inside == {
        "HOME": "/h",
        "NCCL_ALGO": "Ring",
        "SLURM_CONF": "/tmp/parbench-x/slurm.conf",
        "PARBENCH_CLUSTER": "/tmp/parbench-x",
    }


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["srun", "sh", "-c", "exit 3"], 3),
    ],
)
def test_the_code_is_the_command_s(command: list[str], code: int) -> None:
    assert in_cluster(command, nodes=1).returncode == code


def test_a_command_that_is_no_program_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch(mode=0o755)
    path.write_bytes(b"\x00\x01")
    done = in_cluster([str(path)], nodes=1)
    assert done.returncode == 126
    assert done.stderr == f"parbench: {path} cannot be started: Exec format error\n"
