"""A cluster on one machine, from inside: the first process of its namespaces, which starts SLURM and then a command.

Everything is started from here, so the kernel ends it all with this process. Run by
``slurm.local.local`` as a module, with what was asked for in the folder.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.machine.machine import available_cores
from slurm.local.cluster_conf import ClusterSpec, emulated
from slurm.local.daemons import ClusterError, start_cluster
from slurm.local.links import FabricError

FOLDER_VARIABLE = "PARBENCH_CLUSTER"
EMULATED_VARIABLE = "PARBENCH_EMULATED"
_OTHER_CLUSTER = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SINFO_", "SQUEUE_", "SCANCEL_")
# interfaces of the machine around it, which nodes do not have
_OTHER_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FAILED = 4
_CANNOT_START = 126


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the folder of a cluster says of it: the cluster, the command, and the pipe to the outside."""

    spec: ClusterSpec
    command: tuple[str, ...]
    lifeline: int


class Lifeline(threading.Thread):
    """The pipe from outside: a byte is a signal for the command, and its end is the end of everything."""

    def __init__(self, pipe: int) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.command: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Pass signals on until the outside is gone."""
        while received := os.read(self._pipe, 1):
            if self.command is None:
                os._exit(128 + received[0])
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.command.pid, received[0])
        os._exit(128 + signal.SIGKILL)


def order_file(folder: Path) -> Path:
    """Return the file that says what a cluster is."""
    return folder / "cluster.json"


def main(folder: Path) -> int:
    """Start the cluster of a folder, run its command, and return the command's exit code, 4 without a cluster."""
    order = msgspec.json.decode(order_file(folder).read_bytes(), type=Order)
    lifeline = Lifeline(order.lifeline)
    lifeline.start()
    environment = inner_environment(os.environ, folder, order.spec)
    try:
        start_cluster(folder, order.spec, environment)
    except (ClusterError, FabricError, OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"parbench: the cluster did not come up: {error}\n")
        return _FAILED
    return _attend(order.command, environment, lifeline)


def inner_environment(environ: Mapping[str, str], folder: Path, spec: ClusterSpec) -> dict[str, str]:
    """Return the variables of all that runs in the cluster, without those of a SLURM or of a network around it."""
    foreign = (*_OTHER_CLUSTER, *_OTHER_NETWORK)
    kept = {name: value for name, value in environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        "SLURM_CONF": f"{folder}/slurm.conf",
        FOLDER_VARIABLE: str(folder),
        EMULATED_VARIABLE: emulated(spec, available_cores()),
    }


def _attend(command: Sequence[str], environment: Mapping[str, str], lifeline: Lifeline) -> int:
    """Run the command to its end; what else ends meanwhile has nobody but us to be reaped by."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal's Ctrl-C is the command's; SIG_IGN it would inherit
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        sys.stderr.write(f"parbench: {command[0]} cannot be started: {error.strerror}\n")
        return _CANNOT_START
    lifeline.command = process
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
