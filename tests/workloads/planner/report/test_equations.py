"""Each printed equation gives the printed value, which is that of the dry run."""

from typing import Any

import pytest

from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.columns import format_value
from parbench.workloads.planner.report.equations import make_formula_table
from tests.support.workloads.planner_asks import H100, make_spec


@pytest.mark.parametrize(
    ("mesh", "model", "params"),
    [
        ("dp=2,fsdp=4,tp=2", "llama3-8b", {"microbatches": 3}),
        ("fsdp=2,tp=4", "gpt-7.5b", {"bytes_per_element": 4, "checkpointing": "selective"}),
        ("cp=4,tp=2", "llama3-8b", {"cp_method": "ulysses", "checkpointing": "full"}),
        ("fsdp=16,pp=2,tp=4,ep=2", "mixtral-8x7b", {"microbatches": 4}),
    ],
)
def test_formulas_evaluate_to_the_dry_run(
    mesh: str, model: str, params: dict[str, Any]
) -> None:
    run = dry_run(make_spec(mesh, model, **params), H100)
    rows = {row["quantity"]: row for row in make_formula_table(run).rows}
    expected = {
        "state": run.fullest.memory.state,
        "activations": run.fullest.memory.activations,
        "buffers": run.fullest.memory.buffers,
        "step": run.seconds,
        "MFU": run.mfu,
    }
    for axis in run.axes:
        expected[f"bytes on {axis.name}"] = axis.sent_bytes
    values = {name: eval(rows[name]["numbers"]) for name in expected}
    assert values == pytest.approx(expected, rel=1e-4)
    for name, row in rows.items():
        printed, *_ = row["value"].split()
        assert printed == format_value(eval(row["numbers"]), ""), name
