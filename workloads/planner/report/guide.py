"""The tables of ``parbench plan guide``: what each strategy sends, holds and needs. Pure.

``docs/guides/choose-parallelism.md`` explains when to use each.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parbench.bench.results.tables import Document, Row, Section, Table
from parbench.workloads.costs.communication_pattern import Call, list_busiest_calls
from parbench.workloads.costs.memory import compute_rank_memory, compute_state_memory
from parbench.workloads.costs.parameter_table import count_elements
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import CHECKPOINTINGS
from parbench.workloads.planner.candidates import balance_layers, list_divisors, place_step
from parbench.workloads.planner.describe import describe_parameters
from parbench.workloads.planner.dry_run import GIGA, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.report.columns import make_column

SYMBOLS = (
    "One sequence per microbatch, no checkpointing. Psi parameters of e bytes, of which H are in "
    "norm and head and W are replicated by TP. Gradients have g bytes. n ranks, r = (n - 1) / n. "
    "HSDP has n replicas of f shards. L layers, of which D have an FFN in place of experts. M "
    "microbatches of b sequences of s tokens. Per token h hidden elements, q elements of queries "
    "and results, k of keys and values."
)
"""The meaning of the symbols in ``Strategy.formula``, printed below the table of strategies."""


@dataclass(frozen=True)
class Strategy:
    """A strategy of parallel training such as FSDP, and a step that uses no other strategy."""

    name: str
    """The name of the strategy in tables, such as "ZeRO-1" or "TP + SP"."""
    splits: str
    """The tensors or work that ranks divide among themselves, such as "matrices"."""
    link: str
    """The slowest suitable links, and whether compute hides the calls, as a text for the table.

    An example is "intra-node, exposed".
    """
    formula: str
    """The formula of the bytes that a rank sends per step, in the symbols of ``SYMBOLS``."""
    axes: str
    """The mesh axes of the strategy's calls, separated by blanks, such as "dp edp"."""
    spec: StepSpec
    """The training step on a mesh of only this strategy."""
    ease: str = "easy"
    """The effort of adding the strategy to a training program, such as "hard: splits matrices"."""
    batch: str = "1 sequence per rank"
    """The smallest global batch that the ranks allow, such as "1 microbatch per rank"."""

    @property
    def calls(self) -> Sequence[Call]:
        """The communication calls on ``axes`` in a step, of the rank that sends most bytes."""
        return list_busiest_calls(self.spec.distinct_views, self.axes.split())

    @property
    def sent_bytes(self) -> float:
        """The bytes per step that the rank that sends most sends on ``axes``."""
        return sum(call.sent for call in self.calls)


_ONCE = "any link, once per step"
_AHEAD = "inter-node, prefetched one layer ahead"
_TENSOR = "intra-node, exposed"
_ONE_SEQUENCE = "1 sequence"
# The formula and the link of a strategy, by method of context parallelism.
_CONTEXT = {
    "zigzag": ("L * b * s * k * (2 * e + 4) * r", "neighbors, hidden"),
    "allgather_kv": ("3 * L * b * s * k * e * r", _TENSOR),
    "ulysses": ("2 * L * b * s * (q + k) * e * r / n", _TENSOR),
}


def list_strategies(step: StepSpec, ranks: int, gpus_per_node: int) -> list[Strategy]:
    """Return the strategies of parallel training that a model allows.

    Each has a step on a mesh of only this strategy. Data-parallel strategies use all ``ranks``, and
    other strategies at most the GPUs of one node.
    """
    strategies = [
        *_list_data_strategies(step, ranks, gpus_per_node),
        *_list_model_strategies(step, min(gpus_per_node, ranks)),
    ]
    return [
        strategy
        for strategy in strategies
        if strategy.spec.ranks > 1 and not strategy.spec.find_broken_rule()
    ]


