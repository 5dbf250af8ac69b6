"""The search: predict every practical mesh, and rank the meshes. Pure.

Predictions that differ by less than ``PREDICTION_ERROR`` are ties. The simplest of them is first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import (
    MIN_TOKENS,
    SIMPLEST_SCHEDULE,
    SearchRequest,
    estimate_bubble,
    list_batches,
    list_layouts,
    list_pipelines,
)
from parbench.workloads.planner.dry_run import DryRun, dry_run, plan_ranks
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds

MAX_GPUS = 1 << 17
PREDICTION_ERROR = 0.10
"""The median error of step times on published runs, rounded up (docs/concepts/planner-validation.md)."""
SIMULATED_RUNS = 3
SIMULATED_PASSES = 4096
"""Pipelines with at most this number of forward passes are simulated (stages x microbatches).

Only the first ``SIMULATED_RUNS`` runs are simulated.
"""
NEARLY_FULL = 0.95  # the share of usable memory
_WEIGHTS = {"dp": 1, "fsdp": 1, "tp": 2, "ep": 2, "cp": 3, "pp": 3}
"""The effort that each axis adds to running a mesh."""


@dataclass(kw_only=True)
class SearchResult:
    """The predictions of a search, and counts and examples of the steps that it rejected."""

    runs: list[DryRun] = field(default_factory=list)
    num_considered: int = 0
    """The number of steps that satisfy all rules, whether or not they fit in memory."""
    num_too_large: int = 0
    """The number of considered steps that do not fit in memory."""
    broken_rules: dict[str, str] = field(default_factory=dict)
    """The label of the first mesh that breaks a rule, by the text of the rule."""
    smallest: tuple[float, StepSpec] | None = None
    """The peak bytes and the step that needs least memory of the steps that do not fit.

    None if no step was too large.
    """

    @property
    def best(self) -> DryRun:
        return self.runs[0]


def search(
    request: SearchRequest, hardware: Hardware, seconds: Seconds | None = None
) -> SearchResult:
    """Return the best settings of each mesh that fits in memory, ranked by ``rank_runs``.

    Short pipelines of the first meshes are simulated. Context parallelism may leave fewer tokens
    per rank if nothing else fits. ``seconds`` gives the seconds of a communication call. If it is
    None, they follow from ``hardware``.
    """
    if not 1 <= request.gpus <= MAX_GPUS:
        raise UserError(f"--gpus({request.gpus}) is not within 1 and {MAX_GPUS}")
    for context_tokens in (request.context_tokens, MIN_TOKENS - 1):
        result = SearchResult()
        relaxed = replace(request, context_tokens=context_tokens)
        for layout in list_layouts(relaxed, hardware.gpus_per_node):
            predict_layout(relaxed, layout, hardware, seconds, result)
        if result.runs:
            break
    runs = rank_runs(result.runs)
    for index, run in enumerate(runs[:SIMULATED_RUNS]):
        size = run.spec.pipeline_size
        if run.spec.dims.pp > 1 and size.num_stages * size.microbatches <= SIMULATED_PASSES:
            runs[index] = dry_run(run.spec, hardware, seconds=seconds)
    result.runs = rank_runs(runs)
    return result


def predict_layout(
    request: SearchRequest,
    layout: StepSpec,
    hardware: Hardware,
    seconds: Seconds | None,
    result: SearchResult,
) -> None:
    """Add the predictions of a layout to the runs of ``result``.

    They are of each microbatch size with each schedule that fits in memory and has a smaller bubble
    than the simpler schedules. Rejected steps are counted in ``result``.
    """
    for step in list_batches(request, layout):
        least_bubble: float | None = None
        for pipeline in list_pipelines(request, step):
            size = pipeline.pipeline_size
            schedule = pipeline.pipeline_options.schedule
            bubble = estimate_bubble(schedule, size.ranks, size.microbatches, size.stages_per_rank)
            if least_bubble is not None and bubble >= least_bubble:
                continue  # A simpler schedule fits and is not slower.
            run = _predict(request, pipeline, hardware, seconds, result)
            if run is not None:
                result.runs.append(run)
                least_bubble = bubble
            elif least_bubble is None:
                return  # Other schedules and larger microbatches need more memory.


def _predict(
    request: SearchRequest,
    step: StepSpec,
    hardware: Hardware,
    seconds: Seconds | None,
    result: SearchResult,
) -> DryRun | None:
    """Return the prediction with the least recomputation that fits in memory, None if none fits."""
    for checkpointing in request.checkpointings:
        spec = step.with_checkpointing(checkpointing)
        rule = spec.find_broken_rule()
        if rule is not None:
            result.broken_rules.setdefault(rule, spec.dims.label)
            continue
        result.num_considered += 1
        ranks = plan_ranks(spec)
        peak = max(rank.memory.total for rank in ranks)
        if peak <= hardware.usable_bytes:
            return dry_run(spec, hardware, seconds=seconds, exact=False, ranks=ranks)
        result.num_too_large += 1
        if result.smallest is None or peak < result.smallest[0]:
            result.smallest = (peak, spec)
    return None


def rank_runs(runs: Sequence[DryRun]) -> list[DryRun]:
    """Return the best run of each mesh, best mesh first.

    Runs that tie with the fastest come first, in order of their effort. All others follow in order
    of their step time.
    """
    if not runs:
        return []
    fastest = min(run.seconds for run in runs)

    def order(run: DryRun) -> tuple[bool, int, float]:
        if is_tie(run, fastest):
            return False, measure_effort(run), run.seconds
        return True, 0, run.seconds

    by_mesh: dict[str, DryRun] = {}
    for run in sorted(runs, key=order):
        by_mesh.setdefault(run.spec.dims.label, run)
    return list(by_mesh.values())


def measure_effort(run: DryRun) -> int:
    """Return the effort of running a step: the weights of its axes, its schedule, its memory.

    A step that nearly fills the memory needs tuning of the allocator.
    """
    spec = run.spec
    effort = sum(_WEIGHTS.get(axis, 2) for axis in spec.dims.sizes)
    if spec.dims.pp > 1:
        effort += spec.pipeline_options.schedule != SIMPLEST_SCHEDULE
        effort += spec.dims.is_sharded  # FSDP inside a pipeline keeps all stages gathered.
    return effort + (run.memory_share > NEARLY_FULL)


def is_tie(run: DryRun, fastest_seconds: float) -> bool:
    """Return True if a run is not slower than the fastest by more than the prediction error."""
    return run.seconds <= fastest_seconds * (1 + PREDICTION_ERROR)
