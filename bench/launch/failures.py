"""What happened when ranks failed: who died, who raised, and who did not arrive."""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from parbench.bench.launch.flight_recorder import Waits, waits
from parbench.bench.launch.launchers import find_process_state
from parbench.bench.launch.messages import HangReport, Hello, Outcome, Raised
from parbench.bench.launch.processes import describe_exit
from parbench.bench.results.records import Culprit, CulpritCause, RankState, Status


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that the driver has learned of the ranks of one start."""

    hellos: Mapping[int, Hello]
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    last_error: str = ""
    """The last message of the rank or the launcher that failed."""
    errors: Mapping[int, Raised] = field(default_factory=dict)
    """The exceptions of ranks in their order in time."""
    reports: Mapping[int, HangReport] = field(default_factory=dict)
    """The last reports of ranks whose visit exceeded its deadline."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Stacks that the interpreter wrote for ranks that could not report."""
    completed_ranks: Collection[int] = ()
    """Ranks that have completed their job."""

    def format_ranks(self, ranks: Sequence[int]) -> str:
        """Name ranks, with their hosts if there are several: ``rank 1``, ``ranks 0 (n1), 2 (n2)``."""
        hosts = {rank: hello.host for rank, hello in self.hellos.items()}
        has_several = len(set(hosts.values())) > 1
        names = [f"{rank} ({hosts[rank]})" if has_several and rank in hosts else str(rank) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def explain_end(evidence: Evidence, when: str) -> Outcome:
    """Explain the death or the exception of a rank. Of several dead ranks the cause is the first, if it is known."""
    codes = {rank: code for rank, code in evidence.exit_codes.items() if rank not in evidence.completed_ranks}
    dead_ranks = [rank for rank in codes if rank not in evidence.errors]
    culprits: list[int] = []
    cause: CulpritCause = "raised"
    if dead_ranks:
        culprits = find_first_dead(dead_ranks, codes)
        code = codes[culprits[0]]
        reason = f"{evidence.format_ranks(culprits)} died: {describe_exit(code)}"
        cause = "terminated" if code == -signal.SIGTERM else "died"
        if code == -signal.SIGABRT and evidence.last_error:  # C++ prints the cause, such as std::bad_alloc
            reason = f"{reason}; {evidence.last_error}"
    elif evidence.errors:
        rank, error = next(iter(evidence.errors.items()))
        culprits = [rank]
        reason = f"{evidence.format_ranks(culprits)} raised {error.error}"
    else:
        message = evidence.last_error or "their output is in the run's logs"
        reason = f"the ranks ended {when}; {message}"
    states = dict.fromkeys(evidence.hellos, "alive")
    states |= {rank: f"died: {describe_exit(code)}" for rank, code in codes.items()}
    states |= {rank: f"raised {error.error}" for rank, error in evidence.errors.items()}
    stacks = {rank: error.stack for rank, error in evidence.errors.items()}
    return _make_outcome(evidence, "failed", reason, states, stacks, make_culprits(evidence, culprits, cause))


def find_first_dead(dead_ranks: Sequence[int], codes: Mapping[int, int]) -> list[int]:
    """Return the ranks that died first. A launcher ends all others by SIGTERM when one has failed."""
    killed = [rank for rank in dead_ranks if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
    failed = [rank for rank in dead_ranks if codes[rank] > 0]
    return killed or failed or list(dead_ranks)


def explain_hang(evidence: Evidence, index: int, timeout_seconds: float) -> Outcome:
    """Explain why the visit at ``index`` did not end, from the reports of the ranks."""
    reports = evidence.reports
    records = {rank: report.groups for rank, report in reports.items() if report.groups is not None}
    waiting = waits(records) if len(records) == len(evidence.hellos) else {}
    pending = {group.name for groups in records.values() for group in groups.values() if group.name}
    cause, culprits = find_cause_of_hang(evidence, index, waiting, sorted(pending))
    states = {rank: f"{report.phase}, step {report.steps}" for rank, report in reports.items()}
    for rank in find_disconnected_ranks(evidence):
        states[rank] += ", no connection to the other hosts"
    for rank, other_ranks in waiting.items():
        if other_ranks:
            states[rank] += f", waits for {evidence.format_ranks(sorted(other_ranks))}"
    for rank in evidence.hellos.keys() - reports.keys():
        state = find_process_state(evidence.hellos[rank])
        states[rank] = f"no answer (process is {state})" if state else "no answer"
    stacks = {**evidence.stacks, **{rank: report.stack for rank, report in reports.items()}}
    reason = f"no end within {timeout_seconds:g} s: {cause}"
    return _make_outcome(evidence, "hang", reason, states, stacks, culprits)


def find_cause_of_hang(
    evidence: Evidence, index: int, waiting: Waits, pending: Sequence[str]
) -> tuple[str, tuple[Culprit, ...]]:
    """Return the cause as a clause, and the ranks that may have caused it."""
    reports = evidence.reports
    absent_ranks = find_absent_ranks(evidence, index, waiting, is_recorded=bool(waiting and pending))
    if absent_ranks:
        clause = f"{evidence.format_ranks(absent_ranks)} did not arrive"
        return clause, make_culprits(evidence, absent_ranks, "absent")
    if not reports:
        return "no rank answers", ()
    if find_awaited_ranks(waiting):
        reason = "torch records a coalesced launch as done before it is"
        return f"it is unknown which rank did not arrive, because {reason}; see their stacks", ()
    if any(waiting.values()):
        ranks = [rank for rank in waiting if waiting[rank]]
        clause = f"{evidence.format_ranks(ranks)} wait for one another; see their stacks"
        return clause, make_culprits(evidence, ranks, "waiting")
    if waiting and pending:
        return f"every rank has enqueued {', '.join(pending)}, which is not done; see their stacks", ()
    if not any(report.communicates for report in reports.values()):
        return "every rank is in code of its own; see their stacks", ()
    if any(report.index >= index for report in reports.values()):
        return "every rank arrived and waits; see their stacks", ()
    return "no rank has begun it; see their stacks", ()


def find_absent_ranks(evidence: Evidence, index: int, waiting: Waits, *, is_recorded: bool) -> list[int]:
    """Return the ranks that did not arrive where the others wait, by the first criterion that distinguishes ranks.

    They give no report; by torch's record others wait for them and they for nobody; and where nothing is recorded:
    they are not in this visit yet; have begun fewer steps; are not in torch.distributed.
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
    criteria = (silent, certain) if is_recorded or awaited else (silent, earlier, behind, elsewhere)
    return next((sorted(ranks) for ranks in criteria if 0 < len(ranks) < len(evidence.hellos)), [])


def find_silent_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that did not report, or that have no connection to the others."""
    missing = [rank for rank in evidence.hellos if rank not in evidence.reports]
    return missing or find_disconnected_ranks(evidence)


def find_disconnected_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks on hosts without connection to rank 0; if no host has one, those on the host of rank 0."""
    hosts = {rank: hello.host for rank, hello in evidence.hellos.items()}
    other_hosts = {host for host in hosts.values() if host != hosts.get(0)}
    cut_hosts = {hosts[rank] for rank, report in evidence.reports.items() if not report.is_connected}
    if len(other_hosts) > 1 and cut_hosts == other_hosts:
        cut_hosts = {hosts[0]}
    return [rank for rank, host in hosts.items() if host in cut_hosts and rank in evidence.reports]


def find_awaited_ranks(waiting: Waits) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody."""
    return [rank for rank in waiting if not waiting[rank] and any(rank in others for others in waiting.values())]


def _is_coalescing(report: HangReport) -> bool:
    return any(group.is_last_coalesced for group in (report.groups or {}).values())


def make_culprits(evidence: Evidence, ranks: Sequence[int], cause: CulpritCause) -> tuple[Culprit, ...]:
    hosts = {rank: evidence.hellos[rank].host for rank in ranks if rank in evidence.hellos}
    return tuple(Culprit(rank=rank, host=host, cause=cause) for rank, host in hosts.items())


def _make_outcome(
    evidence: Evidence,
    status: Status,
    reason: str,
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    culprits: tuple[Culprit, ...],
) -> Outcome:
    silent_ranks = find_silent_ranks(evidence)
    ranks = [
        RankState(
            rank=rank,
            host=hello.host,
            pid=hello.pid,
            state=states[rank],
            stack=stacks.get(rank, ""),
            is_silent=status == "hang" and rank in silent_ranks,
        )
        for rank, hello in sorted(evidence.hellos.items())
    ]
    return Outcome(status=status, reason=reason, ranks=ranks, culprits=culprits)
