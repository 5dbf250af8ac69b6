"""The order in which a launch visits its cases: everything in passes, small things often, large things once."""

from collections import Counter

from parbench.bench.launch.visits import VISITS, order_of_visits, spread_over_visits
from parbench.bench.plan.cases import Case, make_case
from tests.support.fakes import make_fake_case, make_job


def sized(number: int, megabytes: int) -> Case:
    return make_case("p2p.sendrecv", "a:b", {"size_bytes": megabytes << 20, "number": number})


def test_operations_are_visited_in_passes_in_an_order_of_chance_and_steps_once() -> None:
    names = [
        "collective.barrier",
        "workload.ddp",
        "memory.copy",
        "custom.mine",
        "compute.gemm",
        "p2p.sendrecv",
    ]
    cases = [make_fake_case(number, name) for number, name in enumerate(names)]
    orders = [order_of_visits(cases, *asked)[0] for asked in ((1, 0), (1, 0), (2, 0), (1, 1))]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3, "by seed and launch"
    assert Counter(orders[0]) == {0: VISITS, 2: VISITS, 4: VISITS, 5: VISITS, 1: 1, 3: 1}
    passes = [place for place in orders[0] if place not in (1, 3)]
    each = [tuple(passes[i : i + 4]) for i in range(0, len(passes), 4)]
    assert all(sorted(one) == [0, 2, 4, 5] for one in each), (
        "all are visited before one is visited again"
    )
    assert len(set(each)) > 1


def test_what_is_kept_ready_between_visits_is_bounded_and_the_smallest_come_first() -> None:
    cases = [sized(number, megabytes) for number, megabytes in enumerate((300, 64, 300, 128, 1))]
    counts = Counter(order_of_visits(cases, 0, 0)[0])
    assert counts == {0: VISITS, 1: VISITS, 2: 1, 3: VISITS, 4: VISITS}
    assert order_of_visits([], 0, 0, 2) == ([], [])


def test_what_is_visited_once_comes_in_turn_in_the_first_launch_and_in_another_order_later() -> (
    None
):
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    cases = [*steps, make_fake_case(8)]
    first = [place for place in order_of_visits(cases, 0, 0)[0] if place != 8]
    later = {
        tuple(place for place in order_of_visits(cases, 0, launch)[0] if place != 8)
        for launch in range(1, 4)
    }
    assert first == [*range(8)]
    assert len(later) == 3
    assert all(sorted(order) == first for order in later)


def test_more_visits_are_passes_after_all_others_and_have_no_share_of_the_time() -> None:
    cases = [make_fake_case(0), make_fake_case(1, "custom.mine"), make_fake_case(2)]
    usual, more = order_of_visits(cases, 0, 0, 3)
    assert usual == order_of_visits(cases, 0, 0)[0]
    assert [sorted(more[i : i + 2]) for i in (0, 2, 4)] == [[0, 2]] * 3
    parts = spread_over_visits(make_job(cases, visits=[0, 2, 1, 2, 0, 2], more=2), [1.0, 4.0, 3.0])
    assert parts == [1.0, 1.5, 4.0, 1.5, 0.0, 0.0], "over its usual visits"
