"""What each axis of a mesh sends, what of it is exposed, what ranks hold, and the bubble where there is a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.results.details import COMPONENTS
from bench.results.turns import chosen
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.memory import activations_of, state_of
from workloads.costs.step_spec import Position
from workloads.expert_parallel.expert_probe import Routed, load_metrics, merged, routed_by, sent_in_step, sizes_of
from workloads.expert_parallel.moe_layer import mixtures
from workloads.expert_parallel.routing import BALANCED
from workloads.mesh.axes import expert_groups, expert_parts, groups_along
from workloads.mesh.mesh_stages import mixtures_in
from workloads.pipeline_parallel.bubbles import link_latency
from workloads.pipeline_parallel.pipeline_probe import (
    SHARED,
    Steps,
    Taken,
    bubble_of,
    claims_bubble,
    counted_state,
    facts_of,
    measured_memory,
    saved_bytes,
    steps_of,
    take_steps,
    with_timelines,
)
from workloads.pipeline_parallel.schedules import Schedule, peak_held
from workloads.pipeline_parallel.stages import Chunk, Recorder
from workloads.step.layout import Layout
from workloads.step.memory import BySource, largest_of
from workloads.step.probe import Begin, Step
from workloads.step.sent_bytes import ByAxis, SentBytes

_MEMORY = {
    "memory": "between steps, activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "activations where routes are even",
}
_IDLE = (
    "idle is of the traced wall, where waiting for a stage is exposed pp; idle by cause is the slowest pipeline's own"
)
_EVEN = "memory: the closed form of activations is of even routes, what is counted of those that were taken"
_TIMED = "timed compute: activations have no closed form, as attention keeps none of its own"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is to look at on this rank; ``tokens`` are its positions of a sequence."""

    world: World
    layout: Layout
    at: Position
    expected: ByAxis
    chunks: Mapping[int, Chunk]
    tokens: int


@dataclass(frozen=True)
class Sent:
    """What one rank sends by axis in a step and the closed forms but for experts' tokens; what it routed, if any."""

    sent: ByAxis
    expected: ByAxis
    routed: Routed | None


@dataclass(frozen=True)
class MeshBytes:
    """The probe of bytes by axis, counted and by closed form, those of experts' tokens by the step's own routes."""

    look: Look
    share = 0.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float = 0.0) -> Sent:
        look, layers = self.look, mixtures(self.look.layout.model)
        for mixture in layers:
            mixture.chosen.clear()
        sent, expected = SentBytes(look.layout, look.expected).observe(step, begin, budget_seconds)
        routed = routed_by(layers, look.at.spec.microbatch * look.tokens) if "ep" in look.layout.axes else None
        return Sent(sent, expected, routed)

    def summarise(self, told: Sequence[Sent]) -> Explanation:
        metrics = SentBytes.summarise(self.sent_and_expected(told)).metrics
        if (moe := self.look.at.spec.moe) is not None and (routed := self._routed(told)):
            first = next(ranks for ranks in expert_groups(self.look.at.spec.mesh) if 0 in ranks)
            metrics |= load_metrics([routed[rank] for rank in first], moe.ep, None)
        return Explanation(metrics=metrics, details={"bytes_sent_by_rank": [dict(one.sent) for one in told]})

    def sent_and_expected(self, told: Sequence[Sent]) -> list[tuple[ByAxis, ByAxis]]:
        spec, moe, routed = self.look.at.spec, self.look.at.spec.moe, self._routed(told)
        if moe is None or not routed:
            return [(one.sent, one.expected) for one in told]
        sizes = sizes_of(spec, moe, spec.microbatch * self.look.tokens, moe.etp)
        forwards, to_experts = 1 if spec.checkpointing == "none" else 2, {}
        for ranks in expert_groups(spec.mesh):
            copy = [routed[rank] for rank in ranks]
            for i, rank in enumerate(ranks):
                flights = sent_in_step(moe.variant, i, copy, sizes)
                to_experts[rank] = sum(forwards * one.forward + one.backward for one in flights)
        return [(one.sent, {**one.expected, "ep": to_experts[rank]}) for rank, one in enumerate(told)]

    def _routed(self, told: Sequence[Sent]) -> dict[int, Routed]:
        """Return what each rank routed, with those that split experts: they take each other's tokens."""
        each = [one.routed for one in told if one.routed is not None]
        parts = expert_parts(self.look.at.spec.mesh) if each else []
        return {rank: merged([each[of] for of in ranks], len(ranks))[0] for ranks in parts for rank in ranks}


