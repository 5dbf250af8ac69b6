"""What a measured step should send and hold: call by call, against the closed forms that the steps themselves use."""

from collections import defaultdict
from typing import Any

import pytest

from workloads.costs import (
    ddp_sent_bytes,
    fsdp_sent_bytes,
    hsdp_sent_bytes,
    sent_bytes,
    state_bytes,
    total_padded_numel,
    tp_sent_bytes,
    zero1_sent_bytes,
)
from workloads.definitions import DEFINITIONS, with_defaults
from workloads.hybrid.hybrid_costs import sent_bytes as hybrid_bytes
from workloads.hybrid.hybrid_tensors import parts_of_rank
from workloads.pipeline.pipeline_case import pipeline_of
from workloads.pipeline.pp_bytes import bytes_by_rank
from workloads.planner.row_calls import KINDS, Expected, Step, expected
from workloads.shapes import SHAPES, num_parameters

SHAPE = SHAPES["tiny-llama"]
PSI = num_parameters(SHAPE)


def step(name: str, ranks: int = 4, **params: Any) -> Step:
    given = with_defaults({"shape": "tiny-llama", "microbatch": 4, **params}, name)
    return Step(name=name, params=given, ranks=ranks, on_node=ranks)


def wanted(name: str, ranks: int = 4, **params: Any) -> Expected:
    found = expected(step(name, ranks, **params))
    assert not isinstance(found, str), found
    return found


def by_axis(found: Expected) -> dict[str, float]:
    sent: dict[str, float] = defaultdict(float)
    for call in found.calls:
        sent[call.axis] += call.sent
    return dict(sent)


def padded(ranks: int, *, root: bool = False) -> int:
    parts = parts_of_rank(SHAPE, (0,), (SHAPE.layers,))
    return total_padded_numel([part.size for part in parts if not root or not part.name.startswith("layers.")], ranks)


def test_every_kind_is_a_step_that_can_be_measured() -> None:
    assert {f"workload.{name}" for name in KINDS} <= {definition.name for definition in DEFINITIONS}


@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("ep_layer", {}, "ep_layer: a layer alone is no training step"),
        ("ep_dispatch", {}, "ep_dispatch: dispatch and combine alone are no training step"),
        ("ep_step", {}, "ep_step: routing = router: who sends how much is known once routes were drawn"),
        ("mine", {}, "mine: no step of this suite"),
        ("cp", {"method": "ring", "attention": "timed:5ms"}, "cp with attention = timed:5ms: waits of tiles"),
        ("hybrid", {"mesh": "dp=4", "checkpointing": "selective"}, "hybrid with checkpointing = selective: it sends"),
        ("hybrid", {"mesh": "pp=4", "split": "2+1+1+0"}, "hybrid with split = 2+1+1+0: the planner gives every stage"),
        ("hybrid", {"mesh": "fsdp=4,ep=2", "experts": 4}, "hybrid with experts: its communication depends on routes"),
    ],
)
def test_what_is_not_predicted_says_why_by_name(name: str, params: dict[str, Any], reason: str) -> None:
    found = expected(step(name, **params))
    assert isinstance(found, str)
    assert found.startswith(reason)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("no_sync", [False, True])
def test_ddp_sums_all_gradients_in_buckets(accumulation: int, no_sync: bool) -> None:
    found = wanted("ddp", accumulation=accumulation, no_sync=no_sync)
    rounds = 1 if no_sync else accumulation
    assert by_axis(found) == pytest.approx(ddp_sent_bytes(PSI, 4, 4, num_synchronisations=rounds))
    assert found.state == state_bytes("ddp", PSI, 4, mixed=False)


def test_small_buckets_are_more_calls_and_as_many_bytes() -> None:
    one, many = wanted("ddp"), wanted("ddp", bucket_mb=0.5)
    assert many.calls[0].count == -(-PSI * 4 // (1 << 19))
    assert by_axis(many) == pytest.approx(by_axis(one))


def test_zero1_broadcasts_every_parameter() -> None:
    found = wanted("zero1")
    assert by_axis(found) == pytest.approx(zero1_sent_bytes(PSI, 4, 4))
    broadcasts = sum(call.count for call in found.calls if call.op == "broadcast")
    assert broadcasts == len(parts_of_rank(SHAPE, (0,), (SHAPE.layers,)))
    assert found.state.optimizer == PSI * 8 / 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "kept"), [("zero2", True), ("zero3", False)])
