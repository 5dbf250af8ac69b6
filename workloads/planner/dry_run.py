"""A dry run: the bytes, memory and seconds of one step on a mesh, without GPUs or processes. Pure.

The communication of an axis is the sum of its calls. Compute can hide a fraction of it
(``Efficiency.overlap``): exposed = max(comm (1 - overlap), comm - window). The window is the
seconds of compute that run at the same time: attention for the keys of a ring, the microbatch for
FSDP, the step for tokens on their way to experts, and one backward pass for gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from parbench.bench.results.details import Action
from parbench.workloads.costs.communication_pattern import Call, list_calls
from parbench.workloads.costs.flops import count_flops_per_token
from parbench.workloads.costs.memory import RankMemory, compute_rank_memory, count_updated_elements
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import find_schedule
from parbench.workloads.pipeline_parallel.simulation import SimulatedTimeline, simulate
from parbench.workloads.planner.compute_time import ComputeSeconds, compute_microbatch
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import PlacedCall, PredictSeconds, make_hardware_predictor
from parbench.workloads.planner.placement import place_group

GIGA = 1e9  # bytes in a GB
UPDATED_BYTES = 28
"""The bytes that AdamW reads and writes per parameter in one update.

It reads and writes both moments and the weight in float32, and reads the gradient. With master
weights, the gradient has 2 bytes, and the parameter of 2 bytes is written too.
"""
MAX_SIMULATED_ACTIONS = 40_000
"""The largest number of passes of stages, over all pipeline ranks, in a step that is simulated.

The bubble of a step with more forward and backward passes follows from the formula of the schedule,
if there is one.
"""
BLOCKING_AXES = ("tp", "cp", "ring", "ulysses", "ep", "etp")
"""The axes of tensor, context and expert parallelism.

Their calls block the forward or backward pass, because the next operation needs the result.
``ring`` and ``ulysses`` are the two parts of ``cp`` with the context method ``usp``.
"""
SHARED_WINDOWS = {"efsdp": "fsdp", "edp": "dp"}
"""Axes of experts, and the axis of all other parameters whose calls the same compute hides.

Compute that hides calls on the second axis cannot hide calls on the first one.
"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The seconds and bytes of the communication on one axis of the mesh in a step.

    In ``PlannedWork.axes``, all fields are those of one rank. In ``DryRun.axes``, the bytes are the
    maximum over ranks, and may be of another rank than the seconds (see ``_merge_axes``).
    """

    name: str
    """The name of the axis, such as ``tp``."""
    seconds: float
    """The seconds per step of all calls of a rank on the axis, hidden by compute or not."""
    exposed_seconds: float
    """The part of ``seconds`` that compute does not hide."""
    sent_bytes: float
    """The bytes per step that a rank sends on the axis."""
    links: str
    """The nodes that the largest process group of the calls spans, such as ``inside a node``."""

    @property
    def hidden_seconds(self) -> float:
        """The seconds per step of the communication that compute hides."""
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """The predicted memory of one rank, which represents all pipeline ranks with equal work.

    Ranks have equal work if they have equally many dense and equally many MoE layers, and if they
    agree in having the embedding and in having the head.
    """

    view: RankView
    """The part of the step that this rank has: its stages, layers and position."""
    memory: RankMemory
    """The predicted bytes of this rank by component, such as gradients and activations."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The prediction of one training step on a mesh: its time, its communication and its memory.

    All seconds are per step. The busiest rank is the pipeline rank whose microbatch takes longest,
    with the communication that blocks its passes.
    """

    spec: StepSpec
    """The predicted training step."""
    hardware: Hardware
    """The type of GPU and its links, for which the step is predicted."""
    ranks: tuple[PlannedRank, ...]
    """One representative of each set of pipeline ranks with equal work, in pipeline order."""
    busiest: RankView
    """The part of the step on the busiest rank: its stages, layers and position."""
    compute_seconds: float
    """The seconds in which the busiest rank computes all microbatches, with recomputation."""
    update_seconds: float
    """The seconds of the optimizer's update on the rank that updates most elements."""
    bubble_seconds: float
    """The seconds that the busiest rank waits for other stages, 0 without a pipeline."""
    bubble_method: str
    """The method that gave ``bubble_seconds``, as a text for reports.

    It starts with "no pipeline", "simulated" or "analytical".
    """
    axes: tuple[Axis, ...]
    """The communication on each axis of the mesh that has calls, merged from all ranks."""
    measured_seconds: PredictSeconds | None
    """A function that returns the seconds of one communication call, from fits of a measured run.

    None if these seconds follow from the rates and latencies of ``hardware``.
    """

    @cached_property
    def seconds(self) -> float:
        """The predicted seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds per step by component. Their sum is the time of the step.

        The keys are ``compute``, ``exposed AXIS`` for each axis with exposed communication,
        ``bubble`` and ``update``.
        """
        return {
            "compute": self.compute_seconds,
            **{
                f"exposed {axis.name}": axis.exposed_seconds
                for axis in self.axes
                if axis.exposed_seconds
            },
            "bubble": self.bubble_seconds,
            "update": self.update_seconds,
        }

    @cached_property
    def fullest(self) -> PlannedRank:
        """The rank that holds most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)

    @property
    def fits(self) -> bool:
        """True if the step fits in the usable memory of a GPU on all ranks."""
        return self.memory_share <= 1

    @property
    def memory_share(self) -> float:
        """The memory of the rank that holds most, relative to the usable memory of a GPU."""
        return self.fullest.memory.total / self.hardware.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of all GPUs together."""
        return self.spec.tokens / self.seconds

    @property
    def model_flops_per_second(self) -> float:
        """The model FLOPs per second and GPU, without recomputation, as PaLM counts them."""
        return (
            self.tokens_per_second
            * count_flops_per_token(self.spec.shape, self.spec.moe)
            / self.spec.ranks
        )

    @property
    def mfu(self) -> float:
        """The model FLOP/s per GPU as a fraction of the dense bfloat16 peak of a GPU."""
        return self.model_flops_per_second / self.hardware.flops_per_second


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """The seconds of one microbatch on a rank, and the communication of the rank in a step."""

    view: RankView
    """The part of the step that this rank has: its stages, layers and position."""
    compute_seconds: float
    """The seconds of compute of a microbatch in both passes, without communication."""
    forward: float
    """The seconds of a microbatch's forward pass.

    They include the exposed calls of tensor, context and expert parallelism (``BLOCKING_AXES``).
    """
    backward: float
    """The seconds of a microbatch's backward pass.

    They include recomputation, and the exposed calls of tensor, context and expert parallelism
    (``BLOCKING_AXES``).
    """
    axes: Mapping[str, Axis]
    """The communication of this rank in all microbatches of a step, by name of the mesh axis."""

    @property
    def microbatch(self) -> float:
        """The seconds of a microbatch in both passes.

        They include the exposed calls of tensor, context and expert parallelism.
        """
        return self.forward + self.backward


