"""Any mutation of an order is refused by rule, action and place, and the action is marked in the grid."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UserError
from workloads.pipeline.actions import Action, Order
from workloads.pipeline.schedule_check import check, draw_grid, peak_in_flight
from workloads.pipeline.schedules import NAMES, Schedule, make_schedule, schedule_from_csv


def changed(schedule: Schedule, rank: int, row: list[Action | None]) -> Schedule:
    """The schedule with another row for one rank."""
    order: Order = tuple(tuple(row) if at == rank else old for at, old in enumerate(schedule.order))
    return Schedule(
        name=schedule.name,
        order=order,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
    )


def refusal_of(schedule: Schedule) -> tuple[str, str]:
    """The sentence and the grid."""
    with pytest.raises(UserError) as refusal:
        check(schedule)
    sentence, _, grid = str(refusal.value).partition("\n")
    return sentence, grid


def refusal_of_csv(text: str) -> tuple[str, str]:
    return refusal_of(schedule_from_csv(text, "mine"))


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_good_order_is_fine() -> None:
    check(schedule_from_csv(GOOD))
    check(schedule_from_csv("0F0,,,0B0\n,1F0,1I0,1W0\n"))


def test_two_actions_in_the_wrong_order_are_refused() -> None:
    sentence, grid = refusal_of_csv("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    assert sentence == "mine: 1B0 at rank 1, step 0 needs 1F0, which comes later, at rank 1, step 1"
    assert grid.splitlines() == [
        "step     0     1     2     3",
        "rank 0  0F0   0F1   0B0   0B1",
        "rank 1 >1B0<  1F0   1F1   1B1",
    ]


def test_a_weight_gradient_before_its_input_gradient_is_refused() -> None:
    sentence, grid = refusal_of_csv("0F0,0W0,0I0\n1F0,1B0\n")
    assert sentence == "mine: 0W0 at rank 0, step 1 needs 0I0, which comes later, at rank 0, step 2"
    assert ">0W0<" in grid


def test_the_turn_of_a_v_is_within_a_rank() -> None:
    sentence, grid = refusal_of_csv("0F0,3F0,3B0,0B0\n2F0,1F0,2B0,1B0\n")
    assert sentence == "mine: 2F0 at rank 1, step 0 needs 1F0, which comes later, at rank 1, step 1"
    assert ">2F0<" in grid


@pytest.mark.parametrize(
    ("text", "action", "rank"),
    [
        ("0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "0F1", 0),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1\n", "1B0", 1),
        ("0F0,0I0\n1F0,1B0\n", "0W0", 0),
        ("0F0,0W0\n1F0,1B0\n", "0I0", 0),
    ],
)
def test_an_action_that_lacks_is_refused_and_drawn_at_the_end(text: str, action: str, rank: int) -> None:
    sentence, grid = refusal_of_csv(text)
    assert sentence.startswith(f"mine: {action} lacks on rank {rank}: stages(2) x microbatches(")
    assert sentence.endswith("each need F and B, or F, I and W")
    assert grid.splitlines()[1 + rank].rstrip().endswith(f">{action}<")


def test_a_stage_that_nobody_runs_lacks() -> None:
    short = Schedule(name="mine", order=((Action(0, "F", 0), Action(0, "B", 0)), ()), ranks=2, microbatches=1, chunks=1)
    sentence, grid = refusal_of(short)
    assert sentence.startswith("mine: 1F0 lacks on rank 1")
    assert grid.splitlines()[2].split() == ["rank", "1", ">1F0<", "."]


def test_an_action_that_comes_twice_is_refused() -> None:
    sentence, grid = refusal_of_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B0\n")
    assert sentence == "mine: 1B0 comes twice, at rank 1, step 1 and at rank 1, step 4"
    assert grid.splitlines()[2].split() == ["rank", "1", "1F0", "1B0", "1F1", "1B1", ">1B0<"]


def test_a_stage_on_two_ranks_is_refused() -> None:
    schedule = changed(schedule_from_csv(GOOD, "mine"), 0, [Action(0, "F", 0), None, Action(1, "B", 1)])
    sentence, grid = refusal_of(schedule)
    assert sentence == "mine: 1F0 at rank 1, step 0: rank 0 has stage 1 too, and a stage lies on one rank"
    assert ">1F0<" in grid


@pytest.mark.parametrize("part", ["I", "W"])
def test_a_backward_both_whole_and_in_parts_is_refused(part: str) -> None:
    sentence, grid = refusal_of_csv(f"0F0,0B0,0{part}0\n1F0,1B0\n")
    told = "0B0 at rank 0, step 1: a backward is either whole (B) or in two parts (I and W)"
    assert sentence == f"mine: 0{part}0 at rank 0, step 2 comes beside {told}"
    assert f">0{part}0<" in grid


def test_what_is_out_of_range_is_refused() -> None:
    made = schedule_from_csv(GOOD, "mine")
    sentence, grid = refusal_of(changed(made, 1, [*made.order[1], Action(2, "F", 0)]))
    assert sentence == "mine: 2F0 at rank 1, step 4 has stage(2) >= stages(2)"
    assert ">2F0<" in grid
    sentence, grid = refusal_of(changed(made, 1, [*made.order[1], Action(1, "F", 2)]))
    assert sentence == "mine: 1F2 at rank 1, step 4 has microbatch(2) >= microbatches(2)"
    assert ">1F2<" in grid


def test_rows_must_be_ranks() -> None:
    wrong = Schedule(name="mine", order=((Action(0, "F", 0),),), ranks=2, microbatches=1, chunks=1)
    with pytest.raises(UserError, match=r"^mine has rows\(1\) != ranks\(2\)$"):
        check(wrong)


def test_a_crossing_deadlocks_and_both_ends_are_marked() -> None:
    """Rank 0 wants a gradient before it sends the microbatch that rank 1 begins with."""
    sentence, grid = refusal_of_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert sentence == "mine deadlocks: rank 0 waits with 0B0 for 1B0, rank 1 waits with 1F1 for 0F1"
    assert [line.split() for line in grid.splitlines()[1:]] == [
        ["rank", "0", "0F0", ">0B0<", "0F1", "0B1"],
        ["rank", "1", ">1F1<", "1F0", "1B0", "1B1"],
    ]


def test_a_rank_that_only_waits_for_the_deadlocked_is_not_blamed() -> None:
    sentence, _ = refusal_of_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F1,2F0,2B0,2B1\n")
    assert sentence == "mine deadlocks: rank 1 waits with 1B0 for 2B0, rank 2 waits with 2F1 for 1F1"


def test_the_grid_is_about_twenty_columns_around_the_mark() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=64)
    row = list(schedule.order[2])
    del row[60]
    row.insert(90, schedule.order[2][60])
    sentence, grid = refusal_of(changed(schedule, 2, row))
    assert "needs" in sentence or "deadlocks" in sentence
    head, *rows = grid.splitlines()
    assert len(head.split()) == 22  # "step" and twenty-one of them
    assert len(rows) == 4
    assert max(map(len, rows)) < 200


def test_a_grid_shows_idle_steps_as_dots() -> None:
    schedule = schedule_from_csv("0F0,,0B0\n,1F0,1B0\n")
    assert draw_grid(schedule.order, [(1, 1)]).splitlines() == [
        "step     0     1     2",
        "rank 0  0F0    .    0B0",
        "rank 1   .   >1F0<  1B0",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_dropping_any_action_is_refused(name: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    for rank, row in enumerate(schedule.order):
        for step, action in enumerate(row):
            sentence, grid = refusal_of(changed(schedule, rank, [*row[:step], *row[step + 1 :]]))
            assert f"{action} lacks on rank {rank}" in sentence
            assert f">{action}<" in grid


@pytest.mark.parametrize("name", NAMES)
def test_doubling_any_action_is_refused(name: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    for rank, row in enumerate(schedule.order):
        for step, action in enumerate(row):
            sentence, grid = refusal_of(changed(schedule, rank, [*row[: step + 1], action, *row[step + 1 :]]))
            assert f"{action} comes twice, at rank {rank}, step {step} and" in sentence
            assert f">{action}<" in grid


@pytest.mark.parametrize("name", NAMES)
def test_swapping_a_forward_with_its_backward_is_refused(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    for rank, row in enumerate(schedule.order):
        steps = {action.kind: step for step, action in enumerate(row) if action is not None and action.microbatch == 3}
        forward, backward = steps["F"], steps["B" if "B" in steps else "I"]
        swapped = list(row)
        swapped[forward], swapped[backward] = row[backward], row[forward]
        sentence, grid = refusal_of(changed(schedule, rank, swapped))
        assert f"at rank {rank}" in sentence
        assert ">" in grid


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31))
def test_a_shuffled_rank_is_refused_or_still_respects_every_need(name: str, seed: int) -> None:
    """What the check lets pass, a rank-by-rank replay of its own can run."""
    schedule = make_schedule(name, ranks=2, microbatches=4)
    row = list(schedule.order[1])
    generator = random.Random(seed)
    step = generator.randrange(len(row) - 1)
    row[step], row[step + 1] = row[step + 1], row[step]
    candidate = changed(schedule, 1, row)
    try:
        check(candidate)
    except UserError:
        assert not replays(candidate)
    else:
        assert replays(candidate)


def replays(schedule: Schedule) -> bool:
    """Run the order the slow way: over and over, each rank's first action if what it needs was ever seen."""
    rows = [list(schedule.actions_of(rank)) for rank in range(schedule.ranks)]
    seen: set[tuple[int, str, int]] = set()
    for _ in range(sum(map(len, rows))):
        for row in rows:
            if row and can_run(row[0], seen, schedule.num_stages):
                stage, kind, microbatch = row[0].stage, row[0].kind, row[0].microbatch
                seen |= {(stage, "G", microbatch)} if kind in ("B", "I") else {(stage, kind, microbatch)}
                row.pop(0)
    return not any(rows)


