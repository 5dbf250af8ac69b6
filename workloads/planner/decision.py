"""The decision path for a model and a number of GPUs, and the mesh of the rule of thumb. Pure.

The path asks what fits on one GPU: training state, optimizer shards, all shards, activations, the
sequence, the experts. It ends with the critical batch and with the time that failures cost. The
rule of thumb gives one mesh for the size of the model. Both are independent of the search, so
that they can be compared with it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.memory import layers_equation, rank_memory
from parbench.workloads.costs.parameter_table import (
    num_active_parameters,
    num_parameters,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.candidates import (
    CONTEXT_TOKENS,
    EXPERT_ORDER,
    ORDER,
    SearchRequest,
    place_step,
)
from parbench.workloads.planner.dry_run import GIGA, DryRun
from parbench.workloads.planner.goodput import compute_critical_batch, compute_goodput
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.search import SearchResult, predict_layout, rank_runs

SMALL_PARAMETERS = 10e9
"""The number of parameters below which the rule of thumb uses FSDP or ZeRO only."""
LARGE_PARAMETERS = 100e9
"""The number of parameters from which the rule of thumb always uses a pipeline."""
LONG_SEQUENCE = 32768  # tokens, from which the rule of thumb splits sequences
TOKENS_PER_PARAMETER = 20  # of a compute-optimal training (arXiv 2203.15556)
MAX_LOST_SHARE = 0.05  # of the time of a training, which failures may cost
RULE_CONTEXT_TOKENS = 8192  # of a rank, as Llama 3 was trained on 131,072 tokens with cp=16


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that leads to a parallelism strategy, such as whether a model fits on one GPU.

    The answer is yes if the value of ``equation`` is at most ``limit``.
    """

    text: str
    """The question."""
    equation: Equation
    """The equation whose value decides the answer, with the numbers of the model."""
    limit: float
    """The largest value for the answer yes, in the unit of the equation's value."""
    unit: str
    """The unit of the value and of the limit, such as GB."""
    if_yes: str
    """The advice that follows from yes."""
    if_no: str
    """The advice that follows from no."""

    @property
    def is_yes(self) -> bool:
        """True if the value of the equation is at most the limit."""
        return self.equation.value <= self.limit

    @property
    def answer(self) -> str:
        """The answer with its advice, such as ``yes: DDP is enough``."""
        return f"yes: {self.if_yes}" if self.is_yes else f"no: {self.if_no}"


def list_questions(request: SearchRequest, hardware: Hardware) -> Iterator[Question]:
    """Yield the questions that lead to a strategy for the request's model and GPUs, in order.

    They are about model state, activations, the sequence, experts of a MoE model, the global batch
    and failures. The questions on state end after the first yes, and so do those on activations.
    """
    step, gpus = request.step, request.gpus
    yield from _list_state_questions(step, gpus, hardware)
    yield from _list_activation_questions(step, gpus, hardware)
    yield Question(
        text=f"Is a sequence at most {CONTEXT_TOKENS:,} tokens per GPU?",
        equation=Equation(text="sequence", symbols={"sequence": step.shape.sequence}),
        limit=CONTEXT_TOKENS,
        unit="tokens",
        if_yes="context parallelism would leave too few tokens per GPU",
        if_no="context parallelism can split it if activations do not fit otherwise",
    )
    if step.moe is not None:
        yield _ask_experts(step, hardware)
    yield _ask_batch(request)
    yield _ask_failures(gpus)


def _list_state_questions(step: StepSpec, gpus: int, hardware: Hardware) -> Iterator[Question]:
    """Yield questions on whether the model state fits, until the first whose answer is yes.

    The state is on one GPU, then with a sharded optimizer (ZeRO-1), then fully sharded (FSDP).
    """
    widths = step.widths
    weights = f"({widths.parameters} + {widths.gradients}) * parameters"
    optimizer = f"{widths.optimizer} * parameters"
    symbols = {"parameters": num_parameters(step.shape, step.moe) / GIGA, "gpus": gpus}
    for text, formula, if_yes, if_no in (
        (
            "Do parameters, gradients and optimizer state fit on one GPU?",
            f"{weights} + {optimizer}",
            "DDP is enough",
            "shard the optimizer state",
        ),
        (
            "Do they fit if the GPUs shard the optimizer state (ZeRO-1)?",
            f"{weights} + {optimizer} / gpus",
            "ZeRO-1 is enough",
            "shard parameters and gradients too",
        ),
        (
            "Do they fit if the GPUs shard everything (ZeRO-3, FSDP)?",
            f"({weights} + {optimizer}) / gpus",
            "FSDP holds the state",
            "use more GPUs",
        ),
    ):
        question = Question(
            text=text,
            equation=Equation(text=formula, symbols=symbols),
            limit=hardware.usable_bytes / GIGA,
            unit="GB",
            if_yes=if_yes,
            if_no=if_no,
        )
        yield question
        if question.is_yes:
            return


