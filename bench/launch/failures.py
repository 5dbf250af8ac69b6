"""Explanations of failed ranks: the ranks that died, raised an exception, or did not arrive.

A block is a part of the samples of a case, which all ranks measure together. It hangs if it takes
longer than its timeout.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from parbench.bench.launch.flight_recorder import Waits, find_waits
from parbench.bench.launch.messages import HangReport, Hello, Outcome, RankError
from parbench.bench.launch.processes import describe_exit, get_process_space
from parbench.bench.results.records import Culprit, CulpritCause, RankState


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
    """The last report of each rank about its state, after a block of samples took too long."""
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """The CPU time in seconds of each rank that has measured all of its cases."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """The exit code of each rank that has ended, as far as known. A negative code is a signal."""
    last_error: str = ""
    """The last output line of the rank or the launcher that failed, empty if unknown."""

    def count_complete_reports(self) -> int:
        """Return the number of ranks that have sent the second and last report about a hang."""
        return sum(not report.more for report in self.reports.values())

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Return the ranks as text, with their hosts if the ranks of the run are on several hosts.

        Examples are ``rank 1`` and ``ranks 0 (n1), 2 (n2)``.
        """
        hosts = {rank: hello.host for rank, hello in self.hellos.items()}
        names = [str(rank) for rank in ranks]
        if len(set(hosts.values())) > 1:
            names = [f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def make_culprits(self, ranks: Sequence[int], cause: CulpritCause) -> tuple[Culprit, ...]:
        """Return a ``Culprit`` (a rank that may have caused a failure, and its host) for each rank.

        ``cause`` is their kind of failure, such as ``died`` or ``absent``. Ranks that have not sent
        their first message are left out, because their hosts are unknown.
        """
        hosts = {rank: self.hellos[rank].host for rank in ranks if rank in self.hellos}
        return tuple(Culprit(rank=rank, host=host, cause=cause) for rank, host in hosts.items())


def explain_end(evidence: Evidence, when: str) -> Outcome:
    """Return the result (status failed) of the case during which ranks ended or raised exceptions.

    Its reason names the cause, which is the first of these that applies:

    1. Ranks died: they ended before they had measured all cases, without reporting an exception.
    2. A rank raised an exception. The earliest exception counts.
    3. The ranks ended for an unknown reason. Only then ``when`` is part of the reason, a phrase
       such as ``before every rank had started``.
    """
    errors = evidence.errors
    codes = dict(evidence.exit_codes)
    for rank in evidence.cpu_seconds:
        codes.pop(rank, None)
    dead_ranks = [rank for rank in codes if rank not in errors]
    culprits: list[int] = []
    cause: CulpritCause = "raised"
    if dead_ranks:
        culprits = find_first_dead(dead_ranks, codes)
        code = codes[culprits[0]]
        reason = f"{evidence.format_ranks(culprits)} died: {describe_exit(code)}"
        cause = "terminated" if code == -signal.SIGTERM else "died"
        if (code > 0 or code == -signal.SIGABRT) and evidence.last_error:
            # Python and C++ print the cause, such as ImportError or std::bad_alloc.
            reason = f"{reason}; {evidence.last_error}"
    elif errors:
        culprits = [min(errors, key=lambda rank: errors[rank].seconds)]
        reason = f"{evidence.format_ranks(culprits)} raised {errors[culprits[0]].error}"
    else:
        message = evidence.last_error or "their output is in the run's logs"
        reason = f"the ranks ended {when}; {message}"
    states = dict.fromkeys(evidence.hellos, "alive")
    states |= {rank: f"died: {describe_exit(code)}" for rank, code in codes.items()}
    states |= {rank: f"raised {error.error}" for rank, error in errors.items()}
    stacks = {rank: error.stack for rank, error in errors.items()}
    return Outcome(
        status="failed",
        reason=reason,
        culprits=evidence.make_culprits(culprits, cause),
        ranks=make_states(evidence, states, stacks, []),
    )


def find_first_dead(dead_ranks: Sequence[int], codes: Mapping[int, int]) -> list[int]:
    """Return the dead ranks that probably died first.

    ``codes`` holds the exit code of each dead rank, negative for a signal. The result is the first
    of these lists that is not empty: the ranks killed by a signal other than SIGTERM, the ranks
    that exited with a positive code, all ``dead_ranks``. SIGTERM comes last, because a launcher
    ends the other ranks by SIGTERM when one has failed.
    """
    killed = [rank for rank in dead_ranks if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
    failed = [rank for rank in dead_ranks if codes[rank] > 0]
    return killed or failed or list(dead_ranks)


def explain_hang(
    evidence: Evidence, index: int, timeout_seconds: float, stacks: Mapping[int, str]
) -> Outcome:
    """Return the result (status hang) of a case, with the probable cause and each rank's state.

    Args:
        evidence: the messages of all ranks.
        index: the position, in the order of blocks, of the block of samples that did not end.
        timeout_seconds: the timeout that the block has exceeded.
        stacks: the Python stacks that ``faulthandler`` has written, by rank. A rank that could not
            run its watchdog has no other stack.
    """
    reports = evidence.reports
    records = {rank: report.groups for rank, report in reports.items() if report.groups is not None}
    waiting = find_waits(records) if len(records) == len(evidence.hellos) else {}
    pending = {group.name for groups in records.values() for group in groups.values() if group.name}
    clause, culprits = find_cause_of_hang(evidence, index, waiting, sorted(pending))
    states = {rank: f"{report.phase}, step {report.steps}" for rank, report in reports.items()}
    for rank in find_disconnected_ranks(evidence):
        states[rank] += ", no connection to the other hosts"
    for rank, awaited in waiting.items():
        if awaited:
            states[rank] += f", waits for {evidence.format_ranks(sorted(awaited))}"
    for rank in evidence.hellos.keys() - reports.keys():
        state = find_process_state(evidence.hellos[rank])
        states[rank] = f"no answer (process is {state})" if state else "no answer"
    reported_stacks = {rank: report.stack for rank, report in reports.items()}
    silent_ranks = find_silent_ranks(evidence)
    return Outcome(
        status="hang",
        reason=f"no end within {timeout_seconds:g} s: {clause}",
        culprits=culprits,
        ranks=make_states(evidence, states, {**stacks, **reported_stacks}, silent_ranks),
    )


def find_cause_of_hang(
    evidence: Evidence, index: int, waiting: Waits, pending: Sequence[str]
) -> tuple[str, tuple[Culprit, ...]]:
    """Return the probable cause of a hang: a clause for the message, and the culprits.

    The culprits are the ranks that did not arrive where the others wait, or the ranks that wait for
    one another. They are empty if the reports do not show such ranks.

    Args:
        evidence: the messages of all ranks.
        index: the position, in the order of blocks, of the block of samples that did not end.
        waiting: the ranks that each rank waits for, empty if torch has no records of all ranks.
        pending: the names of the operations that ranks have enqueued and that are not done.
    """
    reports = evidence.reports
    is_recorded = bool(waiting and pending)
    absent_ranks = find_absent_ranks(evidence, index, waiting, is_recorded=is_recorded)
    waiting_ranks = [rank for rank in waiting if waiting[rank]]
    culprits: tuple[Culprit, ...] = ()
    if absent_ranks:
        clause = f"{evidence.format_ranks(absent_ranks)} did not arrive"
        return clause, evidence.make_culprits(absent_ranks, "absent")
    if not reports:
        return "no rank answers", ()
    if find_awaited_ranks(waiting):
        reason = "torch records a coalesced launch as done before it is"
        clause = f"it is unknown which rank did not arrive, because {reason}"
    elif waiting_ranks:
        clause = f"{evidence.format_ranks(waiting_ranks)} wait for one another"
        culprits = evidence.make_culprits(waiting_ranks, "waiting")
    elif is_recorded:
        clause = f"every rank has enqueued {', '.join(pending)}, which is not done"
    elif not any(report.communicates for report in reports.values()):
        clause = "every rank is in code of its own"
    elif any(report.index >= index for report in reports.values()):
        clause = "every rank arrived and waits"
    else:
        clause = "no rank has begun it"
    return f"{clause}; see their stacks", culprits


def find_absent_ranks(
    evidence: Evidence, index: int, waiting: Waits, *, is_recorded: bool
) -> list[int]:
    """Return the ranks that did not arrive where the other ranks wait, sorted.

    The criteria below are tried in order. The first criterion that at least one rank meets, but not
    all ranks, decides: the ranks that meet it are returned. The result is empty if there is none.

    1. The rank sent no report about the hang or, if all ranks did, is cut off from rank 0's host.
    2. With ``is_recorded`` or known waits, there is only one more criterion. Other ranks wait for
       the rank, and it waits for no rank. Ranks that are not inside torch.distributed come first.
       Without such ranks, those whose last collective is a coalesced launch are left out.
    3. The rank is in an earlier block of samples than the one that did not end.
    4. The rank has begun fewer steps of its case than another rank.
    5. The rank is not inside torch.distributed, autograd or a wait for the GPU.

    Args:
        evidence: the messages of all ranks.
        index: the position, in the order of blocks, of the block of samples that did not end.
        waiting: the ranks that each rank waits for, empty if that is unknown.
        is_recorded: True if torch's flight recorder shows operations that are not done.
    """
    reports = evidence.reports
    silent = find_silent_ranks(evidence)
    earlier = [rank for rank, report in reports.items() if report.index < index]
    most_steps = max((report.steps for report in reports.values()), default=0)
    behind = [rank for rank, report in reports.items() if report.steps < most_steps]
    elsewhere = [rank for rank, report in reports.items() if not report.communicates]
    awaited = find_awaited_ranks(waiting)
    # gloo's sends and receives are not recorded, so that an awaited rank may wait in one.
    certain = [rank for rank in awaited if rank in elsewhere]
    if not certain:
        # The record does not show whether a rank waits in its last, coalesced launch.
        certain = [rank for rank in awaited if not _is_coalescing(reports[rank])]
    criteria = [silent, earlier, behind, elsewhere]
    if is_recorded or awaited:
        criteria = [silent, certain]
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
    hosts = {rank: hello.host for rank, hello in evidence.hellos.items()}
    other_hosts = {host for host in hosts.values() if host != hosts.get(0)}
    cut_hosts = {
        hosts[rank] for rank, report in evidence.reports.items() if not report.is_connected
    }
    if len(other_hosts) > 1 and cut_hosts == other_hosts:
        cut_hosts = {hosts[0]}
    return [rank for rank, host in hosts.items() if host in cut_hosts and rank in evidence.reports]


def find_awaited_ranks(waiting: Waits) -> list[int]:
    """Return the ranks that other ranks wait for and that wait for no rank themselves.

    ``waiting`` holds for each rank the ranks that it waits for.
    """
    awaited = set().union(*waiting.values())
    return [rank for rank in waiting if not waiting[rank] and rank in awaited]


def _is_coalescing(report: HangReport) -> bool:
    """Return True if the last collective of a rank on any process group is a coalesced launch.

    A coalesced launch is one launch of several calls. torch may record it as done too early.
    """
    return any(group.is_last_coalesced for group in (report.groups or {}).values())


def make_states(
    evidence: Evidence,
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    silent_ranks: Sequence[int],
) -> list[RankState]:
    """Return the state of each rank when its case failed, in rank order.

    Args:
        evidence: the messages of all ranks, with their hosts and process ids.
        states: a phrase about each rank, such as ``alive``, by rank.
        stacks: the Python stack of each rank as text, by rank. Missing ranks get an empty text.
        silent_ranks: the ranks that did not answer when a measurement took too long.
    """
    ranks = []
    for rank, hello in sorted(evidence.hellos.items()):
        state = RankState(
            rank=rank,
            host=hello.host,
            pid=hello.pid,
            state=states[rank],
            stack=stacks.get(rank, ""),
            is_silent=rank in silent_ranks,
        )
        ranks.append(state)
    return ranks


def find_silent_hosts(ranks: Sequence[RankState]) -> set[str]:
    """Return the names of the hosts on which no rank answered when a measurement took too long.

    ``ranks`` are the states of all ranks. If no rank of any host answered, the result is empty,
    because then the hosts are not the cause.
    """
    answering = {state.host for state in ranks if not state.is_silent}
    return {state.host for state in ranks} - answering if answering else set()


def find_process_state(hello: Hello) -> str | None:
    """Return the state of a rank's process: ``gone``, or psutil's status such as ``stopped``.

    The result is None if this process cannot see that process, for example on another host. A
    zombie counts as gone, unless threads of it remain in a kernel driver. ``hello`` is the first
    message of the rank.
    """
    if hello.process_space != get_process_space():
        return None
    try:
        process = psutil.Process(hello.pid)
        state = str(process.status())
        return "gone" if state == psutil.STATUS_ZOMBIE and process.num_threads() <= 1 else state
    except psutil.NoSuchProcess:
        return "gone"
