"""The equations behind a predicted step. Each printed equation gives the printed value. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from parbench.workloads.costs.communication_pattern import SOURCES, list_busiest_calls, sum_calls
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.flops import matmul_weights
from parbench.workloads.costs.memory import (
    activations_equation,
    buffers_equation,
    state_equation,
)
from parbench.workloads.planner.dry_run import DryRun

OWN_SOURCE = "this planner"


@dataclass(frozen=True, kw_only=True)
class Formula:
    """An equation with the unit of its value and its source."""

    name: str
    equation: Equation
    unit: str
    source: str = OWN_SOURCE


def list_formulas(run: DryRun) -> Iterator[Formula]:
    """Yield the formulas of the memory of a rank, of the bytes of each axis, and of the step.

    The rank is the one that holds most. Bytes are of the rank that sends most.
    """
    view = run.fullest.view
    yield Formula(
        name="state", equation=state_equation(view), unit="B", source="arXiv 1910.02054, figure 1"
    )
    yield Formula(
        name="activations",
        equation=activations_equation(view),
        unit="B",
        source="arXiv 2205.05198, section 4, with flash attention and without dropout",
    )
    yield Formula(name="buffers", equation=buffers_equation(view), unit="B")
    for axis in run.axes:
        yield Formula(
            name=f"bytes on {axis.name}",
            equation=sum_calls(list_busiest_calls(run.spec.distinct_views, (axis.name,))),
            unit="B",
            source=SOURCES[axis.name],
        )
    yield Formula(name="step", equation=_step_equation(run), unit="s")
    yield Formula(
        name="MFU",
        equation=_mfu_equation(run),
        unit="",
        source="PaLM, arXiv 2204.02311, appendix B",
    )


def _step_equation(run: DryRun) -> Equation:
    symbols = {name.replace(" ", "_"): seconds for name, seconds in run.parts.items()}
    return Equation(text=" + ".join(symbols), symbols=symbols)


def _mfu_equation(run: DryRun) -> Equation:
    shape = run.spec.shape
    return Equation(
        text="tokens_per_second * (6 * weights + 12 * layers * heads * head_size * sequence) "
        "/ (gpus * peak)",
        symbols={
            "tokens_per_second": run.tokens_per_second,
            "weights": matmul_weights(shape, run.spec.moe),
            "layers": shape.layers,
            "heads": shape.heads,
            "head_size": (shape.head_size + shape.value_size) / 2,
            "sequence": shape.sequence,
            "gpus": run.spec.ranks,
            "peak": run.hardware.flops_per_second,
        },
    )
