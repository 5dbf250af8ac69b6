"""``parbench plan --guide``: what is written by hand is what is counted call by call, and figures hold the formulas."""

from dataclasses import replace

import pytest
from reports_fixtures import make_plan, make_run, ok, plain

from parbench.bench.plan.cases import make_case
from parbench.bench.results.document import Lines, Table
from parbench.workloads.costs.memory import state_bytes
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.guide import guide, sayings, strategies
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.models import MODELS, model_of
from parbench.workloads.planner.regimes import bubble, grid, largest, regimes, state_by_ranks

H100 = PRESETS["h100"]
SMALL = 0.005  # what a formula by hand leaves out: padding, norms, counts of tokens


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("tiny", "small"))])
def test_a_formula_by_hand_is_the_bytes_of_the_calls(name: str) -> None:
    known = strategies(model_of(name), 64, 8)
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP", "HSDP"} <= {one.name for one in known}
    for one in known:
        assert one.equation.value == pytest.approx(one.sent_bytes, rel=SMALL), f"{name}: {one.name}"


def test_every_strategy_of_a_llama_is_told_and_experts_where_there_are_some() -> None:
    names = [one.name for one in strategies(model_of("llama3-8b"), 64, 8)]
    context = ["CP, zigzag", "CP, allgather_kv", "CP, ulysses"]
    assert names == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP", "HSDP", "TP", "TP + SP", "PP", *context]
    assert strategies(model_of("mixtral-8x7b"), 64, 8)[-1].name == "EP"
    assert {one.name for one in strategies(model_of("llama3-8b"), 1, 8)} == set()
    (pipeline,) = [one for one in strategies(model_of("deepseek-v3"), 64, 8) if one.name == "PP"]
    assert pipeline.spec.split  # 61 layers


def _cells(table: Table, row: str) -> dict[str, object]:
    return next(
        dict(zip((one.title for one in table.columns), line, strict=True)) for line in table.rows if line[0] == row
    )


def test_a_row_has_the_numbers_of_the_model() -> None:
    step = model_of("llama3-8b")
    psi = num_parameters(step.shape)
    table = guide(step, 64, H100).parts[0].tables[0]
    ddp, sharded = _cells(table, "DDP"), _cells(table, "ZeRO-3, FSDP")
    assert ddp["here"] == pytest.approx(2 * psi * 2 * 63 / 64 / 1e9, rel=SMALL)
    assert sharded["here"] == pytest.approx(3 * psi * 2 * 63 / 64 / 1e9, rel=SMALL)
    assert (ddp["state"], sharded["state"]) == pytest.approx((16 * psi / 1e9, 16 * psi / 64 / 1e9), rel=1e-3)
    assert ddp["bytes a rank sends"] == "2 Psi e r"
    assert _cells(table, "ZeRO-1")["calls"] == "1 reduce_scatter, 1 all_gather"


def test_bubbles_are_those_of_the_closed_forms() -> None:
    for ranks, microbatches in ((8, 32), (4, 8), (2, 2)):
        assert bubble("1f1b", ranks, microbatches) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert bubble("interleaved", 8, 32) == pytest.approx(3.5 / 35.5)
    assert bubble("zb_h1", 8, 32) == pytest.approx(7 / 3 / (32 + 7 / 3))
    assert bubble("dualpipe_v", 8, 4) is None


