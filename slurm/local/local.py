"""``parbench slurm local``, from outside: makes the namespaces of a cluster, and sees that nothing of it is left."""

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from parbench.bench.text import UserError
from parbench.slurm.local.cluster import FOLDER_VARIABLE, NODES_FILE, ORDER_FILE, Order, rate_file
from parbench.slurm.local.cluster_conf import ClusterSpec, checked_rate
from parbench.slurm.local.links import Node, shape

_PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""Each program that a cluster needs, and the Debian package that has it."""

_LONGEST_PARENT = 55
"""SLURM's sockets lie deep in the folder, and the path of a socket has at most 107 characters."""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(spec: ClusterSpec, command: Sequence[str], *, keep: bool) -> int:
    """Run a command in a cluster of its own on this machine, and return its exit code.

    ``UserError`` if it cannot be, before anything starts. 4 if the cluster does not come up.
    """
    # what a user's path may lack: this Python's commands, the system's daemons
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*places, "/usr/local/sbin", "/usr/sbin", "/sbin"])
    check_programs(path)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError as error:
        raise UserError(f"user {os.getuid()} has no name in /etc/passwd, which SLURM wants") from error
    if shutil.which(command[0], path=path) is None:
        raise UserError(f"the command {command[0]!r} is not found; what runs in the cluster follows --")
    namespaces = sandbox(os.geteuid())
    with _folder(keep=keep) as (folder, alive):
        end, lifeline = os.pipe()
        order = Order(spec=spec, command=tuple(command), lifeline=end)
        (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
        process = subprocess.Popen(
            [*namespaces, sys.executable, "-m", "parbench.slurm.local.cluster", str(folder)],
            env={**os.environ, "PATH": path},
            pass_fds=(end, alive),
        )
        os.close(end)
        try:
            return _wait(process, lifeline)
        finally:
            os.close(lifeline)
            process.wait()


def check_programs(path: str) -> None:
    """Raise ``UserError`` with the command that installs what a search path lacks."""
    missing = [name for name in _PACKAGES if shutil.which(name, path=path) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        raise UserError(
            f"a cluster on this machine needs {', '.join(missing)}, not found in PATH: "
            f"apt-get install -y --no-install-recommends {packages}"
        )


def sandbox(user: int) -> list[str]:
    """Return the command that runs another in new namespaces; ``UserError`` where the kernel refuses them to ``user``.

    A user needs a user namespace; root must do without, since SLURM's daemons drop groups when they are root.
    """
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command += ["--user", "--map-current-user", "--keep-caps"] if user != 0 else []
    refused = _complaint([*command, "true"])
    if refused is not None:
        raise UserError(
            f"no namespaces can be made here ({refused}): be root with every capability, or allow user namespaces"
        )
    return command


def _complaint(command: Sequence[str]) -> str | None:
    """Run a command; return None if it ended well, else what it said in one line."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return " ".join((done.stderr or done.stdout).split()) if done.returncode else None


def check_parent(parent: Path) -> None:
    text = str(parent)
    plain = re.fullmatch(r"[\w/.+-]+", text, re.ASCII)
    if len(text) > _LONGEST_PARENT or not plain or parent.is_relative_to("/dev/shm"):
        raise UserError(
            f"SLURM cannot work in the temporary folder {text!r}: it has at most {_LONGEST_PARENT} characters, "
            "letters, digits and /._-+ alone, and is not in /dev/shm, of which each node has its own; set TMPDIR"
        )


@contextmanager
def _folder(*, keep: bool) -> Iterator[tuple[Path, int]]:
    """Make the cluster's folder, which goes when this process and all that hold the second value are gone."""
    parent = Path(tempfile.gettempdir()).resolve()
    check_parent(parent)
    folder = Path(tempfile.mkdtemp(prefix="parbench-", dir=parent))
    watched, alive = os.pipe()
    # the folder goes when the pipe ends, even if this process is killed
    sweep = ["sh", "-c", 'trap "" INT TERM HUP; read -r nothing; rm -rf -- "$1"', "sh", str(folder)]
    sweeper = None if keep else subprocess.Popen(sweep, stdin=watched, start_new_session=True)
    os.close(watched)
    try:
        yield folder, alive
    finally:
        os.close(alive)
        if sweeper is None:
            sys.stderr.write(f"parbench: the cluster's folder is kept: {folder}\n")
        else:
            sweeper.wait()


def _wait(process: subprocess.Popen[bytes], lifeline: int) -> int:
    """Return the sandbox's exit code; a signal is passed on, and a second one, or too long a silence, is the end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_WATCHED, signal.SIGCHLD))
    deadline = None
    try:
        while process.poll() is None:
            got = signal.sigtimedwait((*_WATCHED, signal.SIGCHLD), 1.0)
            if deadline is not None and (time.monotonic() > deadline or (got and got.si_signo in _WATCHED)):
                return 128 + signal.SIGKILL
            # the kernel's own signal (SI_KERNEL) is a terminal's Ctrl-C, which the command gets as well
            if got and got.si_signo in _WATCHED and got.si_code != 0x80:
                with suppress(BrokenPipeError):  # it is ending anyway
                    os.write(lifeline, bytes([got.si_signo]))
                deadline = time.monotonic() + 30
        return process.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_WATCHED, signal.SIGCHLD))


FIRST_PROCESS = Path("/proc/1/cmdline")
_STATES = {"down": ("state=DOWN", "reason=rehearsal"), "up": ("state=RESUME",)}


def break_or_mend(action: str, name: str, rate: str | None) -> None:
    """Do ``cut``, ``heal``, ``rate``, ``down`` or ``up`` to a node; only ``rate`` has a rate.

    ``UserError`` outside of a cluster on one machine, for a node it has not, and if SLURM refuses.
    """
    if (rate is not None) != (action == "rate"):
        lack = "needs a rate, such as 50mbit" if rate is None else "takes no rate"
        raise UserError(f"local-fault {action} {name} {lack}")
    folder = _cluster_folder()
    nodes = {node.name: node for node in msgspec.json.decode((folder / NODES_FILE).read_bytes(), type=list[Node])}
    if name not in nodes:
        first, *_, last = [*nodes, *nodes]
        raise UserError(f"{name!r} is none of the cluster's nodes {first} to {last}")
    if state := _STATES.get(action):
        refused = _complaint(["scontrol", "update", f"nodename={name}", *state])
        if refused is not None:
            raise UserError(f"scontrol refuses {name} {state[0]}: {refused}")
    elif action == "cut":
        shape(nodes[name], None)
    else:
        if rate is not None:
            rate_file(folder, name).write_text(checked_rate(rate, "rate"))
        shape(nodes[name], rate_file(folder, name).read_text())


def _cluster_folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise UserError(f"{FOLDER_VARIABLE} is not set: faults are for the inside of parbench slurm local")
    # a kept folder outlives its cluster, and the links of this machine itself are not to be touched
    if not (Path(folder) / NODES_FILE).exists() or folder.encode() not in FIRST_PROCESS.read_bytes():
        raise UserError(f"{FOLDER_VARIABLE}={folder} holds no running cluster of parbench slurm local")
    return Path(folder)
