"""What attention over ranks does in a step: bytes each way, how even its pairs are, and what hops leave exposed."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.results.details import AttentionSteps, Hop
from bench.results.metrics import MetricValue, values
from bench.results.stats import Estimate, median
from bench.results.turns import cross_fitted
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.context_parallel.context_case import ContextPlan, balance
from workloads.context_parallel.recorder import Recorder, Size, Wait
from workloads.step.layout import Layout
from workloads.step.probe import Begin, Step, take_turns
from workloads.step.sent_bytes import bytes_by_axis, counted

BytesEachWay = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw: bytes of one microbatch's passes by direction and axis, pairs by direction and step, waits by
    round, and the seconds of each communication with nothing beside it. Of torch's own attention there are bytes alone.
    """

    sent: BytesEachWay
    pairs: dict[tuple[str, int], int] = field(default_factory=dict)
    rounds: list[list[Wait]] = field(default_factory=list)
    alone: dict[Size, list[float]] = field(default_factory=dict)
    uncertainty_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """What attention sends, computes and waits for; ``expected`` are bytes of a microbatch by direction and axis."""

    world: World
    layout: Layout
    plan: ContextPlan
    expected: BytesEachWay
    recorder: Recorder
    forward: Callable[[], Tensor]
    share = 0.1

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Seen:
        self.layout.optimizer.zero_grad()
        begin()
        losses: list[Tensor] = []
        axes = self.layout.axes
        sent = {"forward": bytes_by_axis(counted(lambda: losses.append(self.forward()), axes))}
        sent["backward"] = bytes_by_axis(counted(losses.pop().backward, axes))
        if self.plan.method == "torch_cp":
            return Seen(sent=sent)
        ahead_seconds = self.world.clock.offsets_ns[self.world.global_rank] / 1e9
        rounds: list[list[Wait]] = []

        def turn() -> None:
            begin()
            with self.recorder.recording():
                step()
            rounds.append(self.recorder.waits(ahead_seconds))

        take_turns(self.world, budget_seconds, turn, most=3)
        pairs = dict(self.recorder.pairs)
        return Seen(
            sent=sent,
            pairs=pairs,
            rounds=rounds,
            alone=self._seconds_alone(rounds[-1]),
            uncertainty_seconds=self.recorder.uncertainty_seconds,
        )

    def _seconds_alone(self, waits: Sequence[Wait]) -> dict[Size, list[float]]:
        world = self.world
        found: dict[Size, list[float]] = {}
        for size in dict.fromkeys(wait.size for wait in waits):
            what, shape, dtype = size
            moved = torch.zeros(shape, dtype=dtype, device=world.device)
            found[size] = []
            for _ in range(1 + 5):  # one to warm up
                world.sync()
                world.barrier()
                began = time.perf_counter()
                self.recorder.moves[what](moved)
                world.sync()
                found[size].append(time.perf_counter() - began)
            del found[size][0]
        return found

    def summarise(self, told: Sequence[Seen]) -> Explanation:
        metrics: dict[str, MetricValue] = {}
        for direction, by_axis in self.expected.items():
            for axis, closed in by_axis.items():
                sent = told[0].sent[direction].get(axis, 0.0)
                found = {"sent": sent, "expected": closed, "ratio": sent / closed if closed else None}
                named = {f"bytes_{name}.{axis}.{direction}": number for name, number in found.items()}
                metrics |= values(named, "one microbatch")
        if self.plan.method == "torch_cp":
            return Explanation(metrics=metrics)
        pairs = [[seen.pairs.get(("forward", i), 0) for i in range(self.plan.num_steps)] for seen in told]
        metrics |= values({"load_balance": balance(pairs), "balance_ceiling": self.plan.balance_ceiling()})
        hops = hops_of(told)
        exposed, waited = _exposed_and_waited(told, range(len(told[0].rounds[-1])))
        metrics |= values({"attention_comm": sum(hop.comm_seconds for hop in hops)}, "on the slowest rank")
        metrics |= values({"attention_exposed": exposed, "attention_wait": waited})
        doubt = max(seen.uncertainty_seconds for seen in told)
        notes = (f"attention's waits are of a GPU's events, known by the host's clock to {doubt * 1e6:.0f} us",)
        details = AttentionSteps(attention_steps=hops).as_details
        return Explanation(metrics=metrics, details=details, notes=notes if doubt else ())


def hops_of(told: Sequence[Seen]) -> tuple[Hop, ...]:
    """Return each hop of a step: its bytes, how often it is made, how long it takes and what of it is exposed."""
    last = told[0].rounds[-1]
    hops: defaultdict[tuple[str, int, Size], list[int]] = defaultdict(list)
    for k, wait in enumerate(last):
        hops[wait.direction, wait.step, wait.size].append(k)
    found = []
    for (direction, step, size), chosen in hops.items():
        exposed, waited = _exposed_and_waited(told, chosen)
        alone = median([max(moves) for moves in zip(*(seen.alone[size] for seen in told), strict=True)])
        hop = Hop(
            direction=direction,
            step=step,
            what=size[0],
            num_bytes=last[chosen[0]].num_bytes,
            count=len(chosen),
            comm_seconds=len(chosen) * alone,
            exposed_seconds=exposed.value,
            wait_seconds=waited.value,
            pairs_by_rank=tuple(seen.pairs.get((direction, step), 0) for seen in told),
        )
        found.append(hop)
    return tuple(found)


def _exposed_and_waited(told: Sequence[Seen], chosen: Sequence[int]) -> tuple[Estimate, Estimate]:
    """Return sums over some waits, alike on all ranks, of the rank with the most: exposed ones, and all."""
    rounds = list(zip(*(seen.rounds for seen in told), strict=True))
    exposed = [
        [sum(_exposed(by_rank, by_rank[rank], k) for k in chosen) for by_rank in rounds] for rank in range(len(told))
    ]
    waited = [[sum(waits[k].seconds for k in chosen) for waits in seen.rounds] for seen in told]
    return cross_fitted(exposed), cross_fitted(waited)


def _exposed(by_rank: Sequence[Sequence[Wait]], mine: Sequence[Wait], k: int) -> float:
    """Return the seconds of a wait in which nothing was missing but the transfer: all peers had begun with theirs."""
    ready = max([mine[k].began, *(by_rank[peer][k].issued for peer in mine[k].peers)])
    return max(0.0, mine[k].ended - ready)
