"""What the planner says of a step beside what real gloo ranks count: bytes by axis, state and activations.

    python -m tests.studies.planned_components [WORD ...]

Each row is a step on 2, 4 or 8 ranks, words choose those that have them all; of every component it shows the rank where
both differ most. Bytes are of a third step, call by call. Parameters are counted between forward and backward,
gradients after it, the optimizer after a step, all by element. Activations are the storages that a forward pass leaves
for backward: what autograd saved, and what selective checkpointing has in torch's caches; a pipeline's are each stage's
own, added up in its order of actions. Exit code 1: a byte differs, state by more than 1 %, or activations by more than
5 %.
"""

import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from parbench.bench.rank.runner import load_target
from parbench.bench.results.details import STATE
from parbench.bench.world.world import World
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.communication_pattern import bytes_by_axis, calls
from parbench.workloads.costs.memory import memory_of
from parbench.workloads.mesh.mesh_step import HybridStep, as_routed
from parbench.workloads.pipeline_parallel.pipeline_probe import PipelineProbe, counted_memory
from parbench.workloads.step import memory, sent_bytes
from parbench.workloads.step.training_step import TrainingStep
from tests.support.ranks import Ranks
from tests.support.training_steps import DEFINITION_BY_NAME

BARS = {"bytes": 1e-9, "state": 0.01, "activations": 0.05}
Components = dict[str, float]


@dataclass(frozen=True)
class Point:
    """A step on so many ranks."""

    ranks: int
    name: str
    shape: str
    checkpointing: str = "none"
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> str:
        more = (f"{key}={value}" if key != "mesh" else str(value) for key, value in self.params)
        return " ".join([self.name, self.shape, self.checkpointing, *more])

    @property
    def case(self) -> dict[str, Any]:
        given = {
            "shape": self.shape,
            "microbatch": 2,
            "checkpointing": self.checkpointing,
            **dict(self.params),
        }
        return DEFINITION_BY_NAME[self.name].whole(given)


def point(ranks: int, name: str, shape: str, checkpointing: str = "none", **params: Any) -> Point:
    return Point(ranks, name, shape, checkpointing, tuple(params.items()))


EVEN: dict[str, Any] = {"routing": "balanced", "experts": 8}
POINTS = (
    point(2, "ddp", "tiny", accumulation=2),
    point(2, "ddp", "tiny", grad_compression="bf16"),
    *(point(2, "zero1", "tiny", optimizer=how) for how in ("zero_redundancy", "distributed")),
    point(2, "fsdp", "tiny-llama", reshard=False),
    point(2, "fsdp", "tiny", "full"),
    point(2, "fsdp", "tiny-llama", "selective"),
    *(
        point(2, name, "tiny", how)
        for name in ("tp", "tp_sp")
        for how in ("none", "selective", "full")
    ),
    *(point(2, name, "tiny-llama", "selective") for name in ("ddp", "tp", "tp_sp")),
    point(2, "pp", "tiny-llama", schedule="1f1b", microbatches=4),
    point(2, "pp", "tiny", "selective", schedule="gpipe", microbatches=4),
    point(2, "cp", "tiny", method="zigzag"),
    point(2, "cp", "tiny-llama", "full", method="ulysses"),
    point(2, "cp", "tiny-llama", "selective", method="ring"),
    point(2, "ep_step", "tiny", **EVEN),
    point(4, "hsdp", "tiny-llama", shard=2),
    *(point(4, "tp_fsdp", "tiny-llama", how, tp=2) for how in ("none", "selective")),
    *(point(4, name, "tiny", "selective") for name in ("tp", "tp_sp")),
    point(4, "pp", "tiny", schedule="zb_v", microbatches=4, layers=8),
    *(point(4, "cp", "tiny", how, method="usp", ulysses=2) for how in ("none", "selective")),
    point(4, "cp", "tiny", "selective", method="allgather_kv"),
    point(4, "ep_step", "tiny-llama", ep=2, **EVEN),
    *(
        point(4, "hybrid", "tiny-llama", how, mesh="fsdp=2,tp=2")
        for how in ("none", "selective", "full")
    ),
    point(4, "hybrid", "tiny", "selective", mesh="tp=4"),
    point(4, "hybrid", "tiny", "selective", mesh="dp=2,pp=2"),
    point(4, "hybrid", "tiny", mesh="pp=2,tp=2", schedule="interleaved"),
    point(4, "hybrid", "tiny-llama", mesh="cp=2,tp=2", cp_method="allgather_kv"),
    point(4, "hybrid", "tiny-llama", "selective", mesh="cp=2,tp=2", cp_method="zigzag"),
    point(4, "hybrid", "tiny", mesh="fsdp=2,tp=2,ep=2,etp=2", **EVEN),
    point(8, "hybrid", "tiny-llama", mesh="dp=2,fsdp=2,tp=2"),
    point(8, "hybrid", "tiny-llama", "selective", mesh="fsdp=2,pp=2,tp=2"),
    point(8, "hybrid", "tiny", "full", mesh="dp=2,cp=2,tp=2"),
    point(8, "hybrid", "tiny-llama", mesh="dp=2,pp=2,cp=2"),
    point(8, "hybrid", "tiny", mesh="dp=2,fsdp=4,ep=4", **EVEN),
    point(8, "tp_fsdp", "tiny", "selective", tp=4),
)


