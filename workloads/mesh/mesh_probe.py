"""What each axis of a mesh sends, what of it is exposed, what ranks hold, and the bubble where there is a pipeline."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.results.metrics import MetricValue, values
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.communication_pattern import sent_bytes
from workloads.costs.moe_costs import Sizes
from workloads.expert_parallel.expert_probe import load_metrics, merged, routed_by, sent_in_step
from workloads.expert_parallel.moe_layer import MoeLayer, mixtures
from workloads.expert_parallel.wire import wired
from workloads.mesh.axes import expert_groups, expert_parts, groups_along
from workloads.mesh.mesh_memory import Look, footprint
from workloads.pipeline_parallel.bubbles import link_latency
from workloads.pipeline_parallel.pipeline_probe import (
    SHARED,
    bubble_of,
    claims_bubble,
    facts_of,
    steps_of,
    take_steps,
    with_timelines,
)
from workloads.pipeline_parallel.stages import Recorder
from workloads.step.overlap import Overlap
from workloads.step.probe import run_probes
from workloads.step.sent_bytes import counted

_PIPELINE_SHARE = 0.4
_IDLE = (
    "idle is of the traced wall, where waiting for a stage is exposed pp; idle by cause is the slowest pipeline's own"
)

Begin = Callable[[], None]
Step = Callable[[], object]
Sent = Mapping[str, float]


def explain_hybrid(
    world: World, look: Look, recorder: Recorder, step: Step, train: Step, begin: Begin, seconds: float
) -> Explanation:
    """Return bytes and exposed time by axis, memory, and the bubble; every rank takes part.

    ``train`` is a step without its update.
    """
    sent, expected, routed = counts(world, look, step, begin)
    share = _PIPELINE_SHARE if look.schedule is not None else 0.0
    bubble = _bubble(world, look, recorder, step, begin, share * seconds)
    found = run_probes(world, (Overlap(world, look.layout),), step, begin, (1 - share) * seconds)
    memory = footprint(world, look, train, begin)
    told = world.gather((sent, expected))
    other = {name: metric for name, metric in found.metrics.items() if not name.startswith("bytes_")}
    return replace(
        found,
        metrics={**other, **bytes_by_axis(told), **routed, **bubble.metrics, **memory.metrics},
        details={**found.details, **bubble.details, **memory.details, **_by_rank(told)},
        notes=(*found.notes, *bubble.notes, *memory.notes),
    )


def bytes_by_axis(told: Sequence[tuple[Sent, Sent]]) -> dict[str, MetricValue]:
    """Return for each axis what the rank that sends most sends, and the ratio to the closed form farthest from 1."""
    metrics: dict[str, MetricValue] = {}
    for axis in dict.fromkeys(name for sent, _ in told for name in sent):
        busiest = max(told, key=lambda one: one[0].get(axis, 0.0))
        metrics |= values({f"bytes_sent.{axis}": busiest[0].get(axis, 0.0)}, "ring-optimal, the rank that sends most")
        if all(axis not in expected for _, expected in told):
            continue
        pairs = [(sent.get(axis, 0.0), expected.get(axis, 0.0)) for sent, expected in told]
        ratios = [sent / expected if expected else float(sent == 0) for sent, expected in pairs if sent or expected]
        ratio = max(ratios, key=lambda one: abs(one - 1), default=None)
        metrics |= values({f"bytes_expected.{axis}": busiest[1].get(axis, 0.0)}, "the same rank")
        metrics |= values({f"bytes_ratio.{axis}": ratio}, "the rank where they differ most")
    return metrics


def _by_rank(told: Sequence[tuple[Sent, Sent]]) -> dict[str, Any]:
    return {"bytes_sent_by_rank": [dict(sent) for sent, _ in told]}


def counts(world: World, look: Look, step: Step, begin: Begin) -> tuple[dict[str, float], Sent, dict[str, MetricValue]]:
    """Return what this rank sends in a step and the closed forms, by axis, and experts' loads; all take part."""
    sent: defaultdict[str, float] = defaultdict(float)
    for mixture in _mixtures(look):
        mixture.chosen.clear()
    if "ep" not in look.layout.axes:
        begin()
        for call in counted(step, look.layout.axes):
            sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
        return dict(sent), look.layout.expected_bytes, {}
    begin()
    sent.update(wired(step, look.layout.axes))
    expected, metrics = _experts(world, look)
    return dict(sent), {**look.layout.expected_bytes, "ep": expected}, metrics


def _experts(world: World, look: Look) -> tuple[float, dict[str, MetricValue]]:
    """Return the closed form of what this rank sent to experts by the step's own routes, and their loads."""
    moe = look.place.moe
    assert moe is not None, "only a mixture has routes"
    each = world.gather(routed_by(_mixtures(look), look.batch.microbatch * look.tokens))
    # ranks that split experts take each other's tokens
    parts = {rank: ranks for ranks in expert_parts(look.place.mesh) for rank in ranks}
    told = [merged([each[other] for other in parts[rank]], moe.etp)[0] for rank in range(len(each))]
    groups = expert_groups(look.place.mesh)
    mine = next(ranks for ranks in groups if world.rank in ranks)
    sizes = Sizes(
        hidden=look.place.shape.hidden,
        element_bytes=look.batch.element_bytes,
        top_k=moe.top_k,
        tokens=look.batch.microbatch * look.tokens * moe.etp,
        experts_per_rank=moe.experts_per_rank,
    )
    flights = sent_in_step(moe.variant, mine.index(world.rank), [told[rank] for rank in mine], sizes)
    first = next(ranks for ranks in groups if 0 in ranks)
    loads = load_metrics([told[rank] for rank in first], moe.ep, None)
    forwards = 1 if look.batch.checkpointing == "none" else 2
    return sum(forwards * one.forward + one.backward for one in flights), loads


def _mixtures(look: Look) -> list[MoeLayer]:
    return mixtures(look.layout.model)


def _bubble(world: World, look: Look, recorder: Recorder, step: Step, begin: Begin, seconds: float) -> Explanation:
    """Return the bubble of the pipeline whose ranks were slowest; nothing is claimed where ranks share cores."""
    schedule = look.schedule
    if schedule is None:
        return Explanation()
    facts = facts_of(schedule)
    if not claims_bubble(world, look.timed_seconds):
        return Explanation(details=facts.as_details, notes=(SHARED,))
    told = world.gather(take_steps(world, recorder, step, begin, seconds))
    of_each = [steps_of([told[rank] for rank in ranks], schedule) for ranks in groups_along(look.place.mesh, "pp")]
    slowest = max(of_each, key=lambda steps: steps.middle.makespan)
    latency = link_latency(slowest.timelines, schedule)
    found = bubble_of(slowest, latency, look.timed_seconds)
    # a step's compute and idle are those of its traced wall here, to which exposed communication belongs
    metrics = {name: metric for name, metric in found.items() if name not in ("compute", "idle", "non_pipeline_time")}
    details = with_timelines(facts, slowest, latency).as_details
    return Explanation(metrics=metrics, details=details, notes=(_IDLE,))