def dry_run(
    spec: StepSpec,
    hardware: Hardware,
    *,
    seconds: PredictSeconds | None = None,
    compute_seconds: float | None = None,
    exact: bool = True,
    ranks: tuple[PlannedRank, ...] = (),
) -> DryRun:
    """Return the prediction of the step ``spec`` on ``hardware``.

    ``seconds`` is a function that returns the seconds of one communication call, from fits of
    measured calls. With None, they follow from the rates and latencies of ``hardware``.
    ``compute_seconds`` is the measured compute of a step, the optimizer included, as the mean over
    pipeline ranks. With None, it follows from ``hardware``.

    With ``exact``, a pipeline is simulated if it has at most ``MAX_SIMULATED_ACTIONS`` passes of
    stages. Otherwise its bubble follows from the formula of the schedule. A schedule without a
    formula is always simulated. ``ranks`` is the result of ``plan_ranks`` for this step. If it is
    empty, this function computes it.
    """
    works, busiest = _estimate_works(spec, hardware, seconds, compute_seconds)
    bubble, method = _compute_bubble(spec, works, busiest, exact=exact)
    update_seconds = 0.0
    if compute_seconds is None:
        updated = max(count_updated_elements(view) for view in spec.distinct_views)
        update_seconds = updated * UPDATED_BYTES / hardware.memory_rate
    return DryRun(
        spec=spec,
        hardware=hardware,
        ranks=ranks or plan_ranks(spec),
        busiest=busiest.view,
        compute_seconds=busiest.compute_seconds * spec.microbatches,
        update_seconds=update_seconds,
        bubble_seconds=bubble,
        bubble_method=method,
        axes=_merge_axes(works, busiest),
        measured_seconds=seconds,
    )


def plan_ranks(spec: StepSpec) -> tuple[PlannedRank, ...]:
    """Return the predicted memory of representative ranks, in the order of the pipeline.

    Pipeline ranks have equal work if they have equally many dense and equally many MoE layers, and
    if they agree in having the embedding and in having the head. Of ranks with equal work, the
    representative is the one with most microbatches in flight, because it needs most memory.
    """
    return tuple(
        PlannedRank(view=view, memory=compute_rank_memory(view)) for view in spec.distinct_views
    )


