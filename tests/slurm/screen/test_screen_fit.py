"""A slow node is found and nobody innocent is blamed, in rounds in which suspects meet good partners only."""

import itertools
import math
import random
from collections.abc import Callable, Sequence, Set

import pytest

from parbench.bench.plan.groups import Pair, parse_pairs, round_pairs
from parbench.slurm.screen.fit import (
    BLAME,
    SUSPECT,
    Exchange,
    Rule,
    Slow,
    confirm,
    find_slow,
    hodges_lehmann,
)
from parbench.slurm.screen.run import Turns, confirmation, tournament
from parbench.slurm.screen.screen import Screening, Verdict, render, screening
from tests.studies.screen_study import Cluster, rates, simulate

HOSTS = ("n1", "n2", "n3", "n10")


def exact(
    n: int,
    factors: dict[int, float],
    links: dict[Pair, float] | None = None,
    *,
    repeats: int = 2,
    drift: Callable[[str], float] = lambda turn: 1.0,
) -> list[Exchange]:
    """Return a whole tournament without noise: a pair takes as long as its slower end, or its link."""
    return [
        Exchange(
            turn=(turn := f"{index} {repeat}"),
            pair=pair,
            seconds=0.1
            * drift(turn)
            * max(*(factors.get(rank, 1.0) for rank in pair), (links or {}).get(pair, 1.0)),
        )
        for repeat in range(repeats)
        for index in range(n - 1 + n % 2)
        for pair in round_pairs(n, index)
    ]


def slow(nodes: Set[int] = frozenset(), links: Set[Pair] = frozenset()) -> Slow:
    return find_slow(exact(6, dict.fromkeys(nodes, 4.0), dict.fromkeys(links, 4.0)))


def told(exchanges: list[Exchange]) -> tuple[set[int], set[Pair]]:
    found = find_slow(exchanges)
    return found.ranks, found.pairs


def test_one_slow_node_is_found_and_nothing_else() -> None:
    for n, factor in itertools.product((3, 4, 5, 6, 9, 16), (1.2, 8.0)):
        for rank in (0, n // 2, n - 1):
            found = find_slow(exact(n, {rank: factor}, repeats=4 if n == 3 else 2))
            assert (found.ranks, found.pairs) == ({rank}, set()), (n, factor, rank)
            assert found.nodes[0].factor == pytest.approx(factor), (n, rank)
            assert found.nodes[0].partners == tuple(other for other in range(n) if other != rank)


def test_a_fine_cluster_has_nothing_slow_and_a_slow_round_blames_nobody() -> None:
    for n in (3, 4, 5, 8, 16):
        assert find_slow(exact(n, {})) == Slow(), n
        assert not find_slow(exact(n, {}))
        assert not told(exact(n, {}, drift=lambda turn: 3 if turn == "1 0" else 1))[0], n
    found = find_slow(exact(16, {5: 2.0}, drift=lambda turn: 3 if turn.startswith("1") else 1))
    assert (found.ranks, found.pairs) == ({5}, set())
    assert found.nodes[0].factor == pytest.approx(2.0), "enough pairs tell each round's own level"


def test_a_slow_link_is_told_from_a_slow_node() -> None:
    for n in (4, 5, 8, 16):
        for pair in itertools.islice(itertools.combinations(range(n), 2), 1, 12, 4):
            found = find_slow(exact(n, {}, {pair: 2.0}))
            assert (found.ranks, found.pairs) == (set(), {pair}), n
            assert found.links[0].factor == pytest.approx(2.0)
    assert told(exact(8, {2: 4.0}, {(0, 5): 2.0})) == ({2}, {(0, 5)})
    assert told(exact(8, {2: 1.5}, {(2, 5): 4.0}))[0] == {2}, (
        "a slow node's slow link does not hide it"
    )
    fast_with_one = exact(4, {}, {(0, 1): 2.0, (0, 2): 2.0})
    assert told(fast_with_one) == (set(), {(0, 1), (0, 2)})


def test_two_slow_nodes_are_found_even_if_they_meet_and_half_of_the_nodes_are_not() -> None:
    for one, other in itertools.islice(itertools.combinations(range(8), 2), 0, None, 5):
        found = find_slow(exact(8, {one: 2.0, other: 3.0}))
        assert (found.ranks, found.pairs) == ({one, other}, set())
        assert [effect.ranks[0] for effect in found.nodes] == [other, one], "strongest first"
    assert not told(exact(6, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}))[0]
    unequal = told(exact(6, {0: 16.0, 1: 8.0, 2: 4.0, 3: 2.0}))
    assert unequal[0] == {0, 1, 2}, "the rest is no longer most of the nodes"


def test_what_is_below_the_floor_or_too_little_to_tell_is_not_slow() -> None:
    assert not find_slow(exact(16, {3: 1.04}))
    assert find_slow(exact(16, {3: 1.06})).ranks == {3}
    assert not find_slow(exact(16, {3: 1.06}), Rule(alpha=0.05, floor=0.10))
    for exchanges in ([Exchange(turn=str(i), pair=(0, 1), seconds=0.1) for i in range(6)], []):
        assert not find_slow(exchanges)


