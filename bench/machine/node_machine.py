"""The machine that ranks run on: this one, or a node of the allocation; a login node is none and asks through srun."""

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from bench.errors import UserError
from bench.launch.srun import more_options
from bench.machine.machine import Machine, look
from bench.machine.slurm_allocation import Allocation

_ANSWER_SECONDS = 30
# the machine is that of the whole node; Slurm would give one task its share, or ask one node for the whole job's GPUs
_OF_TASKS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"),
    *("SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_CPU_BIND"),
)


def machine_of_ranks(environ: Mapping[str, str], allocation: Allocation | None) -> Machine:
    """Return the machine that ranks of the allocation, None for this host's, have; ``UserError`` if no node answers."""
    if allocation is None or "SLURMD_NODENAME" in environ:
        return look(environ)
    told = ""
    for number in range(min(allocation.nodes, 2)):  # one node may be the one that does not answer
        answer = _ask(number, environ)
        if isinstance(answer, Machine):
            return answer
        told = answer
    raise UserError(
        f"--launcher srun: this host is no node of job {allocation.job}, and srun could not tell what its nodes have: "
        f"{told}; start parbench in an sbatch script, or on a node"
    )


def node_command(number: int, environ: Mapping[str, str]) -> list[str]:
    """Return srun's words that print the machine of the allocation's node of a number, as JSON."""
    words = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--relative={number}", "--cpu-bind=none"]
    words += ["--mpi=none", "--overlap", "--input=none", "--export=ALL", *more_options(environ)]
    return [*words, sys.executable, "-m", "bench.machine.node_machine"]


def _ask(number: int, environ: Mapping[str, str]) -> Machine | str:
    """Return the machine of the node of a number, or in words why it cannot be had."""
    environment = {name: value for name, value in environ.items() if name not in _OF_TASKS}
    try:
        done = subprocess.run(
            node_command(number, environ),
            env={**environment, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Machine)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_SECONDS} s"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"


def main() -> None:
    """Print this node's machine as one line of JSON."""
    sys.stdout.write(f"\n{msgspec.json.encode(look(os.environ)).decode()}\n")


if __name__ == "__main__":
    main()
