"""What attention over ranks does in a step: bytes each way, how even its pairs are, and what hops leave exposed."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.results.details import AttentionSteps, Hop
from bench.results.metrics import MetricValue, values
from bench.results.stats import median
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.context_parallel.exchange_plan import ContextPlan, balance
from workloads.context_parallel.recorder import Recorder, Wait
from workloads.costs.communication_pattern import sent_bytes
from workloads.costs.cp_costs import AttentionBytes
from workloads.step.layout import Layout
from workloads.step.sent_bytes import Call, counted

_MOVES = 5

Place = tuple[str, int, str]
"""Direction, step and what moved."""
Size = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is looked at; ``forwards`` is 2 where backward computes the forward pass again."""

    plan: ContextPlan
    sent: AttentionBytes
    recorder: Recorder
    layers: int
    forwards: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank tells the others: its pairs by direction and step, and each round's waits."""

    pairs: dict[tuple[str, int], int]
    rounds: list[list[Wait]]


def explain_attention(
    world: World,
    layout: Layout,
    look: Look,
    forward: Callable[[], Tensor],
    step: Callable[[], None],
    begin: Callable[[], None],
    rounds: int,
) -> Explanation:
    """Return what attention sends, computes and waits for in ``rounds`` steps; every rank takes part."""
    metrics = _bytes_each_way(layout, look, forward, begin)
    if not look.recorder.moves and look.plan.method == "torch_cp":
        return Explanation(metrics=metrics)
    seen = _recorded(world, look.recorder, step, begin, rounds)
    told = world.gather(seen)
    alone = _seconds_alone(world, look.recorder, seen.rounds[-1])
    pairs = [[seen.pairs.get(("forward", i), 0) for i in range(look.plan.num_steps)] for seen in told]
    metrics |= values({"load_balance": balance(pairs), "balance_ceiling": look.plan.balance_ceiling()})
    hops = _hops(told, alone)
    details = AttentionSteps(attention_steps=hops).as_details
    return Explanation(metrics={**metrics, **_times(told, hops)}, details=details)


def _recorded(
    world: World, recorder: Recorder, step: Callable[[], None], begin: Callable[[], None], rounds: int
) -> Seen:
    """Take some steps and return what they show, by the clock of rank 0."""
    ahead_seconds = world.clock.offsets_ns[world.global_rank] / 1e9
    waits = []
    for _ in range(rounds):
        begin()
        with recorder.recording():
            step()
        waits.append([wait.earlier(ahead_seconds) for wait in recorder.waits()])
    return Seen(pairs=dict(recorder.pairs), rounds=waits)


def _bytes_each_way(
    layout: Layout, look: Look, forward: Callable[[], Tensor], begin: Callable[[], None]
) -> dict[str, MetricValue]:
    """Return the bytes of one microbatch's passes by axis: counted, by formula, and their ratio."""
    layout.optimizer.zero_grad()
    begin()
    losses: list[Tensor] = []
    calls = {"forward": counted(lambda: losses.append(forward()), layout.axes)}
    calls["backward"] = counted(losses.pop().backward, layout.axes)
    formula = {
        "forward": look.sent.forward,
        "backward": look.sent.step(1, 1, forwards=look.forwards - 1),
    }
    metrics: dict[str, MetricValue] = {}
    for direction, expected in formula.items():
        sent = _sent_by_axis(calls[direction])
        for axis, num_bytes in expected.items():
            name, closed = f"{axis}.{direction}", num_bytes * look.layers
            ratio = sent[axis] / closed if closed else None
            found = {f"bytes_sent.{name}": sent[axis], f"bytes_expected.{name}": closed, f"bytes_ratio.{name}": ratio}
            metrics |= values(found, "one microbatch")
    return metrics


def _sent_by_axis(calls: Sequence[Call]) -> Mapping[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
    return sent


def _seconds_alone(world: World, recorder: Recorder, waits: Sequence[Wait]) -> dict[Size, float]:
    """Return how long each communication takes with nothing beside it: the median, on the slowest rank."""
    found = {}
    for what, shape, dtype in dict.fromkeys(_size(wait) for wait in waits):
        moved = torch.zeros(shape, dtype=dtype, device=world.device)
        seconds = []
        for _ in range(1 + _MOVES):
            world.sync()
            world.barrier()
            began = time.perf_counter()
            recorder.moves[what](moved)
            world.sync()
            seconds.append(time.perf_counter() - began)
        told = world.gather(seconds[1:])
        found[what, shape, dtype] = median([max(of) for of in zip(*told, strict=True)])
    return found


def _hops(told: Sequence[Seen], alone: Mapping[Size, float]) -> tuple[Hop, ...]:
    """Return each hop of a step: its bytes, how often it is made, how long it takes and what of it is exposed."""
    kinds: Counter[tuple[Place, Size]] = Counter((_place(wait), _size(wait)) for wait in told[0].rounds[-1])
    return tuple(
        Hop(
            direction=direction,
            step=step,
            what=what,
            num_bytes=torch.Size(size[1]).numel() * size[2].itemsize,
            count=count,
            comm_seconds=count * alone[size],
            exposed_seconds=_slowest(told, lambda i, r, k: _exposed(told, i, r, k), (direction, step, what)),
            wait_seconds=_slowest(told, lambda i, r, k: told[r].rounds[i][k].seconds, (direction, step, what)),
            pairs_by_rank=tuple(seen.pairs.get((direction, step), 0) for seen in told),
        )
        for ((direction, step, what), size), count in kinds.items()
    )


def _times(told: Sequence[Seen], hops: Sequence[Hop]) -> dict[str, MetricValue]:
    """Return a step's sums: of communication alone, of what of it is exposed, and of all that attention waits."""
    comm = sum(hop.comm_seconds for hop in hops)
    exposed = _slowest(told, lambda i, r, k: _exposed(told, i, r, k))
    waited = _slowest(told, lambda i, r, k: told[r].rounds[i][k].seconds)
    how = f"the rank with the most, median of {len(told[0].rounds)} steps"
    return values({"attention_comm": comm}, "on the slowest rank") | values(
        {"attention_exposed": exposed, "attention_wait": waited}, how
    )


def _exposed(told: Sequence[Seen], i: int, rank: int, k: int) -> float:
    """Return the seconds of a wait in which nothing was missing but the transfer: all peers had begun with theirs."""
    wait = told[rank].rounds[i][k]
    ready = max([wait.began, *(told[peer].rounds[i][k].issued for peer in wait.peers)])
    return max(0.0, wait.ended - ready)


def _slowest(told: Sequence[Seen], seconds: Callable[[int, int, int], float], place: Place | None = None) -> float:
    """Return the sum over waits (of one place) on the rank where it is most, the median of rounds.

    ``seconds`` are those of a round's wait on a rank; ranks wait for the same in the same order.
    """
    chosen = [k for k, wait in enumerate(told[0].rounds[-1]) if place in (None, _place(wait))]
    rounds, ranks = range(len(told[0].rounds)), range(len(told))
    return median([max(sum(seconds(i, rank, k) for k in chosen) for rank in ranks) for i in rounds])


def _place(wait: Wait) -> Place:
    return wait.direction, wait.step, wait.what


def _size(wait: Wait) -> Size:
    return wait.what, wait.shape, wait.dtype
