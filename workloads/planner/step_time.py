"""How long a step takes: a rank's compute, what communication adds to it, the pipeline's bubble, the update. Pure.

Each axis' communication is the sum of its calls. Of what may hide, a share (``Efficiency.overlap``) does, as far as
there is compute to hide it: exposed = max(comm (1 - overlap), comm - window). The window is attention for a ring's
keys, the microbatch for FSDP's gathers, one backward pass for the sum of gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.results.details import Action
from workloads.pipeline_parallel.bubbles import closed_form
from workloads.pipeline_parallel.schedules import make_schedule
from workloads.pipeline_parallel.simulate import simulate
from workloads.planner.ask import Ask
from workloads.planner.calls import calls_of
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Call, Seconds
from workloads.planner.placement import expert_shards
from workloads.planner.stage_flops import again_bytes, stage_flops
from workloads.planner.stage_parts import Part, elements_of, sends_of, stages_of

UPDATE_BYTES = 28  # AdamW in float32 reads and writes weight and two moments, reads a gradient, writes a 16-bit weight
MOST_ACTIONS = 40_000
_HIDEABLE_CP = ("ring", "striped", "zigzag")


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
        """What compute covers."""
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What the busiest rank's step is made of: they sum to ``seconds``; ``bubble_method`` says how it was found."""

    busiest: Part
    compute_seconds: float
    update_seconds: float
    bubble_seconds: float
    bubble_method: str
    axes: tuple[Axis, ...]

    @property
    def exposed_seconds(self) -> float:
        """Communication that compute does not cover."""
        return sum(axis.exposed_seconds for axis in self.axes)

    @property
    def seconds(self) -> float:
        """The step."""
        return self.compute_seconds + self.update_seconds + self.bubble_seconds + self.exposed_seconds


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One rank's microbatch: forward and backward with the communication that neither can hide, and its axes."""

    part: Part
    compute_seconds: float
    forward: float
    backward: float
    axes: Mapping[str, Axis]

    @property
    def microbatch(self) -> float:
        return self.forward + self.backward


def step_time(
    ask: Ask, parts: tuple[Part, ...], hardware: Hardware, seconds: Seconds, *, exact: bool = True
) -> StepTime:
    """Return the step of the busiest rank; ``exact`` simulates the pipeline where it has no more than so many actions.

    Otherwise the bubble is the closed form, if the schedule has one.
    """
    work = [_work(ask, part, hardware, seconds) for part in parts]
    busiest = max(work, key=lambda each: each.microbatch)
    bubble, method = _bubble(ask, work, busiest, exact=exact)
    # ranks between the ends are alike, but their places in the pipeline differ: the rank with the most of an axis tells
    axes = [max((each.axes[name] for each in work if name in each.axes), key=_exposed) for name in _names(work)]
    shown = [busiest.axes.get(axis.name, axis) if axis.name in ("tp", "cp", "ep") else axis for axis in axes]
    return StepTime(
        busiest=busiest.part,
        compute_seconds=busiest.compute_seconds * ask.microbatches,
        update_seconds=max(_update_seconds(ask, part, hardware) for part in parts),
        bubble_seconds=bubble,
        bubble_method=method,
        axes=tuple(replace(axis, sent_bytes=_most_sent(axis.name, work)) for axis in shown),
    )


def _most_sent(name: str, work: list[_Work]) -> float:
    return max(each.axes[name].sent_bytes for each in work if name in each.axes)


def _exposed(axis: Axis) -> float:
    return axis.exposed_seconds


def _names(work: list[_Work]) -> list[str]:
    return list(dict.fromkeys(name for each in work for name in each.axes))


def _work(ask: Ask, part: Part, hardware: Hardware, seconds: Seconds) -> _Work:
    """Return a rank's microbatch: what stands in the way of its passes goes into them, the rest stays an axis."""
    flops, rate = stage_flops(ask, part), _flops_rate(ask, hardware)
    memory_rate = hardware.memory_bytes_per_second * hardware.efficiency.memory_rate
    compute = (flops.forward / rate, (flops.backward + flops.again) / rate + again_bytes(ask, part) / memory_rate)
    calls = calls_of(ask, part, hardware.gpus_per_node)
    windows = {
        "cp": 3 * flops.attention / rate * ask.microbatches if ask.cp_method in _HIDEABLE_CP else 0.0,
        "fsdp": sum(compute) * (1 if ask.pp > 1 else ask.microbatches),
        "dp": compute[1],
        "edp": compute[1],
    }
    by_axis: dict[str, list[Call]] = {}
    for call in calls:
        by_axis.setdefault(call.axis, []).append(call)
    axes = {
        name: _axis(name, group, hardware.efficiency.overlap.get(name, 0.0), windows.get(name, 0.0), seconds)
        for name, group in by_axis.items()
    }
    blocking = sum(axes[name].exposed_seconds for name in ("tp", "cp", "ep") if name in axes) / ask.microbatches
    share = 1 / 3 if ask.checkpointing == "full" else 1 / 2
    return _Work(
        part=part,
        compute_seconds=sum(compute),
        forward=compute[0] + blocking * share,
        backward=compute[1] + blocking * (1 - share),
        axes=axes,
    )


