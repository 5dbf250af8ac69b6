"""The order of a launch: small cases are visited often and in passes, large ones once."""

from collections import Counter

from parbench.bench.launch.visits import VISITS, order_of_visits, spread_over_visits
from parbench.bench.plan.cases import Case, make_case
from tests.support.fakes import make_fake_case, make_job


def make_sized_case(number: int, megabytes: int) -> Case:
    params = {"size_bytes": megabytes << 20, "number": number}
    return make_case("p2p.sendrecv", "a:b", params)


def test_operations_are_visited_in_passes_and_steps_once() -> None:
    names = ["collective.barrier", "workload.ddp", "memory.copy", "custom.mine", "compute.gemm"]
    cases = [make_fake_case(number, name) for number, name in enumerate(names)]
    order, _ = order_of_visits(cases, seed=1, launch=0)
    assert Counter(order) == {0: VISITS, 2: VISITS, 4: VISITS, 1: 1, 3: 1}
    operations = [place for place in order if place not in (1, 3)]
    passes = [operations[i : i + 3] for i in range(0, len(operations), 3)]
    for places in passes:
        assert sorted(places) == [0, 2, 4]
    assert len({tuple(places) for places in passes}) > 1


def test_order_depends_on_seed_and_launch() -> None:
    cases = [make_fake_case(number) for number in range(4)]
    order = order_of_visits(cases, seed=1, launch=0)
    assert order_of_visits(cases, seed=1, launch=0) == order
    assert order_of_visits(cases, seed=2, launch=0) != order
    assert order_of_visits(cases, seed=1, launch=1) != order


def test_cases_kept_ready_are_limited_in_size() -> None:
    megabytes = (300, 64, 300, 128, 1)
    cases = [make_sized_case(number, size) for number, size in enumerate(megabytes)]
    order, _ = order_of_visits(cases, seed=0, launch=0)
    assert Counter(order) == {0: VISITS, 1: VISITS, 2: 1, 3: VISITS, 4: VISITS}
    assert order_of_visits([], 0, 0, 2) == ([], [])


def test_steps_are_shuffled_only_in_later_launches() -> None:
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    first, _ = order_of_visits(steps, seed=0, launch=0)
    second, _ = order_of_visits(steps, seed=0, launch=1)
    assert first == [*range(8)]
    assert second != first
    assert sorted(second) == first


def test_extra_visits_follow_and_have_no_share_of_the_time() -> None:
    cases = [make_fake_case(0), make_fake_case(1, "custom.mine"), make_fake_case(2)]
    order, extra = order_of_visits(cases, seed=0, launch=0, more=3)
    assert order == order_of_visits(cases, seed=0, launch=0)[0]
    assert [sorted(extra[i : i + 2]) for i in (0, 2, 4)] == [[0, 2]] * 3
    job = make_job(cases, visits=[0, 2, 1, 2, 0, 2], more=2)
    assert spread_over_visits(job, [1.0, 4.0, 3.0]) == [1.0, 1.5, 4.0, 1.5, 0.0, 0.0]