@dataclass(frozen=True)
class MeshBubble:
    """The probe of the pipeline that was slowest in the other half of the steps; no claim where ranks share cores."""

    look: Look
    schedule: Schedule
    recorder: Recorder
    share = 2 / 3  # of what is left for the rest of the step's time

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Taken | None:
        if not claims_bubble(self.look.world, self.look.at.spec.timed_seconds):
            return None
        return take_steps(self.look.world, self.recorder, step, begin, budget_seconds)

    def summarise(self, told: Sequence[Taken | None]) -> Explanation:
        taken, facts = [one for one in told if one is not None], facts_of(self.schedule)
        if not taken:
            return Explanation(details=facts.as_details, notes=(SHARED,))
        pipelines = groups_along(self.look.at.spec.mesh, "pp")
        of_each = [steps_of([taken[rank] for rank in ranks], self.schedule) for ranks in pipelines]
        turns = list(enumerate(chosen([[timeline.makespan for timeline in steps.timelines] for steps in of_each])))
        slowest = Steps(
            schedule=self.schedule,
            timelines=tuple(of_each[pipeline].timelines[turn] for turn, pipeline in turns),
            outside_seconds=tuple(of_each[pipeline].outside_seconds[turn] for turn, pipeline in turns),
            uncertainty_seconds=max(steps.uncertainty_seconds for steps in of_each),
        )
        latency = link_latency(slowest.timelines, self.schedule)
        metrics = bubble_of(slowest, latency, self.look.at.spec.timed_seconds)
        # a step's compute and idle are those of its traced wall here, to which exposed communication belongs
        for name in ("compute", "idle", "non_pipeline_time"):
            del metrics[name]
        details = with_timelines(facts, slowest, latency, self.look.world.clock).as_details
        return Explanation(metrics=metrics, details=details, notes=(_IDLE,))


@dataclass(frozen=True)
class MeshMemory:
    """The probe of what each rank holds, after all others: state and activations by closed form, counted and measured.

    ``train`` is a step without its update.
    """

    look: Look
    train: Callable[[], object]
    share = 0.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float = 0.0) -> BySource:
        look, closed = self.look, asdict(state_of(self.look.at))
        if not look.at.spec.timed:
            closed["activations"] = activations_of(look.at)
        measured = measured_memory(look.layout, look.world, self.train, begin)
        return {"memory": measured, "memory_counted": counted(look), "memory_formula": closed}

    def summarise(self, told: Sequence[BySource]) -> Explanation:
        spec = self.look.at.spec
        notes = [_TIMED] if spec.timed else []
        if spec.moe is not None and spec.moe.routing != BALANCED and spec.checkpointing == "none" and not spec.timed:
            notes.append(_EVEN)
        details = {"memory_by_rank": {name: [one["memory"][name] for one in told] for name in COMPONENTS}}
        return Explanation(metrics=largest_of(told, _MEMORY), details=details, notes=tuple(notes))


def counted(look: Look) -> dict[str, float]:
    """Return the bytes of this rank's tensors, and of what the microbatches in flight have saved for backward."""
    # state first: the forward passes that are counted leave FSDP's parameters gathered
    state, saved = counted_state(look.layout), {}
    for stage, chunk in look.chunks.items():
        for mixture in mixtures_in(chunk).values():
            mixture.given = mixture.chosen[max(mixture.chosen)]  # of such tokens a router would send all to one expert
        saved[stage] = saved_bytes(chunk, (look.at.spec.microbatch, look.tokens), look.at.spec.shape.hidden)
    if (pipeline := look.at.spec.pipeline) is None:
        return {**state, "activations": saved[0]}
    return {**state, "activations": peak_held(pipeline.schedule, look.at.pp_rank, lambda stage: saved[stage])}
