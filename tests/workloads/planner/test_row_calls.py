"""What a measured step should send and hold, call by call: as runs counted it and as its own closed forms say."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from training_steps import OF_NAME

from bench.plan.groups import parse_mesh
from workloads.catalogue import DEFINITIONS
from workloads.context_parallel.context_case import ulysses_of
from workloads.costs.communication_pattern import (
    ddp_sent_bytes,
    fsdp_sent_bytes,
    hsdp_sent_bytes,
    state_bytes,
    total_padded_numel,
    tp_sent_bytes,
)
from workloads.costs.cp_costs import AttentionSizes, attention_bytes
from workloads.costs.mesh_costs import sent_bytes as hybrid_bytes
from workloads.costs.moe_costs import Moved, Sizes, sent_by
from workloads.costs.parameter_table import parts_of_rank
from workloads.expert_parallel.moe_case import moe_of, num_moe_parameters, num_routed_parameters
from workloads.model.shapes import SHAPES, num_parameters
from workloads.pipeline_parallel.pipeline_case import pipeline_of
from workloads.pipeline_parallel.pp_bytes import bytes_by_rank
from workloads.planner.link_time import Call
from workloads.planner.measured_calls import KINDS, expected
from workloads.planner.measured_exchanges import attention_calls
from workloads.planner.measured_step import Expected, Step, call_of

SHAPE = SHAPES["tiny-llama"]
PSI = num_parameters(SHAPE)
SMALL: dict[str, Any] = {"shape": "small-llama", "microbatch": 2}
EVEN: dict[str, Any] = {**SMALL, "routing": "balanced", "experts": 8, "top_k": 2}


def step(name: str, ranks: int = 4, on_node: int = 0, **params: Any) -> Step:
    given = {"shape": "tiny-llama", "microbatch": 4, **params}
    return Step(
        name=name,
        params=OF_NAME[name].whole(given) if name in OF_NAME else given,
        ranks=ranks,
        on_node=on_node or ranks,
    )


def wanted(name: str, ranks: int = 4, **params: Any) -> Expected:
    found = expected(step(name, ranks, **params))
    assert not isinstance(found, str), found
    return found


def by_axis(calls: Iterable[Call]) -> dict[str, float]:
    sent: dict[str, float] = defaultdict(float)
    for call in calls:
        sent[call.axis] += call.sent
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


def sent(name: str, ranks: int = 4, **params: Any) -> dict[str, float]:
    return by_axis(wanted(name, ranks, **params).calls)


def counts(found: Expected, op: str) -> list[float]:
    return [call.count for call in found.calls if call.op == op]


def padded(ranks: int, *, root: bool = False, tp: int = 1) -> int:
    parts = parts_of_rank(SHAPE, (0,), (SHAPE.layers,), tp=tp)
    return total_padded_numel([part.size for part in parts if not root or not part.name.startswith("layers.")], ranks)


def test_a_step_knows_its_sizes_and_where_its_groups_sit() -> None:
    asked = step("ddp", 8, 4, shape="tiny", microbatch=2, hidden=256)
    assert (asked.shape.hidden, asked.activation_bytes) == (256, 2 * 64 * 256 * 4)
    asks = step("ddp"), step("ddp", accumulation=3), step("pp", schedule="1f1b", microbatches=8)
    assert [each.microbatches for each in asks] == [1, 3, 8]
    assert [(asked.place(n).on_node, asked.place(n).nodes) for n in (2, 4, 8)] == [(2, 1), (4, 1), (4, 2)]
    call = call_of(asked, "dp", "all_reduce", 100.0, 3, 8)
    assert (call.axis, call.op, call.num_bytes, call.count, call.why) == ("dp", "all_reduce", 100.0, 3, "ddp")
    assert {f"workload.{name}" for name in KINDS} <= {definition.name for definition in DEFINITIONS}


UNPREDICTED: list[tuple[str, dict[str, Any], str]] = [
    ("ep_layer", {}, "ep_layer: a layer alone is no training step"),
    ("ep_dispatch", {}, "ep_dispatch: dispatch and combine alone are no training step"),
    ("mine", {}, "mine: no step of this suite"),
    ("cp", {"method": "ring", "attention": "timed:5ms"}, "cp with attention = timed:5ms: waits of tiles"),
    ("hybrid", {"mesh": "dp=4", "checkpointing": "selective"}, "hybrid with checkpointing = selective: it sends"),
    ("hybrid", {"mesh": "pp=4", "split": "2+1+1+0"}, "hybrid with split = 2+1+1+0: the planner gives every stage"),
    ("hybrid", {"mesh": "fsdp=4,ep=2", "experts": 4}, "hybrid with experts: its communication depends on routes"),
    ("ep_step", {}, "ep_step: routing = router: who sends how much is known once routes were drawn, of balanced"),
    ("ep_step", {**EVEN, "routing": "zipf"}, "ep_step: routing = zipf"),
    ("ep_step", {**EVEN, "variant": "dedup"}, "ep_step: variant = dedup, capacity = 0, chunks = 1: only dropless"),
    ("ep_step", {**EVEN, "capacity": 1.25}, "ep_step: variant = all_to_all, capacity = 1.25"),
    ("ep_step", {**EVEN, "chunks": 2}, "ep_step: variant = all_to_all, capacity = 0, chunks = 2"),
    ("ep_step", {**EVEN, "tp": 2}, "ep_step: tp = 2, etp = 1, fsdp = false: only whole experts"),
    ("ep_step", {**EVEN, "fsdp": True}, "ep_step: tp = 1, etp = 1, fsdp = true"),
]


def test_what_is_not_predicted_says_why_by_name() -> None:
    for name, params, reason in UNPREDICTED:
        found = expected(step(name, **params))
        assert isinstance(found, str), (name, params)
        assert found.startswith(reason), found


# what a run of two ranks counted at the process group, of the shape "small" with microbatch 4: times by op and bytes
COUNTED: dict[str, dict[str, dict[float, int]]] = {
    "ddp": {"all_reduce": {17475072: 1}},
    "zero1": {
        "all_reduce": {17475072: 1},
        "broadcast": {1572864: 2, 589824: 16, 147456: 32, 98304: 1, 3072: 8, 768: 66},
    },
    "zero2": {"all_gather": {3245568: 1, 1778688: 8}, "reduce_scatter": {1778688: 8, 3245568: 1}},
    "zero3": {"all_gather": {3245568: 2, 1778688: 16}, "reduce_scatter": {1778688: 8, 3245568: 1}},
    "hsdp": {
        "all_gather": {3245568: 1, 1778688: 16},
        "reduce_scatter": {1778688: 8, 3245568: 1},
        "all_reduce": {889344: 8, 1622784: 1},
    },
    "tp": {"all_reduce": {393216: 32}},
    "tp_sp": {"all_gather": {393216: 34}, "reduce_scatter": {393216: 32}, "all_reduce": {768: 34}},
}
# parameters, gradients and optimizer as the same run measured them; the optimizer counts its steps beside its moments
HELD = {
    "ddp": (17475072, 17475072, 34950144),
    "zero1": (17475072, 17475072, 17475072),
    "zero2": (17475072, 8737536, 17475072),
    "zero3": (8737536, 8737536, 17475072),
    "hsdp": (10360320, 8737536, 17475072),
    "tp": (10378752, 10378752, 20757504),
    "tp_sp": (10378752, 10378752, 20757504),
}


def test_calls_and_state_are_those_that_a_run_counted() -> None:
    for name, counted in COUNTED.items():
        found = wanted(name, 2, shape="small")
        mine: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for call in found.calls:
            mine[call.op][call.num_bytes] += call.count
        assert mine == counted, name
        state = found.state
        assert (state.parameters, state.gradients, state.optimizer) == pytest.approx(HELD[name]), name


# what runs of two ranks counted by axis, of the shape tiny with microbatch 4
EXCHANGED: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("cp", {"method": "zigzag"}, {"cp": 1572864, "dp": 3728384}),
    ("cp", {"method": "allgather_kv"}, {"cp": 1572864, "dp": 3728384}),
    ("cp", {"method": "ulysses"}, {"cp": 1048576, "dp": 3728384}),
    ("ep_step", {"routing": "balanced"}, {"ep": 2097280, "dp": 2692096}),
]


def test_bytes_of_exchanges_are_those_that_a_run_counted() -> None:
    for name, params, counted in EXCHANGED:
        assert sent(name, 2, shape="tiny", **params) == counted, (name, params)


def tensor(ranks: int, microbatches: int = 1) -> float:
    sizes = {"layers": SHAPE.layers, "microbatch": 4, "sequence": SHAPE.sequence, "hidden": SHAPE.hidden}
    return tp_sent_bytes(**sizes, element_bytes=4, tp=ranks, num_microbatches=microbatches)["tp"]


def test_bytes_are_those_of_the_closed_forms() -> None:
    psi, root = padded(4), padded(2, root=True)
    both = {"tp": tensor(2), "dp": fsdp_sent_bytes(padded(2, tp=2), 4, 2)["dp"]}
    hsdp = hsdp_sent_bytes(padded(2), 4, replicas=2, shards=2, num_kept=root)
    table: list[tuple[str, int, dict[str, Any], dict[str, float]]] = [
        ("ddp", 4, {"accumulation": 3}, ddp_sent_bytes(PSI, 4, 4, num_synchronisations=3)),
        ("ddp", 4, {"accumulation": 3, "no_sync": True}, ddp_sent_bytes(PSI, 4, 4)),
        ("zero2", 4, {"accumulation": 2}, fsdp_sent_bytes(psi, 4, 4, num_kept=psi, num_microbatches=2)),
        ("zero3", 4, {"accumulation": 2}, fsdp_sent_bytes(psi, 4, 4, num_microbatches=2)),
        ("zero3", 3, {}, fsdp_sent_bytes(padded(3), 4, 3)),
        ("hsdp", 4, {"shard": 2}, hsdp),
        ("tp", 2, {"accumulation": 2}, {"tp": tensor(2, 2)}),
        ("tp", 2, {"precision": "bfloat16"}, {"tp": tensor(2) / 2}),
        ("tp_fsdp", 4, {"tp": 2}, both),
        ("tp_fsdp", 2, {"tp": 2}, {"tp": tensor(2)}),
    ]
    for schedule in ("1f1b", "gpipe", "interleaved", "zb_v"):
        params: dict[str, Any] = {"schedule": schedule, "microbatches": 4}
        pipeline = pipeline_of(step("pp", 2, **params).params, SHAPE, 2)
        table.append(("pp", 2, params, {"pp": max(bytes_by_rank(pipeline, SHAPE, 4, 4))}))
    for name, ranks, params, theirs in table:
        assert sent(name, ranks, **params) == pytest.approx(theirs), (name, params)


def test_how_often_is_called_follows_from_buckets_units_and_synchronisation() -> None:
    assert counts(wanted("ddp", bucket_mb=0.5), "all_reduce") == [-(-PSI * 4 // (1 << 19))]
    once = wanted("zero3", accumulation=3, no_sync=True)
    assert counts(once, "reduce_scatter") == [1] * (SHAPE.layers + 1)
    assert set(counts(once, "all_gather")) == {6}


def test_state_is_what_the_fullest_rank_holds_also_of_sixteen_bits() -> None:
    assert wanted("ddp", precision="bfloat16").state == state_bytes("ddp", PSI, 4, mixed=True)
    held = sum(part.numel for part in parts_of_rank(SHAPE, (0,), (SHAPE.layers,), tp=2))
    assert wanted("tp_fsdp", 4, tp=2).state.parameters == held * 4 / 2
    half = (PSI - SHAPE.hidden) // 2 + SHAPE.hidden  # as many layers; the head's rank has the last norm as well
    assert wanted("pp", 2, schedule="1f1b", microbatches=4).state.parameters == 4 * half


def test_a_hybrid_step_sends_what_its_own_closed_form_says_and_scatters_shards_once() -> None:
    meshes: list[tuple[str, str]] = [("dp=2,fsdp=2", "none"), ("fsdp=2,tp=2", "full"), ("dp=2,pp=2", "none")]
    for text, how in (*meshes, ("pp=2,tp=2", "full"), ("fsdp=2,cp=2", "none"), ("dp=2,cp=2", "full")):
        mesh = parse_mesh(text)
        sizes: dict[str, Any] = {"microbatch": 4, "microbatches": 4, "element_bytes": 4, "checkpointing": how}
        ranks = range(mesh.get("pp", 1))
        theirs = [hybrid_bytes(SHAPE, mesh, coordinate={"pp": rank}, **sizes) for rank in ranks]
        mine = sent("hybrid", mesh=text, microbatches=4, checkpointing=how)
        assert mine == pytest.approx(max(theirs, key=lambda each: sum(each.values()))), (mesh, how)
    one, four = (wanted("hybrid", mesh="fsdp=4", microbatches=count).calls for count in (1, 4))
    scattered = [sum(call.sent for call in calls if call.op == "reduce_scatter") for calls in (one, four)]
    assert scattered[0] == scattered[1] > 0


ATTENTION = [
    ("ring", "none", "float32"),
    ("striped", "selective", "float32"),
    ("zigzag", "full", "bfloat16"),
    ("allgather_kv", "full", "float32"),
    ("ulysses", "selective", "bfloat16"),
    ("usp", "full", "float32"),
    ("usp", "none", "bfloat16"),
]


def test_attention_sends_what_the_closed_form_of_its_method_says() -> None:
    for method, how, precision in ATTENTION:
        asked = step("cp", method=method, accumulation=3, checkpointing=how, precision=precision, **SMALL)
        shape, element_bytes = asked.shape, 2 if precision == "bfloat16" else 4
        sizes = AttentionSizes(
            microbatch=2,
            sequence=shape.sequence,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            element_bytes=element_bytes,
        )
        forwards = 1 if how == "none" else 2
        theirs = attention_bytes(method, sizes, 4, ulysses_of(method, 0, 4)).step(shape.layers, 3, forwards=forwards)
        assert by_axis(attention_calls(asked)) == pytest.approx(theirs), (method, how, precision)


def test_rings_pass_a_message_a_hop_exchanges_go_twice_a_pass_and_gradients_are_averaged_as_well() -> None:
    keys, gradients = attention_calls(step("cp", method="ring", **SMALL))
    assert (keys.op, keys.count, gradients.count) == ("send", 2 * 3 * 8, 3 * 8)
    assert keys.num_bytes == gradients.num_bytes == 2 * 2 * 32 * 192 / 2 * 4
    mixed, back = attention_calls(step("cp", method="ulysses", **SMALL))
    assert (mixed.op, mixed.count, back.count) == ("all_to_all", 2 * 8, 2 * 8)
    assert mixed.num_bytes == 2 * back.num_bytes
    assert sent("cp", method="usp", **SMALL).keys() == {"ring", "ulysses", "dp"}
    given = attention_calls(step("cp", 8, method="usp", ulysses=2, **SMALL))
    assert {call.axis: call.place.ranks for call in given} == {"ring": 4, "ulysses": 2}


def test_even_experts_send_what_their_closed_form_says_and_again_where_layers_are_computed_again() -> None:
    for ep in (2, 4):
        asked = step("ep_step", ep=ep, accumulation=2, **EVEN)
        shape, tokens = asked.shape, 2 * asked.shape.sequence
        sizes = Sizes(hidden=shape.hidden, element_bytes=4, top_k=2, tokens=tokens, experts_per_rank=8 // ep)
        pairs = [[tokens * 2 // ep] * ep] * ep
        each = sent_by("all_to_all", 0, Moved(pairs=pairs, rows=pairs), sizes)
        found = sent("ep_step", ep=ep, accumulation=2, **EVEN)["ep"]
        assert found == pytest.approx(2 * shape.layers * (each.forward + each.backward)), ep
    plain, again = (sent("ep_step", checkpointing=how, **EVEN)["ep"] for how in ("none", "full"))
    assert again / plain == pytest.approx(1.5, rel=0.01)


def test_gradients_of_experts_are_averaged_over_their_copies_and_the_rest_over_all() -> None:
    asked = step("ep_step", ep=2, **EVEN)
    moe = moe_of(asked.params, asked.shape, 4)
    routed = num_routed_parameters(asked.shape, moe)
    rest = num_moe_parameters(asked.shape, moe) - routed
    found = sent("ep_step", ep=2, **EVEN)
    assert found["dp"] == pytest.approx(2 * rest * 4 * 3 / 4)
    assert found["edp"] == pytest.approx(2 * routed / 2 * 4 / 2)
    assert "edp" not in sent("ep_step", ep=4, **EVEN)
    assert wanted("ep_step", ep=4, **EVEN).state.parameters == 4 * (rest + routed / 4)
