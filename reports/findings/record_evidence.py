"""Evidence for findings from the records of a run."""

from collections.abc import Iterator

from parbench.bench.results.stats import median
from parbench.reports.findings.communication_evidence import (
    collect_groups,
    collect_links,
    compare_background_loads,
    compare_with_composites,
    compare_with_fits,
)
from parbench.reports.findings.evidence import Evidence, HostDisturbance, StragglerEvidence
from parbench.reports.findings.step_evidence import (
    build_doctor_command,
    has_equal_work,
    make_step_evidence,
)
from parbench.reports.repetitions import describe_host_disturbance
from parbench.reports.run_data import RunData
from parbench.reports.stragglers import Straggler, find_last_rank, find_late_rank

MIN_NOISY_SHARE = 0.1
"""The share of noisy cases from which a run is noisy."""
NOISY_GRADES = ("noisy", "very noisy")


def collect_evidence(data: RunData) -> Evidence:
    """Return the evidence of a run."""
    steps = (make_step_evidence(data, result) for result in data.steps)
    return Evidence(
        steps=[step for step in steps if step is not None],
        stragglers=list(_find_stragglers(data)),
        links=list(collect_links(data)),
        groups=list(collect_groups(data)),
        fits=list(compare_with_fits(data)),
        composites=list(compare_with_composites(data)),
        background_loads=list(compare_background_loads(data)),
        host_disturbance=_summarize_disturbance(data),
    )


def _find_stragglers(data: RunData) -> Iterator[StragglerEvidence]:
    """Yield the ranks that are last in the cases in which all ranks have the same work."""
    results = [result for result in data.measured if has_equal_work(result)]
    late = find_late_rank(results)
    if late:
        yield _convert_straggler(data, late, observation="arrives last")
    slow = find_last_rank(data.run, results)
    if slow:
        yield _convert_straggler(data, slow, observation="finishes last")


def _convert_straggler(data: RunData, straggler: Straggler, observation: str) -> StragglerEvidence:
    return StragglerEvidence(
        rank=straggler.rank,
        observation=observation,
        where=f"in {straggler.repetition_share}",
        waited_seconds=straggler.seconds,
        waited_share=straggler.time_share,
        command=build_doctor_command(data, straggler.rank),
    )


def _summarize_disturbance(data: RunData) -> HostDisturbance | None:
    """Return the load of the host by other processes, None if there was none."""
    description = describe_host_disturbance(data.run)
    if not description:
        return None
    repetitions = data.run.info.repetitions
    loads = [repetition.load for repetition in repetitions]
    graded = [result for result in data.measured if result.variation is not None]
    noisy = [result for result in graded if result.noise in NOISY_GRADES]
    is_noisy = len(noisy) > MIN_NOISY_SHARE * len(graded)
    variation = median([result.variation or 0.0 for result in graded]) if is_noisy else None
    return HostDisturbance(
        description=description,
        num_disturbed=sum(load is not None and bool(load.disturbance) for load in loads),
        num_repetitions=len(repetitions),
        variation=variation,
    )
