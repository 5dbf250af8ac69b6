"""Compare the planner's bytes and memory with what real gloo ranks count.

    python -m tests.studies.planned_components [WORD ...]

Each row is a step on 2, 4 or 8 ranks; words choose the steps that have them all. For every
component it shows the rank with the largest deviation. Bytes are those of the third step, call by
call. Parameters are counted between forward and backward, gradients after backward, the optimizer
after a step, all by element. Activations are the storages that a forward pass leaves for
backward: what autograd saved, and what selective checkpointing has in torch's caches. Those of a
pipeline are added up in its order of actions. The exit code is 1 if a byte differs, state by more
than 1 %, or activations by more than 20 %: RMSNorm on a CPU saves float32 copies. With ``tp``,
DTensor also saves sums before they are scattered, up to 25 % here.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from parbench.bench.rank.runner import load_target
from parbench.bench.results.details import STATE_COMPONENTS
from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import bytes_by_axis, list_calls
from parbench.workloads.planner.measured.validate import predict_torch_memory
from parbench.workloads.presets import PRESETS
from parbench.workloads.step.memory import MemoryProbe
from parbench.workloads.step.sent_bytes import record_calls
from parbench.workloads.step.train_step import TrainStep
from tests.support.ranks import Ranks

MAX_DEVIATION = {"bytes": 1e-9, "state": 0.01, "activations": 0.2, "tp activations": 0.25}
"""The largest relative deviation by kind of component."""

BytesByComponent = dict[str, float]
DEFINITION_BY_NAME = {definition.short_name: definition for definition in DEFINITIONS}


@dataclass(frozen=True)
class Point:
    """A step on a number of ranks."""

    num_ranks: int
    name: str
    shape: str
    checkpointing: str = "none"
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        parts = [f"{self.num_ranks} ranks:", self.name, self.shape, self.checkpointing]
        for name, value in self.params:
            parts.append(str(value) if name == "mesh" else f"{name}={value}")
        return " ".join(parts)

    @property
    def case_params(self) -> dict[str, Any]:
        params = {
            "shape": self.shape,
            "microbatch": 2,
            "checkpointing": self.checkpointing,
            **dict(self.params),
        }
        return DEFINITION_BY_NAME[self.name].complete(params)


def make_point(
    num_ranks: int, name: str, shape: str, checkpointing: str = "none", **params: Any
) -> Point:
    return Point(num_ranks, name, shape, checkpointing, tuple(params.items()))


BALANCED_EXPERTS: dict[str, Any] = {"routing": "balanced", "experts": 8}
POINTS = (
    make_point(2, "ddp", "tiny", microbatches=2),
    make_point(2, "ddp", "tiny", precision="bfloat16"),
    make_point(2, "zero1", "tiny", optimizer="zero_redundancy"),
    make_point(2, "zero1", "tiny", optimizer="distributed"),
    make_point(2, "fsdp", "tiny-llama", reshard=False),
    make_point(2, "fsdp", "tiny", "full"),
    make_point(2, "fsdp", "tiny-llama", "selective"),
    make_point(2, "tp", "tiny", "none"),
    make_point(2, "tp", "tiny", "selective"),
    make_point(2, "tp", "tiny", "full"),
    make_point(2, "tp_sp", "tiny", "none"),
    make_point(2, "tp_sp", "tiny", "selective"),
    make_point(2, "tp_sp", "tiny", "full"),
    make_point(2, "ddp", "tiny-llama", "selective"),
    make_point(2, "tp", "tiny-llama", "selective"),
    make_point(2, "tp_sp", "tiny-llama", "selective"),
    make_point(2, "pp", "tiny-llama", schedule="1f1b", microbatches=4),
    make_point(2, "pp", "tiny", "selective", schedule="gpipe", microbatches=4),
    make_point(2, "cp", "tiny", cp_method="zigzag"),
    make_point(2, "cp", "tiny-llama", "full", cp_method="ulysses"),
    make_point(2, "cp", "tiny-llama", "selective", cp_method="ring"),
    make_point(2, "ep_step", "tiny", **BALANCED_EXPERTS),
    make_point(4, "hsdp", "tiny-llama"),
    make_point(4, "tp_fsdp", "tiny-llama", "none", tp=2),
    make_point(4, "tp_fsdp", "tiny-llama", "selective", tp=2),
    make_point(4, "tp", "tiny", "selective"),
    make_point(4, "tp_sp", "tiny", "selective"),
    make_point(4, "pp", "tiny", schedule="zb_v", microbatches=4, layers=8),
    make_point(4, "cp", "tiny", "none", cp_method="usp", ulysses=2),
    make_point(4, "cp", "tiny", "selective", cp_method="usp", ulysses=2),
    make_point(4, "cp", "tiny", "selective", cp_method="allgather_kv"),
    make_point(4, "ep_step", "tiny-llama", ep=2, **BALANCED_EXPERTS),
    make_point(4, "hybrid", "tiny-llama", "none", mesh="fsdp=2,tp=2"),
    make_point(4, "hybrid", "tiny-llama", "selective", mesh="fsdp=2,tp=2"),
    make_point(4, "hybrid", "tiny-llama", "full", mesh="fsdp=2,tp=2"),
    make_point(4, "hybrid", "tiny", "selective", mesh="tp=4"),
    make_point(4, "hybrid", "tiny", "selective", mesh="dp=2,pp=2"),
    make_point(4, "hybrid", "tiny", mesh="pp=2,tp=2", schedule="interleaved"),
    make_point(4, "hybrid", "tiny-llama", mesh="cp=2,tp=2", cp_method="allgather_kv"),
    make_point(4, "hybrid", "tiny-llama", "selective", mesh="cp=2,tp=2", cp_method="zigzag"),
    make_point(4, "hybrid", "tiny", mesh="fsdp=2,tp=2,ep=2,etp=2", **BALANCED_EXPERTS),
    make_point(8, "hybrid", "tiny-llama", mesh="dp=2,fsdp=2,tp=2"),
    make_point(8, "hybrid", "tiny-llama", "selective", mesh="fsdp=2,pp=2,tp=2"),
    make_point(8, "hybrid", "tiny", "full", mesh="dp=2,cp=2,tp=2"),
    make_point(8, "hybrid", "tiny-llama", mesh="dp=2,pp=2,cp=2"),
    make_point(8, "hybrid", "tiny", mesh="dp=2,fsdp=4,ep=4", **BALANCED_EXPERTS),
    make_point(8, "tp_fsdp", "tiny", "selective", tp=4),
)


def count_on_rank(
    world: World, name: str, params: dict[str, Any]
) -> tuple[BytesByComponent, BytesByComponent]:
    """Return the bytes that this rank sends in a step by axis, and its memory by component."""
    step = load_target(DEFINITION_BY_NAME[name].target)(world, **params)
    assert isinstance(step, TrainStep)
    # DDP changes the order of its buckets after the first step.
    for _ in range(2):
        step.reset()
        step.step()
    sent = bytes_by_axis(record_calls(step.step, step.mesh.groups))
    [probe] = [probe for probe in step.list_probes() if isinstance(probe, MemoryProbe)]
    counted = probe.observe(step.step, world.barrier, 0.0)["memory_counted"]
    step.close()
    return sent, {name: counted[name] for name in (*STATE_COMPONENTS, "activations")}


@dataclass(frozen=True)
class Comparison:
    """A component in bytes as planned and as counted."""

    name: str
    planned: float
    counted: float
    has_tp: bool = False

    @property
    def ratio(self) -> float:
        if self.counted == 0:
            return 1.0 if self.planned == 0 else 0.0
        return self.planned / self.counted

    @property
    def deviation(self) -> float:
        return abs(self.ratio - 1)

    @property
    def kind(self) -> str:
        if self.name.startswith("bytes"):
            return "bytes"
        if self.name in STATE_COMPONENTS:
            return "state"
        return "tp activations" if self.has_tp else "activations"

    @property
    def is_missed(self) -> bool:
        return self.deviation > MAX_DEVIATION[self.kind]


def compare(point: Point, ranks: Ranks) -> list[Comparison]:
    """Compare bytes rank by rank, and memory on the maximum over ranks of the same stages."""
    counts = ranks.call(
        "tests.studies.planned_components:count_on_rank",
        name=point.name,
        params=point.case_params,
    )
    spec = PRESETS[point.name](point.case_params, point.num_ranks)
    by_component: dict[str, list[Comparison]] = defaultdict(list)
    memory_by_stage: dict[tuple[str, int], Comparison] = {}
    for rank, (sent, held) in enumerate(counts):
        rank_spec = spec.rank_view(rank)
        planned_bytes = bytes_by_axis(list_calls(rank_spec))
        for axis in {**planned_bytes, **sent}:
            name = f"bytes.{axis}"
            comparison = Comparison(name, planned_bytes.get(axis, 0.0), sent.get(axis, 0.0))
            by_component[name].append(comparison)
        planned_memory = predict_torch_memory(rank_spec)
        for name, counted in held.items():
            key = (name, rank_spec.pp_rank)
            largest = memory_by_stage.get(key, Comparison(name, 0.0, 0.0))
            planned = max(largest.planned, getattr(planned_memory, name))
            counted = max(largest.counted, counted)
            memory_by_stage[key] = Comparison(name, planned, counted, spec.dims.tp > 1)
    for comparison in memory_by_stage.values():
        by_component[comparison.name].append(comparison)
    return [
        max(comparisons, key=lambda comparison: comparison.deviation)
        for comparisons in by_component.values()
    ]


def main() -> None:
    words = set(sys.argv[1:])
    points = [point for point in POINTS if words <= set(point.label.split())]
    largest: dict[str, tuple[float, str]] = dict.fromkeys(MAX_DEVIATION, (0.0, "none"))
    num_missed = 0
    for num_ranks in sorted({point.num_ranks for point in points}):
        with Ranks(num_ranks) as ranks:
            for point in points:
                if point.num_ranks != num_ranks:
                    continue
                print(f"\n{point.label}")
                for row in compare(point, ranks):
                    num_missed += row.is_missed
                    candidate = (row.deviation, f"{row.name} of {point.label}")
                    largest[row.kind] = max(largest[row.kind], candidate)
                    numbers = f"{row.planned:14,.0f} {row.counted:14,.0f} {row.ratio:9.5f}"
                    mark = "  MISSED" if row.is_missed else ""
                    print(f"  {row.name:14} {numbers}{mark}", flush=True)
    print(f"\n{len(points)} points")
    for kind, (deviation, place) in largest.items():
        limit = MAX_DEVIATION[kind]
        print(f"largest deviation of {kind}: {deviation:.3%} ({place}), limit {limit:.3%}")
    sys.exit(1 if num_missed else 0)


if __name__ == "__main__":
    main()
