"""Faults on purpose, from inside a cluster on one machine: a link cut or slowed, a node taken from SLURM."""

import os
import subprocess
from pathlib import Path

import msgspec

from bench.text import UserError
from slurm.cluster import FOLDER_VARIABLE
from slurm.cluster_conf import checked_rate
from slurm.daemons import nodes_file, rate_file
from slurm.fabric import Node, cut, shape

FIRST_PROCESS = Path("/proc/1/cmdline")
_STATES = {"down": ("state=DOWN", "reason=rehearsal"), "up": ("state=RESUME",)}


def break_or_mend(action: str, name: str, rate: str | None) -> None:
    """Do ``cut``, ``heal``, ``rate``, ``down`` or ``up`` to a node; only ``rate`` has a rate.

    ``UserError`` outside of a cluster on one machine, for a node it has not, and if SLURM refuses.
    """
    if (rate is not None) != (action == "rate"):
        raise UserError(
            f"local-fault {action} {name} {'needs a rate, such as 50mbit' if rate is None else 'takes no rate'}"
        )
    folder = _cluster_folder()
    node = _find_node(folder, name)
    if action in _STATES:
        _tell_slurm(name, _STATES[action])
    elif action == "cut":
        cut(node)
    else:
        if rate is not None:
            rate_file(folder, name).write_text(checked_rate(rate, "rate"))
        shape(node, rate_file(folder, name).read_text())


def _cluster_folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise UserError(f"{FOLDER_VARIABLE} is not set: faults are for the inside of parbench slurm local")
    # a kept folder outlives its cluster, and the links of this machine itself are not to be touched
    if not nodes_file(Path(folder)).exists() or folder.encode() not in FIRST_PROCESS.read_bytes():
        raise UserError(f"{FOLDER_VARIABLE}={folder} holds no running cluster of parbench slurm local")
    return Path(folder)


def _find_node(folder: Path, name: str) -> Node:
    nodes = {node.name: node for node in msgspec.json.decode(nodes_file(folder).read_bytes(), type=list[Node])}
    if name not in nodes:
        first, *_, last = [*nodes, *nodes]
        raise UserError(f"{name!r} is none of the cluster's nodes {first} to {last}")
    return nodes[name]


def _tell_slurm(name: str, state: tuple[str, ...]) -> None:
    command = ["scontrol", "update", f"nodename={name}", *state]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"scontrol refuses {name} {state[0]}: {' '.join((done.stderr or done.stdout).split())}")
