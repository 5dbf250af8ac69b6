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
    assert find_mpi_variables(environ) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


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
