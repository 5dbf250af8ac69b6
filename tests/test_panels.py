import dataclasses

import pytest

from reports.columns import words
from reports.panels import Panel, Section, Term


def test_a_section_is_frozen_and_says_only_what_it_is_given() -> None:
    column = words("name", str, "a name")
    panel = Panel(id="a", title="A", caption="all", columns=(column,), rows=("x", "y"))
    section = Section(id="s", title="S", panels=(panel,))
    assert (panel.notes, panel.has_facts, panel.is_wide, section.terms, section.notes) == ((), False, False, (), ())
    assert [column.text(row) for row in panel.rows] == ["x", "y"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.title = "T"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Term(name="a", text="b").text = "c"  # type: ignore[misc]
