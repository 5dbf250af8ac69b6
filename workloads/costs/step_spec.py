"""A training step as one description, for execution, costs and the planner. Pure."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from parbench.bench.text import UserError, format_list
from parbench.workloads.context_parallel.context_methods import (
    ContextMethod,
    find_context_method,
)
from parbench.workloads.costs.divisibility import (
    find_indivisible_heads,
    find_indivisible_sequence,
)
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import (
    CHECKPOINTINGS,
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    MIXED,
    SINGLE,
    Checkpointing,
    Shape,
    Widths,
)
from parbench.workloads.pipeline_parallel.order import PipelineOrder, PipelineSize
from parbench.workloads.pipeline_parallel.pipeline_case import (
    Pipeline,
    PipelineOptions,
)

ZeroOne = Literal["", "distributed", "zero_redundancy"]
"""The implementation of ZeRO-1: parbench's, torch's ZeroRedundancyOptimizer, or empty for none."""
MAX_GATHERED_STAGES = 3
"""The maximum number of stages per rank under FSDP.

Torch's pipeline runtime keeps the parameters of this many stages gathered at a time.
"""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """A training step as sizes and options: model, mesh, batch, and each kind of parallelism.

    It holds no tensors. Execution, analytical costs and the planner read the same object.
    """

    shape: Shape
    """The sizes of the model and of one sequence."""
    dims: ParallelDims = field(default_factory=ParallelDims)
    """The mesh: the number of ranks on each axis."""
    name: str = ""
    """The name of the model, such as ``llama3-8b``, for reports and error messages."""
    microbatch: int = 1
    """The number of sequences in one microbatch of one data rank."""
    microbatches: int = 1
    """The number of microbatches that each data rank runs in a step."""
    bytes_per_element: int = 2
    """The bytes of one element of weights and activations."""
    reduce_bytes: int = 4
    """The bytes of one gradient element while it is reduced over ranks."""
    checkpointing: Checkpointing = "none"
    """The activation recomputation: ``none``, ``selective`` or ``full``."""
    checkpoint_every: int = 1
    """K of the checkpointing ``full:K``: one layer in K is recomputed. 1 means every layer."""
    fused: bool = False
    """True if backward recomputes norms and activation functions, as torch.compile does."""
    sequence_parallel: bool = True
    """True if ``tp`` shards the tokens between the attention and FFN blocks."""
    zero1: ZeroOne = ""
    """The sharding of optimizer state over the replicas of ``dp`` (ZeRO-1), empty for none.

    The value names the optimizer that shards: ``distributed`` is parbench's, ``zero_redundancy`` is
    torch's ZeroRedundancyOptimizer.
    """
    reshard: bool = True
    """True if FSDP frees gathered parameters after forward, and gathers them again for backward."""
    no_sync: bool = True
    """True if gradients are reduced in the last microbatch only, False for every microbatch."""
    bucket_bytes: int = 0
    """The bytes of one gradient bucket of data parallelism. 0 means torch's default sizes."""
    prefetch: bool = False
    """True if FSDP is set to gather the parameters of each layer one layer ahead."""
    pipeline_options: PipelineOptions = field(default_factory=PipelineOptions)
    """The schedule and the split of layers into stages. Without ``pp`` they have no effect."""
    cp_method: str = "zigzag"
    """The method of context parallelism: ring, zigzag, allgather_kv, ulysses or usp."""
    ulysses: int = 0
    """The number of ``cp`` ranks that exchange heads with method ``usp``.

    0 means half of the ``cp`` ranks.
    """
    moe: Moe | None = None
    """The mixture of experts that replaces the FFN of layers, None for a dense model."""
    padding: float = 0.0
    """The mean fraction of a sequence's tokens that are padding and have no loss."""
    simulated_seconds: float | None = None
    """The simulated seconds of one rank's forward pass of one microbatch, None for real compute."""
    reference_fits: bool = True
    """True if the single-process reference of the check fits in memory next to the step.

    Then the full model is compared with it, otherwise a small model of the same preset.
    """

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline's stages, and the order of their forward and backward passes.

        None without ``pp``. Raises ``UserError`` if the schedule cannot run this number of layers
        or microbatches.
        """
        if self.dims.pp == 1:
            return None
        return self.pipeline_options.build(self.dims.pp, self.microbatches, self.shape.layers)

    @property
    def order(self) -> PipelineOrder:
        """The forward and backward passes of every pipeline rank, in order. Requires ``pp`` > 1."""
        assert self.pipeline is not None, "a step without pp has no order of actions"
        return self.pipeline.order

    @property
    def ranks(self) -> int:
        """The number of ranks in the mesh."""
        return self.dims.ranks

    @property
    def dense_layers(self) -> int:
        """The number of layers at the start of a MoE model that have an FFN and no experts.

        0 for a dense model.
        """
        return self.moe.dense_layers if self.moe else 0

    @property
    def global_batch(self) -> int:
        """The number of sequences that all ranks together train in one step."""
        return self.dims.dp * self.dims.fsdp * self.microbatch * self.microbatches

    @property
    def tokens(self) -> int:
        """The number of tokens that all ranks together train in one step, padding included."""
        return self.global_batch * self.shape.sequence

    @cached_property
    def local_tokens(self) -> int:
        """The number of tokens of one microbatch that a rank has inside attention and FFN blocks.

        ``cp`` divides this number, ``tp`` does not.
        """
        return self.microbatch * self.shape.sequence // self.dims.cp

    @cached_property
    def sharded_tokens(self) -> int:
        """The number of tokens of one microbatch that a rank holds between two blocks.

        A block is the attention or the FFN of a layer. ``cp`` divides this number, and with
        sequence parallelism ``tp`` does too.
        """
        return self.local_tokens // self.dims.tp if self.sequence_parallel else self.local_tokens

    @property
    def ulysses_ranks(self) -> int:
        """The number of ``cp`` ranks that exchange heads by all_to_all, 1 for a pure ring.

        ``cp / ulysses_ranks`` ranks form each ring.
        """
        return self.context_method.compute_ulysses(self.dims.cp, self.ulysses)

    @property
    def context_method(self) -> ContextMethod:
        """The method of context parallelism with the name ``cp_method``."""
        return find_context_method(self.cp_method)

    @property
    def widths(self) -> Widths:
        """The bytes of weight, gradient and optimizer state per parameter, as fields."""
        return MIXED if self.bytes_per_element < 4 else SINGLE

    @property
    def is_simulated(self) -> bool:
        """True if ranks wait for a given time in place of multiplying matrices."""
        return self.simulated_seconds is not None

    @property
    def gradient_syncs(self) -> int:
        """The number of times per step that each gradient is reduced over data ranks.

        With ``no_sync`` or a pipeline it is 1, after the last backward pass. Otherwise each
        microbatch reduces its gradients.
        """
        return 1 if self.no_sync or self.dims.pp > 1 else self.microbatches

    @property
    def forward_passes(self) -> float:
        """The mean number of forward passes of a layer per microbatch, including recomputation.

        It is 1 without checkpointing, 2 with ``full``, and 1 + 1/K with ``full:K``. With
        ``selective`` it is 2 as well, although the second pass repeats only a part of the layer: it
        does not repeat attention and every second GEMM, whose results are saved.
        """
        return 1.0 if self.checkpointing == "none" else 1.0 + 1 / self.checkpoint_every

    @property
    def pipeline_size(self) -> PipelineSize:
        """The numbers of ranks, microbatches and stages of the pipeline.

        They are not checked: the schedule may be unable to run with them.
        """
        return self.pipeline_options.get_size(self.dims.pp, self.microbatches)

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank, 1 without a pipeline."""
        return 1 if self.dims.pp == 1 else self.pipeline_size.stages_per_rank

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 without sharding.

        Stage 1 shards the optimizer state, stage 2 gradients too, and stage 3 parameters too. Stage
        3 is FSDP (``dims.fsdp`` > 1) with ``reshard``. Stage 2 is FSDP without ``reshard``, where
        parameters stay gathered from forward to backward. Stage 1 is a step without FSDP whose
        ``zero1`` names an optimizer.
        """
        if self.dims.is_sharded:
            return 3 if self.reshard else 2
        return 1 if self.zero1 else 0

    @property
    def checkpointing_label(self) -> str:
        """The checkpointing as users write it: ``none``, ``selective``, ``full`` or ``full:K``."""
        if self.checkpoint_every == 1:
            return self.checkpointing
        return f"{self.checkpointing}:{self.checkpoint_every}"

    def count_buckets(self, num_bytes: float) -> int:
        """Return the number of buckets into which data parallelism puts ``num_bytes`` of gradients.

        The last bucket may be partly filled. Torch's default first bucket is smaller than the
        others.
        """
        first = self.bucket_bytes or DEFAULT_FIRST_BUCKET_BYTES
        others = self.bucket_bytes or DEFAULT_BUCKET_BYTES
        return 1 + max(0, math.ceil((num_bytes - first) / others))

    def make_rank_view(self, rank: int) -> "RankView":
        """Return the part of the step that one global rank has: position, stages and layers."""
        return RankView(spec=self, rank=rank)

    def make_stage_view(self, pp_rank: int) -> "RankView":
        """Return the part of the step that the first rank of one pipeline position has.

        ``pp_rank`` is the position along ``pp``. On every other axis the rank is at position 0.
        """
        rank = pp_rank
        for axis in self.dims.order[self.dims.order.index("pp") + 1 :]:
            rank *= self.dims.size(axis)
        return self.make_rank_view(rank)

    @cached_property
    def distinct_views(self) -> tuple["RankView", ...]:
        """One representative of each set of pipeline ranks that do equal work, in pipeline order.

        Ranks do equal work if they have equally many layers of each kind, and if they agree in
        having the embedding and in having the head. Of these ranks, the one with most microbatches
        in flight is taken, because it needs most memory.
        """
        views_by_work: dict[tuple[int, int, bool, bool], list[RankView]] = {}
        for pp_rank in range(self.dims.pp):
            view = self.make_stage_view(pp_rank)
            views_by_work.setdefault(view.work, []).append(view)
        return tuple(
            # Microbatches in flight rise or fall along the pipeline.
            max((views[0], views[-1]), key=lambda view: view.microbatches_in_flight)
            for views in views_by_work.values()
        )

    def with_checkpointing(self, text: str) -> "StepSpec":
        """Return a copy of the step with another checkpointing.

        ``text`` is ``none``, ``selective``, ``full``, or ``full:K`` with a number K. Raises
        ``UserError`` for other texts.
        """
        checkpointing, every = parse_checkpointing(text)
        return replace(self, checkpointing=checkpointing, checkpoint_every=every)

    def with_dims(self, dims: ParallelDims) -> "StepSpec":
        """Return a copy of the step on the mesh ``dims``.

        In a MoE model, the routed experts are spread over ``ep`` and ``etp`` of this mesh.
        """
        moe = self.moe and replace(self.moe, ep=dims.ep, etp=dims.etp)
        return replace(self, dims=dims, moe=moe)

    def with_pipeline(self, **options: Any) -> "StepSpec":
        """Return a copy of the step with some of its pipeline options replaced.

        ``options`` are fields of ``PipelineOptions``, such as ``schedule="gpipe"``.
        """
        return replace(self, pipeline_options=replace(self.pipeline_options, **options))

    def with_batch(self, global_batch: int) -> "StepSpec":
        """Return a copy of the step with the number of microbatches that makes up a global batch.

        ``global_batch`` counts the sequences of all data ranks. Raises ``UserError`` if the data
        ranks and the microbatch size do not divide it.
        """
        dp, fsdp = self.dims.dp, self.dims.fsdp
        sequences = dp * fsdp * self.microbatch
        microbatches, rest = divmod(global_batch, sequences)
        if rest:
            product = f"dp({dp}) * fsdp({fsdp}) * microbatch({self.microbatch}) = {sequences}"
            raise UserError(f"global batch {global_batch} must be a multiple of {product}")
        return replace(self, microbatches=microbatches)

    def find_broken_rule(self, ranks: int = 0) -> str | None:
        """Return the first reason why this step cannot run, None if it can.

        The text is the violation of a rule: ``heads(6) % tp(4) != 0`` means that 4 ranks cannot
        share 6 heads. ``ranks`` is the world size, which must equal the number of ranks in the
        mesh. 0 skips this comparison.
        """
        dims = self.dims
        if self.is_simulated and (self.moe is not None or dims.cp > 1):
            return "compute = simulated does not support experts or cp > 1: use compute=real"
        if self.checkpoint_every > self.shape.layers:
            return f"checkpointing = {self.checkpointing_label} > layers({self.shape.layers})"
        experts = self.moe.experts if self.moe else 0
        has_ffn = not self.moe or self.moe.dense_layers > 0
        return (
            dims.find_broken_rule(ranks or self.ranks, experts)
            or find_indivisible_heads(self.shape, dims.tp, has_ffn=has_ffn)
            or find_indivisible_sequence(self.shape, dims, self.cp_method, self.ulysses)
            or _find_broken_pipeline(self)
            or _find_broken_experts(self)
            or _find_broken_split_backward(self)
        )

    def require_valid(self, ranks: int = 0) -> "StepSpec":
        """Return this step if it can run, otherwise raise ``UserError``.

        The error has the reason that ``find_broken_rule`` returns. ``ranks`` is the world size, 0
        for the number of ranks in the mesh.
        """
        rule = self.find_broken_rule(ranks)
        if rule is not None:
            raise UserError(rule)
        return self


def _find_broken_pipeline(spec: StepSpec) -> str | None:
    """Return the reason why the schedule or torch's runtime cannot run a step's pipeline.

    It is the violation of a rule of the schedule or of torch, such as ``virtual_stages(1) < 2``. The result
    is None if the step can run, or has no pipeline.
    """
    try:
        pipeline = spec.pipeline
    except UserError as error:
        return str(error)
    if pipeline is None:
        return None
    stages = pipeline.size.stages_per_rank
    if spec.dims.is_sharded and stages > MAX_GATHERED_STAGES:
        limit = f"torch's pipeline runtime gathers at most {MAX_GATHERED_STAGES} stages per rank"
        return f"virtual_stages({stages}) > {MAX_GATHERED_STAGES} with fsdp > 1: {limit}"
    return None


def _find_broken_experts(spec: StepSpec) -> str | None:
    """Return the reason why the routed experts of a step cannot be split over its ranks.

    It is the violation, such as ``expert_ffn(100) % etp(3) != 0``. The result is None if the step
    can run, or has no experts.
    """
    if spec.moe is None:
        return None
    tp, etp = spec.dims.tp, spec.dims.etp
    if spec.moe.expert_ffn % etp:
        return f"expert_ffn({spec.moe.expert_ffn}) % etp({etp}) != 0"
    if tp > 1 and not spec.sequence_parallel:
        return "experts need sequence_parallel = true with tp > 1: each rank routes its own tokens"
    return None


def _find_broken_split_backward(spec: StepSpec) -> str | None:
    """Return the reason why a schedule cannot split the backward pass of this step.

    Such a schedule runs input gradients and weight gradients separately. The result is None if the
    step can run, or if its schedule does not split the backward pass.
    """
    if spec.pipeline is None or not spec.pipeline.schedule.splits_backward:
        return None
    if spec.checkpointing != "none":
        conflict = f"checkpointing = {spec.checkpointing}"
    elif spec.dims.is_sharded:
        conflict = "fsdp > 1"
    elif spec.moe:
        conflict = "experts"
    else:
        return None
    text = f"schedule = {spec.pipeline_options.schedule} splits the backward pass"
    return f"{text}, which is not allowed with {conflict}: use schedule=1f1b or interleaved"


def parse_checkpointing(text: str) -> tuple[Checkpointing, int]:
    """Parse a text such as ``full:2`` into the name of the checkpointing and K.

    One layer in K is recomputed. K is 1 for a text without K. Raises ``UserError`` with the allowed
    texts.
    """
    name, separator, every = text.partition(":")
    for checkpointing in CHECKPOINTINGS:
        if name == checkpointing and not separator:
            return checkpointing, 1
    if name == "full" and every.isdecimal() and int(every):
        return "full", int(every)
    raise UserError(
        f"checkpointing = {text!r} is not allowed: "
        f"choose {format_list((*CHECKPOINTINGS, 'full:K'))}"
    )


class LayerKind(NamedTuple):
    """The layers of one rank that are equal: all with an FFN, or all with a mixture of experts."""

    symbol: str
    """The symbol for the number of these layers in equations.

    It is ``layers`` in a dense model, otherwise ``moe_layers`` or ``dense_layers``.
    """
    layers: int
    """The number of these layers on the rank."""
    moe: Moe | None
    """The mixture of experts in place of the FFN, None for layers with an FFN."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank's part of a step: its position on the mesh, its stages and its number of layers.

    The rank's communication, memory and FLOPs are computed from this object.
    """

    spec: StepSpec
    """The step of all ranks."""
    rank: int
    """The global rank."""

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """The rank's position on each axis of the mesh except ``ep`` and ``etp``, keyed by axis."""
        return self.spec.dims.coordinate(self.rank)

    @property
    def pp_rank(self) -> int:
        """The rank's position along the pipeline, from 0."""
        return self.coordinate["pp"]

    @cached_property
    def layers_by_stage(self) -> tuple[int, ...]:
        """The number of layers in each pipeline stage of the whole model, in order of stages.

        Without a pipeline, the model is one stage.
        """
        pipeline = self.spec.pipeline
        return pipeline.layers_by_stage if pipeline else (self.spec.shape.layers,)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The indices of the pipeline stages on this rank."""
        pipeline = self.spec.pipeline
        return pipeline.list_stages(self.pp_rank) if pipeline else (0,)

    @cached_property
    def layers(self) -> int:
        """The number of layers on this rank, over all of its stages."""
        return sum(self.layers_by_stage[stage] for stage in self.stages)

    @cached_property
    def dense_layers(self) -> int:
        """The number of this rank's layers that have an FFN and no experts in a MoE model.

        0 for a dense model.
        """
        total = 0
        for stage in self.stages:
            earlier = sum(self.layers_by_stage[:stage])
            remaining = self.spec.dense_layers - earlier
            total += max(0, min(remaining, self.layers_by_stage[stage]))
        return total

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The rank's layers as groups of equal layers.

        A dense model has one group. A MoE model has the layers with experts, then those without.
        Empty groups are left out.
        """
        moe = self.spec.moe
        if moe is None:
            return (LayerKind("layers", self.layers, None),)
        kinds = (
            LayerKind("moe_layers", self.layers - self.dense_layers, moe),
            LayerKind("dense_layers", self.dense_layers, None),
        )
        return tuple(kind for kind in kinds if kind.layers)

    @cached_property
    def recomputed_layers(self) -> int:
        """The number of this rank's layers whose forward pass is repeated in backward."""
        return self._count_recomputed(0)

    @cached_property
    def recomputed_dense_layers(self) -> int:
        """The number of this rank's dense layers of a MoE model that backward recomputes."""
        return self.recomputed_layers - self._count_recomputed(self.spec.dense_layers)

    def _count_recomputed(self, first: int) -> int:
        """Return the number of this rank's layers that backward recomputes.

        Only layers with number ``first`` or higher in the model count.
        """
        if self.spec.checkpointing == "none":
            return 0
        every, count = self.spec.checkpoint_every, 0
        for stage in self.stages:
            start = sum(self.layers_by_stage[:stage])
            stop = start + self.layers_by_stage[stage]
            start = min(stop, max(start, first))
            count += -(-stop // every) - -(-start // every)
        return count

    @property
    def has_embedding(self) -> bool:
        """True if this rank has the first pipeline stage, which has the embeddings."""
        return 0 in self.stages

    @property
    def has_head(self) -> bool:
        """True if this rank has the last pipeline stage, which has the final norm and the head."""
        return len(self.layers_by_stage) - 1 in self.stages

    @property
    def work(self) -> tuple[int, int, bool, bool]:
        """A key of this rank's work. Pipeline ranks with equal keys do equal work.

        The elements are the number of all layers, the number of those with an FFN in a MoE model (0
        in a dense model), True if the rank has the embedding, and True if it has the head.
        """
        return self.layers, self.dense_layers, self.has_embedding, self.has_head

    @property
    def microbatches_in_flight(self) -> float:
        """The maximum number of microbatches whose activations this rank holds together.

        A microbatch in one of several stages of the rank counts as 1 / stages. The result is 1
        without a pipeline.
        """
        pipeline = self.spec.pipeline
        if pipeline is None:
            return 1.0
        return pipeline.schedule.microbatches_in_flight(self.pp_rank, pipeline.size)

    @property
    def logits_in_flight(self) -> float:
        """The maximum number of microbatches whose logits this rank holds at once for backward.

        It is 0 on pipeline ranks without the head, and 1 without a pipeline.
        """
        pipeline = self.spec.pipeline
        if pipeline is None:
            return 1.0
        return pipeline.schedule.logits_in_flight(self.pp_rank, pipeline.size)

    @property
    def label(self) -> str:
        """A text for reports, such as ``pp rank 0: 16 layers with embedding``."""
        label = f"pp rank {self.pp_rank}: {self.layers} layers"
        if self.has_embedding:
            label += " with embedding"
        if self.has_head:
            label += " and head" if self.has_embedding else " with head"
        return label

    @cached_property
    def symbols(self) -> dict[str, float]:
        """The values of the symbols in equations of this rank's bytes, keyed by symbol.

        ``tokens`` is the number of this rank's tokens of a microbatch inside attention and FFN
        blocks (``StepSpec.local_tokens``), and ``sharded_tokens`` between these blocks. ``layers``
        is the number of this rank's layers. In a MoE model, ``moe_layers`` of them have experts and
        ``dense_layers`` an FFN. A symbol that starts with ``recomputed_`` counts those of these
        layers that backward recomputes. ``cp``, ``tp``, ``ep`` and ``etp`` are sizes of axes. All
        other symbols are fields or properties of ``StepSpec``, ``Shape`` or ``Moe`` with the same
        name. Only a MoE model has the symbols of experts.
        """
        spec, shape = self.spec, self.spec.shape
        symbols = {
            "microbatch": spec.microbatch,
            "microbatches": spec.microbatches,
            "tokens": spec.local_tokens,
            "sharded_tokens": spec.sharded_tokens,
            "hidden": shape.hidden,
            "vocabulary": shape.vocabulary,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
            "value_size": shape.value_size,
            "ffn": shape.ffn,
            "bytes_per_element": spec.bytes_per_element,
            "reduce_bytes": spec.reduce_bytes,
            "layers": self.layers,
            "dense_layers": self.dense_layers,
            "moe_layers": self.layers - self.dense_layers,
            "recomputed_layers": self.recomputed_layers,
            "recomputed_dense_layers": self.recomputed_dense_layers,
            "recomputed_moe_layers": self.recomputed_layers - self.recomputed_dense_layers,
            "cp": spec.dims.cp,
            "tp": spec.dims.tp,
        }
        if spec.moe is not None:
            symbols |= {
                "experts": spec.moe.experts,
                "top_k": spec.moe.top_k,
                "expert_ffn": spec.moe.expert_ffn,
                "shared": spec.moe.shared,
                "ep": spec.dims.ep,
                "etp": spec.dims.etp,
            }
        return {name: float(value) for name, value in symbols.items()}