def _merge_axes(works: Sequence[PlannedWork], busiest: PlannedWork) -> tuple[Axis, ...]:
    """Return the communication on each axis of a step, merged from that of several ranks.

    The seconds and the bytes of an axis may be of different ranks. On ``BLOCKING_AXES`` the seconds
    are those of the busiest rank. On other axes, and on axes on which the busiest rank has no
    calls, they are those of the rank with most exposed seconds. The bytes are always those of the
    rank that sends most on the axis. ``works`` has one rank of each set with equal work.
    """
    axes = []
    for name in dict.fromkeys(name for work in works for name in work.axes):
        of_ranks = [work.axes[name] for work in works if name in work.axes]
        axis = max(of_ranks, key=lambda axis: axis.exposed_seconds)
        if name in BLOCKING_AXES:
            axis = busiest.axes.get(name, axis)
        axes.append(replace(axis, sent_bytes=max(axis.sent_bytes for axis in of_ranks)))
    return tuple(axes)


def _estimate_works(
    spec: StepSpec,
    hardware: Hardware,
    seconds: PredictSeconds | None,
    compute_seconds: float | None = None,
) -> tuple[list[PlannedWork], PlannedWork]:
    """Return the predicted time and communication of representative pipeline ranks.

    The list has one representative of each set of ranks with equal work (see ``plan_ranks``). The
    second result is the busiest rank: the element whose microbatch takes longest.

    ``seconds`` is a function that returns the seconds of one communication call. With None, they
    follow from the rates and latencies of ``hardware``. ``compute_seconds`` is the measured compute
    of a step, as the mean over pipeline ranks. A rank gets a share of this time by its number of
    layers. With None, the compute of each rank follows from ``hardware``.
    """
    seconds = seconds or make_hardware_predictor(hardware)
    works = []
    for view in spec.distinct_views:
        compute = compute_microbatch(view, hardware)
        if compute_seconds is not None:
            layers_share = view.layers * spec.dims.pp / spec.shape.layers
            compute = compute.scale_to(compute_seconds / spec.microbatches * layers_share)
        works.append(_estimate_work(view, hardware, compute, seconds))
    return works, max(works, key=lambda work: work.microbatch)


def _estimate_work(
    view: RankView, hardware: Hardware, compute: ComputeSeconds, seconds: PredictSeconds
) -> PlannedWork:
    """Return the seconds per microbatch and the communication per step of one rank.

    The seconds of a pass include the exposed communication on ``BLOCKING_AXES``. All other
    communication is only in ``axes`` of the result. ``compute`` has the compute of one microbatch,
    and ``seconds`` returns the seconds of one call.
    """
    spec, overlap = view.spec, hardware.efficiency.overlap
    windows = _list_windows(spec, compute)
    calls_by_axis: dict[str, list[PlacedCall]] = {}
    for call in list_calls(view):
        calls_by_axis.setdefault(call.axis, []).append(place_call(call, hardware, spec))
    axes: dict[str, Axis] = {}
    for name in sorted(calls_by_axis, key=lambda name: name in SHARED_WINDOWS):
        window = windows.get(name, 0.0)
        if SHARED_WINDOWS.get(name) in axes:
            window = max(0.0, window - axes[SHARED_WINDOWS[name]].hidden_seconds)
        axes[name] = _make_axis(name, calls_by_axis[name], overlap.get(name, 0.0), window, seconds)
    blocking = sum(axis.exposed_seconds for name, axis in axes.items() if name in BLOCKING_AXES)
    blocking /= spec.microbatches
    forward_share = 1 / (1 + spec.forward_passes)
    return PlannedWork(
        view=view,
        compute_seconds=compute.forward + compute.backward,
        forward=compute.forward + blocking * forward_share,
        backward=compute.backward + blocking * (1 - forward_share),
        axes=axes,
    )


def _list_windows(spec: StepSpec, compute: ComputeSeconds) -> dict[str, float]:
    """Return the seconds of compute per step that can hide communication, by axis of the mesh.

    ``compute`` has the seconds of one microbatch. The communication on an axis that is not in the
    result is fully exposed.
    """
    microbatch = compute.forward + compute.backward
    step = microbatch * spec.microbatches
    attention = compute.attention * spec.microbatches
    # Megatron's overlap_param_gather hides the gathers of ZeRO-1 behind the next forward pass.
    gradients = microbatch if spec.zero1 else compute.backward
    shards = microbatch if spec.dims.pp > 1 else step
    return {
        "cp": attention if spec.context_method.hides_communication else 0.0,
        "fsdp": shards,
        "efsdp": shards,
        "ep": step,
        "dp": gradients,
        "edp": gradients,
    }


def place_call(call: Call, hardware: Hardware, spec: StepSpec) -> PlacedCall:
    """Return a call together with the nodes that its process group spans on the hardware."""
    return PlacedCall.make(call, place_group(spec.dims, call.group, hardware.gpus_per_node))


