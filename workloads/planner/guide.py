"""The strategy table of ``parbench plan --guide``: what each strategy alone sends and holds on one model.

``tests/studies/strategy_guide.py`` generates the documentation page that explains when to use each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentColumn,
    DocumentPart,
    DocumentTable,
)
from parbench.workloads.costs.communication_pattern import Call, list_calls
from parbench.workloads.costs.memory import rank_memory
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.candidates import place_step, splits
from parbench.workloads.planner.dry_run import GIGA
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.report.render import parameter_words

MODEL, GPUS = "llama3-8b", 64
_LETTERS = (
    "One sequence per microbatch, no checkpointing. Psi parameters of e bytes, of which H in norm and head and W "
    "replicated by TP; gradients of g bytes; n ranks, r = (n - 1) / n, HSDP n replicas of f shards; L layers, D of "
    "them without the experts that the others have; M microbatches of b sequences of s tokens; h hidden, per token q "
    "elements of queries and results, k of keys and values."
)


@dataclass(frozen=True)
class Strategy:
    """One way to split a step. ``formula`` gives the bytes that ``axes`` send."""

    name: str
    splits: str
    link: str
    formula: str
    axes: str
    spec: StepSpec

    @property
    def calls(self) -> tuple[Call, ...]:
        """The strategy's own calls, of the rank that sends most."""
        every = (
            [call for call in list_calls(at) if call.axis in self.axes.split()]
            for at in self.spec.distinct_views
        )
        return tuple(max(every, key=lambda of: sum(call.sent for call in of)))

    @property
    def sent_bytes(self) -> float:
        return sum(call.sent for call in self.calls)


_SELDOM = "any; once a step"
_EVERY = "across; a layer ahead"
_TENSOR = "in a node; exposed"
_CONTEXT = {
    "zigzag": ("L * b * s * k * (2 * e + 4) * r", "neighbours; hidden"),
    "allgather_kv": ("3 * L * b * s * k * e * r", "in a node; exposed"),
    "ulysses": ("2 * L * b * s * (q + k) * e * r / n", "in a node; exposed"),
}


