"""The nodes of a job, and its dead nodes."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from parbench.bench.results.records import Record
from parbench.bench.text import strip_domain
from parbench.slurm.system import Slurm, SlurmError

_DOWN_STATES = ("down", "error", "unknown")
"""The states in which sinfo lists a node that counts as dead, without marks."""


def is_down(state: str) -> bool:
    """Return True if the state of a node, as sinfo prints it, means that the node is dead.

    A node is dead in the states ``down``, ``error`` and ``unknown``. It is also dead in any state
    with an asterisk, such as ``idle*``, because Slurm's daemon on the node does not respond. Other
    marks, such as ``~`` (powered off), are ignored.
    """
    return state.endswith("*") or state.rstrip("~#!%$@^-+").lower() in _DOWN_STATES


class NodeMonitor:
    """The nodes of the current Slurm job, and the dead nodes among them.

    A node that was dead once counts as dead until the job ends.
    """

    def __init__(self, slurm: Slurm, environ: Mapping[str, str]) -> None:
        """Find the nodes of the job in ``environ``, the environment variables of this process.

        Outside of a job, or if Slurm does not answer, the monitor has no nodes.
        """
        self._slurm = slurm
        self._own_node = environ.get("SLURMD_NODENAME", "")
        self._nodes: tuple[str, ...] = ()
        self._dead: dict[str, str] = {}
        with suppress(SlurmError):
            self._nodes = slurm.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))

    def update(self, records: Iterable[Record] = ()) -> set[str]:
        """Look for dead nodes, and return the names of all dead nodes found since the job began.

        A node is dead if ``is_down`` holds for its state in Slurm. It is also dead if one of
        ``records`` is of a hang in which no rank on the node answered, unless this process runs on
        the node.

        Args:
            records: failed records of the point (run) that the job measures.
        """
        states: Mapping[str, str] = {}
        with suppress(SlurmError):
            states = self._slurm.get_node_states(self._nodes) if self._nodes else {}
        for node in self._nodes:
            if is_down(states.get(node, "")):
                self._dead.setdefault(node, "is down")
        for host in _list_silent_hosts(records):
            node = strip_domain(host)
            if node in self._nodes and node != self._own_node:
                self._dead.setdefault(node, "does not answer")
        return set(self._dead)

    def list_alive(self) -> tuple[str, ...]:
        """Return the names of the nodes that are not known to be dead, in the order of Slurm.

        The result is empty if the nodes of the job are unknown.
        """
        return tuple(node for node in self._nodes if node not in self._dead)

    def describe(self) -> str:
        """Return the dead nodes as text: ``n3 is down, n4 does not answer``. Empty if none is."""
        return ", ".join(f"{node} {problem}" for node, problem in self._dead.items())


def _list_silent_hosts(records: Iterable[Record]) -> set[str]:
    """Return the names of the hosts that did not answer in a hang, as the ranks recorded them.

    When a case reaches its timeout, all ranks are asked for their state. A host did not answer if
    none of its ranks answered, and a rank on another host did. Records of other failures are
    ignored.
    """
    silent: set[str] = set()
    for record in records:
        answering = {rank.host for rank in record.ranks if not rank.is_silent}
        if record.status == "hang" and answering:
            silent |= {rank.host for rank in record.ranks} - answering
    return silent