def test_fsdp_gathers_and_scatters_layer_by_layer(ranks: int, accumulation: int, name: str, kept: bool) -> None:
    found = wanted(name, ranks, accumulation=accumulation)
    psi = padded(ranks)
    theirs = fsdp_sent_bytes(psi, 4, ranks, num_kept=psi if kept else 0, num_microbatches=accumulation)
    assert by_axis(found) == pytest.approx(theirs)
    scatters = [call for call in found.calls if call.op == "reduce_scatter"]
    assert len(scatters) == SHAPE.layers + 1


def test_without_sync_gradients_are_scattered_once() -> None:
    found = wanted("zero3", accumulation=3, no_sync=True)
    assert {call.count for call in found.calls if call.op == "reduce_scatter"} == {1}
    assert {call.count for call in found.calls if call.op == "all_gather"} == {6}


def test_hsdp_shards_inside_and_sums_shards_outside() -> None:
    found = wanted("hsdp", shard=2)
    theirs = hsdp_sent_bytes(padded(2), 4, replicas=2, shards=2, num_kept=padded(2, root=True))
    assert by_axis(found) == pytest.approx(theirs)


def test_hsdp_holds_its_root_gathered() -> None:
    found, plain = wanted("hsdp", shard=2).state, state_bytes("hsdp", PSI, 2, mixed=False)
    root = padded(2, root=True) * 4
    assert found.parameters == pytest.approx(plain.parameters + root / 2)
    assert (found.gradients, found.optimizer) == (plain.gradients, plain.optimizer)


