"""Compare the planner's memory with torch's memory trackers, and print a table.

    python -m tests.studies.memory_oracle

A rank runs its real passes with fake tensors and a fake process group, so that large worlds need
neither GPUs nor memory. ``MemTracker`` and ``FSDPMemTracker`` find the peak of each step.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from parbench.bench.results.details import Action
from parbench.bench.world.world import Clock, World
from parbench.workloads.costs.memory import compute_rank_memory
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.mesh.mesh import build_mesh, get_local_tensor
from parbench.workloads.model.shapes import CHECKPOINTINGS, Checkpointing, Shape
from parbench.workloads.model.transformer import DTYPES, Transformer, cross_entropy
from parbench.workloads.parallel import data_parallel
from parbench.workloads.parallel.parallelize import ParallelPart, parallelize
from parbench.workloads.parallel.positions import TokenPositions

GPT = Shape("gpt", 4, 2048, 16, 16, 8192, 2048, 51200)
LLAMA = Shape("llama", 4, 4096, 32, 8, 14336, 4096, 32000)
WIDE = Shape("llama", 4, 8192, 64, 8, 28672, 4096, 128256)
SMALL_VOCABULARY = 8192
"""Of steps with FSDP and TP, where torch has the embedding's gradient of the full vocabulary."""


class FusedNorm(torch.autograd.Function):
    """A norm that saves its input and statistics, as the kernel of GPUs does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight)


def _apply_fused_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    output: Tensor = FusedNorm.apply(x, norm.weight)  # type: ignore[no-untyped-call]
    return output


def shard_with_real_mesh(*args: Any, **kwargs: Any) -> Any:
    """Shard modules while the numbers of ranks in a mesh are not fake."""
    with unset_fake_temporarily():
        return fully_shard(*args, **kwargs)


@contextmanager
def open_fake_world(ranks: int, rank: int) -> Iterator[World]:
    """Be a rank of so many, of which the others are not there."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    rms_forward = nn.RMSNorm.forward
    nn.RMSNorm.forward = _apply_fused_norm  # type: ignore[method-assign, assignment]
    vars(data_parallel)["fully_shard"] = shard_with_real_mesh
    try:
        yield World(
            rank=rank,
            size=ranks,
            global_rank=rank,
            hosts=("host",) * ranks,
            device=torch.device("cpu"),
            backend="fake",
            group=group,
            control=group,
            clock=Clock(offsets_ns=(0,) * ranks, uncertainty_ns=0, method=""),
            seed=0,
        )
    finally:
        nn.RMSNorm.forward = rms_forward  # type: ignore[method-assign]
        vars(data_parallel)["fully_shard"] = fully_shard
        dist.destroy_process_group()


def build_fake_parts(view: RankView) -> dict[int, Transformer]:
    """Return the rank's part of the model for each of its stages.

    Its tensors are fake and on the CPU, so that ``parallelize`` need not initialize them.
    """
    spec = view.spec
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[spec.bytes_per_element])
    parts = {}
    try:
        for stage in view.stages:
            first = sum(view.layers_by_stage[:stage])
            parts[stage] = Transformer(
                spec.shape,
                range(first, first + view.layers_by_stage[stage]),
                has_embedding=stage == 0,
                has_head=stage == len(view.layers_by_stage) - 1,
            )
    finally:
        torch.set_default_dtype(default)
    return parts


def compute_local_loss(logits: Tensor) -> Tensor:
    """Return the loss of this rank's logits.

    It saves as much as ``loss_parallel``, which also computes the shapes of full logits with fake
    tensors. The trackers would count those.
    """
    targets = torch.zeros(logits.shape[:-1].numel(), dtype=torch.long)
    return cross_entropy(logits, targets)


class TotalTracker(MemTracker):  # type: ignore[no-untyped-call]
    """A tracker of the peak of a model whose modules run several microbatches before backward.

    Torch's statistics of single modules allow one microbatch, so that they are left out.
    """

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass


class FakeStep:
    """The forward and backward passes of a rank in the order of its schedule."""

    def __init__(self, world: World, view: RankView) -> None:
        spec = view.spec
        positions = TokenPositions.make(spec, view.rank)
        groups = positions.list_context_groups(spec.dims)
        self.mesh = build_mesh(
            world, spec.dims, context_groups=groups, has_experts=spec.moe is not None
        )
        self.view = view
        self.positions = positions
        self.world = world
        self.parts: dict[int, ParallelPart] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def build(self) -> None:
        """Distribute the parts of the model; under ``FakeTensorMode``."""
        spec = self.view.spec
        attention = self.positions.make_attention(spec, self.world, self.mesh.groups)
        for stage, part in build_fake_parts(self.view).items():
            self.parts[stage] = parallelize(
                part, self.world, self.mesh, spec, self.positions, attention
            )
        self.model = nn.ModuleList([part.part for part in self.parts.values()])

    def train(self, tracker: Any = None) -> None:
        """Run all microbatches and reduce the gradients."""
        spec = self.view.spec
        actions: Sequence[Action]
        if spec.pipeline is None:
            actions = [
                Action(stage=0, kind=kind, microbatch=microbatch)
                for microbatch in range(spec.microbatches)
                for kind in ("F", "B")
            ]
        else:
            actions = spec.order.actions_by_rank[self.view.pp_rank]
        for action in actions:
            part = self.parts[action.stage]
            is_last = action.microbatch == spec.microbatches - 1
            with part.sync_gradients(is_synced=is_last or not spec.no_sync):
                if action.kind == "F":
                    self._run_forward(part, action, tracker)
                else:
                    self._run_backward(action)
        for part in self.parts.values():
            part.finish_gradients()

    def _run_forward(self, part: ParallelPart, action: Action, tracker: Any) -> None:
        spec = self.view.spec
        if tracker is not None:
            tracker.reset_mod_stats()
        x = torch.zeros(spec.microbatch, len(self.positions.attended), dtype=torch.long)
        if action.stage > 0:
            size = (spec.microbatch, len(self.positions.between_blocks), spec.shape.hidden)
            x = torch.zeros(size, dtype=DTYPES[spec.bytes_per_element], requires_grad=True)
        output = part.module(x)
        if part.part.head is not None:
            output = compute_local_loss(output)
        self.outputs[action.stage, action.microbatch] = output

    def _run_backward(self, action: Action) -> None:
        output = self.outputs.pop((action.stage, action.microbatch))
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
        del output
        gc.collect()  # DTensor leaves cycles, which would stay for a number of microbatches.


