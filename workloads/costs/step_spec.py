"""A training step as one description: from the command line to the rank that takes it, and to the planner. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from parbench.bench.plan.groups import INSIDE
from parbench.bench.plan.params import Value
from parbench.bench.text import UserError, format_list, suggest_similar
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh import axes
from parbench.workloads.mesh.axes import along, coordinate_of, multiplied, size_of
from parbench.workloads.model import shapes
from parbench.workloads.model.shapes import MIXED, SINGLE, Checkpointing, Shape, Widths
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline, split_layers
from parbench.workloads.pipeline_parallel.schedule import PipelineSize
from parbench.workloads.pipeline_parallel.schedules import DEFAULT_SCHEDULE, find_schedule

Ends = Literal["vocabulary", "tokens", "whole"]
ZeroOne = Literal["", "broadcast", "reduce_scatter"]


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """A step: ``mesh`` outermost axis first, ``microbatch`` in sequences, ``microbatches`` of each data rank.

    ``device`` is the kind of device where this suite measures it; empty is a step as large clusters take it.
    ``pipeline`` has the order of actions of a measured one. ``timed_seconds`` is a microbatch's forward pass where
    compute is waited for. ``full`` checkpointing is of one layer in ``every``. ``reduced_bytes`` are those of a
    gradient's element on its way, 0 the element's own. ``state`` has the widths of state that are not the usual ones.

    What layouts do otherwise: ``each_microbatch`` sums gradients after every one; ``reshard`` gives FSDP's parameters
    back after forward, ``keeps_root`` but for those that are in no layer; ``zero1`` shards the optimizer of DDP;
    ``sequence_parallel`` shards over ``tp`` what lies between the blocks; of embedding and head ``tp`` splits, as
    ``ends`` says, the vocabulary, the tokens, or nothing. ``own_tokens``: ranks of ``tp`` take other tokens but in
    attention. ``drawn`` are the sequences of which a microbatch is a view. ``overlaps``: gradients or parameters
    travel beside compute, ``prefetches`` parameters on gloo as well. ``axis_names`` are shown for axes. Where not
    ``reference_fits``, a single process of this size does not fit in memory next to the step.
    """

    shape: Shape
    mesh: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    microbatch: int = 1
    microbatches: int = 1
    element_bytes: int = 2
    state: Widths | None = None
    checkpointing: Checkpointing = "none"
    every: int = 1
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 0
    split: str = ""
    pipeline: Pipeline | None = None
    cp_method: str = "zigzag"
    ulysses: int = 1
    moe: Moe | None = None
    device: str = ""
    timed_seconds: float | None = None
    reduced_bytes: int = 0
    bucket_bytes: int = 0
    """The size at which DDP closes a bucket of gradients; 0 is torch's default."""
    each_microbatch: bool = False
    reshard: bool = True
    keeps_root: bool = False
    zero1: ZeroOne = ""
    sequence_parallel: bool = True
    ends: Ends = "vocabulary"
    own_tokens: bool = False
    drawn: int = 0
    overlaps: bool = False
    prefetches: bool = False
    axis_names: Mapping[str, str] = field(default_factory=dict)
    reference_fits: bool = True

    @staticmethod
    def of(params: Mapping[str, Value], device: str = "cpu") -> "StepSpec":
        """Return what a measured step's parameters say beside its mesh; those of a single layer leave out some."""
        given = {**{param.name: param.default for param in shapes.COMMON}, **params}
        return StepSpec(
            shape=shapes.shape_of(given),
            name=str(given["shape"]),
            microbatch=int(given["microbatch"]),
            microbatches=int(given.get("microbatches", given["accumulation"])),
            element_bytes=shapes.PRECISIONS[str(given["precision"])],
            checkpointing=cast(Checkpointing, given["checkpointing"]),
            device=device,
            timed_seconds=shapes.parse_compute(str(given["compute"])),
            ends="whole",
            sequence_parallel=False,
            reference_fits=given.get("check") != shapes.SMALL,
        )

    def size(self, *axes: str) -> int:
        return size_of(self.mesh, *axes)

    def ranks_of(self, group: tuple[str, ...]) -> int:
        """Return the ranks of a group along axes; ``expert_shards`` and ``edp`` are those of a mixture's own groups."""
        if group == ("expert_shards",):
            return self.expert_shards
        if group == ("edp",):
            shards = self.expert_shards if self.planned else 1
            return self.world // (self.size("pp", "ep", "etp") * shards)
        return self.size(*group)

    @cached_property
    def world(self) -> int:
        """All ranks: the product of the axes that lie inside no other."""
        return size_of(self.mesh, *multiplied(self.mesh))

    @cached_property
    def expert_shards(self) -> int:
        """Over how many ranks ``fsdp`` still shards an expert, once ``ep`` has taken neighbours of cp, fsdp and dp."""
        left = self.size("ep") // math.gcd(self.size("ep"), self.size("cp"))
        return self.size("fsdp") // math.gcd(left, self.size("fsdp"))

    @property
    def planned(self) -> bool:
        """Whether it is a step as large clusters take it, none of this suite's own."""
        return not self.device

    @property
    def mixed(self) -> bool:
        """Whether weights of 16 bits have float32 masters."""
        return self.element_bytes < 4

    @property
    def widths(self) -> Widths:
        return self.state or (MIXED if self.mixed else SINGLE)

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient's element on its way."""
        return self.reduced_bytes or (self.state.gradients if self.state else self.element_bytes)

    def count_buckets(self, num_bytes: float) -> int:
        """Return the number of buckets in which DDP sums gradients of so many bytes, if each has its full size."""
        first = self.bucket_bytes or shapes.DEFAULT_FIRST_BUCKET_BYTES
        others = self.bucket_bytes or shapes.DEFAULT_BUCKET_BYTES
        return 1 + max(0, math.ceil((num_bytes - first) / others))

    @property
    def gradient_text(self) -> str:
        return "e" if self.gradient_bytes == self.element_bytes else str(self.gradient_bytes)

    @property
    def timed(self) -> bool:
        return self.timed_seconds is not None

    @cached_property
    def stages_per_rank(self) -> int:
        """Chunks of the model that a rank of the pipeline holds; 1 without one."""
        if self.pipeline is not None:
            return self.pipeline.order.stages_per_rank
        if self.size("pp") == 1:
            return 1
        return self.chunks or find_schedule(self.schedule).stages_per_rank

    @cached_property
    def pipeline_size(self) -> PipelineSize:
        return PipelineSize(self.size("pp"), self.microbatches, self.stages_per_rank)

    @cached_property
    def order(self) -> PipelineOrder:
        """The actions of the pipeline."""
        if self.pipeline is not None:
            return self.pipeline.order
        return find_schedule(self.schedule).make_order(self.pipeline_size)

    def microbatches_in_flight(self, pp_rank: int) -> float:
        """Return the maximum of microbatches whose activations a rank of the pipeline holds."""
        if self.size("pp") == 1:
            return 1.0
        if self.pipeline is not None:
            return self.pipeline.order.microbatches_in_flight(pp_rank)
        return find_schedule(self.schedule).microbatches_in_flight(pp_rank, self.pipeline_size)

    def logits_in_flight(self, pp_rank: int) -> float:
        """Return the maximum of microbatches whose logits a rank of a planned pipeline holds."""
        if self.size("pp") == 1:
            return 1.0
        return find_schedule(self.schedule).logits_in_flight(pp_rank, self.pipeline_size)

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.size("dp", "fsdp") * self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Sequences that one data rank takes in a step."""
        return self.microbatch * self.microbatches

    @property
    def tokens(self) -> int:
        return self.global_batch * self.shape.sequence

    @cached_property
    def local_tokens(self) -> int:
        """Tokens of one microbatch that a rank of ``cp`` holds."""
        return self.microbatch * self.shape.sequence // self.size("cp")

    @property
    def forwards(self) -> float:
        """How often a layer's forward pass communicates: what is computed again, sends again.

        A planned step that keeps its products (``selective``) keeps their sums as well; torch's policy does not.
        """
        again = self.checkpointing == "full" or (
            self.checkpointing == "selective" and not self.planned
        )
        return 1 + 1 / self.every if again else 1

    @property
    def mesh_text(self) -> str:
        """The mesh as it is written, without axes of one rank."""
        shown = {name: size for name, size in self.mesh.items() if size > 1} or {"dp": 1}
        return ",".join(f"{name}={size}" for name, size in shown.items())

    def at(self, rank: int) -> "Position":
        return Position(spec=self, coordinate=coordinate_of(self.mesh, rank))

    def at_stage(self, rank: int) -> "Position":
        return Position(spec=self, coordinate={**coordinate_of(self.mesh, 0), "pp": rank})

    @cached_property
    def positions(self) -> tuple["Position", ...]:
        """The ranks that differ: of a pipeline the first, the fullest of those between, the last; more if uneven."""
        last = self.size("pp") - 1
        if not self.uneven:
            groups = [[rank] for rank in sorted({0, last})]
            if last > 1:
                groups.insert(1, [1, last - 1])
        else:
            ranks_by_kind: dict[StageKind, list[int]] = {}
            for rank in range(last + 1):
                ranks_by_kind.setdefault(self.at_stage(rank).kind, []).append(rank)
            groups = [[ranks[0], ranks[-1]] for ranks in ranks_by_kind.values()]
        # Microbatches in flight rise or fall along the pipeline, so that an end of a group has most.
        return tuple(self.at_stage(max(ranks, key=self.microbatches_in_flight)) for ranks in groups)

    @property
    def uneven(self) -> bool:
        """Whether ranks of the pipeline differ in more than the ends."""
        return bool(self.split) or bool(self.moe and self.moe.dense_layers)

    @property
    def zero(self) -> int:
        """The stage of ZeRO: 1 shards the optimizer, 2 gradients too, 3 parameters too."""
        return 1 if self.zero1 else 0 if self.size("fsdp") == 1 else 3 if self.reshard else 2

    @property
    def checkpointing_text(self) -> str:
        return self.checkpointing + (f":{self.every}" if self.every > 1 else "")

    def checkpointed(self, text: str) -> "StepSpec":
        """Return it with ``none``, ``selective``, ``full``, or ``full:K``, which is one layer in K."""
        how, _, every = text.partition(":")
        if how not in shapes.CHECKPOINTINGS or (
            every and (how != "full" or not every.isdecimal() or not int(every))
        ):
            words = format_list((*shapes.CHECKPOINTINGS, "full:K"))
            raise UserError(
                f"checkpointing {text!r} is not {words}{suggest_similar(how, shapes.CHECKPOINTINGS)}"
            )
        return replace(self, checkpointing=how, every=int(every or 1))

    def on(self, mesh: Mapping[str, int], **more: Any) -> "StepSpec":
        """Return it on a mesh, with whatever ``more`` names."""
        moe = self.moe and replace(self.moe, ep=mesh.get("ep", 1), etp=mesh.get("etp", 1))
        return replace(self, mesh=mesh, moe=moe, **more)

    def with_batch(self, global_batch: int) -> "StepSpec":
        """Return it with as many microbatches as make the global batch; ``UserError`` where they do not."""
        dp, fsdp = self.size("dp"), self.size("fsdp")
        each = dp * fsdp * self.microbatch
        if global_batch < each or global_batch % each:
            raise UserError(
                f"global batch({global_batch}) % (dp({dp}) * fsdp({fsdp}) * microbatch({self.microbatch})) "
                f"!= 0, or is below it"
            )
        return replace(self, microbatches=global_batch // each)

    def refusal(self, world: int = 0, experts: int = 0) -> str | None:
        """Return the first equation that the step breaks, with its numbers; None where it can run.

        ``world`` are the ranks that there are, ``experts`` those that are to come, 0 what the step itself has.
        """
        shape, mesh, experts = (
            self.shape,
            self.mesh,
            experts or (self.moe.experts if self.moe else 0),
        )
        return (
            axes.refuse_axes(mesh, world or self.world)
            or axes.refuse_heads(shape, mesh, experts=experts > 0)
            or axes.refuse_sequence(shape, mesh, cp_method=self.cp_method)
            or axes.refuse_stages(
                shape,
                mesh,
                self.microbatch,
                self.microbatches,
                self.schedule,
                self.chunks,
                self.split,
            )
            or axes.refuse_experts(mesh, experts)
            or self._refuse_parts()
            or axes.refuse_split_backward(mesh, self.schedule, self.checkpointing, experts)
        )

    def _refuse_parts(self) -> str | None:
        """Refuse experts that ``etp`` does not divide, and a mixture's first layers that ``tp`` does not."""
        if self.moe and self.moe.expert_ffn % self.size("etp"):
            return f"expert_ffn({self.moe.expert_ffn}) % etp({self.size('etp')}) != 0"
        if self.moe and self.moe.dense_layers and self.shape.ffn % self.size("tp"):
            return f"ffn({self.shape.ffn}) % tp({self.size('tp')}) != 0"
        return None

    def require(self, gpus: int) -> None:
        """Refuse, by equation, a mesh that is not of ``gpus`` ranks or cannot carry the step."""
        if self.world != gpus:
            product = " * ".join(
                f"{name}({size})" for name, size in self.mesh.items() if name not in INSIDE
            )
            raise UserError(f"--mesh {product or 'of no axis'} = {self.world} != --gpus({gpus})")
        reason = self.refusal()
        if reason is not None:
            raise UserError(f"--mesh {self.mesh_text} cannot carry {self.name}: {reason}")


