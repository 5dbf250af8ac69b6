"""Translates the environment variables of MPI launchers to those of torch, such as RANK."""

from collections.abc import Mapping

from parbench.bench.text import UserError

_DEFAULT_PORT = "29500"
"""The default port of torchrun."""
# The variables of Open MPI, of PMI launchers (MPICH, Intel MPI, MVAPICH, Cray, srun --mpi=pmi2) and
# of PMIx launchers (srun --mpi=pmix), of which the first one that is set counts. The size is that
# of a step of Slurm, because the job may have more tasks.
_SOURCES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PMI_LOCAL_RANK",
        "SLURM_LOCALID",
    ),
    "LOCAL_WORLD_SIZE": (
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "PMI_LOCAL_SIZE",
    ),
}


def find_mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch needs in this process, a rank that MPI has started.

    The result has values of environment variables by name: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as far as they are known and missing in
    ``environ``. The result is empty if torch's RANK or WORLD_SIZE is set, or if no MPI launcher has
    started at least two ranks. Raises ``UserError`` if ranks may be on several hosts and
    MASTER_ADDR is not set.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    variables = {}
    for name, sources in _SOURCES.items():
        values = [environ[source] for source in sources if environ.get(source)]
        if values:
            variables[name] = values[0]
    size = variables.get("WORLD_SIZE", "")
    if "RANK" not in variables or not size.isdecimal() or int(size) < 2:
        return {}
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        variables.setdefault("LOCAL_WORLD_SIZE", size)
    if "MASTER_ADDR" not in environ:
        if variables.get("LOCAL_WORLD_SIZE") != size:
            hint = "mpirun -x MASTER_ADDR=HOST (Open MPI), mpirun -genv MASTER_ADDR HOST (MPICH)"
            raise UserError(
                f"an MPI launcher started {size} ranks, which may be on several hosts",
                hint=f"name the host of rank 0: {hint}",
            )
        variables["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in environ:
        variables["MASTER_PORT"] = _DEFAULT_PORT
    return variables
