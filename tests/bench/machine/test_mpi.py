"""Ranks that an MPI launcher started have torch's names, and meet at a place that is theirs."""

from parbench.bench.machine.mpi import variables_of_mpi
from parbench.bench.machine.world_spec import Joined
from tests.support.refusals import usage_error

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1537081345",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
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


def test_ranks_of_one_host_are_named_as_torchrun_names_them_and_meet_by_themselves() -> None:
    found = variables_of_mpi(OPEN_MPI)
    port = int(found.pop("MASTER_PORT"))
    named = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert found == named
    assert 20000 <= port < 30000
    assert Joined.find({**found, "MASTER_PORT": "1"}) == Joined(
        rank=1, size=2, local_size=2, one_node=True
    )
    assert variables_of_mpi({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"] == str(
        port
    ), "all ranks' alike"
    other = variables_of_mpi({**OPEN_MPI, "PMIX_NAMESPACE": "1537081346"})["MASTER_PORT"]
    assert other != str(port), "and another job's is not"
    pmix = variables_of_mpi(PMIX)
    assert {name: pmix[name] for name in named} == named
    assert pmix["MASTER_PORT"] == "29500", "where nothing names the job"


def test_ranks_of_several_hosts_need_to_be_told_where_they_meet() -> None:
    told = usage_error(variables_of_mpi, HYDRA)
    assert told.startswith(
        "a PMI launcher started 4 ranks on several hosts: name rank 0's, as mpirun -x MASTER_ADDR="
    )
    assert usage_error(variables_of_mpi, PMI2).startswith(
        "a PMI launcher started 2 ranks on hosts that it does not tell: "
    )
    found = variables_of_mpi({**HYDRA, "MASTER_ADDR": "n1", "MASTER_PORT": "1234"})
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert variables_of_mpi({**PMI2, "MASTER_ADDR": "n1"})["LOCAL_RANK"] == "0"
    one = variables_of_mpi({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n1"})
    assert one["LOCAL_WORLD_SIZE"] == "1"
    assert "MASTER_ADDR" not in one


def test_torchs_own_names_go_first_and_one_rank_is_alone() -> None:
    assert variables_of_mpi({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}) == {}
    assert variables_of_mpi({}) == {}
    assert variables_of_mpi({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) == {}
    shell = {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}
    assert variables_of_mpi(shell) == {}, "an interactive step of a job of four"
