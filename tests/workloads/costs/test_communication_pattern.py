"""Calls and bytes of every strategy: what runs counted, and what the papers say of each."""

from dataclasses import replace
from typing import Any

import pytest
from planner_asks import ask
from training_steps import OF_NAME

from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.communication_pattern import Call, bytes_by_axis, calls, equation_of, sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import elements_of, num_parameters, padded_elements, tables_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from parbench.workloads.pipeline_parallel.schedules import make_schedule

TINY = SHAPES["tiny"]  # every parameter's rows divide by 4
PSI, LAYERS, HIDDEN = num_parameters(TINY), TINY.layers, TINY.hidden
ROOT = (512 + 64 + 512) * HIDDEN + 2 * HIDDEN  # embeddings, head and last norm
TOKENS = 4 * 64
WHOLE = TOKENS * HIDDEN * 4  # b s h e


def spec(name: str, ranks: int = 4, **params: Any) -> StepSpec:
    case = OF_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return STRATEGIES[name](case, ranks, "cpu")


def sent(name: str, ranks: int = 4, *, rank: int = 0, **params: Any) -> dict[str, float]:
    return bytes_by_axis(calls(spec(name, ranks, **params).at(rank)))


def on_axis(of: StepSpec, axis: str) -> list[Call]:
    return [call for call in calls(of.at(0)) if call.axis == axis]


def test_a_call_on_800_bytes_sends_what_nccl_tests_count_and_one_rank_alone_nothing() -> None:
    """An all_reduce is a ring's n - 1 steps twice; a broadcast counts the busiest rank of a chain, not the mean."""
    rings = dict.fromkeys(["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"], 600)
    expected = {"all_reduce": 1200, **rings, "broadcast": 800, "reduce": 800, "send": 800, "recv": 0, "barrier": 0}
    assert {operation: sent_bytes(operation, 800, 4) for operation in expected} == expected
    assert {sent_bytes(operation, 800, 1) for operation in expected} == {0}
    with pytest.raises(ValueError, match=r"operation\(allreduce\) is none of all_reduce, all_gather"):
        sent_bytes("allreduce", 8, 2)
    with pytest.raises(ValueError, match=r"n\(0\) < 1"):
        sent_bytes("all_reduce", 8, 0)


def test_the_text_of_an_equation_is_what_it_gives() -> None:
    one = Equation(text="3 b (s + h) e / t", symbols={"b": 2, "s": 5, "h": 0.5, "e": 4, "t": 8})
    assert (one.value, one.numbers) == (3 * 2 * 5.5 * 4 / 8, "3 * 2 * (5 + 0.5) * 4 / 8")
    for mesh, model in (("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b"), ("fsdp=8,tp=2,ep=4", "mixtral-8x7b")):
        of = calls(ask(mesh, model, microbatches=4).at(0))
        for axis in {call.axis for call in of}:
            told = equation_of([call for call in of if call.axis == axis])
            assert eval(told.numbers) == pytest.approx(told.value) == pytest.approx(bytes_by_axis(of)[axis])
        assert all(call.why for call in of)


# what ranks of a run, two or for hsdp four, counted at the process group, of the shape "small" with microbatch 4: times
# by operation and bytes; and parameters, gradients and optimizer as they measured them
# the same of the shape "tiny", by axis


