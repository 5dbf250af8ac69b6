"""The variables of torch for ranks that an MPI launcher has started."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from parbench.bench.text import UserError

_DEFAULT_PORT = 29500
"""The port of torch's own launcher."""
_JOB_VARIABLES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "PALS_APID",
    "SLURM_JOB_ID",
)


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables in which a launcher sets a rank and the number of ranks, in total and on the host of the rank."""

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
        local_rank=(
            "MPI_LOCALRANKID",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "PMI_LOCAL_RANK",
            "SLURM_LOCALID",
        ),
        local_size=("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(  # srun --mpi=pmix; the size is that of the step, because the job may have more tasks
        name="a PMIx launcher",
        rank="PMIX_RANK",
        size="SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        local_size=(),
    ),
)


def find_mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for this rank, empty if no MPI launcher has started several or torch's are set.

    Ranks of one host meet at a port that the job determines. Raises ``UserError`` if ranks may be on several hosts and
    MASTER_ADDR is not set.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    launcher = _find_launcher(environ)
    if launcher is None:
        return {}
    size = environ[launcher.size]
    variables = {"RANK": environ[launcher.rank], "WORLD_SIZE": size}
    for name, sources in (
        ("LOCAL_RANK", launcher.local_rank),
        ("LOCAL_WORLD_SIZE", launcher.local_size),
    ):
        values = [environ[source] for source in sources if environ.get(source)]
        if values:
            variables[name] = values[0]
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        variables.setdefault("LOCAL_WORLD_SIZE", size)
    if "MASTER_ADDR" not in environ:
        if variables.get("LOCAL_WORLD_SIZE") != size:
            hosts = (
                "several hosts"
                if "LOCAL_WORLD_SIZE" in variables
                else "hosts that it does not name"
            )
            hint = "name rank 0's, as mpirun -x MASTER_ADDR=HOST (Open MPI) or mpirun -genv MASTER_ADDR HOST (MPICH)"
            raise UserError(f"{launcher.name} started {size} ranks on {hosts}: {hint}")
        variables["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in environ:
        variables["MASTER_PORT"] = str(_choose_port(environ))
    return variables


def _find_launcher(environ: Mapping[str, str]) -> _Launcher | None:
    """Return the MPI launcher that has started several ranks, None if there is none."""
    for launcher in _LAUNCHERS:
        size = environ.get(launcher.size, "")
        if launcher.rank in environ and size.isdecimal() and int(size) > 1:
            return launcher
    return None


def _choose_port(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all ranks of a job.

    It is below the ports that a system assigns by itself.
    """
    for name in _JOB_VARIABLES:
        if name in environ:
            return 20000 + zlib.crc32(environ[name].encode()) % 10000
    return _DEFAULT_PORT
