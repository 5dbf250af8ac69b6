"""The equations behind a predicted step. Each printed equation gives the printed value. Pure."""

from collections.abc import Iterator

from parbench.bench.results.tables import Row, Table
from parbench.workloads.costs.communication_pattern import SOURCES, list_busiest_calls, sum_calls
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.flops import count_model_matmul_weights
from parbench.workloads.costs.memory import (
    make_activations_equation,
    make_buffers_equation,
    make_state_equation,
)
from parbench.workloads.planner.dry_run import DryRun
from parbench.workloads.planner.report.columns import format_value, make_column

OWN_SOURCE = "this planner"


def make_formula_table(run: DryRun) -> Table:
    """Return the table of the equations from which the prediction of a step follows.

    They are for the memory of the rank that holds most, the bytes on each axis of the rank that
    sends most, the step time and the MFU.
    """
    return Table(
        "equations",
        "Formulas",
        caption="each with its numbers in the same order",
        columns=[
            make_column(key) for key in ("quantity", "equation", "numbers", "value", "source")
        ],
        rows=list(_list_rows(run)),
    )


def _list_rows(run: DryRun) -> Iterator[Row]:
    """Yield the rows of ``make_formula_table``, one for each equation."""
    view = run.fullest.view
    yield _make_row("state", make_state_equation(view), "B", "arXiv 1910.02054, figure 1")
    dropout = "with" if run.spec.shape.dropout else "without"
    korthikanti = f"arXiv 2205.05198, section 4, with flash attention and {dropout} dropout"
    yield _make_row("activations", make_activations_equation(view), "B", korthikanti)
    yield _make_row("buffers", make_buffers_equation(view), "B", OWN_SOURCE)
    for axis in run.axes:
        calls = list_busiest_calls(run.spec.distinct_views, (axis.name,))
        yield _make_row(f"bytes on {axis.name}", sum_calls(calls), "B", SOURCES[axis.name])
    parts = {name.replace(" ", "_"): seconds for name, seconds in run.parts.items()}
    yield _make_row("step", Equation(text=" + ".join(parts), symbols=parts), "s", OWN_SOURCE)
    yield _make_row("MFU", _make_mfu_equation(run), "", "PaLM, arXiv 2204.02311, appendix B")


def _make_row(quantity: str, equation: Equation, unit: str, source: str) -> Row:
    """Return the table row of one equation.

    The row has the ``quantity`` that it computes, its text with symbols, its text with numbers, its
    value with ``unit``, and the publication ``source``.
    """
    return {
        "quantity": quantity,
        "equation": equation.text,
        "numbers": equation.numbers,
        "value": format_value(equation.value, unit),
        "source": source,
    }


def _make_mfu_equation(run: DryRun) -> Equation:
    """Return the equation of the MFU of a predicted step, as a fraction of the dense peak."""
    shape = run.spec.shape
    return Equation(
        text="tokens_per_second * (6 * weights + 12 * layers * heads * head_size * sequence) "
        "/ (gpus * peak)",
        symbols={
            "tokens_per_second": run.tokens_per_second,
            "weights": count_model_matmul_weights(shape, run.spec.moe),
            "layers": shape.layers,
            "heads": shape.heads,
            "head_size": (shape.head_size + shape.value_size) / 2,
            "sequence": shape.sequence,
            "gpus": run.spec.ranks,
            "peak": run.hardware.flops_per_second,
        },
    )