def test_data_parallel_sends_2_psi_zero1_as_much_or_3_and_fsdp_3_or_2_where_parameters_stay() -> None:
    unit = PSI * 4 * 3 / 4
    table: list[tuple[str, dict[str, Any], float]] = [
        ("ddp", {}, 2 * unit),
        ("ddp", {"accumulation": 3}, 3 * 2 * unit),
        ("ddp", {"accumulation": 3, "no_sync": True}, 2 * unit),
        ("ddp", {"precision": "bfloat16"}, unit),
        ("ddp", {"grad_compression": "bf16"}, unit),
        ("zero1", {}, 2 * unit + PSI * 4),
        ("zero1", {"accumulation": 3}, 3 * 2 * unit + PSI * 4),
        ("zero1", {"optimizer": "distributed"}, 2 * unit),
        ("fsdp", {}, 3 * unit),
        ("fsdp", {"accumulation": 3}, 3 * 3 * unit),
        ("fsdp", {"accumulation": 3, "no_sync": True}, (3 * 2 + 1) * unit),
        ("fsdp", {"accumulation": 3, "reshard": False}, 3 * 2 * unit),
    ]
    for name, params, num_bytes in table:
        assert sent(name, **params) == {"dp": pytest.approx(num_bytes)}, (name, params)
    shards = sent("hsdp", shard=2, accumulation=2)  # the root stays gathered
    assert shards["shard"] == pytest.approx(2 * (3 * PSI - ROOT) * 4 / 2)
    assert shards["replicate"] == pytest.approx(2 * 2 * (PSI / 2) * 4 / 2)
    assert sent("hsdp", shard=4) == {"shard": pytest.approx(3 * unit - ROOT * 4 * 3 / 4)}
    for size, buckets in ((0.5, -(-PSI * 4 // (1 << 19))), (25.0, 1)):
        assert [call.times for call in calls(spec("ddp", bucket_mb=size).at(0))] == [buckets]
    at = spec("fsdp", 3).at(0)  # each parameter is padded on its own
    tables = tables_of(at)
    padded = LAYERS * padded_elements(tables.layers[0][1], 3) + padded_elements(tables.ends, 3)
    assert bytes_by_axis(calls(at))["dp"] == pytest.approx(3 * padded * 4 * 2 / 3)
    assert padded > PSI


def test_tensor_parallel_sends_8_bshe_a_layer_and_10_or_11_eighths_of_it_where_it_is_computed_again() -> None:
    """A layer that is computed again stops before its last sum, of which a scatter is half."""
    for ranks in (2, 4):
        layers = 8 * WHOLE * (ranks - 1) / ranks * LAYERS
        for params, times in (({"accumulation": 2}, 2.0), ({"precision": "bfloat16"}, 1 / 2)):
            assert sent("tp", ranks, **params) == {"tp": pytest.approx(times * layers)}, params
        norms = (2 * LAYERS + 1) * 2 * HIDDEN * 4
        ends = (2 * WHOLE + 2 * norms) * (ranks - 1) / ranks  # both gather; norms sum their gradients
        for how, plain, along in (("none", 1, 1), ("selective", 10 / 8, 11 / 8), ("full", 10 / 8, 11 / 8)):
            assert sent("tp", ranks, checkpointing=how)["tp"] == pytest.approx(plain * layers), how
            assert sent("tp_sp", ranks, checkpointing=how)["tp"] == pytest.approx(along * layers + ends), how
    both = sent("tp_fsdp", tp=2)
    assert both["tp"] == sent("tp", 2)["tp"]
    assert both["dp"] == pytest.approx(3 * elements_of(spec("tp_fsdp", tp=2).at(0)) * 4 / 2)
    assert sent("tp_fsdp", 2, tp=2).keys() == {"tp"}


def test_a_split_vocabulary_sums_norms_alone_and_whole_ends_too() -> None:
    split = ask("tp=2", "llama3-8b")
    norms, ends = (2 * 32 + 1) * 4096, 2 * 128256 * 4096
    for one, elements in ((split, norms), (replace(split, ends="tokens"), norms + ends)):
        assert [call.num_bytes / 2 for call in on_axis(one, "tp") if call.op == "all_reduce"] == [elements]
    full = replace(split, checkpointing="full")
    passes = [sum(call.times for call in on_axis(one, "tp") if call.op == "all_gather") for one in (split, full)]
    assert passes == [4 * 32 + 2, 6 * 32 + 2]


def test_attention_sends_keys_round_a_ring_gathers_them_or_exchanges_heads() -> None:
    """Of c ranks, e bytes an element and float32 sums; g is the share of key heads."""
    c, g = 4, 1 / 2
    unit = TOKENS / c * HIDDEN * LAYERS  # elements of a rank's queries in all layers
    for how, again in (("none", 1), ("full", 2)):
        for precision, e in (("float32", 4), ("bfloat16", 2)):
            expected = {
                "zigzag": {"cp": 2 * g * unit * (c - 1) * ((again + 1) * e + 4)},
                "allgather_kv": {"cp": 2 * g * unit * (c - 1) * (again + 2) * e},
                "ulysses": {"cp": 4 * unit * (again + 1) * e * (c - 1) / c},
                "usp": {
                    "ring": 2 * g * unit * ((again + 1) * e + 4),
                    "ulysses": (2 + 2 * g) * unit * (again + 1) * e / 2,
                },
            }
            for method, axes in expected.items():
                heads = 4 if method == "ulysses" else 2  # each of four ranks needs one
                params: dict[str, Any] = {"kv_heads": heads, "checkpointing": how, "precision": precision}
                found = sent("cp", c, method=method, ulysses=2 if method == "usp" else 0, **params)
                del found["dp"]
                assert found == pytest.approx(axes), (method, how, precision)
    given = calls(spec("cp", 8, method="usp", ulysses=2).at(0))
    assert {call.axis: call.ranks for call in given} == {"ring": 4, "ulysses": 2, "dp": 8}
    assert [call.times for call in on_axis(ask("cp=4", microbatches=3), "cp")] == [2 * 3 * 8 * 3, 3 * 8 * 3]  # hops


def test_even_experts_send_t_k_h_each_way_and_their_gradients_go_to_their_copies() -> None:
    even: dict[str, Any] = {"routing": "balanced", "experts": 8, "top_k": 2}
    for ep in (2, 4):
        flight, told = TOKENS * 2 * HIDDEN * 4 * (ep - 1) / ep, 8 * 8 * (ep - 1) / ep
        for how, again in (("none", 1), ("full", 2)):
            found = sent("ep_step", ep=ep, checkpointing=how, accumulation=3, **even)
            assert found["ep"] == pytest.approx(3 * LAYERS * (2 * (again + 1) * flight + again * told)), (ep, how)
        at = spec("ep_step", ep=ep, **even).at(0)
        dense, routed = elements_of(at, "whole", "split"), elements_of(at, "routed")
        assert found["dp"] == pytest.approx(2 * dense * 4 * 3 / 4)
        assert found.get("edp", 0) == pytest.approx(2 * routed * 4 * (1 - ep / 4))
    split = sent("hybrid", 8, mesh="dp=2,tp=4,ep=2,etp=2", microbatches=1, **even)
    n = TOKENS / 4
    each = (2 * 2 * 2 * n * HIDDEN + 3 * 2 * n * 2) * 4  # forward and backward; weights, their sums, routes
    assert split["etp"] == pytest.approx(LAYERS * each / 2)


def test_a_pipeline_sends_bshe_a_boundary_way_and_microbatch_and_nothing_where_a_stages_neighbour_is_its_own() -> None:
    for schedule in ("1f1b", "gpipe", "interleaved", "zb_v", "dualpipe_v"):
        order = make_schedule(schedule, ranks=4, microbatches=8)
        for rank in range(4):
            mine = set(order.stages_of(rank))
            beside = {(stage, other) for stage in mine for other in (stage - 1, stage + 1)}
            out = [one for one in beside if one[1] not in mine and 0 <= one[1] < order.num_stages]
            given: dict[str, Any] = {"schedule": schedule, "microbatches": 8, "layers": 8, "microbatch": 1}
            found = sent("pp", rank=rank, **given).get("pp")
            assert found == len(out) * 8 * 64 * HIDDEN * 4, (schedule, rank)
            peers = {call.peer for call in calls(spec("pp", **given).at(rank))}
            assert peers == {next(r for r in range(4) if other in order.stages_of(r)) for _, other in out}
    own = {"order": "0F0,1F0,1B0,0B0;2F0,3F0,3B0,2B0", "microbatches": 1}  # two stages that follow each other
    assert [sent("pp", 2, rank=rank, **own) for rank in range(2)] == [{"pp": WHOLE}] * 2


def test_axes_share_what_lies_between_and_axes_of_one_rank_make_no_call() -> None:
    def mesh(text: str, ranks: int, **more: Any) -> dict[str, float]:
        return sent("hybrid", ranks, mesh=text, microbatches=4, **more)

    assert sent("hybrid", 1, mesh="dp=1", microbatches=4) == {}
    assert mesh("dp=1,tp=2", 2).keys() == {"tp"}
    assert mesh("dp=4", 4) == sent("ddp")  # once a step
    assert mesh("dp=2,cp=2", 4)["dp"] == sent("ddp")["dp"]
    assert mesh("dp=2,fsdp=4", 8)["dp"] == pytest.approx(2 * PSI / 4 * 4 / 2)
    assert mesh("fsdp=4", 4)["fsdp"] == pytest.approx((2 * 4 + 1) * PSI * 4 * 3 / 4)
    stage = elements_of(spec("hybrid", mesh="fsdp=2,pp=2", microbatches=4).at(0))
    assert mesh("fsdp=2,pp=2", 4)["fsdp"] == pytest.approx(2 * stage * 4 / 2)  # gathered once, however many pass
    assert mesh("pp=2,cp=2,tp=2", 8)["pp"] == mesh("pp=2", 2)["pp"] / 4
    for method in ("ring", "striped", "zigzag", "allgather_kv", "ulysses"):
        both, one = (mesh(f"cp=2,tp={tp}", 2 * tp, cp_method=method)["cp"] for tp in (2, 1))
        assert both == pytest.approx(one / 2), method
    for text in ("dp=2,fsdp=4", "dp=2,pp=2,fsdp=2,cp=2,tp=2"):
        large = ask(text, "llama3-8b", microbatches=4)
        sizes = {**large.mesh, "dp": large.size("dp", "cp")}
        for at in large.positions:
            for call in calls(at):
                assert call.ranks == sizes[call.axis], (text, call)
                assert min(call.num_bytes, call.times) > 0
    [summed] = on_axis(ask("dp=4,cp=2", "llama3-8b"), "dp")
    assert summed.num_bytes <= 25 * 2**20
    assert summed.num_bytes * summed.times == pytest.approx(num_parameters(SHAPES["llama3-8b"]) * 2)


def test_gradients_travel_in_their_own_dtype() -> None:
    wide = Widths.parse("gradients=float32", MIXED)
    for mesh, zero1, wider in (("dp=8", "", 2.0), ("dp=8", "reduce_scatter", 1.5), ("fsdp=8", "", 4 / 3)):
        plain, float32 = (
            sum(bytes_by_axis(calls(ask(mesh, "llama3-8b", zero1=zero1, state=state).at(0))).values())
            for state in (None, wide)
        )
        assert float32 / plain == pytest.approx(wider), (mesh, zero1)
