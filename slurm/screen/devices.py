"""The check of all devices of each node, ``parbench check`` on all nodes at the same time."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from parbench.bench.check.cases import LOAD_SECONDS, make_options
from parbench.bench.check.health import Health
from parbench.bench.check.hosts import OVERHEAD_SECONDS, compare_hosts, parse_result
from parbench.bench.launch.processes import PARBENCH, convert_sigterm_to_interrupt
from parbench.bench.machine.slurm_allocation import build_srun_command
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.options import make_plan
from parbench.bench.text import get_last_line

_START_SECONDS = {"cuda": 12.0, "cpu": 5.0}
"""The seconds for the start of all ranks in a repetition, by device.

NCCL and CUDA contexts take longer than gloo.
"""
_SECONDS_PER_CASE = 0.35  # the expected duration of one measured case


def estimate_check_seconds(device: str, num_devices: int) -> float:
    """Return the expected duration of ``parbench check`` on one node in seconds.

    It becomes the time budget of the check. ``device`` is ``cuda`` or ``cpu``, and ``num_devices``
    is the number of GPUs or of groups of cores on the node.
    """
    options = make_options(device, num_devices, budget="1m", inject=None)
    backend = "nccl" if device == "cuda" else "gloo"
    world = WorldSpec(nproc=num_devices, backend=backend, device=device)
    plan = make_plan(options, DEFINITIONS, world)
    case_seconds = _SECONDS_PER_CASE * len(plan.cases)
    if device == "cuda":
        case_seconds += LOAD_SECONDS
    return plan.repetitions * (_START_SECONDS[device] + case_seconds)


def check_nodes(
    nodes: Sequence[str], seconds: float, folder: Path, environ: Mapping[str, str]
) -> tuple[Health, ...]:
    """Run ``parbench check`` on all nodes at once, and return the result of each node.

    The results have the order of ``nodes``. The devices of all nodes are compared with each other.
    If a node does not answer, its result has a text about this in ``problems``.

    Args:
        nodes: Slurm's names of the nodes.
        seconds: the time budget of each check.
        folder: the folder to create. It gets ``NODE.out`` and ``NODE.err`` with the standard output
            and the error messages of each node.
        environ: the environment variables of srun.
    """
    folder.mkdir(parents=True)
    options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    options += [f"--nodelist={','.join(nodes)}", "--cpu-bind=none"]
    options += [f"--output={folder}/%N.out", f"--error={folder}/%N.err"]
    command = [*build_srun_command(environ, *options), *PARBENCH, "check", "--format=json"]
    command += ["--budget", f"{seconds:.0f}s", "--out", str(folder)]
    limit = seconds + OVERHEAD_SECONDS
    problem = f"no answer within {limit:.0f} s"
    with convert_sigterm_to_interrupt():
        try:
            completed = subprocess.run(command, env=environ, capture_output=True, timeout=limit)
            problem = get_last_line(completed.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            pass
    return compare_hosts([_read_result(node, folder, problem) for node in nodes])


def _read_result(node: str, folder: Path, problem: str) -> Health:
    """Return the result of ``parbench check`` that a node has written to ``folder/NODE.out``.

    If the file has no result, the returned ``Health`` has a problem with the last line of
    ``NODE.err``, or with the text ``problem`` if the node has written no error.
    """
    contents = []
    for suffix in ("out", "err"):
        file = folder / f"{node}.{suffix}"
        contents.append(file.read_bytes() if file.exists() else b"")
    return parse_result(node, contents[0], contents[1] or problem.encode(), 4)
