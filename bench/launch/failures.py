"""Explanations of failed ranks: the ranks that died, raised an exception, or did not arrive.

A step that all ranks begin together hangs if it takes longer than the timeout.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from parbench.bench.launch.flight_recorder import Waits, find_waits
from parbench.bench.launch.messages import HangReport, Hello, Outcome, RankError
from parbench.bench.launch.processes import describe_exit, get_process_space
from parbench.bench.results.records import Culprit, CulpritCause, RankState, Status

_STACKS = "see the stacks in logs/ of the run"
"""A clause of the reason of a hang."""


@dataclass(kw_only=True)
class Evidence:
    """The messages and exit codes of the ranks of one start, from which failures are explained.

    The keys of all mappings are global ranks. A rank without such a message or exit code is
    missing.
    """

    hellos: dict[int, Hello] = field(default_factory=dict)
    """The first message of each rank, with its host and process id."""
    errors: dict[int, RankError] = field(default_factory=dict)
    """The exception that each failed rank has reported."""
    reports: dict[int, HangReport] = field(default_factory=dict)
    """The last report of each rank about its state, after a step took too long."""
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """The CPU time in seconds of each rank that has measured all of its cases."""
    exits: dict[int, int] = field(default_factory=dict)
    """The exit code of each ended rank that a launcher such as torchrun has started on its host.

    A negative code is a signal. Rank 0 is missing.
    """

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Return global ranks as text, with their hosts if the run's ranks are on several hosts.

        Examples are ``rank 1`` and ``ranks 0 (n1), 2 (n2)``.
        """
        hosts = {rank: hello.place.host_key for rank, hello in self.hellos.items()}
        names = [str(rank) for rank in ranks]
        if len(set(hosts.values())) > 1:
            names = [f"{rank} ({hosts.get(rank, ('not started', ''))[0]})" for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def make_outcome(
        self,
        status: Status,
        reason: str,
        culprits: Sequence[int],
        cause: CulpritCause,
        phrases: Mapping[int, str],
        stacks: Mapping[int, str],
        silent_ranks: Sequence[int] = (),
    ) -> Outcome:
        """Return the result of a case whose ranks have failed, with the state of each rank.

        Args:
            status: ``failed`` or ``hang``.
            reason: a sentence about the cause.
            culprits: the ranks that may have caused the failure. Ranks that have not sent their
                first message are left out, because their hosts are unknown.
            cause: the kind of failure of the culprits, such as ``died`` or ``absent``.
            phrases: a phrase about each rank, such as ``alive``, by rank.
            stacks: the Python stack of each rank as text, by rank. Missing ranks get an empty text.
            silent_ranks: the ranks that did not answer when a measurement took too long and the
                driver asked all ranks for their state.
        """
        states = [
            RankState(
                rank=rank,
                host=hello.host,
                pid=hello.pid,
                state=phrases[rank],
                stack=stacks.get(rank, ""),
                is_silent=rank in silent_ranks,
            )
            for rank, hello in sorted(self.hellos.items())
        ]
        return Outcome(
            status=status,
            reason=reason,
            culprits=tuple(
                Culprit(rank=rank, host=self.hellos[rank].host, cause=cause)
                for rank in culprits
                if rank in self.hellos
            ),
            ranks=states,
        )


def explain_end(evidence: Evidence, exit_codes: Mapping[int, int], last_error: str) -> Outcome:
    """Return the result (status failed) of the case during which ranks ended or raised exceptions.

    Its reason names the cause, which is the first of these that applies:

    1. Ranks died: they ended before they had measured all cases, without reporting an exception.
    2. A rank raised an exception. The earliest exception counts.
    3. The ranks ended for an unknown reason.

    Args:
        evidence: the messages of all ranks.
        exit_codes: the exit code of each rank that has ended, as far as known. A negative code is a
            signal.
        last_error: the last output line of the rank or launcher that failed, empty if unknown.
    """
    errors = evidence.errors
    codes = {rank: code for rank, code in exit_codes.items() if rank not in evidence.cpu_seconds}
    dead_ranks = [rank for rank in codes if rank not in errors]
    # SIGTERM comes last, because a launcher ends the other ranks by SIGTERM when one has failed.
    killed = [rank for rank in dead_ranks if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
    failed = [rank for rank in dead_ranks if codes[rank] > 0]
    culprits = killed or failed or dead_ranks
    cause: CulpritCause = "raised"
    if culprits:
        code = codes[culprits[0]]
        reason = f"{evidence.format_ranks(culprits)} died: {describe_exit(code)}"
        cause = "terminated" if code == -signal.SIGTERM else "died"
        if last_error:  # Python and C++ print the cause, such as ImportError or std::bad_alloc.
            reason = f"{reason}; {last_error}"
    elif errors:
        culprits = [min(errors, key=lambda rank: errors[rank].seconds)]
        reason = f"{evidence.format_ranks(culprits)} raised {errors[culprits[0]].error}"
    else:
        reason = "the ranks ended; " + (last_error or "their output is in logs/ of the run")
    phrases = {
        **dict.fromkeys(evidence.hellos, "alive"),
        **{rank: f"died: {describe_exit(code)}" for rank, code in codes.items()},
        **{rank: f"raised {error.error}" for rank, error in errors.items()},
    }
    stacks = {rank: error.stack for rank, error in errors.items()}
    return evidence.make_outcome("failed", reason, culprits, cause, phrases, stacks)


def explain_hang(evidence: Evidence, timeout_seconds: float, stacks: Mapping[int, str]) -> Outcome:
    """Return the result (status hang) of a case, with the probable cause and each rank's state.

    The culprits are the ranks that did not arrive where the others wait, or the ranks that wait for
    one another. There are none if the reports do not show such ranks.

    Args:
        evidence: the messages of all ranks.
        timeout_seconds: the timeout that the step has exceeded.
        stacks: the Python stacks that ``faulthandler`` has written, by rank. A rank that could not
            run its watchdog has no other stack.
    """
    reports = evidence.reports
    waits = find_waits({rank: report.groups for rank, report in reports.items()})
    waiting_ranks = [rank for rank in waits if waits[rank]]
    culprits = find_absent_ranks(evidence, waits)
    cause: CulpritCause = "absent"
    clause = f"no rank is known to be missing; {_STACKS}, or allow more time with --timeout"
    if culprits:
        clause = f"{evidence.format_ranks(culprits)} did not arrive"
    elif not reports:
        clause = "no rank answers"
    elif waiting_ranks:
        clause = f"{evidence.format_ranks(waiting_ranks)} wait for one another; {_STACKS}"
        culprits = waiting_ranks
        cause = "waiting"
    phrases = {rank: f"{report.phase}, step {report.steps}" for rank, report in reports.items()}
    for rank in waiting_ranks:
        phrases[rank] += f", waits for {evidence.format_ranks(sorted(waits[rank]))}"
    for rank in find_disconnected_ranks(evidence):
        phrases[rank] += ", no connection to the other hosts"
    for rank in evidence.hellos.keys() - reports.keys():
        state = find_process_state(evidence.hellos[rank])
        phrases[rank] = f"no answer (process is {state})" if state else "no answer"
    reason = f"timed out after {timeout_seconds:g} s: {clause}"
    all_stacks = {**stacks, **{rank: report.stack for rank, report in reports.items()}}
    silent_ranks = find_silent_ranks(evidence)
    return evidence.make_outcome("hang", reason, culprits, cause, phrases, all_stacks, silent_ranks)


def find_absent_ranks(evidence: Evidence, waits: Waits) -> list[int]:
    """Return the ranks that did not arrive where the other ranks wait, sorted.

    The criteria below are tried in order. The first criterion that at least one rank meets, but not
    all ranks, decides: the ranks that meet it are returned. The result is empty if there is none.

    1. The rank sent no report about the hang or, if all ranks did, is cut off from rank 0's host.
    2. Other ranks wait for the rank, and it waits for no rank. Ranks that are not inside
       torch.distributed, autograd or a wait for the GPU come first. If any rank is known to wait
       for another one, no further criterion is tried.
    3. The rank has begun fewer blocks of samples than another rank, or as many blocks and fewer
       steps of its case.
    4. The rank is not inside torch.distributed, autograd or a wait for the GPU.

    ``waits`` has the ranks that each rank waits for, as far as known.
    """
    reports = evidence.reports
    silent = find_silent_ranks(evidence)
    elsewhere = [rank for rank, report in reports.items() if not report.communicates]
    all_awaited = set().union(*waits.values())
    if all_awaited:
        awaited = [rank for rank in all_awaited if not waits[rank]]
        # An awaited rank may wait in a send or a receive.
        criteria = [silent, [rank for rank in awaited if rank in elsewhere], awaited]
    else:
        positions = {rank: (report.index, report.steps) for rank, report in reports.items()}
        last_position = max(positions.values(), default=(0, 0))
        behind = [rank for rank in positions if positions[rank] < last_position]
        criteria = [silent, behind, elsewhere]
    for ranks in criteria:
        if 0 < len(ranks) < len(evidence.hellos):
            return sorted(ranks)
    return []


def find_silent_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that have sent no report about a hang.

    If all ranks have sent a report, the result is the ranks on hosts that are cut off from the host
    of rank 0, see ``find_disconnected_ranks``.
    """
    missing = [rank for rank in evidence.hellos if rank not in evidence.reports]
    return missing or find_disconnected_ranks(evidence)


def find_disconnected_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks on hosts that have no connection to the torch store of rank 0.

    If there are several other hosts and none of them has a connection, the result is the ranks on
    the host of rank 0. Only ranks that have sent a report are returned.
    """
    hosts = {rank: hello.place.host_key for rank, hello in evidence.hellos.items()}
    reports = evidence.reports
    cut_hosts = {hosts[rank] for rank in reports if not reports[rank].is_connected}
    other_hosts = set(hosts.values()) - {hosts[0]}
    if len(other_hosts) > 1 and cut_hosts == other_hosts:
        cut_hosts = {hosts[0]}
    return [rank for rank in reports if hosts[rank] in cut_hosts]


def find_process_state(hello: Hello) -> str | None:
    """Return the state of a rank's process: ``gone``, or psutil's status such as ``stopped``.

    The result is None if this process cannot see that process, for example on another host. A
    zombie counts as gone. ``hello`` is the first message of the rank.
    """
    if hello.process_space != get_process_space():
        return None
    try:
        state = str(psutil.Process(hello.pid).status())
        return "gone" if state == psutil.STATUS_ZOMBIE else state
    except psutil.NoSuchProcess:
        return "gone"
