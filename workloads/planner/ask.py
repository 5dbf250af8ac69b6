"""What is asked of a dry run: a model on a mesh, the batch, and how it is computed. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from bench.plan.groups import INSIDE
from bench.text import UserError, did_you_mean, listed
from workloads.mesh.axes import AXES, refuse, sequences_of
from workloads.pipeline_parallel.schedules import default_chunks
from workloads.planner.models import Model

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
PRECISIONS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A step: ``mesh`` outermost axis first, ``microbatch`` in sequences, ``microbatches`` of each data rank.

    The last five are what the measured steps do otherwise (``as_measured``). ``sharded_vocabulary`` lets ``tp`` split
    embedding and head too, as Megatron and torchtitan do. ``reduces_each_microbatch``: ``fsdp`` without a pipeline
    scatters gradients after each, so that none are held whole. ``float32_loss`` keeps a float32 log-softmax beside the
    logits. ``fused_kernels``: an RMSNorm keeps its input alone, and what attention gives is not copied.
    ``stops_early``: a layer that is computed again ends where backward needs no more of it, before its last scatter.
    """

    model: Model
    mesh: Mapping[str, int]
    microbatch: int = 1
    microbatches: int = 1
    element_bytes: int = 2
    checkpointing: Checkpointing = "none"
    schedule: str = "1f1b"
    chunks: int = 0
    cp_method: str = "zigzag"
    sharded_vocabulary: bool = True
    reduces_each_microbatch: bool = True
    float32_loss: bool = True
    fused_kernels: bool = True
    stops_early: bool = False

    @cached_property
    def world(self) -> int:
        """All ranks: the product of the axes that lie inside no other."""
        return math.prod(size for name, size in self.mesh.items() if name not in INSIDE)

    @cached_property
    def dp(self) -> int:
        """Replicas."""
        return self.mesh.get("dp", 1)

    @cached_property
    def fsdp(self) -> int:
        """Ranks that share a replica's parameters."""
        return self.mesh.get("fsdp", 1)

    @cached_property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return self.mesh.get("pp", 1)

    @cached_property
    def cp(self) -> int:
        """Ranks that share a sequence."""
        return self.mesh.get("cp", 1)

    @cached_property
    def tp(self) -> int:
        """Ranks that share a layer."""
        return self.mesh.get("tp", 1)

    @cached_property
    def ep(self) -> int:
        """Ranks that share a layer's experts."""
        return self.mesh.get("ep", 1)

    @cached_property
    def stages_per_rank(self) -> int:
        """Chunks of the model that a rank of the pipeline holds; 1 without one."""
        return (self.chunks or default_chunks(self.schedule)) if self.pp > 1 else 1

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return sequences_of(self.mesh, microbatch=self.microbatch, microbatches=self.microbatches)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.model.shape.sequence

    @cached_property
    def local_tokens(self) -> int:
        """Tokens of one microbatch that a rank of ``cp`` holds."""
        return self.microbatch * self.model.shape.sequence // self.cp

    @property
    def mesh_text(self) -> str:
        """The mesh as it is written, without axes of one rank."""
        shown = {name: size for name, size in self.mesh.items() if size > 1} or {"dp": 1}
        return ",".join(f"{name}={size}" for name, size in shown.items())

    def with_batch(self, global_batch: int) -> "Ask":
        """Return it with as many microbatches as make the global batch; ``UserError`` where they do not."""
        each = self.dp * self.fsdp * self.microbatch
        if global_batch < each or global_batch % each:
            raise UserError(
                f"global batch({global_batch}) % (dp({self.dp}) * fsdp({self.fsdp}) * microbatch({self.microbatch})) "
                f"!= 0, or is below it"
            )
        return replace(self, microbatches=global_batch // each)


def as_measured(ask: Ask, device: str = "cpu") -> Ask:
    """Return the step as ``workload.hybrid`` takes it on a kind of device."""
    return replace(
        ask,
        sharded_vocabulary=False,
        reduces_each_microbatch=False,
        float32_loss=False,
        fused_kernels=device != "cpu",
        stops_early=True,
    )


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of ``dp=8,pp=4,tp=8``, outermost first; ``UserError`` for what is no axis, or named twice."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise UserError(f"--mesh {text!r}: axis {name!r} is not {listed(AXES)}{did_you_mean(name, AXES)}")
        if name in mesh:
            raise UserError(f"--mesh {text!r} names {name} twice")
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh {text!r}: {name} has size {size!r}, and needs a whole number above 0")
        mesh[name] = int(size)
    return mesh


def refusal(ask: Ask) -> str | None:
    """Return the equation that the step breaks, with its numbers, None where it can run: the measured steps' rules."""
    if ask.checkpointing not in CHECKPOINTING:
        return f"checkpointing {ask.checkpointing!r} is not {listed(CHECKPOINTING)}"
    return refuse(
        ask.model.shape,
        ask.mesh,
        microbatches=ask.microbatches,
        microbatch=ask.microbatch,
        world=ask.world,
        num_experts=ask.model.num_experts or None,
        schedule=ask.schedule,
        cp_method=ask.cp_method,
        chunks=ask.chunks,
        checkpointing=ask.checkpointing,
    )


def require(ask: Ask, gpus: int) -> None:
    """Refuse, by equation, a mesh that is not of ``gpus`` ranks or cannot carry the step."""
    if ask.world != gpus:
        product = " * ".join(f"{name}({size})" for name, size in ask.mesh.items() if name not in INSIDE)
        raise UserError(f"--mesh {product or 'of no axis'} = {ask.world} != --gpus({gpus})")
    reason = refusal(ask)
    if reason is not None:
        raise UserError(f"--mesh {ask.mesh_text} cannot carry {ask.model.name}: {reason}")