def counted_on(world: World, name: str, case: dict[str, Any]) -> tuple[Components, Components]:
    """Return the bytes that this rank sends in a step by axis, and those that it holds by component."""
    step = load_target(DEFINITION_BY_NAME[name].target)(world, **case)
    assert isinstance(step, TrainingStep)
    for _ in range(2):  # DDP orders its buckets anew after the first
        step.reset()
        step.step()
    sent = bytes_by_axis(sent_bytes.counted(step.step, step.layout.axes))
    with mock.patch.object(memory, "peak_during", lambda run, device: run()):
        held = held_by(step, world)
    step.close()
    return sent, {name: held[name] for name in (*STATE, "activations")}


def held_by(step: TrainingStep, world: World) -> Components:
    if isinstance(step, HybridStep):
        return counted_memory(step.look(), as_routed)
    probe = next(one for one in step.probes() if isinstance(one, memory.Memory | PipelineProbe))
    if isinstance(probe, PipelineProbe):
        return counted_memory(probe.look)
    return dict(probe.observe(step.step, world.barrier, 0.0)["memory_counted"])


@dataclass(frozen=True)
class Compared:
    """A component as planned and as counted."""

    name: str
    planned: float
    counted: float

    @property
    def ratio(self) -> float:
        return self.planned / self.counted if self.counted else float(not self.planned)

    @property
    def apart(self) -> float:
        return abs(self.ratio - 1)

    @property
    def bar(self) -> str:
        return (
            "bytes"
            if self.name.startswith("bytes")
            else "state"
            if self.name in STATE
            else "activations"
        )

    @property
    def missed(self) -> bool:
        return self.apart > BARS[self.bar]


def compare(of: Point, ranks: Ranks) -> list[Compared]:
    """Compare bytes rank by rank, and memory on the fullest of the ranks that have the same stages."""
    told = ranks.call("tests.studies.planned_components:counted_on", name=of.name, case=of.case)
    sent: dict[str, list[Compared]] = {}
    held: dict[tuple[str, int], Compared] = {}
    for rank, (calls_of_rank, memory_of_rank) in enumerate(told):
        at = STRATEGIES[of.name](of.case, of.ranks, "cpu").at(rank)
        expected = bytes_by_axis(calls(at))
        for axis in dict.fromkeys((*expected, *calls_of_rank)):
            row = Compared(f"bytes.{axis}", expected.get(axis, 0.0), calls_of_rank.get(axis, 0.0))
            sent.setdefault(axis, []).append(row)
        for name, counted in memory_of_rank.items():
            before = held.get((name, at.pp_rank), Compared(name, 0.0, 0.0))
            most = max(before.planned, getattr(memory_of(at), name)), max(before.counted, counted)
            held[name, at.pp_rank] = Compared(name, *most)
    components = (*STATE, "activations")
    each = (
        *sent.values(),
        *([row for row in held.values() if row.name == name] for name in components),
    )
    return [max(rows, key=lambda row: row.apart) for rows in each]


def main() -> None:
    chosen = [
        one
        for one in POINTS
        if all(word in f"{one.ranks} {one.words}".split() for word in sys.argv[1:])
    ]
    worst = dict.fromkeys(BARS, (0.0, "none"))
    failed = 0
    for size in sorted({one.ranks for one in chosen}):
        with Ranks(size) as ranks:
            for one in (each for each in chosen if each.ranks == size):
                print(f"\n{one.ranks} ranks: {one.words}")
                for row in compare(one, ranks):
                    failed += row.missed
                    worst[row.bar] = max(
                        worst[row.bar], (row.apart, f"{row.name} of {one.ranks} ranks: {one.words}")
                    )
                    numbers = f"{row.planned:14,.0f} {row.counted:14,.0f} {row.ratio:9.5f}"
                    print(f"  {row.name:14} {numbers}{'  MISSED' * row.missed}", flush=True)
    print(f"\n{len(chosen)} points")
    for bar, (apart, where) in worst.items():
        print(f"largest deviation of {bar}: {apart:.3%} ({where}), allowed {BARS[bar]:.3%}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
