"""Ranks that an MPI launcher started, in the variables by which torch knows ranks."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from parbench.bench.text import UserError

_TORCHS_PORT = 29500
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID", "SLURM_JOB_ID")


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """A launcher by the variables that it sets: a rank's number, of how many, and both on its host by any of names."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(  # MPICH, Intel MPI, MVAPICH, Cray, and srun --mpi=pmi2
        name="a PMI launcher",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        local_size=("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(  # srun --mpi=pmix, whose step tells how many there are: a job's own count may be of others
        name="a PMIx launcher",
        rank="PMIX_RANK",
        size="SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        local_size=(),
    ),
)


def variables_of_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torch calls this rank where an MPI launcher started several; nothing where torch's names are set.

    Ranks of one host meet there, at a port that is the job's own; ``UserError`` if nobody says where those of several
    hosts do.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    for launcher in _LAUNCHERS:
        size = environ.get(launcher.size, "")
        if launcher.rank in environ and size.isdecimal() and int(size) > 1:
            break
    else:
        return {}
    found = {"RANK": environ[launcher.rank], "WORLD_SIZE": size}
    for name, theirs in (("LOCAL_RANK", launcher.local_rank), ("LOCAL_WORLD_SIZE", launcher.local_size)):
        if told := next((environ[one] for one in theirs if one in environ), ""):
            found[name] = told
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        found.setdefault("LOCAL_WORLD_SIZE", size)
    if "MASTER_ADDR" not in environ:
        if found.get("LOCAL_WORLD_SIZE") != size:
            hosts = "several hosts" if "LOCAL_WORLD_SIZE" in found else "hosts that it does not tell"
            how = "name rank 0's, as mpirun -x MASTER_ADDR=HOST (Open MPI) or mpirun -genv MASTER_ADDR HOST (MPICH)"
            raise UserError(f"{launcher.name} started {size} ranks on {hosts}: {how}")
        found["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in environ:
        job = next((environ[name] for name in _JOBS if name in environ), None)
        # below the ports that a system gives away by itself
        found["MASTER_PORT"] = str(_TORCHS_PORT if job is None else 20000 + zlib.crc32(job.encode()) % 10000)
    return found
