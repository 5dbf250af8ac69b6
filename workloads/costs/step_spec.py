"""A training step as one description, for execution, costs and the planner. Pure."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from parbench.bench.text import UserError, format_list, suggest_similar
from parbench.workloads.context_parallel.context_methods import (
    ContextMethod,
    find_context_method,
)
from parbench.workloads.costs.divisibility import (
    find_indivisible_heads,
    find_indivisible_sequence,
)
from parbench.workloads.expert_parallel.moe_case import Moe
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
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_case import (
    Pipeline,
    PipelineOptions,
    format_checkpointing_refusal,
)
from parbench.workloads.pipeline_parallel.schedule import PipelineSize

ZeroOne = Literal["", "distributed", "zero_redundancy"]
MAX_GATHERED_STAGES = 3
"""The stages per rank that torch's pipeline runtime keeps gathered under FSDP."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """A training step: the model, its mesh, its batch, and how each parallelism works."""

    shape: Shape
    dims: ParallelDims = field(default_factory=ParallelDims)
    name: str = ""
    microbatch: int = 1  # sequences
    microbatches: int = 1  # per data rank and step
    bytes_per_element: int = 2  # of weights and activations
    reduce_bytes: int = 4  # per element of a gradient that is reduced
    state: Widths | None = None  # None = the usual widths of bytes_per_element
    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 1  # full checkpointing recomputes one layer in so many
    fused: bool = False  # backward computes norms and activation functions again (torch.compile)
    sequence_parallel: bool = True  # shard the tokens between blocks over tp
    zero1: ZeroOne = ""  # how the optimizer of data-parallel replicas is sharded
    reshard: bool = True  # FSDP frees parameters after forward
    no_sync: bool = True  # reduce gradients in the last microbatch only
    bucket_bytes: int = 0  # the size of a bucket of gradients, 0 = torch's default
    prefetch: bool = False  # FSDP gathers parameters one layer ahead explicitly
    pipeline_options: PipelineOptions = field(default_factory=PipelineOptions)
    cp_method: str = "zigzag"
    ulysses: int = 0  # ranks of cp that exchange heads, in usp; 0 = half
    moe: Moe | None = None
    padding: float = 0.0  # mean share of a sequence's tokens that have no loss
    simulated_seconds: float | None = None  # of a microbatch's forward pass, None = real compute
    reference_fits: bool = True  # a single process of this size fits in memory next to the step

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The stages and their order, None without ``pp``.

        Raises ``UserError`` if the layers or microbatches do not fit the schedule.
        """
        if self.dims.pp == 1:
            return None
        return self.pipeline_options.build(self.dims.pp, self.microbatches, self.shape.layers)

    @property
    def order(self) -> PipelineOrder:
        """The actions of the pipeline. Requires ``pipeline`` not to be None."""
        assert self.pipeline is not None, "a step without pp has no order of actions"
        return self.pipeline.order

    @property
    def ranks(self) -> int:
        return self.dims.ranks

    @property
    def dense_layers(self) -> int:
        """The number of first layers of a MoE model, which have an FFN in place of experts."""
        return self.moe.dense_layers if self.moe else 0

    @property
    def global_batch(self) -> int:
        """The number of sequences in a step over all ranks."""
        return self.dims.dp * self.dims.fsdp * self.num_sequences

    @property
    def num_sequences(self) -> int:
        """The number of sequences in a step of one data rank."""
        return self.microbatch * self.microbatches

    @property
    def tokens(self) -> int:
        """The number of tokens in a step over all ranks."""
        return self.global_batch * self.shape.sequence

    @cached_property
    def local_tokens(self) -> int:
        """The number of tokens of a microbatch on one rank of ``cp``."""
        return self.microbatch * self.shape.sequence // self.dims.cp

    @cached_property
    def sharded_tokens(self) -> int:
        """The number of tokens of a microbatch that a rank holds between the blocks of a layer."""
        return self.local_tokens // self.dims.tp if self.sequence_parallel else self.local_tokens

    @property
    def ulysses_ranks(self) -> int:
        """The ranks of ``cp`` that exchange heads. The others of ``cp`` form a ring."""
        return self.context_method.compute_ulysses(self.dims.cp, self.ulysses)

    @property
    def context_method(self) -> ContextMethod:
        return find_context_method(self.cp_method)

    @property
    def has_master_weights(self) -> bool:
        """True if weights of 16 bits have float32 masters."""
        return self.bytes_per_element < 4

    @property
    def widths(self) -> Widths:
        """The bytes per element of parameters, gradients, master weights and moments."""
        return self.state or (MIXED if self.has_master_weights else SINGLE)

    @property
    def is_simulated(self) -> bool:
        """True if compute is simulated."""
        return self.simulated_seconds is not None

    @property
    def gradient_syncs(self) -> int:
        """The reductions of gradients per step. A pipeline reduces after its last backward pass."""
        return 1 if self.no_sync or self.dims.pp > 1 else self.microbatches

    @property
    def forward_passes(self) -> float:
        """The mean number of forward passes of a layer per microbatch, with recomputation."""
        return 1.0 if self.checkpointing == "none" else 1.0 + 1 / self.checkpoint_every

    @property
    def pipeline_size(self) -> PipelineSize:
        """The size of the pipeline, without a check that it is possible."""
        return self.pipeline_options.get_size(self.dims.pp, self.microbatches)

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank."""
        return 1 if self.dims.pp == 1 else self.pipeline_size.stages_per_rank

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO: 1 shards the optimizer, 2 gradients too, 3 parameters too."""
        if self.dims.is_sharded:
            return 3 if self.reshard else 2
        return 1 if self.zero1 else 0

    @property
    def checkpointing_label(self) -> str:
        if self.checkpoint_every == 1:
            return self.checkpointing
        return f"{self.checkpointing}:{self.checkpoint_every}"

    def count_buckets(self, num_bytes: float) -> int:
        """Return the number of full buckets that ``num_bytes`` of gradients make."""
        first = self.bucket_bytes or DEFAULT_FIRST_BUCKET_BYTES
        others = self.bucket_bytes or DEFAULT_BUCKET_BYTES
        return 1 + max(0, math.ceil((num_bytes - first) / others))

    def rank_view(self, rank: int) -> "RankView":
        """Return a rank's part of the step."""
        return RankView(spec=self, rank=rank)

    def stage_view(self, pp_rank: int) -> "RankView":
        """Return the part of the first rank at position ``pp_rank`` along ``pp``."""
        rank = pp_rank
        for axis in self.dims.order[self.dims.order.index("pp") + 1 :]:
            rank *= self.dims.size(axis)
        return self.rank_view(rank)

    @cached_property
    def distinct_views(self) -> tuple["RankView", ...]:
        """One rank of each kind along the pipeline, for each kind the rank with most memory."""
        views_by_kind: dict[StageKind, list[RankView]] = {}
        for pp_rank in range(self.dims.pp):
            view = self.stage_view(pp_rank)
            views_by_kind.setdefault(view.kind, []).append(view)
        return tuple(
            # Microbatches in flight rise or fall along the pipeline.
            max((views[0], views[-1]), key=lambda view: view.microbatches_in_flight)
            for views in views_by_kind.values()
        )

    def with_checkpointing(self, text: str) -> "StepSpec":
        """Return the step with ``none``, ``selective``, ``full``, or ``full:K``.

        Raises ``UserError`` for other texts.
        """
        checkpointing, every = parse_checkpointing(text)
        return replace(self, checkpointing=checkpointing, checkpoint_every=every)

    def with_dims(self, dims: ParallelDims) -> "StepSpec":
        """Return the step on another mesh."""
        moe = self.moe and replace(self.moe, ep=dims.ep, etp=dims.etp)
        return replace(self, dims=dims, moe=moe)

    def with_pipeline(self, **options: Any) -> "StepSpec":
        """Return a copy with some fields of its pipeline options replaced."""
        return replace(self, pipeline_options=replace(self.pipeline_options, **options))

    def with_batch(self, global_batch: int) -> "StepSpec":
        """Return the step with the microbatches that make a global batch.

        Raises ``UserError`` if the data ranks do not divide the batch.
        """
        dp, fsdp = self.dims.dp, self.dims.fsdp
        microbatches, rest = divmod(global_batch, dp * fsdp * self.microbatch)
        if rest or not microbatches:
            product = f"dp({dp}) * fsdp({fsdp}) * microbatch({self.microbatch})"
            raise UserError(f"global batch({global_batch}) % ({product}) != 0, or is less")
        return replace(self, microbatches=microbatches)

    def find_broken_rule(self, ranks: int = 0) -> str | None:
        """Return the first equation that the step does not satisfy, None if it can run.

        ``ranks`` is the world size. 0 means the number of ranks of the mesh.
        """
        dims = self.dims
        experts = self.moe.experts if self.moe else 0
        return (
            dims.find_broken_rule(ranks or self.ranks, experts)
            or find_indivisible_heads(self.shape, dims.tp, has_experts=self.moe is not None)
            or find_indivisible_sequence(self.shape, dims, self.cp_method, self.ulysses)
            or _find_broken_pipeline(self)
            or _find_broken_experts(self)
            or _find_broken_split_backward(self)
        )

    def require(self, gpus: int) -> None:
        """Raise ``UserError`` if the mesh does not have ``gpus`` ranks or breaks another rule."""
        if self.ranks != gpus:
            sizes = {name: self.dims.size(name) for name in self.dims.order}
            axes = [f"{name}({size})" for name, size in sizes.items() if size > 1]
            product = " * ".join(axes) or "dp(1)"
            raise UserError(f"--mesh {product} = {self.ranks} != --gpus({gpus})")
        rule = self.find_broken_rule()
        if rule is not None:
            raise UserError(f"--mesh {self.dims.label} cannot carry {self.name}: {rule}")


