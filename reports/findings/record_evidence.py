"""Evidence for findings from the records of a run."""

from collections.abc import Iterator
from typing import Literal

from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.stragglers import (
    Straggler,
    find_last_arriving_rank,
    find_last_finishing_rank,
)
from parbench.reports.analysis.timelines import find_slow_computing_rank
from parbench.reports.findings.communication_evidence import collect_rates, compare_operations
from parbench.reports.findings.evidence import (
    CollectedEvidence,
    RateAboveLink,
    StragglerEvidence,
)
from parbench.reports.findings.step_evidence import make_step_evidence
from parbench.reports.run_data import RunData

UNEQUAL_WORK_DETAILS = {"pipeline", "crossover_ranks", "expert_load"}
"""The details of steps whose ranks have different work by design."""
MIN_READ_SHARE = 0.01
"""The share of waiting from which the traces of a step are searched for a slow rank."""


def collect_evidence(data: RunData) -> CollectedEvidence:
    """Return the evidence of a run."""
    steps = (make_step_evidence(data, result) for result in data.steps)
    return CollectedEvidence(
        steps=[step for step in steps if step is not None],
        stragglers=list(_find_stragglers(data)),
        rates=list(collect_rates(data)),
        comparisons=list(compare_operations(data)),
        rates_above_link=list(_find_rates_above_link(data)),
    )


def _find_rates_above_link(data: RunData) -> Iterator[RateAboveLink]:
    link = data.plan.link_bytes_per_second
    for result in data.communication:
        busbw = result.value("busbw")
        if link and busbw and busbw > link:
            yield RateAboveLink(
                name=data.labels[result.case.id],
                bytes_per_second=busbw,
                link_bytes_per_second=link,
            )


def _find_stragglers(data: RunData) -> Iterator[StragglerEvidence]:
    """Yield the ranks that are last in cases in which all ranks have the same work."""
    results = [
        result for result in data.measured if not result.details.keys() & UNEQUAL_WORK_DETAILS
    ]
    late = find_last_arriving_rank(results)
    if late:
        yield _convert_straggler(data, late, "arrives last")
    slow = find_last_finishing_rank(data.run, results)
    if slow:
        yield _convert_straggler(data, slow, "finishes last")
    for result in results:
        if not result.is_communication:
            yield from _find_slow_rank(data, result)


def _convert_straggler(
    data: RunData, straggler: Straggler, observation: Literal["arrives last", "finishes last"]
) -> StragglerEvidence:
    return StragglerEvidence(
        rank=straggler.rank,
        observation=observation,
        occasions=f"in {straggler.describe_repetitions()}",
        waited_seconds=straggler.seconds,
        waited_share=straggler.time_share,
        command=_build_doctor_command(data, straggler.rank),
    )


def _find_slow_rank(data: RunData, step: CaseResult) -> Iterator[StragglerEvidence]:
    """Yield the rank that computes longest in the traces of a step in which ranks wait."""
    wait_seconds = step.value("straggler_wait") or 0.0
    if not step.seconds or wait_seconds < MIN_READ_SHARE * step.seconds:
        return
    straggler = find_slow_computing_rank(data.run, step)
    if straggler:
        yield StragglerEvidence(
            rank=straggler.rank,
            observation="computes longest",
            occasions=f"in {straggler.describe_repetitions()} of {data.labels[step.case.id]}",
            waited_seconds=wait_seconds,
            waited_share=wait_seconds / step.seconds,
            compute_ratio=straggler.time_share,
            command=_build_doctor_command(data, straggler.rank),
        )


def _build_doctor_command(data: RunData, rank: int) -> str:
    """Return the command that examines the host of a rank."""
    if data.nodes is None:
        return "parbench doctor"
    return f"srun --nodelist {data.nodes.get_host(rank)} parbench doctor"
