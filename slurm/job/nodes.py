"""The nodes of a job, and its dead nodes."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from parbench.bench.results.records import Record
from parbench.slurm.system import Slurm, SlurmError

_DOWN_STATES = ("down", "error", "unknown")
"""The states of dead nodes in sinfo."""


def is_down(state: str) -> bool:
    """Return True if the state of a node, as sinfo prints it, means that the node is dead.

    An asterisk as in ``down*`` means that the node does not answer.
    """
    return state.endswith("*") or state.rstrip("~#!%$@^-+").lower() in _DOWN_STATES


class NodeMonitor:
    """The nodes of a job, and those of them that are dead.

    A node that was dead once counts as dead until the job ends.
    """

    def __init__(self, slurm: Slurm, environ: Mapping[str, str]) -> None:
        """Find the nodes of the job in its environment variables. Outside of a job it has none."""
        self._slurm = slurm
        self._own_node = environ.get("SLURMD_NODENAME", "")
        self._nodes: tuple[str, ...] = ()
        self._node_by_host: Mapping[str, str] = {}
        self._dead: dict[str, str] = {}
        with suppress(SlurmError):
            self._nodes = slurm.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
            self._node_by_host = slurm.map_hosts(self._nodes)

    def update(self, records: Iterable[Record] = ()) -> set[str]:
        """Look for dead nodes, and return the names of all that have been found in the job so far.

        A node is dead if Slurm reports it as down, or if no rank on it answered in one of
        ``records`` with a hang.
        """
        states: Mapping[str, str] = {}
        with suppress(SlurmError):
            states = self._slurm.get_node_states(self._nodes) if self._nodes else {}
        for node in self._nodes:
            if is_down(states.get(node, "")):
                self._dead.setdefault(node, "is down")
        for host in _list_silent_hosts(records):
            node = self._node_by_host.get(host, self._own_node)
            if node != self._own_node:
                self._dead.setdefault(node, "does not answer")
        return set(self._dead)

    def list_alive(self) -> tuple[str, ...]:
        """Return the names of the nodes that are not known to be dead. Empty outside of a job."""
        return tuple(node for node in self._nodes if node not in self._dead)

    def describe(self) -> str:
        """Return the dead nodes as a text such as ``n3 is down``, empty if no node is dead."""
        return ", ".join(f"{node} {problem}" for node, problem in self._dead.items())


def _list_silent_hosts(records: Iterable[Record]) -> set[str]:
    """Return the names of the hosts that did not answer when a case hung.

    When a case runs out of time, each rank reports where it is. A host did not answer if none of
    its ranks reported, and a rank on another host did.
    """
    silent: set[str] = set()
    for record in records:
        answering = {rank.host for rank in record.ranks if not rank.is_silent}
        if record.status == "hang" and answering:
            silent |= {rank.host for rank in record.ranks} - answering
    return silent