StageKind = tuple[int, int, bool, bool]
"""What tells a rank of the pipeline from another: its layers, those of them that are dense, whether it has an end."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One rank's part of a step, from which its calls, its memory and its arithmetic follow."""

    spec: StepSpec
    coordinate: Mapping[str, int]

    def along(self, *axes: str) -> int:
        """Return its number among the ranks that differ in some axes alone, the last of them varying fastest."""
        return along(self.coordinate, self.spec.mesh, *axes)

    @property
    def pp_rank(self) -> int:
        return self.coordinate["pp"]

    @cached_property
    def layers_by_stage(self) -> tuple[int, ...]:
        spec = self.spec
        if spec.pipeline is not None:
            return spec.pipeline.layers_by_stage
        return split_layers(spec.shape.layers, spec.size("pp") * spec.stages_per_rank, spec.split)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.stages_of(self.pp_rank)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of the pipeline."""
        spec = self.spec
        if spec.size("pp") == 1:
            return (0,)
        if spec.pipeline is not None:
            return spec.pipeline.order.stages_of(pp_rank)
        return find_schedule(spec.schedule).stages_of(pp_rank, spec.pipeline_size)

    @cached_property
    def layers(self) -> int:
        return sum(self.layers_by_stage[stage] for stage in self.stages)

    @cached_property
    def dense_layers(self) -> int:
        """Of its layers those that have an FFN where others of a mixture have experts."""
        return sum(map(self.dense_of, self.stages)) if self.spec.moe else 0

    def dense_of(self, stage: int) -> int:
        dense = self.spec.moe.dense_layers if self.spec.moe else 0
        return max(0, min(dense - sum(self.layers_by_stage[:stage]), self.layers_by_stage[stage]))

    @property
    def embedding(self) -> bool:
        return 0 in self.stages

    @property
    def head(self) -> bool:
        return len(self.layers_by_stage) - 1 in self.stages

    @property
    def kind(self) -> StageKind:
        """What tells its work from that of other ranks of the pipeline."""
        return self.layers, self.dense_layers, self.embedding, self.head

    @property
    def words(self) -> str:
        ends = [name for name, held in (("embedding", self.embedding), ("head", self.head)) if held]
        return f"pp rank {self.pp_rank}: {self.layers} layers" + (
            f" with {' and '.join(ends)}" if ends else ""
        )

    @cached_property
    def symbols(self) -> dict[str, float]:
        """What letters stand for: b s h V microbatch, a cp rank's part of a sequence, hidden size and vocabulary.

        e are the bytes of an element, a heads of size d, of values u, j of them of keys, g = j / a, f the FFN's inner
        size, L this rank's layers, D those of a mixture that have no experts, M microbatches, c t the ranks of cp and
        tp, G = b s the tokens of a block, n those of this rank between blocks.
        """
        spec, shape = self.spec, self.spec.shape
        gathered, tp = spec.local_tokens, spec.size("tp")
        return {
            "b": spec.microbatch,
            "s": shape.sequence // spec.size("cp"),
            "h": shape.hidden,
            "V": shape.vocabulary,
            "e": spec.element_bytes,
            "a": shape.heads,
            "d": shape.head_size,
            "j": shape.kv_heads,
            "g": shape.kv_heads / shape.heads,
            "f": shape.ffn,
            "u": shape.value_size,
            "L": self.layers,
            "D": self.dense_layers,
            "M": spec.microbatches,
            "c": spec.size("cp"),
            "t": tp,
            "G": gathered,
            "n": gathered / tp if spec.sequence_parallel or spec.own_tokens else gathered,
        }
