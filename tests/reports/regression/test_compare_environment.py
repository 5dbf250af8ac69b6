"""What differs around two runs, and what of it forbids a comparison."""

from typing import Any

import msgspec

from parbench.bench.plan.plan import Measure, parse_fault
from parbench.reports.regression.environment import (
    HARMLESS,
    Change,
    Surroundings,
    changes,
    plan_changes,
    surroundings,
)
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    make_plan,
    make_run,
    ok_record,
)

CASE = collective_case()
PLAN = make_plan([CASE])


def around(environment: dict[str, Any] | None, *own: dict[str, Any]) -> Surroundings:
    records = [ok_record(CASE, i, environment=one) for i, one in enumerate(own or ({},))]
    return surroundings(make_run(PLAN, records, environment), records)


def found(base: dict[str, Any], new: dict[str, Any], *meant: str) -> list[Change]:
    return list(changes(around(base), around(new), meant))


def test_alike_surroundings_have_no_changes() -> None:
    assert found(ENVIRONMENT, ENVIRONMENT) == []
    assert found({"load": {"one_minute": 0.1}}, {"load": {"one_minute": 9.0}}) == [], (
        "the load is passed over"
    )
    hoisted = around({"host": {"name": "node-a"}})
    each = around({}, {f"rank {i}": {"host": {"name": "node-a"}} for i in range(2)})
    assert changes(hoisted, each) == (), "what all ranks share equals what each has"
    assert changes(around(None), around(None)) == ()
    assert [one.decisive for one in changes(around(None), hoisted)] == [False], (
        "nothing is known of one side"
    )


def test_a_changed_value_is_named_with_both_sides_and_what_forbids_a_comparison_decides() -> None:
    [one] = found({"host": {"cpu_model": "A"}}, {"host": {"cpu_model": "B"}})
    assert one == Change(path="host.cpu_model", base="A", new="B", decisive=True)
    for base, new, text, decisive in (
        (
            {"host": {"cpu_model": "A"}},
            {"host": {"cpu_model": "B"}},
            "host.cpu_model: A -> B",
            True,
        ),
        (
            {"variables": {}},
            {"variables": {"NCCL_ALGO": "Ring"}},
            "variables.NCCL_ALGO: not set -> Ring",
            True,
        ),
        ({}, {"host": {"governor": "performance"}}, "host.governor: - -> performance", False),
        (
            {"host": {"governor": None}},
            {"host": {"governor": "one"}},
            "host.governor: - -> one",
            False,
        ),
        (
            {"host": {"name": "a"}},
            {"host": {"name": "b\n\x1b[31m"}},
            "host.name: a -> b \\x1b[31m",
            True,
        ),
    ):
        [one] = found(base, new)
        assert (one.text, one.decisive) == (text, decisive)
    for path in HARMLESS:
        group, _, name = path.partition(".")
        [one] = found({group: {name: "1"}}, {group: {name: "2"}})
        assert (one.path, one.decisive) == (path, False), (
            "it changes from run to run on one machine"
        )
    for meant, decisive in (("versions.torch", False), ("versions.*", False), ("host.*", True)):
        [one] = found({"versions": {"torch": "2.12"}}, {"versions": {"torch": "2.13"}}, meant)
        assert (one.decisive, one.meant) == (decisive, not decisive), meant


def test_what_decides_comes_first() -> None:
    base, new = ({"host": {"address": text, "name": text}} for text in "ab")
    assert [one.path for one in found(base, new)] == ["host.name", "host.address"]


def test_ranks_that_differ_are_compared_as_a_set() -> None:
    one, other = ({"host": {"name": name}} for name in ("node-a", "node-b"))
    base = around({}, {"rank 0": one, "rank 1": other})
    swapped = around({}, {"rank 0": other, "rank 1": one})
    assert changes(base, swapped) == ()
    [moved] = changes(base, around({}, {"rank 0": one, "rank 1": {"host": {"name": "node-c"}}}))
    assert moved.text == "host.name: node-a, node-b -> node-a, node-c"


def test_a_run_that_changed_within_itself_is_named() -> None:
    changed = {"changed": {"host.name": ["node-a", "node-b"]}}
    base, new = {"host": {"name": "node-a"}}, around({"host": {"name": "node-a"}}, {}, changed)
    [one] = changes(around(base), new)
    assert (one.base, one.new, one.decisive, one.within) == (
        "node-a",
        "node-a then node-b",
        True,
        "NEW",
    )
    [both] = changes(new, new)
    assert both.within == "BASE and NEW"


def test_what_a_later_launch_lost_is_a_change() -> None:
    lost = {"changed": {"variables.NCCL_ALGO": ["Ring", None]}}
    [one] = changes(
        around({"variables": {"NCCL_ALGO": "Ring"}}),
        around({"variables": {"NCCL_ALGO": "Ring"}}, lost),
    )
    assert one.text == "variables.NCCL_ALGO: Ring -> not set"


def test_alike_plans_have_no_changes() -> None:
    assert plan_changes(PLAN, PLAN) == ()
    other_cases = msgspec.structs.replace(PLAN, cases=(), notes=("a note",))
    assert plan_changes(PLAN, other_cases) == ()


def test_how_a_run_was_asked_for_is_shown_and_decides_nothing() -> None:
    injection = parse_fault("slow:1:10%", 4)
    new = msgspec.structs.replace(
        PLAN, preset="full", measure=Measure(precision=0.01), injection=injection
    )
    shown = plan_changes(PLAN, new)
    assert {one.text for one in shown} == {
        "plan.preset: node -> full",
        "plan.measure.precision: 0.025 -> 0.01",
        "plan.injection: none -> slow:1:10%",
    }
    assert not any(one.decisive for one in shown)
