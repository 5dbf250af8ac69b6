"""Explanations of failed ranks: the ranks that died, that raised, and that did not arrive."""

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
    """Everything that the ranks of one start have reported to the driver. Mappings are by rank."""

    hellos: dict[int, Hello] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)
    reports: dict[int, HangReport] = field(default_factory=dict)
    """The last reports of ranks whose block exceeded its deadline."""
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """The CPU time in seconds of each rank that has completed its job."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    last_error: str = ""
    """The last message of the rank or the launcher that failed."""

    def count_complete_reports(self) -> int:
        """Return the number of ranks that have sent their complete report of a hang."""
        return sum(not report.more for report in self.reports.values())

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Return the ranks as text with their hosts: ``ranks 0 (n1), 2 (n2)``.

        The hosts are left out if all ranks share one.
        """
        hosts = {rank: hello.host for rank, hello in self.hellos.items()}
        names = [str(rank) for rank in ranks]
        if len(set(hosts.values())) > 1:
            names = [f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def make_culprits(self, ranks: Sequence[int], cause: CulpritCause) -> tuple[Culprit, ...]:
        """Return the culprits with their hosts, without ranks that never reported."""
        hosts = {rank: self.hellos[rank].host for rank in ranks if rank in self.hellos}
        return tuple(Culprit(rank=rank, host=host, cause=cause) for rank, host in hosts.items())


def explain_end(evidence: Evidence, when: str) -> Outcome:
    """Return a failed outcome that explains the death or the exception of a rank.

    The first death is the cause, as far as exit codes show the order of deaths. ``when`` is a
    phrase about the time of the failure, such as ``before every rank had started``.
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
    """Return the dead ranks that probably died first, from the exit codes by rank.

    A launcher ends all other ranks by SIGTERM when one has failed.
    """
    killed = [rank for rank in dead_ranks if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
    failed = [rank for rank in dead_ranks if codes[rank] > 0]
    return killed or failed or list(dead_ranks)


def explain_hang(
    evidence: Evidence, index: int, timeout_seconds: float, stacks: Mapping[int, str]
) -> Outcome:
    """Return a hang outcome that explains why the block at ``index`` did not end.

    ``stacks`` are the stacks by rank that the interpreter wrote for ranks that may be unable to
    report.
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
    """Return the cause of a hang as a clause, and the ranks that may have caused it.

    ``index`` is the index of the block that did not end. ``waiting`` holds for each rank the ranks
    that it waits for, empty if this is unknown. ``pending`` holds the names of the operations that
    are not done.
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
    """Return the ranks that did not arrive where the others wait, empty if they are unknown.

    ``index`` is the index of the block that did not end. ``is_recorded`` is True if torch's records
    show the operations that are not done. The first criterion that distinguishes ranks decides. The
    ranks that sent no report come first. If torch's records exist, the next ones are ranks that
    others wait for and that wait for nobody. Otherwise they are ranks that are in an earlier block,
    have begun fewer steps, or are not in torch.distributed.
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
    """Return the ranks without a report of a hang, otherwise those without connection."""
    missing = [rank for rank in evidence.hellos if rank not in evidence.reports]
    return missing or find_disconnected_ranks(evidence)


def find_disconnected_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks on hosts without connection to rank 0.

    If no other host has a connection, the ranks on the host of rank 0 are returned.
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
    """Return the ranks that others wait for and that wait for no rank."""
    awaited = set().union(*waiting.values())
    return [rank for rank in waiting if not waiting[rank] and rank in awaited]


def _is_coalescing(report: HangReport) -> bool:
    """Return True if the last collective of any of the rank's groups is a coalesced launch."""
    return any(group.is_last_coalesced for group in (report.groups or {}).values())


def make_states(
    evidence: Evidence,
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    silent_ranks: Sequence[int],
) -> list[RankState]:
    """Return the final state of each rank in rank order.

    ``states`` and ``stacks`` hold texts by rank. A rank without a stack has an empty one.
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
    """Return the hosts on which all ranks are silent, empty if no rank of any host has answered."""
    answering = {state.host for state in ranks if not state.is_silent}
    return {state.host for state in ranks} - answering if answering else set()


def find_process_state(hello: Hello) -> str | None:
    """Return the state of a rank's process, such as ``stopped`` or ``gone``.

    None if this process cannot see the rank's process. A zombie is gone, unless threads of it
    remain in a kernel driver.
    """
    if hello.process_space != get_process_space():
        return None
    try:
        process = psutil.Process(hello.pid)
        state = str(process.status())
        return "gone" if state == psutil.STATUS_ZOMBIE and process.num_threads() <= 1 else state
    except psutil.NoSuchProcess:
        return "gone"