def strategies(step: StepSpec, ranks: int, gpus_per_node: int) -> list[Strategy]:
    """Return those that the model allows, on all ranks or on as many of a node as its sizes divide among."""
    node = min(gpus_per_node, ranks)
    whole, dp = place_step(step, ParallelDims(fsdp=ranks)), place_step(step, ParallelDims(dp=ranks))
    zero1, zero2 = replace(dp, zero1="distributed"), replace(whole, reshard=False)
    halves = place_step(step, ParallelDims(dp=ranks // node, fsdp=node))
    tensor = _widest(step, "tp", node)
    plain = replace(tensor, sequence_parallel=False)
    pipeline = _widest(replace(step, microbatches=4 * node), "pp", node)
    pipeline = replace(pipeline, microbatches=4 * pipeline.dims.size("pp"))
    dense = step.moe and step.moe.dense_layers
    layers = "8 * L"
    if step.moe:
        layers = "4 * (L + D)" if dense else "4 * L"
    activations = f"({layers} + 4) * b * s * h * e"
    gathers = "2 * Psi * e - H * e"
    shards = f"({gathers} + Psi * g) * r"
    hybrid = f"({gathers} + Psi * g) * (f - 1) / f + 2 * Psi * g * r / f"
    pairs = "2 * M * b * s * h * e" if pipeline.dims.pp > 2 else "M * b * s * h * e"
    found = [
        Strategy("DDP", "the batch", _SELDOM, "2 * Psi * g * r", "dp edp", dp),
        Strategy("ZeRO-1", "optimizer", _SELDOM, "Psi * (g + e) * r", "dp edp", zero1),
        Strategy("ZeRO-2", "+ gradients", _EVERY, "Psi * (e + g) * r", "fsdp efsdp", zero2),
        Strategy("ZeRO-3, FSDP", "+ parameters", _EVERY, shards, "fsdp efsdp", whole),
        Strategy("HSDP", "state in a node", "node, sums across", hybrid, "fsdp efsdp dp", halves),
        Strategy("TP", "matrices", _TENSOR, f"{activations} * r", "tp", plain),
        Strategy(
            "TP + SP",
            "matrices, tokens",
            _TENSOR,
            f"({activations} + 2 * W * g) * r",
            "tp",
            tensor,
        ),
        Strategy("PP", "layers", "across; little", pairs, "pp", pipeline),
    ]
    for method, (formula, link) in _CONTEXT.items():
        spec = _widest(replace(step, cp_method=method), "cp", node)
        found.append(Strategy(f"CP, {method}", "sequences", link, formula, "cp", spec))
    if step.moe:
        dealt = max(
            size for size in range(1, node + 1) if node % size == step.moe.experts % size == 0
        )
        formula, spec = (
            f"4 * {'(L - D)' if dense else 'L'} * b * s * top_k * h * e * r",
            place_step(step, ParallelDims(dp=dealt, ep=dealt)),
        )
        found.append(Strategy("EP", "experts", "in a node; exposed", formula, "ep", spec))
    return [one for one in found if one.spec.ranks > 1 and not one.spec.find_broken_rule()]


def _widest(step: StepSpec, axis: str, node: int) -> StepSpec:
    """Return it on the most ranks of a node that the rules allow on an axis."""
    sized = (
        place_step(step, ParallelDims().resize(**{axis: size}))
        for size in range(node, 0, -1)
        if node % size == 0
    )
    cut = (
        spec.with_pipeline(split=splits(spec.shape, spec.moe, spec.dims.pp, 1, "1f1b")[0])
        for spec in sized
    )
    return next(spec for spec in cut if not spec.find_broken_rule())


def held_state(spec: StepSpec) -> float:
    """Return the bytes of state of the fullest rank, with parameters that ZeRO-2 keeps gathered."""
    states: list[float] = []
    for view in spec.distinct_views:
        memory = rank_memory(view)
        states.append(memory.state + (0.0 if spec.reshard else memory.buffers))
    return max(states)


def guide(step: StepSpec, gpus: int, hardware: Hardware) -> Document:
    """Return the table of strategies for a model on ``gpus`` GPUs."""
    heading = (
        f"{step.name}: {parameter_words(step.shape, step.moe)}, {step.shape.layers} layers of {step.shape.hidden}, "
        f"sequence {step.shape.sequence}; {gpus} GPUs ({hardware.name}), {hardware.gpus_per_node} a node"
    )
    table = _table(strategies(step, gpus, hardware.gpus_per_node))
    part = DocumentPart(id="strategies", title="Strategies", tables=[table])
    return Document(name=f"guide {step.name} on {gpus} GPUs", heading=heading, parts=[part])


def _row(strategy: Strategy) -> list[Cell]:
    spec = strategy.spec
    memory = max(
        (rank_memory(position) for position in spec.distinct_views), key=lambda held: held.total
    )
    calls_by_op: Counter[str] = Counter()
    for call in strategy.calls:
        calls_by_op[call.op] += round(call.times)
    is_hybrid = strategy.name == "HSDP"
    return [
        strategy.name,
        " x ".join(map(str, spec.dims.sizes.values())) if is_hybrid else str(spec.ranks),
        strategy.splits,
        ", ".join(f"{count} {op}" for op, count in calls_by_op.items()),
        strategy.formula,
        strategy.sent_bytes / GIGA,
        held_state(spec) / GIGA,
        memory.activations / GIGA,
        strategy.link,
    ]


def _table(known: Sequence[Strategy]) -> DocumentTable:
    columns = [
        DocumentColumn(title="strategy", help="alone, nothing else split"),
        DocumentColumn(
            title="ranks",
            help="all of them, or as many of a node as the model's sizes divide among",
        ),
        DocumentColumn(title="splits", help="what each rank has a part of, beside the batch"),
        DocumentColumn(
            title="calls",
            help="of a step of one microbatch; a pipeline takes four microbatches a stage",
        ),
        DocumentColumn(
            title="bytes a rank sends", help="in letters, those of the rank that sends most"
        ),
        DocumentColumn(title="here", help="the same, counted call by call", unit="GB"),
        DocumentColumn(
            title="state", help="parameters, gradients and optimizer of a rank", unit="GB"
        ),
        DocumentColumn(
            title="activations", help="what backward needs, without checkpointing", unit="GB"
        ),
        DocumentColumn(
            title="link it wants",
            help="the slowest that it bears: what is hidden stands beside compute",
        ),
    ]
    return DocumentTable(
        id="table",
        title="Strategies",
        caption="each applied alone",
        columns=columns,
        rows=list(map(_row, known)),
        notes=[_LETTERS],
    )