def can_run(action: Action, seen: set[tuple[int, str, int]], num_stages: int) -> bool:
    if action.kind == "F":
        return action.stage == 0 or (action.stage - 1, "F", action.microbatch) in seen
    if action.kind == "W":
        return (action.stage, "G", action.microbatch) in seen
    after = action.stage == num_stages - 1 or (action.stage + 1, "G", action.microbatch) in seen
    return after and (action.stage, "F", action.microbatch) in seen


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("naive", 1, (1, 1, 1, 1)),
        ("gpipe", 1, (8, 8, 8, 8)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("zb_h1", 1, (4, 4, 4, 4)),
        ("zb_h2", 1, (7, 7, 7, 7)),
        ("looped_bfs", 2, (16, 16, 16, 16)),
        ("zb_v", 2, (8, 8, 8, 8)),
        ("dualpipe_v", 2, (9, 9, 9, 9)),
    ],
)
def test_chunks_in_flight_are_the_tables(name: str, chunks: int, expected: tuple[int, ...]) -> None:
    """P=4, M=8: GPipe M, 1F1B P-r, ZB-H1 P, ZB-H2 2P-1, LoopedBFS M v, ZB-V P (2P chunks), DualPipeV 2P+1 chunks."""
    assert peak_in_flight(make_schedule(name, ranks=4, microbatches=8, chunks=chunks)) == expected


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (4, 3), (4, 4), (8, 2)])
def test_interleaved_holds_p_and_a_share_more_on_rank_0(ranks: int, chunks: int) -> None:
    """P (1 + (P-1)/(P v)) microbatches of all chunks (arXiv 2205.05198), which is P v + P - 1 chunks; less behind."""
    held = peak_in_flight(make_schedule("interleaved", ranks=ranks, microbatches=4 * ranks, chunks=chunks))
    assert held[0] == ranks * chunks + ranks - 1
    assert all(one == other + 2 for one, other in pairwise(held))


def test_fewer_microbatches_hold_no_more_than_there_are() -> None:
    assert peak_in_flight(make_schedule("1f1b", ranks=4, microbatches=2)) == (2, 2, 2, 1)
    assert peak_in_flight(make_schedule("zb_h2", ranks=4, microbatches=3)) == (3, 3, 3, 3)