def _find_broken_pipeline(spec: StepSpec) -> str | None:
    """Return the rule of the schedule or of torch's runtime that a pipeline breaks, or None."""
    try:
        pipeline = spec.pipeline
    except UserError as error:
        return str(error)
    if pipeline is None:
        return None
    stages_per_rank, fsdp = pipeline.size.stages_per_rank, spec.dims.fsdp
    if fsdp > 1 and stages_per_rank > MAX_GATHERED_STAGES:
        reason = "torch's runtime keeps so many stages gathered and would gather the others again"
        return f"chunks({stages_per_rank}) > {MAX_GATHERED_STAGES} with fsdp({fsdp}): {reason}"
    return None


def _find_broken_experts(spec: StepSpec) -> str | None:
    """Return the rule that the experts of a step break, None if they break none."""
    if spec.moe is None:
        return None
    tp, etp = spec.dims.tp, spec.dims.etp
    if spec.moe.expert_ffn % etp:
        return f"expert_ffn({spec.moe.expert_ffn}) % etp({etp}) != 0"
    if spec.moe.dense_layers and spec.shape.ffn % tp:
        return f"ffn({spec.shape.ffn}) % tp({tp}) != 0"
    if tp > 1 and not spec.sequence_parallel:
        return "experts need sequence_parallel = true with tp > 1: each rank routes its own tokens"
    return None


