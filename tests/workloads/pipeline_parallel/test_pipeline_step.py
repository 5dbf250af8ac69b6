"""A pipeline of any schedule computes what one process does, bit for bit, and sends what the closed form says."""

from typing import Any

import pytest
import torch
from mesh_steps import Params, small_pipeline
from ranks import Ranks
from training_steps import wrong_after_a_step

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.pipeline_parallel import schedules
from parbench.workloads.pipeline_parallel.pipeline_step import notes_of, order_of_gradients
from parbench.workloads.pipeline_parallel.schedules import make_schedule, schedule_from_csv
from parbench.workloads.step.sent_bytes import counted


def looked_at(world: World, cases: list[Params]) -> list[tuple[list[int], float, float, str]]:
    """Return for each case what is wrong after a step on each of two batches, its bytes, counted and by closed form,
    and how the rank describes it."""
    found = []
    for params in cases:
        step = small_pipeline(world, {"microbatches": 4, **params})
        wrong = [wrong_after_a_step(step) for _ in range(2)]
        step.reset()
        calls = counted(step.step, step.layout.axes)
        sent = sum(sent_bytes(call.op, call.num_bytes, call.ranks) for call in calls)
        found.append((wrong, sent, step.expected_bytes()["pp"], repr(step.describe())))
        step.close()
    return found


def assert_right(ranks: Ranks, cases: list[Params]) -> None:
    told = ranks.call("test_pipeline_step:looked_at", cases=cases)
    for looks in told:
        for params, (wrong, sent, expected, described), (*_, first) in zip(cases, looks, told[0], strict=True):
            assert wrong == [0, 0], params
            assert sent == expected > 0, params
            assert described == first, params


# stage 2 takes its gradients from the last microbatch on, stage 0 from the first; and so does the other rank
OPPOSITE = (
    "0F0,0F1,0F2,2F0,2F1,2F2,2B2,2B1,2B0,0B0,0B1,0B2;"
    "1F0,1F1,1F2,3F0,3F1,3F2,3B2,3B1,3B0,1B0,1B1,1B2"
)  # fmt: skip


def test_schedules_of_every_kind_get_the_bits_of_one_process(two_ranks: Ranks) -> None:
    assert_right(two_ranks, [{"schedule": name} for name in ("gpipe", "looped_bfs", "zb_h2", "zb_v", "dualpipe_v")])


@pytest.mark.full
def test_options_and_orders_of_ones_own_change_no_bit(two_ranks: Ranks) -> None:
    """A valid order whose stages take gradients in different orders is right, though no one process sums in it."""
    cases: list[Params] = [
        {"recipe": "llama", "split": "1+3"},
        {"checkpointing": "full", "precision": "bfloat16"},
        {"checkpointing": "selective", "schedule": "gpipe"},
        {"order": "0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", "microbatches": 2, "split": "2+2"},
        *({"order": OPPOSITE, "microbatches": 3, "precision": of} for of in ("float32", "bfloat16")),
    ]
    assert_right(two_ranks, [{"schedule": "1f1b", **params} for params in cases])


@pytest.mark.full
def test_every_schedule_gets_the_bits_of_one_process_on_four_ranks_too(two_ranks: Ranks, four_ranks: Ranks) -> None:
    chunks: list[Params] = [
        {"schedule": "interleaved", "chunks": 4, "layers": 8},
        {"schedule": "interleaved_zb", "chunks": 1},
    ]
    assert_right(two_ranks, [*({"schedule": name} for name in schedules.NAMES), *chunks])
    cases = [{"schedule": name, "microbatches": 8 if name == "dualpipe_v" else 4} for name in schedules.NAMES]
    assert_right(four_ranks, cases)


def test_one_process_can_follow_a_rank_s_stages_where_their_orders_are_one() -> None:
    for order, taken in (
        (OPPOSITE, [(), ()]),
        (OPPOSITE.replace("2B2,2B1,2B0", "2B0,2B1,2B2"), [(0, 1, 2), ()]),
        ("0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", [(1, 0), (0, 1)]),
        ("0F0,0I0,0F1,0I1,0W1,0W0;1F0,1I0,1W0,1F1,1I1,1W1", [(1, 0), (0, 1)]),
    ):
        schedule = schedule_from_csv(order.replace(";", "\n"), "order")
        assert [order_of_gradients(schedule, rank) for rank in range(2)] == taken, order


SPOILS = ("one bit", "a microbatch twice", "microbatches in another order")


def wrong_after_spoiling(world: World, spoil: str) -> int:
    """Return what is wrong on a rank after a spoilt step."""
    step = small_pipeline(world, {"schedule": "1f1b", "microbatches": 4})
    run = step.layout.forward_backward
    assert run is not None

    def spoilt(microbatches: Any) -> Any:
        one, two, three, four = microbatches
        if spoil == "microbatches in another order":
            return run([three, four, one, two])
        if spoil == "a microbatch twice":
            return run([one, two, three, one])
        loss = run(microbatches)
        if world.rank == 0:
            gradient = step.layout.model.get_parameter("layers.0.ffn.up.weight").grad
            assert gradient is not None
            value = gradient.view(-1)[5]
            value.copy_(torch.nextafter(value, torch.tensor(1.0)))
        return loss

    object.__setattr__(step.layout, "forward_backward", spoilt)
    step.step()
    found = step.check()
    step.close()
    return found


def test_the_gate_sees_one_bit(two_ranks: Ranks) -> None:
    """Sums of the same microbatches in another order differ in their last bits."""
    bit, *others = (two_ranks.call("test_pipeline_step:wrong_after_spoiling", spoil=spoil) for spoil in SPOILS)
    assert bit == [1, 0]
    assert min(wrong for of_rank in others for wrong in of_rank) > 0


def test_a_pipeline_says_where_its_microbatches_do_not_fill_it() -> None:
    for name, microbatches, told in (
        ("1f1b", 4, []),
        ("1f1b", 3, ["50%"]),
        ("1f1b", 2, ["60%"]),
        ("interleaved", 3, []),
    ):
        notes = notes_of(make_schedule(name, ranks=4, microbatches=microbatches))
        words = "do not fill the pipeline: at F = I = W its bubble is"
        assert list(notes) == [f"microbatches({microbatches}) < ranks(4) {words} {share} of the time" for share in told]
