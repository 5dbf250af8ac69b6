"""A dry run: what one step on a mesh would hold, send and take, without a GPU or a process group. Pure.

Each axis' communication is the sum of its calls. Of what may hide, a share (``Efficiency.overlap``) does, as far as
there is compute to hide it: exposed = max(comm (1 - overlap), comm - window). The window is attention for a ring's
keys, the microbatch for FSDP's gathers and for tokens on their way to experts, one backward pass for gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from parbench.bench.results.details import Action
from parbench.workloads.costs.communication_pattern import Call, list_calls
from parbench.workloads.costs.flops import flops_per_token, recomputed_bytes, stage_flops
from parbench.workloads.costs.memory import RankMemory, rank_memory, updated_elements
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import find_schedule
from parbench.workloads.pipeline_parallel.simulation import Timeline, simulate
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import PlacedCall, Seconds, by_hardware
from parbench.workloads.planner.placement import place_of

GIGA = 1e9
MOST_ACTIONS = 40_000
SHARDING = ("dp", "edp", "fsdp", "efsdp")
_WITHIN = ("tp", "cp", "ring", "ulysses", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis' communication in a step: seconds of the busiest rank, bytes of the rank that sends most over it."""

    name: str
    seconds: float
    exposed_seconds: float
    sent_bytes: float
    where: str
    assumption: str

    @property
    def hidden_seconds(self) -> float:
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True, kw_only=True)
class Held:
    """One kind of rank, and what it holds."""

    at: RankView
    memory: RankMemory


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A step as predicted; ``ranks`` are those that differ.

    ``seconds`` are what the ``busiest`` rank's step is made of; ``bubble_method`` says how the bubble was found.
    """

    spec: StepSpec
    hardware: Hardware
    ranks: tuple[Held, ...]
    busiest: RankView
    compute_seconds: float
    update_seconds: float
    bubble_seconds: float
    bubble_method: str
    axes: tuple[Axis, ...]

    @cached_property
    def exposed_seconds(self) -> float:
        return sum(axis.exposed_seconds for axis in self.axes)

    @cached_property
    def sharding_seconds(self) -> float:
        """What gathering state and summing gradients adds."""
        return sum(axis.exposed_seconds for axis in self.axes if axis.name in SHARDING)

    @cached_property
    def seconds(self) -> float:
        return (
            self.compute_seconds + self.update_seconds + self.bubble_seconds + self.exposed_seconds
        )

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they go to."""
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
    def fullest(self) -> Held:
        return max(self.ranks, key=lambda held: held.memory.total)

    @property
    def fits(self) -> bool:
        return self.fullest.memory.total <= self.hardware.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.spec.tokens / self.seconds

    @property
    def model_flops_per_second(self) -> float:
        """Of one GPU, as PaLM counts them."""
        return (
            self.tokens_per_second
            * flops_per_token(self.spec.shape, self.spec.moe)
            / self.spec.ranks
        )

    @property
    def mfu(self) -> float:
        """The share of the dense bfloat16 peak."""
        return self.model_flops_per_second / self.hardware.flops_per_second

    @property
    def caveats(self) -> tuple[str, ...]:
        if self.mfu <= 1:
            return ()
        flops = max(stage_flops(held.at).total for held in self.ranks) * self.spec.microbatches
        executed = flops / self.seconds / self.hardware.flops_per_second
        return (
            f"MFU {self.mfu:.1%} is above 100%: it counts attention whole, of which a causal mask leaves half; what is "
            f"executed is {executed:.1%} of the peak",
        )

    @property
    def missing(self) -> str:
        fullest = self.fullest
        return (
            f"{self.spec.name} with {self.spec.dims.label} needs {fullest.memory.total / 1e9:,.1f} GB on "
            f"{fullest.at.label} ({fullest.memory.state / 1e9:,.1f} GB of state, "
            f"{fullest.memory.activations / 1e9:,.1f} GB of activations, {fullest.memory.buffers / 1e9:,.1f} GB of "
            f"buffers) > {self.hardware.usable_bytes / 1e9:,.1f} GB usable of {self.hardware.memory_bytes / 1e9:,.0f}"
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's microbatch: forward and backward with the communication that neither can hide, and its axes."""

    at: RankView
    compute_seconds: float
    forward: float
    backward: float
    axes: Mapping[str, Axis]

    @property
    def microbatch(self) -> float:
        return self.forward + self.backward


def dry_run(
    spec: StepSpec,
    hardware: Hardware,
    *,
    seconds: Seconds | None = None,
    exact: bool = True,
    held: tuple[Held, ...] = (),
) -> DryRun:
    """Return the predicted step; ``seconds`` tells a call's time, by default ``hardware``'s latency and bandwidth.

    ``exact`` simulates a pipeline of no more than so many actions; otherwise the bubble is the schedule's closed form,
    if it has one. ``held`` is what ranks hold, where that is known already.
    """
    seconds = seconds or by_hardware(hardware)
    work = [work_of(at, hardware, seconds) for at in spec.distinct_views]
    busiest = max(work, key=lambda each: each.microbatch)
    bubble, method = _bubble(spec, work, busiest, exact=exact)
    axes = []
    for name in dict.fromkeys(name for each in work for name in each.axes):
        of = [each.axes[name] for each in work if name in each.axes]
        # ranks between the ends are alike, but their places in the pipeline differ: the rank with the most tells
        shown = max(of, key=lambda axis: axis.exposed_seconds)
        if name in _WITHIN:
            shown = busiest.axes.get(name, shown)
        axes.append(replace(shown, sent_bytes=max(axis.sent_bytes for axis in of)))
    memory_rate = hardware.memory_bytes_per_second * hardware.efficiency.memory_rate
    return DryRun(
        spec=spec,
        hardware=hardware,
        ranks=held or held_by(spec),
        busiest=busiest.at,
        compute_seconds=busiest.compute_seconds * spec.microbatches,
        update_seconds=max(updated_elements(at) for at in spec.distinct_views)
        * spec.widths.updated
        / memory_rate,
        bubble_seconds=bubble,
        bubble_method=method,
        axes=tuple(axes),
    )


def held_by(spec: StepSpec) -> tuple[Held, ...]:
    return tuple(Held(at=at, memory=rank_memory(at)) for at in spec.distinct_views)


def work_of(at: RankView, hardware: Hardware, seconds: Seconds) -> Work:
    """Return a rank's microbatch: what stands in the way of its passes goes into them, the rest stays an axis."""
    spec, efficiency = at.spec, hardware.efficiency
    flops = stage_flops(at)
    rate = (
        hardware.flops_per_second
        * efficiency.gemm
        * (1.0 if spec.has_master_weights else hardware.float32_share)
    )
    moved = recomputed_bytes(at) / (hardware.memory_bytes_per_second * efficiency.memory_rate)
    compute = (flops.forward / rate, (flops.backward + flops.recomputed) / rate + moved)
    windows = {
        "cp": 3 * flops.attention / rate * spec.microbatches
        if spec.context_method.hides_communication
        else 0.0,
        "fsdp": sum(compute) * (1 if spec.dims.size("pp") > 1 else spec.microbatches),
        "ep": sum(compute) * spec.microbatches,
        # The next forward pass hides the gathers of updated parameters (Megatron, overlap_param_gather).
        "dp": sum(compute) if spec.zero1 else compute[1],
        "edp": sum(compute) if spec.zero1 else compute[1],
    }
    by_axis: dict[str, list[PlacedCall]] = {}
    for call in list_calls(at):
        by_axis.setdefault(call.axis, []).append(placed(call, hardware, spec))
    axes = {
        name: _axis(name, group, efficiency.overlap.get(name, 0.0), windows.get(name, 0.0), seconds)
        for name, group in by_axis.items()
    }
    blocking = (
        sum(axes[name].exposed_seconds for name in _WITHIN if name in axes) / spec.microbatches
    )
    share = 1 / (1 + spec.forward_passes)
    return Work(
        at=at,
        compute_seconds=sum(compute),
        forward=compute[0] + blocking * share,
        backward=compute[1] + blocking * (1 - share),
        axes=axes,
    )


def placed(call: Call, hardware: Hardware, spec: StepSpec) -> PlacedCall:
    return PlacedCall.of(
        call, place_of(spec.dims, call.group, hardware.gpus_per_node, hardware.nodes_per_pod)
    )


def _axis(
    name: str, of: Sequence[PlacedCall], overlap: float, window: float, seconds: Seconds
) -> Axis:
    total = sum(one.count * seconds(one) for one in of)
    if name == "pp":
        exposed, assumption = 0.0, "its latency is in the bubble, its bytes pass beside compute"
    elif overlap and window:
        exposed = max(total * (1 - overlap), total - window)
        assumption = f"max({1 - overlap:.0%} of it, what exceeds {window:.3g} s of compute)"
    else:
        exposed, assumption = total, "nothing hides it"
    return Axis(
        name=name,
        seconds=total,
        exposed_seconds=exposed,
        sent_bytes=sum(one.sent for one in of),
        where=max((one.place for one in of), key=lambda place: place.ranks).words,
        assumption=assumption,
    )


def _bubble(
    spec: StepSpec, work: Sequence[Work], busiest: Work, *, exact: bool
) -> tuple[float, str]:
    """Return the seconds in which the busiest rank waits for its pipeline, and how that was found."""
    pp, chunks = spec.dims.size("pp"), spec.stages_per_rank
    if pp == 1:
        return 0.0, "no pipeline"
    of_rank, hop = _of_rank(spec, work), _hop(busiest)
    forward, half = (
        fmean(each.forward for each in of_rank),
        fmean(each.backward for each in of_rank) / 2,
    )
    passes = PassSeconds(forward, half, half)
    form = find_schedule(spec.pipeline_options.schedule).compute_bubble(spec.pipeline_size, passes)
    if form.seconds is None or (exact and pp * spec.microbatches * chunks * 2 <= MOST_ACTIONS):
        waited = _simulated(spec, of_rank, hop).makespan - spec.microbatches * busiest.microbatch
        return max(0.0, waited), "simulated with each stage's times and the link's latency"
    # a pipeline fills and drains over its mean stage, and each hop of that adds a message
    return form.seconds + 2 * (pp - 1) * hop, f"closed form {form.note}, and 2(P-1) messages"


def pipeline_of(run: DryRun, seconds: Seconds | None = None) -> Timeline:
    """Return every action of a predicted pipeline, whatever found its bubble; ``seconds`` as of ``dry_run``."""
    work = [
        work_of(at, run.hardware, seconds or by_hardware(run.hardware))
        for at in run.spec.distinct_views
    ]
    return _simulated(
        run.spec, _of_rank(run.spec, work), _hop(max(work, key=lambda each: each.microbatch))
    )


def _of_rank(spec: StepSpec, work: Sequence[Work]) -> Sequence[Work]:
    """Return the work of every rank of the pipeline: that of a rank of the same kind."""
    work_by_kind = {rank_work.at.kind: rank_work for rank_work in work}
    return [work_by_kind[spec.stage_view(rank).kind] for rank in range(spec.dims.pp)]


def _hop(busiest: Work) -> float:
    messages = sum(call.times for call in list_calls(busiest.at) if call.axis == "pp")
    return busiest.axes["pp"].seconds / messages if "pp" in busiest.axes else 0.0


def _simulated(spec: StepSpec, work: Sequence[Work], hop: float) -> Timeline:
    """Return the schedule's own order of actions, each rank's times spread over its stages' layers."""
    seconds: dict[tuple[int, str], float] = {}
    for rank, each in enumerate(work):
        at = spec.stage_view(rank)
        for stage in at.stages:
            share = at.layers_by_stage[stage] / at.layers
            forward, backward = each.forward * share, each.backward * share
            seconds[stage, "F"], seconds[stage, "B"] = forward, backward
            seconds[stage, "I"] = seconds[stage, "W"] = backward / 2

    def of(action: Action) -> float:
        return seconds[action.stage, action.kind]

    return simulate(spec.order, of, hop)