def _find_broken_split_backward(spec: StepSpec) -> str | None:
    """Return the reason why a schedule cannot split the backward pass of this step, or None."""
    if spec.pipeline is None or not spec.pipeline.schedule.splits_backward:
        return None
    schedule = spec.pipeline.schedule.name
    if spec.checkpointing != "none":
        return format_checkpointing_refusal(schedule, spec.checkpointing)
    if spec.dims.is_sharded:
        reason = (
            f"fsdp({spec.dims.fsdp}): torch's FSDP reduces gradients after a full backward pass"
        )
    elif spec.moe is not None:
        reason = f"experts({spec.moe.experts}): a backward pass combines their tokens only once"
    else:
        return None
    return f"schedule = {schedule} splits the backward pass, which is not allowed with {reason}"


def parse_checkpointing(text: str) -> tuple[Checkpointing, int]:
    """Return the checkpointing of a text, and K if one layer in K is recomputed (1 for all).

    Raises ``UserError`` with the allowed texts.
    """
    name, separator, every = text.partition(":")
    for checkpointing in CHECKPOINTINGS:
        if name == checkpointing and not separator:
            return checkpointing, 1
    if name == "full" and every.isdecimal() and int(every):
        return "full", int(every)
    allowed = format_list((*CHECKPOINTINGS, "full:K"))
    hint = suggest_similar(name, CHECKPOINTINGS)
    raise UserError(f"checkpointing {text!r} is not {allowed}{hint}")


