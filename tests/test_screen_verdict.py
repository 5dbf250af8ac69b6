"""What screening says: a word for each node, its evidence, an option to paste, an exit code."""

import pytest

from bench.rounds import Pair, round_pairs
from slurm.screen_fit import Exchange, Slow, confirm, find_slow
from slurm.screen_verdict import Screening, Verdict, render, screening

HOSTS = ("n1", "n2", "n3", "n10")


def exchanges(slow: dict[int, float], links: dict[Pair, float] | None = None) -> tuple[Exchange, ...]:
    """Return two whole tournaments of four nodes."""
    return tuple(
        Exchange(
            turn=f"{index} {repeat}",
            pair=pair,
            seconds=0.1 * max(slow.get(pair[0], 1.0), slow.get(pair[1], 1.0), (links or {}).get(pair, 1.0)),
        )
        for repeat in range(2)
        for index in range(3)
        for pair in round_pairs(4, index)
    )


def screened(
    seen: tuple[Exchange, ...], again: tuple[Exchange, ...] | None, silent: dict[str, str] | None = None
) -> Screening:
    suspects = find_slow(seen)
    return screening(HOSTS, seen, suspects, None if again is None else confirm(again, suspects), silent or {})


def words(found: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in (*found.nodes, *found.links)}


def test_a_fine_cluster_is_fine() -> None:
    found = screened(exchanges({}), ())
    assert words(found) == dict.fromkeys(HOSTS, "fine")
    assert (found.exclude, found.code) == ("", 0)
    assert render(found).splitlines()[-1] == "nothing to exclude"


def test_a_slow_node_has_its_factor_its_evidence_and_an_option_to_paste() -> None:
    found = screened(exchanges({2: 4.0}), exchanges({2: 3.0}))
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "slow", "n10": "fine"}
    bad = found.nodes[2]
    assert bad.factor == pytest.approx(3.0), "of what was measured to confirm it, not of what made it a suspect"
    assert bad.evidence == "4.00x with n1, n2, n10 in 6 exchanges; again with n1, n2, n10 in 6 exchanges"
    assert (found.exclude, found.code) == ("--exclude=n3", 1)
    assert render(found).splitlines()[-1] == "--exclude=n3"


def test_the_others_are_measured_without_the_slow_one() -> None:
    found = screened(exchanges({2: 4.0}), exchanges({2: 4.0}))
    fine = [verdict for verdict in found.nodes if verdict.name != "n3"]
    assert all(verdict.factor == pytest.approx(1.0) for verdict in fine)
    assert fine[0].evidence == "with n2, n10 in 4 exchanges"


def test_a_suspect_that_is_not_slow_again_is_fine_and_says_so() -> None:
    found = screened(exchanges({2: 4.0}), exchanges({}))
    assert words(found)["n3"] == "fine"
    assert found.nodes[2].evidence.endswith("at first; not when measured again")
    assert (found.exclude, found.code) == ("", 0)


def test_a_suspect_that_could_not_be_measured_again_is_not_blamed() -> None:
    found = screened(exchanges({2: 4.0}), None)
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "unconfirmed", "n10": "fine"}
    assert [verdict.factor for verdict in found.nodes if verdict.name != "n3"] == pytest.approx([1.0] * 3)
    assert (found.exclude, found.code) == ("", 4)


@pytest.mark.parametrize(
    ("again", "word", "code"),
    [({(0, 3): 2.0}, "slow", 1), ({}, "fine", 0), (None, "unconfirmed", 4)],
)
def test_a_slow_link_is_shown_as_such_and_excludes_neither_node(
    again: dict[Pair, float] | None, word: str, code: int
) -> None:
    found = screened(exchanges({}, {(0, 3): 2.0}), None if again is None else exchanges({}, again))
    assert words(found) == {**dict.fromkeys(HOSTS, "fine"), "n1-n10": word}
    assert (found.exclude, found.code) == ("", code)
    assert ("link n1-n10 is slow, its nodes are not" in render(found)) == (word == "slow")


def test_a_node_that_did_not_answer_stands_among_the_others_in_their_order() -> None:
    found = screened(exchanges({}), (), {"n4": "no end within 10 s: rank 3 (n4) did not arrive"})
    assert [verdict.name for verdict in found.nodes] == ["n1", "n2", "n3", "n4", "n10"]
    assert found.nodes[3].verdict == "did not answer"
    assert (found.exclude, found.code) == ("--exclude=n4", 4)
    assert "rank 3 (n4) did not arrive" in render(found)


def test_what_is_slow_and_what_is_silent_are_both_excluded() -> None:
    found = screened(exchanges({0: 4.0}), exchanges({0: 4.0}), {"n4": "did not start"})
    assert found.exclude == "--exclude=n1,n4"
    assert found.code == 4


def test_a_node_that_met_too_few_is_not_called_fine() -> None:
    seen = tuple(e for e in exchanges({}) if 3 not in e.pair or e.pair == (0, 3))
    found = screening(HOSTS, seen, Slow(), Slow(), {})
    assert words(found)["n10"] == "cannot tell"
    assert found.code == 4


def test_the_table_has_a_line_for_each_node_and_says_what_it_could_have_seen() -> None:
    lines = render(screened(exchanges({}), ())).splitlines()
    assert lines[0].split() == ["node", "verdict", "time", "evidence"]
    assert [line.split()[0] for line in lines[1:5]] == list(HOSTS)
    assert lines[1].startswith("n1    fine     1.00x (")
    assert "a node would have been suspected from 1.05 times the others' time" in lines


def test_what_was_not_measured_is_said_and_is_no_success() -> None:
    found = Screening(
        nodes=(Verdict(nodes=("n1",), verdict="fine"),), problems=("left out",), runs=("runs/a",), notes=("emulated",)
    )
    assert found.code == 4
    assert render(found).splitlines() == [
        "node  verdict  time  evidence",
        "n1    fine     -",
        "not measured: left out",
        "note: emulated",
        "run: runs/a",
        "nothing to exclude",
    ]
