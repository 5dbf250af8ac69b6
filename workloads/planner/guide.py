"""``parbench plan --guide``: every strategy beside the others on one model, and where each is good. Pure.

Each row is what the closed forms say of a step that has one strategy alone; what common sayings leave out is noted with
its numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from parbench.bench.results.document import Cell, Column, Document, Part, Table
from parbench.bench.results.runs import Run
from parbench.workloads.costs.communication_pattern import Call, attention_bytes, calls, sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.memory import memory_of
from parbench.workloads.costs.parameter_table import elements_of, num_parameters
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.pipeline_parallel.bubbles import bubble_fraction, bubble_fraction_span
from parbench.workloads.planner.candidates import splits
from parbench.workloads.planner.dry_run import GIGA
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.regimes import regimes, simulated
from parbench.workloads.planner.report.render import assumptions, parameter_words

MODEL, GPUS = "llama3-8b", 64
_LETTERS = (
    "One sequence a microbatch, no checkpointing. Psi parameters of e bytes, W of them that TP leaves whole; n ranks, "
    "r = (n - 1) / n, HSDP n copies of f shards; L layers, D of them without the experts that the others have; M "
    "microbatches of b sequences of s tokens; h hidden, of a token q queries and results, k keys and values."
)
_STAGES, _MICROBATCHES = 4, 8


@dataclass(frozen=True)
class Strategy:
    """One way to split a step: ``formula`` is of the bytes that ``axes`` send, ``measured`` the case that takes it."""

    name: str
    splits: str
    link: str
    formula: str
    axes: str
    spec: StepSpec
    measured: str
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The strategy's own calls, of the rank that sends most."""
        every = ([call for call in calls(at) if call.axis in self.axes.split()] for at in self.spec.positions)
        return tuple(max(every, key=lambda of: sum(call.sent for call in of)))

    @property
    def sent_bytes(self) -> float:
        return sum(call.sent for call in self.calls)

    @property
    def equation(self) -> Equation:
        """The bytes as one writes them by hand, without padding and what is small."""
        spec, shape = self.spec, self.spec.shape
        n = spec.world // (spec.size("fsdp") if "dp" in self.axes.split() else 1)
        symbols: dict[str, float] = {
            "Psi": num_parameters(shape, spec.moe),
            "e": spec.element_bytes,
            "n": n,
            "r": (n - 1) / n,
            "f": spec.size("fsdp"),
            "L": shape.layers,
            "M": spec.microbatches,
            "b": spec.microbatch,
            "s": shape.sequence,
            "h": shape.hidden,
            "q": shape.heads * (shape.head_size + shape.value_size),
            "k": shape.kv_heads * (shape.head_size + shape.value_size),
            "D": spec.moe.dense_layers if spec.moe else 0,
            "W": elements_of(spec.at(0), "whole"),
            "top_k": spec.moe.top_k if spec.moe else 0,
        }
        return Equation(text=self.formula, symbols=symbols)


_SELDOM = "any; once a step"
_EVERY = "across; a layer ahead"
_TENSOR = "in a node; exposed"
_CONTEXT = {
    "zigzag": ("L b s k (2 e + 4) r", "neighbours; hidden"),
    "allgather_kv": ("3 L b s k e r", "in a node; exposed"),
    "ulysses": ("2 L b s (q + k) e r / n", "in a node; exposed"),
}