StageKind = tuple[int, int, bool, bool]
"""The number of layers, the number without experts, True with embedding, True with head."""


class LayerKind(NamedTuple):
    """The number of equal layers on a rank, and their mixture of experts."""

    symbol: str  # the name of ``layers`` in equations
    layers: int
    moe: Moe | None  # in place of the FFN


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank's part of a step, from which its calls, its memory and its FLOPs follow."""

    spec: StepSpec
    rank: int

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """The rank's position on each axis, keyed by axis."""
        return self.spec.dims.coordinate(self.rank)

    @property
    def pp_rank(self) -> int:
        return self.coordinate["pp"]

    @cached_property
    def layers_by_stage(self) -> tuple[int, ...]:
        """The number of layers of each pipeline stage of the model."""
        pipeline = self.spec.pipeline
        return pipeline.layers_by_stage if pipeline else (self.spec.shape.layers,)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of the rank."""
        pipeline = self.spec.pipeline
        return pipeline.stages_of(self.pp_rank) if pipeline else (0,)

    @cached_property
    def layers(self) -> int:
        """The number of layers on the rank."""
        return sum(self.layers_by_stage[stage] for stage in self.stages)

    @cached_property
    def dense_layers(self) -> int:
        """The number of the rank's layers that have an FFN in a MoE model."""
        total = 0
        for stage in self.stages:
            earlier = sum(self.layers_by_stage[:stage])
            remaining = self.spec.dense_layers - earlier
            total += max(0, min(remaining, self.layers_by_stage[stage]))
        return total

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The rank's layers by kind: all of a dense model, or those with experts and without."""
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
        """The number of the rank's layers that backward recomputes."""
        return self._count_recomputed(0)

    @cached_property
    def recomputed_dense_layers(self) -> int:
        """The number of the rank's dense layers that backward recomputes."""
        return self.recomputed_layers - self._count_recomputed(self.spec.dense_layers)

    def _count_recomputed(self, first: int) -> int:
        """Return the number of the rank's recomputed layers, from layer number ``first`` on."""
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
        return 0 in self.stages

    @property
    def has_head(self) -> bool:
        return len(self.layers_by_stage) - 1 in self.stages

    @property
    def kind(self) -> StageKind:
        """The layers and modules of the rank. Ranks of equal kind do equal work."""
        return self.layers, self.dense_layers, self.has_embedding, self.has_head

    @property
    def microbatches_in_flight(self) -> float:
        """The maximum number of microbatches whose activations the rank holds at once."""
        pipeline = self.spec.pipeline
        if pipeline is None:
            return 1.0
        return pipeline.schedule.microbatches_in_flight(self.pp_rank, pipeline.size)

    @property
    def logits_in_flight(self) -> float:
        """The maximum number of microbatches whose logits the rank holds at once."""
        pipeline = self.spec.pipeline
        if pipeline is None:
            return 1.0
        return pipeline.schedule.logits_in_flight(self.pp_rank, pipeline.size)

    @property
    def label(self) -> str:
        parts = [
            name
            for name, exists in (("embedding", self.has_embedding), ("head", self.has_head))
            if exists
        ]
        suffix = f" with {' and '.join(parts)}" if parts else ""
        return f"pp rank {self.pp_rank}: {self.layers} layers{suffix}"

    @cached_property
    def symbols(self) -> dict[str, float]:
        """The values of the symbols of equations, by name.

        ``tokens`` is the number of tokens of a microbatch inside a block, and ``sharded_tokens``
        between the blocks. ``layers`` counts the rank's layers, ``moe_layers`` only those with
        experts.
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