def tensor(ranks: int, accumulation: int = 1) -> float:
    return tp_sent_bytes(
        layers=SHAPE.layers,
        microbatch=4,
        sequence=SHAPE.sequence,
        hidden=SHAPE.hidden,
        element_bytes=4,
        tp=ranks,
        num_microbatches=accumulation,
    )["tp"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_tp_sums_four_times_a_layer(accumulation: int) -> None:
    found = wanted("tp", 2, accumulation=accumulation)
    assert by_axis(found) == pytest.approx({"tp": tensor(2, accumulation)})
    assert [call.count for call in found.calls] == [4 * SHAPE.layers * accumulation]


def test_tp_sp_adds_the_ends_and_the_norms() -> None:
    found = wanted("tp_sp", 2)
    ends = 2 * sent_bytes("all_gather", 4 * SHAPE.sequence * SHAPE.hidden * 4, 2)
    norms = (2 * SHAPE.layers + 1) * sent_bytes("all_reduce", SHAPE.hidden * 4, 2)
    assert by_axis(found) == pytest.approx({"tp": tensor(2) + ends + norms})


@pytest.mark.parametrize("name", ["tp", "tp_sp"])
def test_tensor_ranks_hold_their_part_and_all_that_is_not_split(name: str) -> None:
    held = sum(part.numel for part in parts_of_rank(SHAPE, (0,), (SHAPE.layers,), tp=2))
    found = wanted(name, 2).state
    assert (found.parameters, found.gradients, found.optimizer) == (4 * held, 4 * held, 8 * held)
    assert PSI / 2 < held < PSI


def test_tp_fsdp_is_both() -> None:
    found = wanted("tp_fsdp", 4, tp=2)
    parts = parts_of_rank(SHAPE, (0,), (SHAPE.layers,), tp=2)
    sharded = fsdp_sent_bytes(total_padded_numel([part.size for part in parts], 2), 4, 2)["dp"]
    assert by_axis(found) == pytest.approx({"tp": tensor(2), "dp": sharded})
    assert found.state.parameters == sum(part.numel for part in parts) * 4 / 2


def test_tp_fsdp_of_one_shard_is_tp() -> None:
    assert by_axis(wanted("tp_fsdp", 2, tp=2)) == by_axis(wanted("tp", 2))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb_v"])
def test_a_pipelines_busiest_rank_sends_at_its_boundaries(schedule: str) -> None:
    asked = step("pp", 2, schedule=schedule, microbatches=4)
    found = expected(asked)
    assert not isinstance(found, str), found
    theirs = max(bytes_by_rank(pipeline_of(asked.params, SHAPE, 2), SHAPE, 4, 4))
    assert by_axis(found) == pytest.approx({"pp": theirs})


def test_a_pipelines_fullest_rank_holds_its_end() -> None:
    found = wanted("pp", 2, schedule="1f1b", microbatches=4).state
    half = (PSI - SHAPE.hidden) // 2 + SHAPE.hidden  # as many layers; the head's rank has the last norm as well
    assert found.parameters == 4 * half


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2", "fsdp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,cp=2", "fsdp=2,cp=2"])
def test_hybrid_is_the_measured_steps_own_closed_form(mesh: str, how: str) -> None:
    found = wanted("hybrid", 4, mesh=mesh, microbatches=4, checkpointing=how)
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    theirs = [
        hybrid_bytes(
            SHAPE,
            axes,
            microbatch=4,
            microbatches=4,
            element_bytes=4,
            coordinate={"pp": rank},
            checkpointing=how,
        )
        for rank in range(axes.get("pp", 1))
    ]
    assert by_axis(found) == pytest.approx(max(theirs, key=lambda sent: sum(sent.values())))


def test_shards_of_a_hybrid_step_are_reduced_once_whatever_the_microbatches() -> None:
    one, four = (wanted("hybrid", 4, mesh="fsdp=4", microbatches=count) for count in (1, 4))
    scattered = [sum(call.sent for call in found.calls if call.op == "reduce_scatter") for found in (one, four)]
    assert scattered[0] == scattered[1] > 0


def test_sixteen_bits_halve_what_is_sent() -> None:
    assert by_axis(wanted("tp", 2, precision="bfloat16"))["tp"] == by_axis(wanted("tp", 2))["tp"] / 2
    assert wanted("ddp", precision="bfloat16").state == state_bytes("ddp", PSI, 4, mixed=True)


# what a run of two ranks counted at the process group, of the shape "small" with microbatch 4: (op, bytes, count)
COUNTED = {
    "ddp": [("all_reduce", 17475072, 1)],
    "zero1": [
        ("all_reduce", 17475072, 1),
        ("broadcast", 1572864, 2),
        ("broadcast", 589824, 16),
        ("broadcast", 147456, 32),
        ("broadcast", 98304, 1),
        ("broadcast", 3072, 8),
        ("broadcast", 768, 66),
    ],
    "zero2": [
        ("all_gather", 3245568, 1),
        ("all_gather", 1778688, 8),
        ("reduce_scatter", 1778688, 8),
        ("reduce_scatter", 3245568, 1),
    ],
    "zero3": [
        ("all_gather", 3245568, 2),
        ("all_gather", 1778688, 16),
        ("reduce_scatter", 1778688, 8),
        ("reduce_scatter", 3245568, 1),
    ],
    "hsdp": [
        ("all_gather", 3245568, 1),
        ("all_gather", 1778688, 16),
        ("reduce_scatter", 1778688, 8),
        ("all_reduce", 889344, 8),
        ("reduce_scatter", 3245568, 1),
        ("all_reduce", 1622784, 1),
    ],
    "tp": [("all_reduce", 393216, 32)],
    "tp_sp": [("all_gather", 393216, 34), ("reduce_scatter", 393216, 32), ("all_reduce", 768, 34)],
}


def together(calls: list[tuple[str, float, float]]) -> dict[tuple[str, float], float]:
    found: dict[tuple[str, float], float] = defaultdict(float)
    for op, num_bytes, count in calls:
        found[op, num_bytes] += count
    return dict(found)


@pytest.mark.parametrize("name", COUNTED)
def test_calls_are_those_that_a_run_counted(name: str) -> None:
    found = wanted(name, 2, shape="small")
    mine = together([(call.op, call.num_bytes, call.count) for call in found.calls])
    assert mine == together([(op, float(num_bytes), float(count)) for op, num_bytes, count in COUNTED[name]])


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


@pytest.mark.parametrize("name", HELD)
def test_state_is_what_a_run_measured(name: str) -> None:
    state = wanted(name, 2, shape="small").state
    assert (state.parameters, state.gradients, state.optimizer) == pytest.approx(HELD[name])


def test_groups_sit_on_their_nodes() -> None:
    asked = step("hsdp", 8, shard=4)
    assert (asked.place(4).on_node, asked.place(4).inside) == (4, True)
    spread = Step(name="ddp", params=asked.params, ranks=8, on_node=2)
    assert (spread.place(8).nodes, spread.place(8).inside) == (4, False)