def measure_peak_bytes(view: RankView) -> int:
    """Return the peak memory of the second step of a rank, with the optimizer's state."""
    warnings.filterwarnings("ignore")
    spec = view.spec
    with open_fake_world(spec.ranks, view.rank) as world, ExitStack() as stack:
        step = FakeStep(world, view)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        step.build()
        step.train()
        step.model.zero_grad()
        gc.collect()
        tracker: Any
        if spec.dims.is_sharded:
            tracker = FSDPMemTracker(step.parts[0].part)
        else:
            tracker = TotalTracker()
            tracker.track_external(step.model)
        with tracker:
            step.train(tracker)
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
        elements = sum(get_local_tensor(p).numel() for p in step.model.parameters())
    return int(snapshot["Total"]) + spec.widths.optimizer * elements


def compute_gathered_inputs(view: RankView) -> float:
    """Return the bytes of gathered inputs that torch's DTensor saves, and Megatron does not."""
    spec = view.spec
    blocks: float = 2  # of the layer that is recomputed
    if spec.checkpointing == "none":
        blocks = 2 * view.layers * view.microbatches_in_flight
    gathered = spec.local_tokens - spec.sharded_tokens
    return (blocks + view.has_head) * gathered * spec.shape.hidden * spec.bytes_per_element


def make_spec(
    shape: Shape, mesh: str, checkpointing: Checkpointing = "none", **fields: Any
) -> StepSpec:
    """Build a step of two microbatches by default, so that its peak has gradients."""
    spec = StepSpec(shape=shape, dims=ParallelDims.parse(mesh), checkpointing=checkpointing)
    return replace(spec, **{"microbatches": 2, **fields})


def list_views() -> list[RankView]:
    """Return ranks of steps, of pipelines the first and the last."""
    specs = []
    for mesh in ("dp=1", "tp=8", "fsdp=8"):
        for checkpointing in CHECKPOINTINGS:
            specs.append(make_spec(GPT, mesh, checkpointing))
            specs.append(make_spec(LLAMA, mesh, checkpointing))
    wide = replace(WIDE, layers=16, vocabulary=SMALL_VOCABULARY)
    for shape, mesh in ((WIDE, "fsdp=512"), (wide, "fsdp=64,tp=8")):
        specs.append(make_spec(shape, mesh, "full"))
        specs.append(make_spec(shape, mesh, no_sync=False))
    specs.append(make_spec(LLAMA, "fsdp=64", microbatches=1))
    specs.append(make_spec(LLAMA, "fsdp=64", microbatches=1, reshard=False))
    long = replace(LLAMA, sequence=16384)
    specs.append(make_spec(long, "fsdp=8,cp=8", cp_method="allgather_kv"))
    specs.append(make_spec(long, "fsdp=8,cp=8", cp_method="ulysses"))
    specs.append(make_spec(long, "fsdp=8,cp=4", "full", cp_method="ulysses"))
    views = [spec.make_rank_view(0) for spec in specs]
    deep = replace(LLAMA, layers=16)
    for schedule, spec in (
        ("1f1b", make_spec(deep, "pp=4", microbatches=8)),
        ("gpipe", make_spec(deep, "pp=4", "full", microbatches=8)),
        ("interleaved", make_spec(deep, "pp=4", microbatches=8)),
        ("1f1b", make_spec(deep, "pp=4,tp=4", microbatches=8)),
        ("1f1b", make_spec(deep, "pp=2,tp=8", "full", microbatches=8)),
    ):
        pipeline = spec.with_pipeline(schedule=schedule)
        views += [pipeline.make_stage_view(0), pipeline.make_stage_view(pipeline.dims.pp - 1)]
    return views


def render_row(view: RankView) -> str:
    spec = view.spec
    planned = compute_rank_memory(view).total
    extra = compute_gathered_inputs(view) if spec.dims.tp > 1 else 0.0
    peak = measure_peak_bytes(view)
    mesh = spec.dims.label
    if spec.pipeline is not None:
        mesh = f"{mesh} {spec.pipeline.schedule.name}, stage rank {view.pp_rank}"
    if spec.dims.cp > 1:
        mesh = f"{mesh} {spec.cp_method}"
    cells = (
        spec.shape.recipe,
        mesh,
        spec.checkpointing,
        f"{peak / 1e9:.2f}",
        f"{planned / 1e9:.2f}",
        f"{extra / 1e9:.2f}",
        f"{(planned + extra) / peak - 1:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| model | mesh | recomputation | torch (GB) | planned | gathered inputs | error |")
    print("|---|---|---|---|---|---|---|")
    for step in list_views():
        print(render_row(step), flush=True)
