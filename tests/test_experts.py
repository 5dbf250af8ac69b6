"""Expert-parallel steps as records tell them: loads by layer and rank, which are alike, and what is refused."""

import pytest
from reports_fixtures import EXPERT_LOADS, ep, make_plan, make_run, mixture_record, ok, step

from bench.errors import UserError
from bench.records import Record
from reports.parallel.experts import Mixture, distinct, mixtures, read_mixture, shares, unreadable_mixtures
from reports.summary import Row, summarize


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records]), records)).rows


def mixture_of(record: Record) -> Mixture:
    (found,) = mixtures(rows_of(record))
    return found


def test_a_step_says_its_scope_routing_and_claim() -> None:
    one = mixture_of(mixture_record("ep_dispatch", "zipf", 1.25))
    assert (one.scope, one.routing, one.capacity, one.ep) == ("ep_dispatch", "zipf", 1.25, 2)
    assert (one.variant, one.experts) == ("all_to_all", 8)
    assert one.claim == "ep_dispatch: what it may claim"
    assert mixture_of(mixture_record(capacity=0.0)).capacity is None


def test_without_an_expert_axis_one_rank_has_all_experts() -> None:
    one = mixture_of(mixture_record(axes={}))
    assert one.ep == 1
    (share,) = shares([one])
    assert share.chosen == tuple(EXPERT_LOADS["balanced"])


def test_each_rank_has_its_own_experts() -> None:
    first, second = shares([mixture_of(mixture_record(routing="hot_rank"))])
    assert (first.rank, first.first_expert, first.chosen) == (0, 0, (192,) * 4)
    assert (second.rank, second.first_expert, second.chosen) == (1, 4, (64,) * 4)
    assert (first.of_mean, second.of_mean) == (1.5, 0.5)


def test_copies_of_the_experts_are_added_up() -> None:
    first, second = shares([mixture_of(mixture_record(rank_load=[[100, 200, 30, 40]]))])
    assert (first.kept, second.kept) == (130, 240)


def test_layers_that_are_alike_are_shown_once() -> None:
    load = EXPERT_LOADS["zipf"]
    alike = mixture_of(mixture_record(expert_load=[load] * 3, rank_load=[[1, 2]] * 3))
    assert alike.layers == (0,)
    assert len(shares([alike])) == 2
    apart = mixture_of(mixture_record(expert_load=[load, load[::-1]], rank_load=[[1, 2]] * 2))
    assert apart.layers == (0, 1)
    dropping = mixture_of(mixture_record(expert_load=[load] * 2, rank_load=[[1, 2], [2, 1]]))
    assert dropping.layers == (0, 1)


def test_nothing_chosen_has_no_share() -> None:
    (share, _) = shares([mixture_of(mixture_record(expert_load=[[0] * 8], rank_load=[[0, 0]]))])
    assert share.of_mean is None


def test_capacity_changes_no_choice_but_scope_and_routing_do() -> None:
    found = mixtures(
        rows_of(
            mixture_record("ep_layer", "zipf"),
            mixture_record("ep_layer", "zipf", 1.25),
            mixture_record("ep_layer", "hot_rank", 1.25),
            mixture_record("ep_step", "zipf"),
        )
    )
    assert [(one.scope, one.routing, one.capacity) for one in distinct(found)] == [
        ("ep_layer", "zipf", None),
        ("ep_layer", "hot_rank", 1.25),
        ("ep_step", "zipf", None),
    ]


def test_other_steps_are_none() -> None:
    (row,) = rows_of(ok(step()))
    assert read_mixture(row) is None
    assert (mixtures([row]), unreadable_mixtures([row])) == ((), ())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rank_load": [[1, 2], [1, 2]]}, "layers of expert_load(1) != layers of rank_load(2)"),
        ({"expert_load": [], "rank_load": []}, "or there are none"),
        ({"expert_load": [[1] * 7]}, "experts(7) % ep(2) != 0"),
        ({"rank_load": [[1, 2, 3]]}, "ranks(3) % ep(2) != 0"),
        ({"expert_load": [[1] * 8, [1] * 6], "rank_load": [[1, 2]] * 2}, "or layers differ in them"),
        ({"expert_load": [["many"] * 8]}, "Expected `int`, got `str`"),
        ({"axes": {"ep": {"ranks": 0}}}, "ep(0) < 1"),
    ],
)
def test_facts_that_contradict_themselves_are_told(changed: dict[str, object], told: str) -> None:
    details = {**mixture_record().details, **changed}
    (row,) = rows_of(ok(ep(), details=details))
    assert mixtures([row]) == ()
    (sentence,) = unreadable_mixtures([row])
    assert sentence.startswith("No expert facts: the experts of ")
    assert told in sentence
    with pytest.raises(UserError):
        read_mixture(row)
