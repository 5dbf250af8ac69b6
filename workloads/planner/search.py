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
from parbench.workloads.planner.link_time import PredictSeconds

MAX_GPUS = 1 << 17  # of a search
PREDICTION_ERROR = 0.10
"""The median relative error of predicted step times on published runs, rounded up.

See docs/concepts/planner-validation.md.
"""
SIMULATED_RUNS = 3
"""The number of best meshes whose pipelines are simulated at the end of a search."""
SIMULATED_PASSES = 4096
"""The most forward passes (stages x microbatches) of a step that is simulated at the end."""
NEARLY_FULL = 0.95
"""The fraction of usable memory above which a step counts as harder to run."""
_WEIGHTS = {"dp": 1, "fsdp": 1, "tp": 2, "ep": 2, "cp": 3, "pp": 3}
"""The points that each axis of a mesh adds to the effort of running it, see ``measure_effort``."""


@dataclass(kw_only=True)
class SearchResult:
    """The predicted steps of a search that fit in memory, and facts about those that do not."""

    context_tokens: int
    """Context parallelism left each rank more tokens of a sequence than this number."""
    feasible: list[DryRun] = field(default_factory=list)
    """All predicted steps that fit in memory."""
    runs: list[DryRun] = field(default_factory=list)
    """The best feasible step of each mesh, best mesh first. Empty during the search."""
    num_considered: int = 0
    """The number of tried steps that satisfy all divisibility rules.

    It includes the steps that do not fit in memory.
    """
    num_too_large: int = 0
    """The number of considered steps that do not fit in memory."""
    broken_rules: dict[str, str] = field(default_factory=dict)
    """The first mesh that breaks a rule, such as ``tp=4``, keyed by the violation.

    The violation is the broken rule with its numbers, such as ``heads(6) % tp(4) != 0``.
    """
    smallest: tuple[float, StepSpec] | None = None
    """The pair (bytes per GPU, step) of the step that needs least memory of those that do not fit.

    None if no step was too large.
    """

    @property
    def best(self) -> DryRun:
        """The best predicted step, which is the first of ``runs``. Requires that a step fits."""
        return self.runs[0]


def search(
    request: SearchRequest, hardware: Hardware, seconds: PredictSeconds | None = None
) -> SearchResult:
    """Predict the step on every practical mesh, and return the meshes that fit, best first.

    Each mesh has its best settings, and ``rank_runs`` gives the order. The pipelines of the first
    ``SIMULATED_RUNS`` meshes are simulated if they have at most ``SIMULATED_PASSES`` forward
    passes. If no mesh fits in memory, the search is repeated once with larger ``cp``, which may
    leave each rank as few as ``MIN_TOKENS`` tokens of a sequence. If no mesh fits then either,
    ``feasible`` and ``runs`` of the result are empty, and its other fields are those of the second
    search.

    ``seconds`` is a function that returns the seconds of one communication call, from fits of
    measured calls. With None, they follow from the rates and latencies of ``hardware``. Raises
    ``UserError`` if the number of GPUs is not from 1 to ``MAX_GPUS``.
    """
    if not 1 <= request.gpus <= MAX_GPUS:
        raise UserError(f"--gpus {request.gpus} is not between 1 and {MAX_GPUS}")
    for context_tokens in (request.context_tokens, MIN_TOKENS - 1):
        result = SearchResult(context_tokens=context_tokens)
        relaxed = replace(request, context_tokens=context_tokens)
        for layout in list_layouts(relaxed, hardware.gpus_per_node):
            predict_layout(relaxed, layout, hardware, seconds, result)
        if result.feasible:
            break
    runs = rank_runs(result.feasible)
    for index, run in enumerate(runs[:SIMULATED_RUNS]):
        size = run.spec.pipeline_size
        if run.spec.dims.pp > 1 and size.num_stages * size.microbatches <= SIMULATED_PASSES:
            runs[index] = dry_run(run.spec, hardware, seconds=seconds)
            result.feasible[result.feasible.index(run)] = runs[index]
    result.runs = rank_runs(runs)
    return result


def predict_layout(
    request: SearchRequest,
    layout: StepSpec,
    hardware: Hardware,
    seconds: PredictSeconds | None,
    result: SearchResult,
) -> None:
    """Predict a step on one mesh with several batches and schedules, and add them to ``result``.

    ``layout`` is the step on the mesh with a stage of ZeRO. Each microbatch size is tried with each
    pipeline schedule, except for schedules whose bubble is not smaller than that of a simpler
    schedule that fits. Predictions that fit in memory are added to ``result.feasible``. Of the steps
    that do not fit, ``result`` gets only the number and the smallest. ``seconds`` is as in
    ``search``.
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
                result.feasible.append(run)
                least_bubble = bubble
            elif least_bubble is None:
                return  # Other schedules and larger microbatches need more memory.


def _predict(
    request: SearchRequest,
    step: StepSpec,
    hardware: Hardware,
    seconds: PredictSeconds | None,
    result: SearchResult,
) -> DryRun | None:
    """Return the prediction of a step with the least recomputation that fits in memory.

    The checkpointings of the request are tried, the one with least recomputation first, until the
    step fits. The result is None if it fits with none of them. The bubble of a pipeline follows
    from the formula of its schedule if there is one. ``seconds`` returns the seconds of a
    communication call, None to compute them from ``hardware``.

    Facts on the tried steps are added to ``result``: the violations of divisibility rules
    (``broken_rules``), the number of steps without a violation (``num_considered``), the number of
    those that do not fit (``num_too_large``), and the smallest of these (``smallest``).
    """
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
    """Return the best predicted step of each mesh, best mesh first.

    Steps that tie with the fastest come first, those with least effort (``measure_effort``) before
    the others. All other steps follow in order of their step time.
    """
    if not runs:
        return []
    fastest = min(run.seconds for run in runs)

    def order(run: DryRun) -> tuple[bool, int, float]:
        """Return the sort key of a predicted step. The best step has the smallest key.

        The key is (False, its effort, its seconds) for a step that ties with the fastest, and
        (True, 0, its seconds) for other steps.
        """
        if is_tie(run, fastest):
            return False, measure_effort(run), run.seconds
        return True, 0, run.seconds

    by_mesh: dict[str, DryRun] = {}
    for run in sorted(runs, key=order):
        by_mesh.setdefault(run.spec.dims.label, run)
    return list(by_mesh.values())


def measure_effort(run: DryRun) -> int:
    """Return a score of the effort of setting up and running a step, higher for more effort.

    Each axis of the mesh adds 1 to 3 points (``_WEIGHTS``). One more point each is for a schedule
    other than 1F1B, for FSDP inside a pipeline, and for a step that fills more than ``NEARLY_FULL``
    of the usable memory.
    """
    spec = run.spec
    effort = sum(_WEIGHTS.get(axis, 2) for axis in spec.dims.sizes)
    if spec.dims.pp > 1:
        effort += spec.pipeline_options.schedule != SIMPLEST_SCHEDULE
        effort += spec.dims.is_sharded  # FSDP inside a pipeline keeps all stages gathered.
    return effort + (run.memory_share > NEARLY_FULL)


def is_tie(run: DryRun, fastest_seconds: float) -> bool:
    """Return True if a predicted step ties with the fastest, which takes ``fastest_seconds``.

    It ties if its time is at most (1 + ``PREDICTION_ERROR``) times ``fastest_seconds``.
    """
    return run.seconds <= fastest_seconds * (1 + PREDICTION_ERROR)