def _make_axis(
    name: str, calls: Sequence[PlacedCall], overlap: float, window: float, seconds: PredictSeconds
) -> Axis:
    """Return the communication of one rank on an axis, from all of its calls in a step.

    ``overlap`` is the fraction of the communication that compute can hide. ``window`` is the
    seconds of compute per step that can hide it. ``seconds`` returns the seconds of one call. The
    messages of ``pp`` count as hidden, because the bubble includes their latency.
    """
    total = sum(call.count * seconds(call) for call in calls)
    exposed = max(total * (1 - overlap), total - window)
    if name == "pp":
        exposed = 0.0  # Its latency is in the bubble, and its bytes move during compute.
    largest = max((call.place for call in calls), key=lambda place: place.ranks)
    return Axis(
        name=name,
        seconds=total,
        exposed_seconds=exposed,
        sent_bytes=sum(call.sent for call in calls),
        links=largest.label,
    )


def _compute_bubble(
    spec: StepSpec, works: Sequence[PlannedWork], busiest: PlannedWork, *, exact: bool
) -> tuple[float, str]:
    """Return the seconds per step that the busiest rank waits for other stages of the pipeline.

    The second result is the text for ``DryRun.bubble_method``. ``works`` has one rank of each set
    with equal work. With ``exact``, the pipeline is simulated if it has at most
    ``MAX_SIMULATED_ACTIONS`` passes of stages. Otherwise the bubble follows from the formula of the
    schedule. A schedule without a formula for these sizes is always simulated.
    """
    pp = spec.dims.pp
    if pp == 1:
        return 0.0, "no pipeline"
    by_rank, hop = _list_works_by_rank(spec, works), _compute_hop(busiest)
    half_backward = fmean(work.backward for work in by_rank) / 2
    passes = PassSeconds(fmean(work.forward for work in by_rank), half_backward, half_backward)
    schedule = find_schedule(spec.pipeline_options.schedule)
    form = schedule.compute_bubble(spec.pipeline_size, passes)
    num_actions = pp * spec.microbatches * spec.stages_per_rank * 2
    if form is None or (exact and num_actions <= MAX_SIMULATED_ACTIONS):
        makespan = _simulate_step(spec, by_rank, hop).makespan
        bubble = max(0.0, makespan - spec.microbatches * busiest.microbatch)
        return bubble, "simulated with each stage's times and the link's latency"
    # A pipeline fills and drains with mean stages, and each hop adds a message.
    return form.seconds + 2 * (pp - 1) * hop, f"analytical: {form.note}, and 2(P-1) messages"


def simulate_pipeline(run: DryRun) -> SimulatedTimeline:
    """Simulate the pipeline of a predicted step, and return the timeline of its passes.

    It is simulated even if ``run.bubble_seconds`` follows from a formula.
    """
    works, busiest = _estimate_works(run.spec, run.hardware, run.measured_seconds)
    return _simulate_step(run.spec, _list_works_by_rank(run.spec, works), _compute_hop(busiest))


def _list_works_by_rank(spec: StepSpec, works: Sequence[PlannedWork]) -> Sequence[PlannedWork]:
    """Return the predicted seconds and communication of each rank, in the order of the pipeline.

    ``works`` has one representative of each set of pipeline ranks with equal work.
    """
    work_by_kind = {work.view.work: work for work in works}
    return [work_by_kind[spec.make_stage_view(rank).work] for rank in range(spec.dims.pp)]


def _compute_hop(busiest: PlannedWork) -> float:
    """Return the mean seconds of a message from the busiest rank to another stage.

    The result is 0 if this rank sends none.
    """
    if "pp" not in busiest.axes:
        return 0.0
    messages = sum(call.times for call in list_calls(busiest.view) if call.axis == "pp")
    return busiest.axes["pp"].seconds / messages


def _simulate_step(spec: StepSpec, works: Sequence[PlannedWork], hop: float) -> SimulatedTimeline:
    """Return the timeline of all actions of a step in its pipeline schedule.

    ``works`` has the work of each pipeline rank, in order. The seconds of a rank are divided among
    its stages by their number of layers. ``hop`` is the seconds of a message between stages.
    """
    seconds: dict[tuple[int, str], float] = {}
    for rank, work in enumerate(works):
        view = spec.make_stage_view(rank)
        for stage in view.stages:
            share = view.layers_by_stage[stage] / view.layers
            seconds[stage, "F"] = work.forward * share
            seconds[stage, "B"] = work.backward * share
            seconds[stage, "I"] = seconds[stage, "W"] = work.backward * share / 2

    def get_seconds(action: Action) -> float:
        """Return the seconds of a pass of one stage on one microbatch, without its message."""
        return seconds[action.stage, action.kind]

    return simulate(spec.order, get_seconds, hop)