def _flops_rate(ask: Ask, hardware: Hardware) -> float:
    """Return FLOP/s of whole layers."""
    share = 1.0 if ask.element_bytes == 2 else hardware.float32_share
    return hardware.flops_per_second * hardware.efficiency.gemm * share


def _axis(name: str, calls: list[Call], overlap: float, window: float, seconds: Seconds) -> Axis:
    total = sum(call.count * seconds(call) for call in calls)
    if name == "pp":
        exposed, assumption = 0.0, "its latency is in the bubble, its bytes pass beside compute"
    elif overlap and window:
        exposed = max(total * (1 - overlap), total - window)
        assumption = f"max({1 - overlap:.0%} of it, what exceeds {window:.3g} s of compute)"
    else:
        exposed, assumption = total, "nothing hides it"
    place = max((call.place for call in calls), key=lambda place: place.ranks)
    return Axis(
        name=name,
        seconds=total,
        exposed_seconds=exposed,
        sent_bytes=sum(call.sent for call in calls),
        where=place.words,
        assumption=assumption,
    )


def _update_seconds(ask: Ask, part: Part, hardware: Hardware) -> float:
    """AdamW touches 28 bytes a parameter that the rank owns, at the memory's rate."""
    rate = hardware.memory_bytes_per_second * hardware.efficiency.memory_rate
    return owned_elements(ask, part) * UPDATE_BYTES / rate


def owned_elements(ask: Ask, part: Part) -> float:
    """Return the parameters that a rank updates: its shard of what it holds."""
    dense, experts = elements_of(ask, part)
    return dense / ask.fsdp + experts / expert_shards(ask.mesh)


def _hop_seconds(ask: Ask, busiest: _Work) -> float:
    """Return how long one message between stages is on its way."""
    axis = busiest.axes.get("pp")
    if axis is None:
        return 0.0
    return axis.seconds / (sends_of(ask, busiest.part) * ask.microbatches)


def _bubble(ask: Ask, work: list[_Work], busiest: _Work, *, exact: bool) -> tuple[float, str]:
    """Return the seconds in which the busiest rank waits for its pipeline, and how that was found."""
    if ask.pp == 1:
        return 0.0, "no pipeline"
    hop = _hop_seconds(ask, busiest)
    mine = ask.microbatches * busiest.microbatch
    actions = ask.pp * ask.microbatches * ask.stages_per_rank * 2
    mean = _mean(ask, work)
    form = closed_form(
        ask.schedule,
        ranks=ask.pp,
        microbatches=ask.microbatches,
        chunks=ask.stages_per_rank,
        f=mean[0],
        i=mean[1] / 2,
        w=mean[1] / 2,
    )
    if form.makespan_bubble_seconds is None or (exact and actions <= MOST_ACTIONS):
        return max(0.0, _simulated(ask, work, hop) - mine), "simulated with each stage's times and the link's latency"
    # a pipeline fills and drains over its mean stage, and each hop of that adds a message
    hops = 2 * (ask.pp - 1) * hop
    return form.makespan_bubble_seconds + hops, f"closed form {form.note}, and 2(P-1) messages"


def _mean(ask: Ask, work: list[_Work]) -> tuple[float, float]:
    """Return forward and backward seconds of the mean rank: the ends once each, the others as the middle one."""
    first, middle, last = work[0], work[min(1, len(work) - 1)], work[-1]
    inner = ask.pp - 2
    forward = (first.forward + inner * middle.forward + last.forward) / ask.pp
    backward = (first.backward + inner * middle.backward + last.backward) / ask.pp
    return forward, backward


def _simulated(ask: Ask, work: list[_Work], hop: float) -> float:
    """Return the makespan of the schedule's own order of actions, with each rank's times spread over its stages."""
    schedule = make_schedule(ask.schedule, ranks=ask.pp, microbatches=ask.microbatches, chunks=ask.stages_per_rank)
    by_rank = [work[0], *[work[min(1, len(work) - 1)]] * (ask.pp - 2), work[-1]]
    seconds: dict[tuple[int, str], float] = {}
    for rank in range(ask.pp):
        each = ask.stages_per_rank
        forward, backward = by_rank[rank].forward / each, by_rank[rank].backward / each
        for stage in stages_of(ask, rank):
            seconds[stage, "F"], seconds[stage, "B"] = forward, backward
            seconds[stage, "I"] = seconds[stage, "W"] = backward / 2

    def of(action: Action) -> float:
        return seconds[action.stage, action.kind]

    return simulate(schedule, of, lambda source, target: hop).makespan
