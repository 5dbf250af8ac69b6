"""Which of a job's nodes are dead: Slurm has them down or took them from the job, or they were silent in a hang."""

import socket
from collections.abc import Iterable, Mapping

from bench.results.records import Record
from slurm.point_run import silent_hosts
from slurm.system import Slurm, SlurmError

_DOWN = ("down", "error", "unknown")


def is_down(state: str) -> bool:
    """Say whether a node in a state of sinfo, such as ``down*``, is dead; ``*``: it does not answer."""
    return state.endswith("*") or state.rstrip("~#!%$@^-+").lower() in _DOWN


class DeadNodes:
    """The nodes of this job and what is known of their death; once dead, a node stays so for the job."""

    def __init__(self, slurm: Slurm, environ: Mapping[str, str], host: str | None = None) -> None:
        self._slurm = slurm
        self._here = _short(host or socket.gethostname())
        self._job = environ.get("SLURM_JOB_ID", "")
        self._dead: dict[str, str] = {}
        try:
            self._all = slurm.host_names(environ.get("SLURM_JOB_NODELIST", ""))
        except SlurmError:
            self._all = ()

    def look(self, records: Iterable[Record] = ()) -> set[str]:
        """Ask Slurm, and a run's new records, which nodes are dead; return all that are.

        This process's own host is not silent, whatever its ranks are.
        """
        silent = {_short(host) for host in silent_hosts(records)} - {self._here}
        states, kept = self._states(), self._kept()
        for node in self._all:
            if is_down(states.get(node, "")) or node not in kept:
                self._dead.setdefault(node, "down")
            elif _short(node) in silent:
                self._dead.setdefault(node, "silent")
        return set(self._dead)

    def _states(self) -> Mapping[str, str]:
        try:
            return self._slurm.node_states(self._all) if self._all else {}
        except SlurmError:
            return {}

    def _kept(self) -> tuple[str, ...]:
        """Return the nodes that the job has still: one that was down may be up again, but is the job's no more.

        A job that is ending gives its nodes back one by one, which says nothing of them.
        """
        try:
            facts = self._slurm.show_job(self._job) if self._job else ()
            if not facts or facts[0].get("JobState") != "RUNNING":
                return self._all
            return self._slurm.host_names(facts[0].get("NodeList", "")) or self._all
        except SlurmError:
            return self._all

    def alive(self) -> tuple[str, ...]:
        """Return the nodes not known to be dead, in Slurm's order; empty outside of a job."""
        return tuple(node for node in self._all if node not in self._dead)

    def words(self) -> str:
        """Return which nodes are dead and how, as in ``n3 is down``; empty if none is."""
        down, silent = ([node for node in self._dead if self._dead[node] == how] for how in ("down", "silent"))
        told = [f"{_and(down)} {'is' if len(down) == 1 else 'are'} down"] if down else []
        told += [f"{_and(silent)} {'gives' if len(silent) == 1 else 'give'} no answer"] if silent else []
        return " and ".join(told)


def _short(host: str) -> str:
    return host.partition(".")[0]


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
