"""Values as cells and words: three digits with their unit, unknown as a dash, nothing that a terminal obeys."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.metrics import MetricValue
from parbench.reports import cells
from parbench.reports.analysis.labels import (
    differences,
    environment_facts,
    flatten,
    operation,
    short_labels,
)
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import (
    collective_case,
    ok_record,
    rate_metric,
    seconds_metric,
    step_case,
)

SIGNIFICANT: dict[float | None, str] = {}
SIGNIFICANT |= {
    12.345: "12.3",
    1.2: "1.20",
    999.6: "1000",
    9.996: "10.0",
    123456.0: "123000",
    0.00012345: "0.000123",
}
SIGNIFICANT |= {-12.345: "-12.3", 0.0: "0", None: "-", math.nan: "-", math.inf: "-"}
DURATIONS: dict[float | None, str] = {}
DURATIONS |= {
    12.345e-6: "12.3 us",
    0.5e-6: "0.500 us",
    999.96e-6: "1.00 ms",
    0.0456: "45.6 ms",
    1.0: "1.00 s",
}
DURATIONS |= {75.0: "75.0 s", 0.0: "0 us", None: "-"}
SIZES: dict[Any, str] = {65536: "64K", 1001: "1001", None: "-", "x": "-", True: "-"}
QUANTITIES: dict[tuple[float | None, str], str] = {
    (2.5e9, "B/s"): "2.50 GB/s",
    (1536.0, "B"): "1.50 KiB",
    (512.0, "B"): "512 B",
    (1024.0, "B"): "1.00 KiB",
    (3 << 30, "B"): "3.00 GiB",
    (1234.0, "tokens/s"): "1230 tokens/s",
    (0.25, ""): "0.250",
    (None, "B"): "-",
    (math.nan, "s"): "-",
}


def test_values_have_three_significant_digits_and_choose_their_unit() -> None:
    for value, text in SIGNIFICANT.items():
        assert cells.significant(value) == text, value
    for seconds, text in DURATIONS.items():
        assert cells.duration(seconds) == text, seconds
    for (value, unit), text in QUANTITIES.items():
        assert cells.quantity(value, unit) == text, (value, unit)
    for size, text in SIZES.items():
        assert cells.size(size) == text, size
    assert [cells.gigabytes(rate) for rate in (1e9, 0.0, None)] == ["1.00", "0", "-"]
    assert [cells.percent(share) for share in (0.345, -0.02, None, math.nan)] == [
        "34.5 %",
        "-2.00 %",
        "-",
        "-",
    ]


@settings(max_examples=50, deadline=None)
@given(st.floats(min_value=1e-12, max_value=1e15))
def test_what_is_printed_is_within_half_a_digit(value: float) -> None:
    text = cells.significant(value)
    assert "e" not in text
    assert math.isclose(float(text), value, rel_tol=0.00501)


def test_an_interval_is_in_the_unit_of_its_value_and_without_one_there_are_no_brackets() -> None:
    metric = MetricValue(value=950e-6, unit="s", better="lower", low=900e-6, high=1100e-6)
    assert cells.measured(metric) == "950 us [900, 1100]"
    assert (
        cells.measured(MetricValue(value=2e9, unit="B/s", better="higher", low=1e9, high=3e9))
        == "2.00 GB/s [1.00, 3.00]"
    )
    assert cells.measured(rate_metric(2e9)) == "2.00 GB/s"
    assert (
        cells.measured(seconds_metric(None))
        == cells.measured(None)
        == cells.interval(rate_metric(2e9))
        == "-"
    )


def test_words_are_counted_and_what_cannot_be_seen_is_written_out() -> None:
    assert cells.counted((("precision", 4), ("budget", 1))) == "precision x4, budget"
    assert cells.counted(()) == "-"
    assert cells.visible("a\x1b[31m\n  b\x00") == "a\\x1b[31m b\\x00"
    assert cells.visible("Größe 64K") == "Größe 64K"


def labels_of(*cases: Case) -> list[str]:
    return list(short_labels(summarize_rows(*map(ok_record, cases))).values())


def differences_of(*cases: Case, without: tuple[str, ...] = ()) -> list[str]:
    return list(differences(summarize_rows(*map(ok_record, cases)), without).values())


def test_an_operation_leaves_out_its_kind_what_has_an_axis_and_what_stands_elsewhere() -> None:
    assert operation(collective_case("all_reduce")) == "all_reduce"
    assert operation(collective_case("broadcast", root=1)) == "broadcast root=1"
    assert operation(make_case("lonely", "m:f", {})) == "lonely"
    case = collective_case("all_reduce", group="pairs", group_index=1, op="sum")
    assert operation(case, ("group", "group_index")) == "all_reduce op=sum"
    assert operation(case) == "all_reduce group=pairs group_index=1 op=sum"


def test_a_step_says_only_what_tells_it_apart() -> None:
    cases = [
        step_case("ddp"),
        step_case("pipeline", schedule="1f1b"),
        step_case("pipeline", schedule="gpipe"),
    ]
    assert labels_of(*cases) == ["ddp", "pipeline schedule=1f1b", "pipeline schedule=gpipe"]
    assert labels_of(step_case("ddp"), step_case("ddp", bucket_mb=1.0)) == [
        "ddp",
        "ddp bucket_mb=1.0",
    ]
    assert labels_of(step_case("ddp"), make_case("mine.ddp", "m:f", {})) == ["step.ddp", "mine.ddp"]
    assert labels_of(step_case("a", word="\x1b[1m"), step_case("a", word="b")) == [
        "a word=\\x1b[1m",
        "a word=b",
    ]


def test_differences_are_the_parameters_alone_save_those_named_and_those_without_a_value() -> None:
    cases = [step_case("a", split="even", chunks=1), step_case("a", split="3,1", chunks=2)]
    assert differences_of(*cases) == ["split=even chunks=1", "split=3,1 chunks=2"]
    assert differences_of(*cases, without=("chunks",)) == ["split=even", "split=3,1"]
    assert differences_of(*cases, without=("chunks", "split")) == ["", ""]
    assert differences_of(step_case("a")) == [""]
    assert differences_of(step_case("a", split=""), step_case("a", split="3+1")) == [
        "",
        "split=3+1",
    ]


FLAT: list[tuple[Any, str]] = [
    (None, "-"),
    ("", "-"),
    ({}, "-"),
    ([], "-"),
    ([0, None, "x"], "0, -, x"),
    (True, "yes"),
    (False, "no"),
]
FLAT += [(0.1234567891, "0.123457")]


def test_every_value_is_text_under_its_dotted_name() -> None:
    for value, text in FLAT:
        assert flatten({"name": value}) == [("name", text)], value
    assert flatten({"a": {"b": {"c": 1}}, "d": "x"}) == [("a.b.c", "1"), ("d", "x")]
    calls = [{"axis": "dp", "ranks": 4}, {"axis": "tp", "ranks": None}]
    assert flatten({"calls": calls}) == [("calls", "axis=dp ranks=4, axis=tp ranks=-")]


def test_pairs_of_ranks_in_an_environment_are_told_by_kind_however_many() -> None:
    pairs = {
        f"{i}-{j}": "same node" if i // 8 == j // 8 else "other node"
        for i in range(64)
        for j in range(i + 1, 64)
    }
    told = dict(environment_facts({"host": {"name": "a"}, "locality": pairs}))
    assert list(told) == ["host.name", "pairs of ranks: same node", "pairs of ranks: other node"]
    assert told["pairs of ranks: same node"].startswith("0-1, 0-2, ")
    assert told["pairs of ranks: same node"].endswith("... (224 pairs)")
    assert environment_facts({"locality": {"0-1": "same core"}}) == [
        ("pairs of ranks: same core", "0-1")
    ]
    assert environment_facts({"a": {"b": 1}, "locality": None}) == [("a.b", "1")]


def test_what_may_be_nothing_is_shown_with_its_interval_in_one_unit() -> None:
    small = MetricValue(value=12e-6, unit="s", low=-3.2e-3, high=3.3e-3)
    assert cells.compared(small, cells.duration) == "0.0120 ms [-3.20, 3.30]"
    share = MetricValue(value=0.0576, low=-0.03, high=0.14)
    assert cells.compared(share, cells.percent) == "5.76 % [-3.00 %, 14.0 %]"
    assert cells.compared(MetricValue(value=1e-18, unit="s"), cells.duration) == "0 us"
    assert [cells.compared(one, cells.percent) for one in (None, MetricValue(value=None))] == [
        "-",
        "-",
    ]