def _list_data_strategies(step: StepSpec, ranks: int, gpus_per_node: int) -> list[Strategy]:
    """Return the data-parallel strategies DDP, ZeRO-1, ZeRO-2, FSDP and HSDP, each on all ranks.

    HSDP shards parameters over the ranks of a node, at most ``gpus_per_node``.
    """
    sharded = place_step(step, ParallelDims(fsdp=ranks))
    replicated = place_step(step, ParallelDims(dp=ranks))
    zero1 = replace(replicated, zero1="distributed")
    zero2 = replace(sharded, reshard=False)
    node = min(gpus_per_node, ranks)
    hybrid = place_step(step, ParallelDims(dp=ranks // node, fsdp=node))
    gathers = "2 * Psi * e - H * e"
    shards = f"({gathers} + Psi * g) * r"
    hybrid_bytes = f"({gathers} + Psi * g) * (f - 1) / f + 2 * Psi * g * r / f"
    return [
        Strategy("DDP", "the batch", _ONCE, "2 * Psi * g * r", "dp edp", replicated),
        Strategy("ZeRO-1", "optimizer", _ONCE, "Psi * (g + e) * r", "dp edp", zero1),
        Strategy("ZeRO-2", "+ gradients", _AHEAD, "Psi * (e + g) * r", "fsdp efsdp", zero2),
        Strategy("ZeRO-3, FSDP", "+ parameters", _AHEAD, shards, "fsdp efsdp", sharded),
        Strategy(
            "HSDP",
            "state in a node",
            "intra-node, gradients inter-node",
            hybrid_bytes,
            "fsdp efsdp dp",
            hybrid,
        ),
    ]


def _list_model_strategies(step: StepSpec, node: int) -> list[Strategy]:
    """Return the strategies that split the model: TP, PP, context and expert parallelism.

    Each uses as many ranks of a node as the model allows. ``node`` is the number of GPUs of a node.
    """
    tensor = _resize_axis(step, "tp", node)
    without_sp = replace(tensor, sequence_parallel=False)
    pipeline = _resize_axis(replace(step, microbatches=4 * node), "pp", node)
    pipeline = replace(pipeline, microbatches=4 * pipeline.dims.pp)
    layers = "8 * L"
    moe_layers = "L"
    if step.moe:
        layers = "4 * (L + D)" if step.moe.dense_layers else "4 * L"
        moe_layers = "(L - D)" if step.moe.dense_layers else "L"
    activations = f"({layers} + 4) * b * s * h * e"
    tensor_bytes = f"({activations} + 2 * W * g) * r"
    messages = "2 * M * b * s * h * e" if pipeline.dims.pp > 2 else "M * b * s * h * e"
    code = "hard: splits matrices"
    stages = "hard: needs stages of equal work"
    batch = "1 microbatch per rank"
    tokens = "matrices, tokens"
    strategies = [
        Strategy(
            "TP", "matrices", _TENSOR, f"{activations} * r", "tp", without_sp, code, _ONE_SEQUENCE
        ),
        Strategy("TP + SP", tokens, _TENSOR, tensor_bytes, "tp", tensor, code, _ONE_SEQUENCE),
        Strategy("PP", "layers", "inter-node, few bytes", messages, "pp", pipeline, stages, batch),
    ]
    for method, (formula, link) in _CONTEXT.items():
        spec = _resize_axis(replace(step, cp_method=method), "cp", node)
        ease = "medium: replaces attention"
        name = f"CP, {method}"
        strategies.append(
            Strategy(name, "sequences", link, formula, "cp", spec, ease, _ONE_SEQUENCE)
        )
    if step.moe:
        ep = math.gcd(node, step.moe.experts)
        formula = f"4 * {moe_layers} * b * s * top_k * h * e * r"
        spec = place_step(step, ParallelDims(dp=ep, ep=ep))
        ease = "medium: needs balanced routing"
        strategies.append(Strategy("EP", "experts", _TENSOR, formula, "ep", spec, ease))
    return strategies


def _resize_axis(step: StepSpec, axis: str, node: int) -> StepSpec:
    """Return the step on a mesh with only the axis ``axis``, as large as possible within a node.

    The size of the axis divides ``node``, the number of GPUs of a node, and satisfies all
    divisibility rules of the step. If only size 1 does, the result is a step on one rank.
    """
    for size in reversed(list_divisors(node)):
        spec = place_step(step, ParallelDims().resize(**{axis: size}))
        spec = spec.with_pipeline(
            layers_per_stage=balance_layers(spec.shape, spec.moe, spec.dims.pp, 1, "1f1b")
        )
        if not spec.find_broken_rule():
            return spec
    return step


def compute_state(spec: StepSpec) -> float:
    """Return the bytes of parameters, gradients and optimizer state of the rank that holds most.

    They include the full parameters that ZeRO-2 keeps between forward and backward.
    """
    states: list[float] = []
    for view in spec.distinct_views:
        gathered = 0.0
        if spec.dims.is_sharded and not spec.reshard:
            gathered = count_elements(view) * spec.bytes_per_element
        states.append(compute_state_memory(view).state + gathered)
    return max(states)


def make_guide_document(step: StepSpec, gpus: int, hardware: Hardware) -> Document:
    """Return the document of ``parbench plan guide`` for the model of ``step`` on ``gpus`` GPUs.

    It compares the strategies, batch sizes and recomputation in tables.
    """
    shape = step.shape
    heading = (
        f"{step.name}: {describe_parameters(step)}, {shape.layers} layers of {shape.hidden}, "
        f"sequence {shape.sequence}, {gpus} GPUs ({hardware.name}), {hardware.gpus_per_node} per "
        "node"
    )
    strategies = list_strategies(step, gpus, hardware.gpus_per_node)
    batch_tables = [
        _make_regime_table(step, gpus, hardware),
        _make_recomputation_table(step, gpus, hardware),
    ]
    sections = [
        Section("strategies", "Strategies", tables=[_make_strategy_table(strategies)]),
        Section("batch", "Batch", tables=batch_tables),
    ]
    return Document(name=f"guide {step.name} on {gpus} GPUs", heading=heading, sections=sections)


def _make_strategy_table(strategies: Sequence[Strategy]) -> Table:
    """Return the table that compares strategies: their calls, bytes, memory and ease of use."""
    return Table(
        "table",
        "Strategies",
        caption="one strategy at a time",
        columns=[
            make_column("strategy"),
            make_column("ranks", description="all, or as many of a node as the model allows"),
            make_column("splits", description="what each rank has a part of"),
            make_column("batch", "minimum global batch"),
            make_column("ease", "ease of use"),
            make_column("calls", description="per step with 1 microbatch (PP: 4 per rank)"),
            make_column("formula", "bytes a rank sends", description="of the rank that sends most"),
            make_column("sent_gb", "sent", "GB", "the same, counted call by call"),
            make_column("state_gb", "state", "GB", "parameters, gradients and optimizer"),
            make_column("activations_gb", "activations", "GB", "without checkpointing"),
            make_column("link", description="the slowest suitable links, calls hidden or exposed"),
        ],
        rows=[_make_strategy_row(strategy) for strategy in strategies],
        notes=[
            SYMBOLS,
            "With gradients in float32 and parameters in 16 bits (g = 2 * e), ZeRO-3 sends about as "
            "much as DDP. With equal sizes (g = e), it sends 1.5 times as much.",
        ],
    )


def _make_strategy_row(strategy: Strategy) -> Row:
    """Return the row of ``_make_strategy_table`` for a strategy.

    Activations are those of the rank that holds most memory.
    """
    spec = strategy.spec
    memories = [compute_rank_memory(view) for view in spec.distinct_views]
    memory = max(memories, key=lambda memory: memory.total)
    calls_by_op: Counter[str] = Counter()
    for call in strategy.calls:
        calls_by_op[call.op] += round(call.times)
    ranks = str(spec.ranks)
    if spec.dims.ep == 1:
        ranks = " x ".join(map(str, spec.dims.sizes.values()))
    return {
        "strategy": strategy.name,
        "ranks": ranks,
        "splits": strategy.splits,
        "batch": strategy.batch,
        "ease": strategy.ease,
        "calls": ", ".join(f"{count} {op}" for op, count in calls_by_op.items()),
        "formula": strategy.formula,
        "sent_gb": strategy.sent_bytes / GIGA,
        "state_gb": compute_state(spec) / GIGA,
        "activations_gb": memory.activations / GIGA,
        "link": strategy.link,
    }


def _make_regime_table(step: StepSpec, gpus: int, hardware: Hardware) -> Table:
    """Return a table of communication relative to compute for FSDP and FSDP with TP.

    Each row has a number of tokens per GPU, and the simplest mesh whose communication takes at most
    as long as its compute, so that compute could hide it.
    """
    token_counts = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    return Table(
        "regimes",
        "Batch regimes",
        caption="all communication of a step relative to its compute, by tokens per GPU",
        columns=[
            make_column("tokens", "tokens per GPU"),
            make_column("fsdp", "FSDP", "percent", "communication / compute"),
            make_column("fsdp_tp", "FSDP with TP", "percent", "communication / compute"),
            make_column("tp", "size of TP", description="the one with the smallest ratio"),
            make_column("regime", description="the simplest mesh whose ratio is at most 1"),
        ],
        rows=[_make_regime_row(step, gpus, tokens, hardware) for tokens in token_counts],
        notes=["Communication bound: in neither mesh can compute hide all communication."],
    )


def _make_regime_row(step: StepSpec, gpus: int, tokens: int, hardware: Hardware) -> Row:
    """Return the row of ``_make_regime_table`` for ``tokens`` tokens per GPU.

    The row has the ratio of communication to compute for FSDP, and for FSDP with TP of the size
    with the smallest ratio. With TP, the ranks of a ``tp`` group share a microbatch of ``tokens``
    times the size of ``tp``, so that the tokens per GPU are the same. A ratio is None if the model
    does not allow the mesh. The last column is the simplest mesh whose ratio is at most 1: FSDP,
    otherwise FSDP with TP, otherwise "communication bound". ``gpus`` is the number of GPUs of the
    mesh.
    """
    ratio_by_tp: dict[int, float] = {}
    for tp in list_divisors(hardware.gpus_per_node):
        dims = ParallelDims(fsdp=gpus // tp, tp=tp)
        if dims.ranks != gpus or 1 < tp == gpus:
            continue
        ratio = _compute_comm_ratio(step, dims, tokens * tp, hardware)
        if ratio is not None:
            ratio_by_tp[tp] = ratio
    sharded_ratio = ratio_by_tp.pop(1, None)
    best_tp = min(ratio_by_tp, key=lambda tp: ratio_by_tp[tp], default=0)
    mixed_ratio = ratio_by_tp.get(best_tp)
    regime = "communication bound"
    if sharded_ratio is not None and sharded_ratio <= 1:
        regime = "FSDP"
    elif mixed_ratio is not None and mixed_ratio <= 1:
        regime = "FSDP with TP"
    return {
        "tokens": f"{tokens:,}",
        "fsdp": sharded_ratio,
        "fsdp_tp": mixed_ratio,
        "tp": f"tp={best_tp}" if best_tp else None,
        "regime": regime,
    }


def _compute_comm_ratio(
    step: StepSpec, dims: ParallelDims, tokens: int, hardware: Hardware
) -> float | None:
    """Return the seconds of all communication of a step, divided by its seconds of compute.

    The step is on the mesh ``dims``, and each data rank has one microbatch of ``tokens`` tokens.
    The result is None if the model does not allow the mesh.
    """
    sequence = min(tokens, step.shape.sequence)
    shape = replace(step.shape, sequence=sequence)
    spec = place_step(replace(step, shape=shape, microbatch=tokens // sequence), dims)
    if spec.find_broken_rule():
        return None
    run = dry_run(spec, hardware)
    return sum(axis.seconds for axis in run.axes) / run.compute_seconds


def _make_recomputation_table(step: StepSpec, gpus: int, hardware: Hardware) -> Table:
    """Return a table of tokens per second per GPU, by checkpointing (rows) and microbatch.

    The model uses FSDP on all GPUs. A cell is empty if the step does not fit in memory.
    """
    sizes = (1, 2, 4, 8, 16)
    rows = []
    for checkpointing in CHECKPOINTINGS:
        row: dict[str, str | float | None] = {"checkpointing": checkpointing}
        for microbatch in sizes:
            spec = replace(place_step(step, ParallelDims(fsdp=gpus)), microbatch=microbatch)
            run = dry_run(spec.with_checkpointing(checkpointing), hardware)
            row[f"microbatch_{microbatch}"] = run.tokens_per_second / gpus if run.fits else None
        rows.append(row)
    return Table(
        "recomputation",
        "Recomputation and batch",
        caption=f"tokens/s per GPU with FSDP on {gpus} GPUs, empty where memory is too small",
        columns=[
            make_column("checkpointing"),
            *(make_column(f"microbatch_{size}", f"microbatch {size}", "number") for size in sizes),
        ],
        rows=rows,
    )
