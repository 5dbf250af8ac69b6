"""The questions that lead from a model and a number of GPUs to a parallelism strategy. Pure.

They ask what fits on one GPU: training state, optimizer shards, all shards, activations, the
sequence, the experts. The last are about the critical batch and the time that failures cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.memory import compute_rank_memory, make_layers_equation
from parbench.workloads.costs.parameter_table import (
    count_active_parameters,
    count_parameters,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.planner.candidates import CONTEXT_TOKENS, SearchRequest, place_step
from parbench.workloads.planner.dry_run import GIGA
from parbench.workloads.planner.goodput import compute_critical_batch, compute_goodput
from parbench.workloads.planner.hardware import Hardware

TOKENS_PER_PARAMETER = 20  # of a compute-optimal training (arXiv 2203.15556)
MAX_LOST_SHARE = 0.05  # of the time of a training, which failures may cost


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

    They are about model state, activations, the sequence, the experts of a MoE model, the global
    batch and failures. Several questions on model state follow each other until one has the answer
    yes, and likewise on activations.
    """
    step, gpus = request.step, request.gpus
    yield from _list_state_questions(step, gpus, hardware)
    yield from _list_activation_questions(step, gpus, hardware)
    yield Question(
        text=f"Is the sequence at most {CONTEXT_TOKENS:,} tokens long?",
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

    The first question assumes the full state on each GPU, the second a sharded optimizer (ZeRO-1),
    and the third a fully sharded state (FSDP).
    """
    widths = step.widths
    weights = f"({widths.parameters} + {widths.gradients}) * parameters"
    optimizer = f"{widths.optimizer} * parameters"
    symbols = {"parameters": count_parameters(step.shape, step.moe) / GIGA, "gpus": gpus}
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
            "FSDP is enough",
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

    The first question assumes no recomputation. If its answer is no, a second one assumes full
    recomputation.
    """
    dims = ParallelDims(fsdp=gpus)
    for checkpointing, if_yes, if_no in (
        ("none", "no recomputation is needed", "recompute, or use TP"),
        ("full", "recomputation is enough", "use TP or CP, inside a node first"),
    ):
        spec = place_step(step, dims).with_checkpointing(checkpointing)
        view = spec.make_rank_view(0)
        memory = compute_rank_memory(view)
        layers = make_layers_equation(view).value
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
        if_yes="EP is not required, and would only save memory",
        if_no="spread experts over GPUs (EP), inside a node first",
    )


def _ask_batch(request: SearchRequest) -> Question:
    """Return the question on whether the tokens of a step are at most the critical batch.

    Beyond the critical batch, more data-parallel ranks save few steps.
    """
    step = request.step
    parameters = count_active_parameters(step.shape, step.moe)
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
        if_no="more data ranks save few steps. Use a smaller batch, or TP or PP in their place",
    )


def _ask_failures(gpus: int) -> Question:
    """Return the question on whether failures cost at most a fraction of the training time.

    The fraction is ``MAX_LOST_SHARE``. The cost includes checkpoints, lost work and restarts.
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