def test_the_interval_holds_the_factor_and_is_wider_with_more_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        cluster = Cluster(n=16, nodes={4: 0.5}, noise=noise)
        exchanges = simulate(cluster, tournament(16, 5), random.Random(3))
        effect = next(e for e in find_slow(exchanges).nodes if e.ranks == (4,))
        assert effect.low < 2.0 < effect.high
        widths.append(math.log(effect.high / effect.low))
    assert widths[1] > 3 * widths[0]
    assert math.log(effect.least) > 1.2 * math.log(effect.high / effect.factor), (
        "so many nodes are compared"
    )
    by_hand = [([3.0], 3.0), ([0.0, 1.0, 5.0], 1.75), ([0.1, 0.1, 0.1, 0.1, 9.0], 0.1)]
    for values, middle in by_hand:
        assert hodges_lehmann(values) == pytest.approx(middle)


def test_a_suspect_is_confirmed_by_good_partners_alone_and_a_link_against_what_its_ends_do_with_others() -> (
    None
):
    assert confirm(exact(6, {2: 2.0}), slow({2})).ranks == {2}
    assert confirm(exact(6, {}), slow({2})).ranks == set()
    with_each_other_only = exact(6, {}, {(2, 3): 5.0})
    assert confirm(with_each_other_only, slow({2, 3})).ranks == set()
    [found] = confirm(exact(6, {2: 2.0}), slow({2, 3})).nodes
    assert (found.ranks, found.partners) == ((2,), (0, 1, 4, 5))
    assert (BLAME.alpha < SUSPECT.alpha, BLAME.floor > SUSPECT.floor) == (True, True)
    assert not confirm(exact(6, {2: 1.06}), slow({2})), "blame asks for more than suspicion"
    suspect = slow(links={(0, 4)})
    assert confirm(exact(6, {}, {(0, 4): 2.0}), suspect).pairs == {(0, 4)}
    assert confirm(exact(6, {}), suspect).pairs == set()
    assert confirm(exact(6, {4: 2.0}), suspect).pairs == set(), "it is the node's, not the link's"
    [found] = confirm(exact(6, {4: 1.5}, {(0, 4): 6.0}), suspect).links
    assert found.factor == pytest.approx(4.0), "as slow as it is beyond the slower of its ends"


@pytest.mark.parametrize(
    ("cluster", "least_found", "most_blamed"),
    [
        (Cluster(n=4, noise=0.05, drift=0.2), 1.0, 0.0),
        (Cluster(n=4, noise=0.05, spikes=0.1), 0.0, 0.0),
        (Cluster(n=4, noise=0.05, nodes={1: 0.5}), 0.96, 0.04),
        # over 1000 trials with spikes 1.6 % blame somebody: 0 of 25 would be a matter of the seed
        pytest.param(Cluster(n=16, noise=0.05, spikes=0.1), 0.0, 0.04, marks=pytest.mark.full),
        pytest.param(Cluster(n=16, noise=0.03, nodes={1: 0.9}), 0.7, 0.04, marks=pytest.mark.full),
    ],
    ids=["4-drift", "4-spikes", "4-slow", "16-spikes", "16-little-slow"],
)
def test_simulated_the_guilty_are_found_and_nobody_else_is(
    cluster: Cluster, least_found: float, most_blamed: float
) -> None:
    found = rates(cluster, 25 if cluster.nodes else 100, seed=3)
    assert found.exactly >= least_found
    assert found.blamed <= most_blamed


def test_a_small_tournament_is_whole_and_repeated_and_of_a_large_one_some_rounds() -> None:
    known = {
        (3, 5): (3, 4),
        (4, 5): (3, 2),
        (4, 3): (3, 1),
        (4, 7): (3, 3),
        (5, 5): (5, 1),
        (64, 5): (5, 1),
    }
    for (n, rounds), (num_values, repeats) in {**known, (6, 12): (5, 3)}.items():
        turns = tournament(n, rounds)
        assert (turns.values, turns.repeats) == (tuple(map(str, range(num_values))), repeats), (
            n,
            rounds,
        )
        assert len(turns) == num_values * repeats >= rounds
    assert tournament(4, 5).settings() == ["repeat=0,1", "round=0,1,2"], "repeats outermost"