def test_state_is_zeros_formula_at_every_number_of_ranks() -> None:
    step = model_of("llama3-8b")
    (figure,) = state_by_ranks(step, H100).figures
    assert isinstance(figure, Lines)
    psi = num_parameters(step.shape) / 1e9
    for ranks in (2, 64, 1024):
        told = [figure.lines[name][ranks] for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")]
        wanted = [16 * psi, (4 + 12 / ranks) * psi, (2 + 14 / ranks) * psi, 16 / ranks * psi]
        assert told == pytest.approx(wanted, rel=1e-3)


def test_the_largest_model_fills_the_memory_and_no_more() -> None:
    table = largest(model_of("llama3-8b"), H100)
    for name, held in (("DDP", 16), ("ZeRO-1", 4 + 12 / 64), ("ZeRO-2", 2 + 14 / 64), ("ZeRO-3, or TP x PP", 16 / 64)):
        assert _cells(table, name)["64"] == pytest.approx(H100.usable_bytes / held / 1e9), name
    assert state_bytes(1.0).state == 16
    assert _cells(table, "TP 8 x PP 8 x ZeRO-1")["32"] is None


def test_a_square_is_that_dry_run_or_names_the_rule() -> None:
    step = model_of("llama3-70b")
    table = grid(step, 64, H100)
    cell = _cells(table, "pp 2")["tp 8"]
    spec = replace(step.on({"dp": 4, "pp": 2, "tp": 8}), zero1="reduce_scatter", checkpointing="selective")
    run = dry_run(spec.with_batch(256), H100, exact=False)
    assert run.fits
    assert cell == pytest.approx(run.mfu)
    assert _cells(table, "pp 1")["tp 1"] == "too large"
    assert _cells(table, "pp 1")["tp 16"] == "kv_heads"
    assert _cells(table, "pp 16")["tp 16"] is None


def test_a_mixture_and_layers_that_do_not_divide_have_squares_too() -> None:
    table = grid(model_of("deepseek-v3"), 1024, H100)
    assert all(isinstance(cell, float) for row in table.rows[1:] for cell in row[1:])


def test_loose_sayings_have_the_numbers_that_they_leave_out() -> None:
    step = model_of("llama3-8b")
    told = dict(sayings(strategies(step, 64, 8), step))
    assert "1 Psi on 2, 1.75 Psi on 8, 1.97 Psi on 64 ranks" in told["DDP sends 2 Psi"]
    assert "zb_v 0.0% of a rank's own span, 5.9% of the step" in told["a zero-bubble pipeline has no bubble"]
    both = told["Ring and Ulysses send the same"]
    # forward: a ring 7 hops of 2 b (s/8) k e, Ulysses 7/8 of 2 b (s/8) (h + k) e
    ring, ulysses = 7 * 2 * 1024 * 1024 * 2 / 1e6, 7 / 8 * 2 * 1024 * (4096 + 1024) * 2 / 1e6
    assert f"a ring {ring:,.1f} MB forward" in both
    assert f"Ulysses {ulysses:,.1f} MB forward" in both
    assert "1 + heads/kv_heads = 5 ranks" in both


def test_a_runs_counted_bytes_stand_beside_the_formula_of_the_same_step() -> None:
    def counted(name: str, ratio: float, **params: object) -> object:
        case = make_case(f"workload.{name}", "t:p", params)  # type: ignore[arg-type]
        return ok(case, metrics={"bytes_ratio.dp": plain(ratio, "")})

    records = [
        counted("ddp", 1.0),
        counted("zero1", 1.5, optimizer="zero_redundancy"),
        counted("fsdp", 1.25, reshard=False),
    ]
    run = make_run(make_plan([]), records)  # type: ignore[arg-type]
    table = guide(model_of("llama3-8b"), 64, H100, run).parts[0].tables[0]
    told = {str(row[0]): row[-1] for row in table.rows}
    assert (told["DDP"], told["ZeRO-2"]) == (1.0, 1.25)
    assert told["ZeRO-1"] is None, "torch's ZeroRedundancyOptimizer sends otherwise than the formula"
    assert told["ZeRO-3, FSDP"] is None
    assert "measured ratio" not in {
        one.title for one in guide(model_of("llama3-8b"), 8, H100).parts[0].tables[0].columns
    }


def test_regimes_stand_for_every_model_of_the_catalogue() -> None:
    for name in MODELS:
        assert len(regimes(model_of(name), 16, H100)) == 6, name