def strategies(step: StepSpec, ranks: int, gpus_per_node: int) -> list[Strategy]:
    """Return those that the model allows, on all ranks or on as many of a node as its sizes divide among."""
    node = min(gpus_per_node, ranks)
    whole, dp = step.on({"fsdp": ranks}), step.on({"dp": ranks})
    zero1, zero2 = replace(dp, zero1="reduce_scatter"), replace(whole, reshard=False)
    halves = step.on({"dp": ranks // node, "fsdp": node})
    tensor = _widest(step, "tp", node)
    plain = replace(tensor, sequence_parallel=False)
    pipeline = _widest(replace(step, microbatches=4 * node, schedule="1f1b"), "pp", node)
    pipeline = replace(pipeline, microbatches=4 * pipeline.size("pp"))
    dense = step.moe and step.moe.dense_layers
    layers = "4 (L + D)" if dense else "4 L" if step.moe else "8 L"
    sums, gathers = "2 Psi e r", "3 Psi e r"
    hybrid, pairs = "(3 (f - 1) + 2 r) Psi e / f", "2 M b s h e" if pipeline.size("pp") > 2 else "M b s h e"
    found = [
        Strategy("DDP", "the batch", _SELDOM, sums, "dp edp", dp, "ddp"),
        Strategy("ZeRO-1", "optimizer", _SELDOM, sums, "dp edp", zero1, "zero1", {"optimizer": "distributed"}),
        Strategy("ZeRO-2", "+ gradients", _EVERY, sums, "fsdp", zero2, "fsdp", {"reshard": False}),
        Strategy("ZeRO-3, FSDP", "+ parameters", _EVERY, gathers, "fsdp", whole, "fsdp", {"reshard": True}),
        Strategy("HSDP", "state in a node", "node, sums across", hybrid, "fsdp dp edp", halves, "hsdp"),
        Strategy("TP", "matrices", _TENSOR, f"{layers} b s h e r", "tp", plain, "tp"),
        Strategy("TP + SP", "matrices, tokens", _TENSOR, f"(({layers} + 4) b s h + 2 W) e r", "tp", tensor, "tp_sp"),
        Strategy("PP", "layers", "across; little", pairs, "pp", pipeline, "pp", {"schedule": "1f1b"}),
    ]
    for method, (formula, link) in _CONTEXT.items():
        spec = _widest(replace(step, cp_method=method), "cp", node)
        found.append(Strategy(f"CP, {method}", "sequences", link, formula, "cp", spec, "cp", {"method": method}))
    if step.moe:
        dealt = max(size for size in range(1, node + 1) if node % size == step.moe.experts % size == 0)
        formula, spec = f"4 {'(L - D)' if dense else 'L'} b s top_k h e r", step.on({"dp": dealt, "ep": dealt})
        found.append(Strategy("EP", "experts", "in a node; exposed", formula, "ep", spec, "ep_step"))
    return [one for one in found if one.spec.world > 1 and not one.spec.refusal()]


def _widest(step: StepSpec, axis: str, node: int) -> StepSpec:
    """Return it on the most ranks of a node that the rules allow on an axis."""
    sized = (step.on({axis: size}) for size in range(node, 0, -1) if node % size == 0)
    cut = (replace(spec, split=splits(spec.shape, spec.moe, spec.size("pp"), 1, "1f1b")[0]) for spec in sized)
    return next(spec for spec in cut if not spec.refusal())


def guide(
    step: StepSpec,
    gpus: int,
    hardware: Hardware,
    against: Run | None = None,
    seconds: Seconds | None = None,
    notes: Sequence[str] = (),
) -> Document:
    """Return the table of strategies and the figures of regimes for a model on so many GPUs."""
    known = strategies(step, gpus, hardware.gpus_per_node)
    heading = (
        f"{step.name}: {parameter_words(step.shape, step.moe)}, {step.shape.layers} layers of {step.shape.hidden}, "
        f"sequence {step.shape.sequence}; {gpus} GPUs ({hardware.name}), {hardware.gpus_per_node} a node"
    )
    first = Part(id="strategies", title="Strategies", tables=[_strategies(known, against)], notes=[])
    told = [f"Assumed: {one}." for one in assumptions(hardware, step.element_bytes, notes)]
    second = Part(id="regimes", title="Regimes", tables=regimes(step, gpus, hardware, seconds), notes=told)
    sayings = Part(id="sayings", title="Loose sayings", tables=[_sayings(known, step)])
    return Document(name=f"guide {step.name} on {gpus} GPUs", heading=heading, parts=[first, second, sayings])


def _strategies(known: Sequence[Strategy], against: Run | None) -> Table:
    rows: list[list[Cell]] = []
    for one in known:
        memory = max((memory_of(at) for at in one.spec.positions), key=lambda held: held.total)
        made: Counter[str] = Counter()
        for call in one.calls:
            made[call.op] += round(call.times)
        rows.append(
            [
                one.name,
                f"{one.spec.world}" if one.name != "HSDP" else " x ".join(map(str, one.spec.mesh.values())),
                one.splits,
                ", ".join(f"{count} {op}" for op, count in made.items()),
                one.equation.text,
                one.sent_bytes / GIGA,
                memory.state / GIGA,
                memory.activations / GIGA,
                one.link,
                ratio_of(one, against) if against else None,
            ]
        )
    columns = [
        Column(title="strategy", help="alone, nothing else split"),
        Column(title="ranks", help="all of them, or as many of a node as the model's sizes divide among"),
        Column(title="splits", help="what each rank has a part of, beside the batch"),
        Column(title="calls", help="of a step of one microbatch; a pipeline takes four microbatches a stage"),
        Column(title="bytes a rank sends", help="in letters, those of the rank that sends most"),
        Column(title="here", help="the same, counted call by call", unit="GB"),
        Column(title="state", help="parameters, gradients and optimizer of a rank", unit="GB"),
        Column(title="activations", help="what backward needs, without checkpointing", unit="GB"),
        Column(title="link it wants", help="the slowest that it bears: what is hidden stands beside compute"),
        Column(title="measured ratio", help="bytes counted over bytes by formula, of the run's steps", unit="number"),
    ]
    keep = len(columns) - (against is None)
    return Table(
        id="table",
        title="Strategies",
        caption="each alone",
        columns=columns[:keep],
        rows=[row[:keep] for row in rows],
        notes=[_LETTERS, *([f"Ratios are those of {against.path}."] if against else [])],
    )


def ratio_of(one: Strategy, run: Run) -> float | None:
    """Return bytes counted over expected of a run's steps of the kind, the median over axes and launches."""
    found = []
    for record in run.records:
        asked = record.case.whole
        if record.case.name == f"workload.{one.measured}" and one.params.items() <= asked.items():
            told = [record.metrics[name].value for name in record.metrics if name.startswith("bytes_ratio.")]
            found += [value for value in told if value is not None]
    return median(found) if found else None


def _sayings(known: Sequence[Strategy], step: StepSpec) -> Table:
    return Table(
        id="notes",
        title="Loose sayings",
        caption="what is often said, and the numbers here",
        columns=[
            Column(title="said", help="by papers, courses and blogs"),
            Column(title="holds", help="where, with numbers"),
        ],
        rows=sayings(known, step),
    )


def sayings(known: Sequence[Strategy], step: StepSpec) -> list[tuple[str, str]]:
    psi = num_parameters(step.shape, step.moe) * step.element_bytes
    sums = ", ".join(f"{sent_bytes('all_reduce', psi, n) / psi:.3g} Psi on {n}" for n in (2, 8, 64))
    waits = []
    for name in ("zb_h2", "zb_v"):
        line = simulated(name, _STAGES, _MICROBATCHES)
        waits.append(
            f"{name} {bubble_fraction_span(line):.1%} of a rank's own span, {bubble_fraction(line):.1%} of the step"
        )
    found = [
        ("DDP sends 2 Psi", f"2 Psi (n-1)/n: {sums} ranks"),
        (
            "FSDP sends 1.5 times what DDP does",
            "3 Psi beside 2 Psi at one microbatch; DDP sums once a step, FSDP gathers for each: 3 M / 2 at M",
        ),
        (
            "a zero-bubble pipeline has no bubble",
            f"at P = {_STAGES}, M = {_MICROBATCHES}, F = I = W: {'; '.join(waits)}: it must still fill and drain",
        ),
        ("1f1b has a smaller bubble than gpipe", _same_bubble()),
    ]
    attention = {one.spec.cp_method: one.spec.at(0) for one in known if one.axes == "cp"}
    if {"zigzag", "ulysses"} <= attention.keys():
        found.append(("Ring and Ulysses send the same", _ring_and_ulysses(attention, step)))
    return found


def _same_bubble() -> str:
    gpipe, other = (simulated(name, _STAGES, _MICROBATCHES) for name in ("gpipe", "1f1b"))
    return (
        f"both (P-1)/(M+P-1), {bubble_fraction(gpipe):.1%} and {bubble_fraction(other):.1%} at P = {_STAGES}, "
        f"M = {_MICROBATCHES}; it holds {_STAGES} microbatches in place of {_MICROBATCHES}, so that M can be larger"
    )


def _ring_and_ulysses(attention: Mapping[str, Position], step: StepSpec) -> str:
    told = []
    for method in ("zigzag", "ulysses"):
        sent = attention_bytes(attention[method])
        forward, backward = (sum(sent[way].values()) / 1e6 for way in ("forward", "backward"))
        name = "a ring" if method == "zigzag" else "Ulysses"
        told.append(f"{name} {forward:,.1f} MB forward, {backward:,.1f} MB backward")
    ranks = {at.spec.size("cp") for at in attention.values()}
    crossover = 1 + step.shape.heads / step.shape.kv_heads
    return (
        f"a layer on {' and '.join(map(str, sorted(ranks)))} ranks: {'; '.join(told)}; forward they are alike at "
        f"1 + heads/kv_heads = {crossover:g} ranks, above it Ulysses sends less"
    )
