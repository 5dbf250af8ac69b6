"""Cases have stable ids, and operations are selected by name."""

import pytest

from parbench.bench.plan.cases import make_case, matches, select_definitions
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.params import Value
from tests.support.refusals import usage_error


def test_case_id_ignores_order_of_params() -> None:
    first = make_case("n", "t:f", {"a": 1, "b": "x"})
    second = make_case("n", "t:f", {"b": "x", "a": 1})
    assert first.id == second.id


def test_case_id_differs_for_values_that_compare_equal() -> None:
    values: list[Value] = [1, True, 1.0, "1", 0, False, ""]
    ids = {make_case("n", "t:f", {"x": value}).id for value in values}
    assert len(ids) == len(values)


def test_case_id_ignores_defaults_of_optional_params() -> None:
    [pairwise] = select_definitions(DEFINITIONS, ["p2p.pairwise"])
    assert pairwise.build_case({"repeat": 0}).id == pairwise.build_case({}).id
    assert pairwise.build_case({"repeat": 1}).id != pairwise.build_case({}).id


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [("collective.*", True), ("all_*", True), ("p2p.*", False), ("reduce", False)],
)
def test_pattern_matches_whole_names_without_prefix(pattern: str, is_match: bool) -> None:
    assert matches("collective.all_reduce", pattern) is is_match


def test_selection_keeps_order_of_catalogue() -> None:
    assert select_definitions(DEFINITIONS, []) == DEFINITIONS
    selected = select_definitions(DEFINITIONS, ["p2p.s*", "all_reduce", "collective.all_re*"])
    assert [definition.name for definition in selected] == [
        "collective.all_reduce",
        "p2p.sendrecv",
    ]


def test_unknown_operation_is_refused_with_suggestion() -> None:
    message = usage_error(select_definitions, DEFINITIONS, ["collective.*", "al_reduce"])
    assert "'al_reduce'" in message
    assert "'all_reduce'" in message
