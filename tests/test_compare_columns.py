"""The columns and sentences of a comparison."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from compare_fixtures import OTHER, compared, launches, run_of
from reports_fixtures import bad, collective, step

from reports.columns import Column, T
from reports.comparing.compare import WORST_FIRST, Comparison, compare
from reports.comparing.compare_columns import (
    change_columns,
    effect_words,
    family_columns,
    heading,
    probability,
    sentences,
    series_columns,
    sizes_words,
    verdict_words,
    worst_first,
)
from reports.comparing.compare_rule import Effect, Rule

CURVE = [collective(size_bytes=1024 * 4**i) for i in range(3)]


def texts(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def curve(*factors: float) -> Comparison:
    base = [record for case in CURVE for record in launches(case)]
    new = [record for case, factor in zip(CURVE, factors, strict=True) for record in launches(case, factor)]
    return compared(base, new)


def test_a_series_shows_its_verdict_with_effect_floor_and_what_could_be_seen() -> None:
    found = compared(launches(), launches(factor=1.1))
    shown = texts(series_columns(found.series), found.series[0])
    assert shown.pop("effect").startswith("+10.0 % [+")
    assert 3 < float(shown.pop("detectable").removesuffix(" %")) < 10
    assert shown == {
        "operation": "all_reduce",
        "mode": "blocking",
        "dtype": "float32",
        "size": "1K",
        "verdict": "SLOWER",
        "floor": "3.00 %",
        "BASE": "1.00 ms",
        "NEW": "1.10 ms",
        "rank p": "0.0079",
        "launches": "5 v 5",
        "why": "-",
    }


def test_a_series_without_times_shows_why() -> None:
    found = compared([*launches(), *launches(OTHER)], [*launches(), bad(OTHER, 0, "failed", "rank 1 died")])
    shown = texts(series_columns(found.series), found.series[1])
    assert (shown["verdict"], shown["effect"], shown["NEW"], shown["why"]) == ("FAILED", "-", "-", "rank 1 died")
    assert (shown["floor"], shown["detectable"], shown["rank p"], shown["launches"]) == ("-", "-", "-", "0 v 0")


def test_sorting_puts_the_worst_first_and_numbers_by_value() -> None:
    found = curve(1.2, 1.0, 0.8)
    by_title = {column.title: column for column in series_columns(found.series)}
    keys = [by_title["verdict"].sort(one) for one in found.series]
    assert keys == [WORST_FIRST.index(word) for word in ("SLOWER", "SAME", "FASTER")]
    assert [by_title["effect"].sort(one) for one in found.series] == pytest.approx([0.2, 0.0, -0.2])
    assert [by_title["size"].sort(one) for one in found.series] == [1024, 4096, 16384]


def test_what_tells_series_apart_is_never_dropped() -> None:
    never = {column.title for column in series_columns(curve(1, 1, 1).series) if column.drop == 0}
    assert {"operation", "mode", "size", "verdict", "effect"} == never


def test_steps_are_named_by_what_differs_between_them() -> None:
    steps = [step("ddp"), step("pp", schedule="1f1b"), step("pp", schedule="gpipe")]
    records = [record for case in steps for record in launches(case)]
    found = compared(records, records)
    names = [texts(series_columns(found.series), one) for one in found.series]
    assert [name["operation"] for name in names] == ["ddp", "pp schedule=1f1b", "pp schedule=gpipe"]
    assert {(name["mode"], name["size"]) for name in names} == {("-", "-")}


def test_worlds_are_shown_where_there_are_several() -> None:
    assert "ranks" not in texts(series_columns(curve(1, 1, 1).series), curve(1, 1, 1).series[0])
    two = msgspec.structs.replace(launches()[0].world, nodes=2)
    found = compared([*launches(), *launches(OTHER)], [*launches(), *launches(OTHER, world=two)])
    shown = [texts(series_columns(found.series), one)["ranks"] for one in found.series]
    assert shown[-1] == "4 ranks on 2 nodes, gloo, cpu"


def test_a_family_names_the_sizes_that_moved() -> None:
    [family] = curve(1.2, 1.0, 0.8).families
    shown = texts(family_columns([family]), family)
    assert (shown["operation"], shown["sizes"], shown["verdict"]) == ("all_reduce", "1K to 16K (3)", "SLOWER")
    assert shown["slower at"].startswith("1K +20.0 % [")
    assert shown["faster at"].startswith("16K -20.0 % [")
    assert shown["p"] == "<0.0001"


def test_a_family_of_one_step_has_no_size() -> None:
    [family] = compared(launches(step()), launches(step(), 1.3)).families
    shown = texts(family_columns([family]), family)
    assert sizes_words(family) == "-"
    assert shown["slower at"].startswith("+30.0 % [")
    assert shown["faster at"] == "-"


def test_changes_say_whether_they_forbid_a_comparison() -> None:
    environment: list[dict[str, Any]] = [
        {"versions": {"torch": text, "numpy": text}, "host": {"address": text, "name": "n"}} for text in "12"
    ]
    environment[0]["host"]["name"] = "m"
    found = compare(run_of(launches(), environment[0]), run_of(launches(), environment[1]), Rule(), ["versions.torch"])
    shown = {one.path: texts(change_columns(), one) for one in found.changes}
    assert {path: one["forbids a comparison"] for path, one in shown.items()} == {
        "host.name": "yes",
        "versions.numpy": "yes",
        "host.address": "no",
        "versions.torch": "no: meant",
    }
    assert (shown["host.name"]["BASE"], shown["host.name"]["NEW"]) == ("m", "n")


def test_a_run_that_changed_within_itself_is_told() -> None:
    moved = launches()
    moved[3] = msgspec.structs.replace(moved[3], environment={"changed": {"host.name": ["node-a", "node-b"]}})
    [change] = compared(launches(), moved).changes
    assert texts(change_columns(), change)["forbids a comparison"] == "yes (NEW changed within itself)"


# --- words ---


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "-"),
        (Effect(change=0.05, floor=0.03), "+5.00 %"),
        (Effect(change=-0.05, floor=0.03, low=-0.06, high=0.001), "-5.00 % [-6.00, +0.100]"),
        (Effect(change=0.0, floor=0.03, low=-0.01, high=0.01), "0 % [-1.00, +1.00]"),
    ],
)
def test_an_effect_in_words(found: Effect | None, text: str) -> None:
    assert effect_words(found) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0, "<0.0001"), (0.00794, "0.0079"), (1.0, "1.0000")])
def test_a_probability_in_words(value: float | None, text: str) -> None:
    assert probability(value) == text


def test_the_heading_names_both_runs_and_counts_verdicts() -> None:
    found = curve(1.2, 1.0, 1.2)
    base, new, verdict = heading(found)
    assert base == "BASE: runs/run-1, host node-a, started 2026-01-02T03:04:05.678Z, 5 launches"
    assert new.startswith("NEW: runs/run-1")
    assert verdict == "Verdict: 2 SLOWER, 1 SAME"
    assert verdict_words(found) == "2 SLOWER, 1 SAME"


def test_worst_first_goes_by_verdict_then_by_size_of_the_change() -> None:
    assert [one.effect.change for one in worst_first(curve(1.1, 1.0, 1.3).series) if one.effect] == pytest.approx(
        [0.3, 0.1, 0.0], abs=1e-6
    )


def test_only_the_verdicts_that_occur_are_explained() -> None:
    told = sentences(curve(1.0, 1.0, 1.0))
    assert [sentence.partition(":")[0] for sentence in told if sentence.partition(":")[0] in WORST_FIRST] == ["SAME"]
    assert all(sentence.endswith(".") for sentence in told)
    assert any("5.00 % over 1 family" in sentence for sentence in told)


def test_advice_fits_what_is_unknown() -> None:
    few = sentences(compared(launches(), launches(count=2)))
    assert any("--launches 5" in sentence for sentence in few)
    vague = sentences(compared(launches(), launches(factor=1.03)))
    assert any("parbench doctor" in sentence for sentence in vague)
    older, newer = (run_of(launches(), {"versions": {"torch": version}}) for version in ("2.12", "2.13"))
    changed = compare(older, newer, Rule())
    assert any("--across versions.torch" in sentence for sentence in sentences(changed))
    assert not any("--" in sentence for sentence in sentences(curve(1, 1, 1)))


def test_the_time_between_the_runs_is_told() -> None:
    base, new = run_of(launches()), run_of(launches())
    later = msgspec.structs.replace(new.info, started="2026-01-02T03:05:25.678Z")
    new = msgspec.structs.replace(new, info=later)
    [told] = [one for one in sentences(compare(base, new, Rule())) if "began" in one]
    assert told.startswith("NEW began 1 min 20 s after BASE")
    [told] = [one for one in sentences(compare(new, base, Rule())) if "began" in one]
    assert told.startswith("NEW began 1 min 20 s before BASE")
    assert not [one for one in sentences(compare(base, base, Rule())) if "began" in one]


def test_every_verdict_has_a_meaning() -> None:
    from reports.comparing.compare_columns import MEANINGS

    assert set(MEANINGS) == set(WORST_FIRST)