def test_suspects_meet_good_partners_and_good_nodes_meet_beside_them() -> None:
    assert confirmation(4, {3}, set(), 5).settings() == [
        "repeat=0,1",
        "pairs=0-3 1-2,0-2 1-3,0-1 2-3",
    ]
    among_many = met(16, confirmation(16, {5}, set(), 5))
    assert [sorted(itertools.chain.from_iterable(turn)) for turn in among_many] == [
        list(range(16))
    ] * 5
    two_of_five = met(5, confirmation(5, {0, 4}, set(), 5))
    assert all(any(not {0, 4} & set(pair) for pair in turn) for turn in two_of_five), (
        "good ones meet beside them"
    )
    cases: list[tuple[int, set[int], set[Pair]]] = [
        (64, set(), {(2 * i, 2 * i + 1) for i in range(11)}),
        *(
            (3, {2}, set()),
            (4, {3}, set()),
            (4, set(), {(0, 3)}),
            (4, {1}, {(0, 3)}),
            (5, {0, 4}, set()),
        ),
        *((8, {1, 2}, {(0, 3), (0, 5)}), (16, {5}, set()), (16, {1, 2, 3, 4, 5, 6, 7}, set())),
    ]
    for n, nodes, links in cases:
        turns = confirmation(n, nodes, links, 5)
        assert all(turns.values)
        assert len(set(turns.values)) == len(turns.values), (
            "no round is measured twice under one name"
        )
        pairs = [pair for turn in met(n, turns) for pair in turn]
        for node in nodes:
            partners = {sum(pair) - node for pair in pairs if node in pair}
            assert not partners & nodes, (n, nodes, links)
            assert len(partners) == min(5, n - len(nodes)), (n, nodes, links)
        good = [pair for pair in pairs if not nodes & set(pair) and pair not in links]
        assert len(good) * turns.repeats >= 3, (n, nodes, links)
        assert len(set(good)) >= min(2, n - len(nodes) - 1), (n, nodes, links)
        if not nodes:
            assert all(pairs.count(link) * turns.repeats >= 4 for link in links), (
                "chance is not to blame it"
            )
        assert links <= set(pairs), (n, nodes, links)
        for end in itertools.chain.from_iterable(links):
            assert any(end in pair for pair in good), "a suspect link's ends meet others too"


def met(n: int, turns: Turns) -> list[tuple[Pair, ...]]:
    assert turns.parameter == "pairs"
    return [parse_pairs(text, n) for text in turns.values]


def screened(seen: Sequence[Exchange], again: Sequence[Exchange] | None) -> Screening:
    suspects = find_slow(seen)
    return screening(
        HOSTS, tuple(seen), suspects, None if again is None else confirm(again, suspects), {}
    )


def words(found: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in (*found.nodes, *found.links)}


def test_a_fine_cluster_is_told_in_a_line_for_each_node_with_what_could_have_been_seen() -> None:
    found = screened(exact(4, {}), ())
    assert words(found) == dict.fromkeys(HOSTS, "fine")
    assert (found.exclude, found.code) == ("", 0)
    lines = render(found).splitlines()
    assert lines[0].split() == ["node", "verdict", "time", "evidence"]
    assert [line.split()[0] for line in lines[1:5]] == list(HOSTS)
    assert lines[1].startswith("n1    fine     1.00x (")
    assert "a node would have been suspected from 1.05 times the others' time" in lines
    assert lines[-1] == "nothing to exclude"


def test_a_slow_node_has_its_factor_its_evidence_and_an_option_to_paste() -> None:
    found = screened(exact(4, {2: 4.0}), exact(4, {2: 3.0}))
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "slow", "n10": "fine"}
    bad = found.nodes[2]
    assert bad.factor == pytest.approx(3.0), (
        "of what was measured to confirm it, not of what made it a suspect"
    )
    assert (
        bad.evidence
        == "4.00x with n1, n2, n10 in 6 exchanges; again with n1, n2, n10 in 6 exchanges"
    )
    assert (found.exclude, found.code) == ("--exclude=n3", 1)
    assert render(found).splitlines()[-1] == "--exclude=n3"
    fine = [verdict for verdict in found.nodes if verdict.name != "n3"]
    assert [verdict.factor for verdict in fine] == pytest.approx([1.0] * 3), (
        "measured without the slow one"
    )
    assert fine[0].evidence == "with n2, n10 in 4 exchanges"
    found = screened(exact(4, {2: 4.0}), exact(4, {}))
    assert found.nodes[2].evidence.endswith("at first; not when measured again")
    found = screened(exact(4, {2: 4.0}), None)
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "unconfirmed", "n10": "fine"}
    assert [verdict.factor for verdict in found.nodes if verdict.name != "n3"] == pytest.approx(
        [1.0] * 3
    )


def test_a_slow_link_is_shown_as_such_and_excludes_neither_node() -> None:
    for again, word, code in (
        (exact(4, {}, {(0, 3): 2.0}), "slow", 1),
        (exact(4, {}), "fine", 0),
        (None, "unconfirmed", 4),
    ):
        found = screened(exact(4, {}, {(0, 3): 2.0}), again)
        assert words(found) == {**dict.fromkeys(HOSTS, "fine"), "n1-n10": word}
        assert (found.exclude, found.code) == ("", code), word
        assert ("link n1-n10 is slow, its nodes are not" in render(found)) == (word == "slow")


def test_what_was_not_measured_or_met_too_few_is_no_success() -> None:
    seen = tuple(e for e in exact(4, {}) if 3 not in e.pair or e.pair == (0, 3))
    found = screening(HOSTS, seen, Slow(), Slow(), {})
    assert (words(found)["n10"], found.code) == ("cannot tell", 4)
    fine = Verdict(nodes=("n1",), verdict="fine")
    found = Screening(nodes=(fine,), problems=("left out",))
    assert found.code == 4
    assert "not measured: left out" in render(found)
