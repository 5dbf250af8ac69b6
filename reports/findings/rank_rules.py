"""Rules about ranks for which the others wait."""

from collections.abc import Callable, Iterator

from parbench.bench.results.formatting import format_percent, format_seconds
from parbench.reports.findings.evidence import Evidence, StepEvidence, StragglerEvidence
from parbench.reports.findings.finding import MIN_SHARE, Finding

MIN_COMPUTE_RATIO = 1.1

RunRule = Callable[[Evidence], Iterator[Finding]]


def find_stragglers(evidence: Evidence) -> Iterator[Finding]:
    """A rank is late or slow in most cases of a run."""
    for straggler in evidence.stragglers:
        yield from _describe(straggler)


def find_straggler_of_step(step: StepEvidence) -> Iterator[Finding]:
    """A rank is late or slow in a training step."""
    if step.straggler is not None:
        yield from _describe(step.straggler)


RULES: tuple[RunRule, ...] = (find_stragglers,)
STEP_RULES = (find_straggler_of_step,)


def _describe(straggler: StragglerEvidence) -> Iterator[Finding]:
    share = min(straggler.waited_share, 1.0)
    if share < MIN_SHARE:
        return
    ratio = straggler.compute_ratio or 1.0
    is_slow = ratio >= MIN_COMPUTE_RATIO or straggler.observation == "finishes last"
    cause = ""
    if ratio >= MIN_COMPUTE_RATIO:
        cause = f" It computes {ratio:.2f} times as long as the others."
    elif straggler.host_idle_seconds:
        idle = format_seconds(straggler.host_idle_seconds)
        cause = f" Its host probably does not keep up: it is idle for {idle} longer."
    rank = f"Rank {straggler.rank}"
    yield Finding(
        kind="slow-rank" if is_slow else "late-rank",
        subject=rank,
        message=f"{rank} {straggler.observation} {straggler.where}. The others wait "
        f"{format_seconds(straggler.waited_seconds)} ({format_percent(share)}) for it.{cause}",
        command=straggler.command,
        amount=format_percent(share),
        time_share=share,
        evidence={
            "rank": straggler.rank,
            "waited_seconds": straggler.waited_seconds,
            "compute_ratio": straggler.compute_ratio,
        },
    )