def _list_activation_questions(step: StepSpec, gpus: int, hardware: Hardware) -> Iterator[Question]:
    """Yield questions on whether the activations of one sequence fit next to a shard of FSDP.

    They are without recomputation, with full recomputation, and with tensor parallelism. The first
    question whose answer is yes is the last.
    """
    tp = _find_tensor_size(step, gpus, hardware)
    full_tp = ParallelDims(fsdp=max(1, gpus // tp), tp=tp)
    for dims, checkpointing, if_yes, if_no in (
        (
            ParallelDims(fsdp=gpus),
            "none",
            "no recomputation is needed",
            "recompute, or split layers",
        ),
        (ParallelDims(fsdp=gpus), "full", "recomputation is enough", "split layers or sequences"),
        (full_tp, "selective", f"tp={tp} avoids full recomputation", "add a pipeline or recompute"),
    ):
        spec = place_step(step, dims).with_checkpointing(checkpointing)
        view = spec.rank_view(0)
        memory = rank_memory(view)
        layers = layers_equation(view, checkpointing).value
        symbols = {
            "layers": spec.shape.layers,
            "saved_per_layer": layers / spec.shape.layers / GIGA,
            "logits_and_ids": (memory.activations - layers) / GIGA,
            "shard_and_buffers": (memory.state + memory.buffers) / GIGA,
        }
        mesh = f"{dims.label}, checkpointing {checkpointing}"
        question = Question(
            text=f"Do the activations of one sequence fit next to the shard ({mesh})?",
            equation=Equation(
                text="layers * saved_per_layer + logits_and_ids + shard_and_buffers",
                symbols=symbols,
            ),
            limit=hardware.usable_bytes / GIGA,
            unit="GB",
            if_yes=if_yes,
            if_no=if_no,
        )
        yield question
        if question.is_yes:
            return


def _ask_experts(step: StepSpec, hardware: Hardware) -> Question:
    """Return the question on whether the parameters of all experts fit on one GPU."""
    moe = step.moe
    assert moe is not None
    moe_layers = step.shape.layers - moe.dense_layers
    matrices = 3 if step.shape.recipe == "llama" else 2
    return Question(
        text="Do the experts' parameters fit on one GPU?",
        equation=Equation(
            text="bytes * moe_layers * experts * matrices * hidden * expert_ffn / 1000000000",
            symbols={
                "bytes": step.widths.parameters,
                "moe_layers": moe_layers,
                "experts": moe.experts,
                "matrices": matrices,
                "hidden": step.shape.hidden,
                "expert_ffn": moe.expert_ffn,
            },
        ),
        limit=hardware.usable_bytes / GIGA,
        unit="GB",
        if_yes="expert parallelism saves memory only",
        if_no="spread experts over GPUs (EP), inside a node first",
    )


def _ask_batch(request: SearchRequest) -> Question:
    """Return the question on whether the tokens of a step are at most the critical batch.

    Beyond the critical batch, more data-parallel ranks save few steps.
    """
    step = request.step
    parameters = num_active_parameters(step.shape, step.moe)
    critical = compute_critical_batch(TOKENS_PER_PARAMETER * parameters)
    return Question(
        text="Is the batch at most the critical batch (arXiv 2001.08361) of a training with "
        f"{TOKENS_PER_PARAMETER} tokens per parameter?",
        equation=Equation(
            text="global_batch * sequence",
            symbols={"global_batch": request.global_batch, "sequence": step.shape.sequence},
        ),
        limit=critical.value,
        unit="tokens",
        if_yes="more data ranks still save steps",
        if_no="more data ranks save few steps: use a smaller batch or split the model",
    )


def _ask_failures(gpus: int) -> Question:
    """Return the question on whether failures cost at most ``MAX_LOST_SHARE`` of the time.

    The cost of failures includes checkpoints, lost work and restarts.
    """
    goodput = compute_goodput(gpus)
    advice = f"save a checkpoint every {goodput.symbols['interval'] / 60:,.0f} minutes"
    return Question(
        text=f"Do failures, as frequent as in arXiv 2407.21783, cost at most {MAX_LOST_SHARE:.0%} "
        "of the time?",
        equation=Equation(text=f"1 - {goodput.text}", symbols=goodput.symbols),
        limit=MAX_LOST_SHARE,
        unit="of the time",
        if_yes=advice,
        if_no=f"{advice}, and make checkpoints and restarts shorter",
    )


@dataclass(frozen=True, kw_only=True)
class RuleOfThumb:
    """The common advice for the parallelism of a model of some size, and the prediction for it."""

    text: str
    """The advice, such as "TP in the node, then FSDP or PP"."""
    run: DryRun | None
    """The prediction on the advised mesh, None if no such mesh fits."""


def apply_rule_of_thumb(
    request: SearchRequest, hardware: Hardware, seconds: Seconds | None = None
) -> RuleOfThumb:
    """Return the common advice on parallelism for the size of the request's model.

    The result includes the prediction of the step on the advised mesh. Of advised meshes with
    pipelines, it is the shortest pipeline that fits without full recomputation, or otherwise the
    shortest that fits. ``seconds`` returns the measured seconds of a communication call. If it is
    None, the seconds follow from the hardware.
    """
    text, layouts = _find_rule(request, hardware)
    recomputing: DryRun | None = None
    for layout in layouts:
        result = SearchResult()
        if layout.ranks == request.gpus and not layout.dims.find_broken_rule(
            request.gpus, layout.moe.experts if layout.moe else 0
        ):
            predict_layout(request, layout, hardware, seconds, result)
        if not result.runs:
            continue
        run = rank_runs(result.runs)[0]
        if run.spec.checkpointing != "full":
            return RuleOfThumb(text=text, run=run)
        recomputing = recomputing or run
    return RuleOfThumb(text=text, run=recomputing)


def _find_rule(request: SearchRequest, hardware: Hardware) -> tuple[str, list[StepSpec]]:
    """Return the common advice on parallelism for a model of this size, as text and as steps.

    The steps are on the advised meshes, in order of preference. Some meshes may be impossible on
    these GPUs.
    """
    step, gpus = request.step, request.gpus
    node = hardware.gpus_per_node
    parameters = num_parameters(step.shape, step.moe)
    tp = _find_tensor_size(step, gpus, hardware)
    cp = 1
    suffix = ""
    if step.shape.sequence > LONG_SEQUENCE:
        cp = step.shape.sequence // RULE_CONTEXT_TOKENS
        suffix = f", CP with {RULE_CONTEXT_TOKENS:,} tokens per rank for long sequences"
    if step.moe is not None:
        if parameters < LARGE_PARAMETERS:
            ep = min(step.moe.experts, node)
            text = f"MoE below {LARGE_PARAMETERS / 1e9:.0f} B: EP in the node, then FSDP{suffix}"
            return text, [_shard(step, gpus, cp=cp, ep=ep)]
        ep = min(step.moe.experts, 8 * node)
        text = f"MoE above {LARGE_PARAMETERS / 1e9:.0f} B: EP over 8 nodes, PP, ZeRO-1{suffix}"
        return text, _list_pipelines(step, gpus, cp=cp, tp=1, ep=ep)
    if parameters < SMALL_PARAMETERS:
        text = f"below {SMALL_PARAMETERS / 1e9:.0f} B: FSDP or ZeRO alone{suffix}"
        return text, [_shard(step, gpus, cp=cp)]
    if parameters < LARGE_PARAMETERS:
        text = f"10 to {LARGE_PARAMETERS / 1e9:.0f} B: TP in the node, then FSDP or PP{suffix}"
        return text, [_shard(step, gpus, cp=cp, tp=tp), *_list_pipelines(step, gpus, cp=cp, tp=tp)]
    text = (
        f"above {LARGE_PARAMETERS / 1e9:.0f} B: TP in the node, PP until it fits, then DP{suffix}"
    )
    return text, _list_pipelines(step, gpus, cp=cp, tp=tp)


def _find_tensor_size(step: StepSpec, gpus: int, hardware: Hardware) -> int:
    """Return the largest size of ``tp`` that a node, all GPUs and the key and value heads allow.

    It divides all three numbers.
    """
    return math.gcd(hardware.gpus_per_node, gpus, step.shape.kv_heads)


def _shard(step: StepSpec, gpus: int, *, cp: int = 1, tp: int = 1, ep: int = 1) -> StepSpec:
    """Return the step with FSDP over all ranks that are not in ``cp`` or ``tp``."""
    dims = ParallelDims(fsdp=max(1, gpus // (cp * tp)), cp=cp, tp=tp, ep=ep)
    return place_step(step, dims)


def _list_pipelines(step: StepSpec, gpus: int, *, cp: int, tp: int, ep: int = 1) -> list[StepSpec]:
    """Return the step on meshes with 2, 4, 8 ... pipeline ranks, up to one rank per layer.

    All ranks that are not in ``pp``, ``cp`` or ``tp`` are data ranks, which use ZeRO-1.
    """
    steps: list[StepSpec] = []
    pp = 2
    order = EXPERT_ORDER if ep > 1 else ORDER
    while pp <= step.shape.layers:
        dims = ParallelDims(
            dp=max(1, gpus // (pp * cp * tp)), pp=pp, cp=cp, tp=tp, ep=ep, order=order
        )
        sharded = dims.size("dp", "cp") > 1
        steps.append(replace(place_step(step, dims), zero1="distributed" if sharded else ""))
        pp *= 2
    return steps
