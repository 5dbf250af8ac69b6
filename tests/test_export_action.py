"""github-action-benchmark's two files: what its extractor takes, each value in the file of its direction."""

import json

import pytest
from compare_fixtures import CASE, launches, run_of
from jsonschema import Draft202012Validator
from reports_fixtures import bad, sample_run

from reports.exchange.export_action import FILES, render_action

# what src/extract.ts of github-action-benchmark 1.x takes for customSmallerIsBetter and customBiggerIsBetter
ENTRIES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "unit", "value"],
        "properties": {
            "name": {"type": "string"},
            "unit": {"type": "string", "minLength": 1},
            "value": {"type": "number"},
            "range": {"type": "string"},
            "extra": {"type": "string"},
        },
        "additionalProperties": False,
    },
}


def test_both_files_are_lists_of_entries_with_unique_names() -> None:
    files = render_action(sample_run())
    assert set(files) == set(FILES.values())
    for content in files.values():
        entries = json.loads(content)
        Draft202012Validator(ENTRIES).validate(entries)
        assert len({one["name"] for one in entries}) == len(entries) > 10


def test_times_are_smaller_and_rates_are_bigger() -> None:
    smaller, bigger = (json.loads(render_action(run_of(launches()))[name]) for name in FILES.values())
    assert [one["name"].split()[-1] for one in smaller] == ["time"]
    assert [one["name"].split()[-1] for one in bigger] == ["algbw", "busbw"]
    assert smaller[0]["value"] == pytest.approx(1e-3, rel=1e-3)
    assert smaller[0]["unit"] == "s"
    assert smaller[0]["range"].count(" to ") == 1
    assert smaller[0]["extra"].splitlines()[:2] == ["4 ranks, gloo, cpu", "5 launches"]


def test_a_wrong_result_has_no_entry() -> None:
    files = render_action(run_of([*launches(count=4), bad(CASE, 4, "wrong")]))
    assert [json.loads(content) for content in files.values()] == [[], []]
