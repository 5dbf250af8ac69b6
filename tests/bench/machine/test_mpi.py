"""Ranks that an MPI launcher started get torch's variables and a place to meet."""

import pytest

from parbench.bench.machine.mpi import find_mpi_variables
from tests.support.refusals import usage_error

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1537081345",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
PMI2 = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_JOBID": "1.2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
}
PMIX = {
    "PMIX_RANK": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "1",
}


@pytest.mark.parametrize("environ", [OPEN_MPI, PMIX])
def test_ranks_of_one_host_get_torch_variables(environ: dict[str, str]) -> None:
    variables = find_mpi_variables(environ)
    port = int(variables.pop("MASTER_PORT"))
    assert 20000 <= port < 30000
    assert variables == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_port_depends_on_job_only() -> None:
    port = find_mpi_variables(OPEN_MPI)["MASTER_PORT"]
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
    other_job = {**OPEN_MPI, "PMIX_NAMESPACE": "1537081346"}
    assert find_mpi_variables(other_rank)["MASTER_PORT"] == port
    assert find_mpi_variables(other_job)["MASTER_PORT"] != port


@pytest.mark.parametrize("environ", [HYDRA, PMI2])
def test_ranks_of_several_hosts_need_address(environ: dict[str, str]) -> None:
    assert "MASTER_ADDR" in usage_error(find_mpi_variables, environ)
    variables = find_mpi_variables({**environ, "MASTER_ADDR": "n1", "MASTER_PORT": "1234"})
    assert variables["RANK"] == environ["PMI_RANK"]
    assert variables["WORLD_SIZE"] == environ["PMI_SIZE"]
    assert "MASTER_ADDR" not in variables


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        # The shell of an interactive step, in a job of four tasks.
        {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    ],
)
def test_other_processes_get_no_variables(environ: dict[str, str]) -> None:
    assert find_mpi_variables(environ) == {}
