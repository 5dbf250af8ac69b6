"""Compare the planner's memory with torch's memory trackers, and print a table.

    python -m tests.studies.memory_oracle

A rank runs its real step with fake tensors and a fake process group, so that large worlds need
neither GPUs nor memory. ``MemTracker`` and ``FSDPMemTracker`` find the peak of each step.
"""

import gc
import warnings
from collections.abc import Iterator
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

from parbench.bench.world.world import Clock, World
from parbench.workloads.costs.memory import rank_memory
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import CHECKPOINTINGS, Shape
from parbench.workloads.model.transformer import Transformer, cross_entropy, get_dtype
from parbench.workloads.parallel import data_parallel
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.parallel.mesh import build_mesh, get_local_tensor
from parbench.workloads.parallel.parallelize import parallelize
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
def open_fake_world(ranks: int) -> Iterator[World]:
    """Be the first of so many ranks, which are not there."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    rms_forward = nn.RMSNorm.forward
    nn.RMSNorm.forward = _apply_fused_norm  # type: ignore[method-assign, assignment]
    vars(data_parallel)["fully_shard"] = shard_with_real_mesh
    try:
        yield World(
            rank=0,
            size=ranks,
            global_rank=0,
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


def build_fake_model(spec: StepSpec) -> Transformer:
    """Return the model with fake tensors on the CPU, which ``parallelize`` need not initialize."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(get_dtype(spec))
    try:
        return Transformer(spec.shape)
    finally:
        torch.set_default_dtype(default)


def compute_local_loss(logits: Tensor) -> Tensor:
    """Return the loss of this rank's logits.

    It saves as much as ``loss_parallel``, which also computes the shapes of full logits with fake
    tensors. The trackers would count those.
    """
    targets = torch.zeros(logits.shape[:-1].numel(), dtype=torch.long)
    return cross_entropy(logits, targets)


def measure_peak_bytes(spec: StepSpec) -> int:
    """Return the peak memory of the second step of the first rank, with the optimizer's state."""
    warnings.filterwarnings("ignore")
    with open_fake_world(spec.ranks) as world, ExitStack() as stack:
        positions = TokenPositions.of(spec, 0)
        mesh = build_mesh(world, spec.dims)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        part = parallelize(build_fake_model(spec), world, mesh, spec, positions, None)
        tokens = torch.zeros(spec.microbatch, spec.shape.sequence, dtype=torch.long)

        def train(tracker: Any = None) -> None:
            for index in range(spec.microbatches):
                if tracker is not None:
                    tracker.reset_mod_stats()
                is_last = index == spec.microbatches - 1
                with part.sync_gradients(is_synced=is_last or not spec.no_sync):
                    compute_local_loss(part.module(tokens)).backward()  # type: ignore[no-untyped-call]
            part.finish_gradients()

        train()
        part.part.zero_grad()
        gc.collect()
        tracker: Any
        if spec.dims.is_sharded:
            tracker = FSDPMemTracker(part.part)
        else:
            tracker = MemTracker()
            tracker.track_external(part.part)
        with tracker:
            train(tracker)
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
        elements = sum(get_local_tensor(p).numel() for p in part.part.parameters())
    return int(snapshot["Total"]) + spec.widths.optimizer * elements


def compute_gathered_inputs(spec: StepSpec) -> float:
    """Return the bytes of gathered inputs that torch's DTensor saves, and Megatron does not."""
    blocks = 2 * spec.shape.layers if spec.checkpointing == "none" else 2
    gathered = spec.local_tokens - spec.sharded_tokens
    return (blocks + 1) * gathered * spec.shape.hidden * spec.bytes_per_element


def list_specs() -> list[StepSpec]:
    """Return steps of two microbatches, so that gradients are there at the peak."""
    specs = []
    for shape in (GPT, LLAMA):
        for mesh in ("dp=1", "tp=8", "fsdp=8"):
            for checkpointing in CHECKPOINTINGS:
                spec = StepSpec(shape=shape, dims=ParallelDims.parse(mesh), microbatches=2)
                specs.append(replace(spec, checkpointing=checkpointing))
    for mesh, shape in (
        ("fsdp=512", WIDE),
        ("fsdp=64,tp=8", replace(WIDE, layers=16, vocabulary=SMALL_VOCABULARY)),
    ):
        spec = StepSpec(shape=shape, dims=ParallelDims.parse(mesh), microbatches=2)
        specs += [
            replace(spec, checkpointing="full"),
            replace(spec, checkpointing="none", no_sync=False),
        ]
    single = StepSpec(shape=LLAMA, dims=ParallelDims.parse("fsdp=64"))
    return [*specs, single, replace(single, reshard=False)]


def render_row(spec: StepSpec) -> str:
    planned = rank_memory(spec.rank_view(0)).total
    extra = compute_gathered_inputs(spec) if spec.dims.tp > 1 else 0.0
    peak = measure_peak_bytes(spec)
    cells = (
        spec.shape.recipe,
        spec.dims.label,
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
    for step in list_specs():
        print(render_row(step), flush=True)
