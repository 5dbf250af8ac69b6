"""nccl-tests' text and JSON as results of ours: its numbers, its own words, and what is refused."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from parbench.reports.formats.foreign import ImportedResult
from parbench.reports.formats.import_nccl import parse_nccl
from tests.support.exchange_fixtures import (
    NCCL,
    NCCL_COLUMNS,
    NCCL_FOOT,
    NCCL_HEAD,
    metric_value,
    nccl_report,
    parse_error,
)

NO_PROGRAM = NCCL.replace("# Collective test starting: all_reduce_perf\n", "")
NO_RANKS = "\n".join(line for line in NCCL.splitlines() if " Rank " not in line)


def of(text: str) -> tuple[ImportedResult, ...]:
    return parse_nccl(text, "f", None).found


def of_row(row: str, operation: str = "all_reduce") -> tuple[ImportedResult, ...]:
    return of(NCCL_HEAD.replace("all_reduce", operation) + NCCL_COLUMNS + row + "\n" + NCCL_FOOT)


def report(result: Mapping[str, Any] | None = None, **more: Any) -> str:
    document = nccl_report(**more)
    document["results"][0] |= result or {}
    return json.dumps(document)


def test_text_rows_are_results_by_placement() -> None:
    foreign = parse_nccl(NCCL, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == (
        "nccl-tests",
        "2.19.6",
        4,
        2,
    )
    assert (foreign.backend, foreign.device, foreign.hosts) == (
        "nccl",
        "cuda",
        ("hopper1", "hopper2"),
    )
    assert foreign.left_out == ()
    assert [dict(found.params) for found in foreign.found] == [
        {
            "size_bytes": size,
            "dtype": "float32",
            "mode": "pipelined",
            "placement": placement,
            "redop": "sum",
        }
        for size in (1024, 4194304)
        for placement in ("out_of_place", "in_place")
    ]
    assert {found.name for found in foreign.found} == {"collective.all_reduce"}
    checks = [(found.check.passed, found.check.wrong) for found in foreign.found]
    assert checks == [(True, 0), (True, 0), (True, 0), (False, 2)]
    times = [18.93e-6, 17.02e-6, 71.36e-6, 70.80e-6]
    assert [metric_value(found, "time") for found in foreign.found] == pytest.approx(times)
    # the rates of the small size lost their digits to rounding, and are computed
    assert metric_value(foreign.found[0], "algbw") == pytest.approx(1024 / 18.93e-6)
    assert metric_value(foreign.found[0], "busbw") == pytest.approx(1024 / 18.93e-6 * 1.5)
    large = foreign.found[2]
    assert (metric_value(large, "algbw"), metric_value(large, "busbw")) == (
        pytest.approx(58.78e9),
        pytest.approx(88.16e9),
    )


def test_text_row_keeps_check_root_and_type() -> None:
    unchecked = of_row("1024 256 float sum -1 18.93 0.05 0.08 N/A 17.02 0.06 0.09 N/A")
    assert [one.check.passed for one in unchecked] == [None, None]
    (rooted, _) = of_row(
        "1024 256 bfloat16 none 3 18.93 0.05 0.08 0 17.02 0.06 0.09 0", "broadcast"
    )
    assert rooted.name == "collective.broadcast"
    assert (rooted.params["root"], rooted.params["dtype"], "redop" in rooted.params) == (
        3,
        "bfloat16",
        False,
    )
    (empty, _) = of_row("0 0 float none -1 0.27 0.00 0.00 0 0.20 0.00 0.00 0", "all_gather")
    assert (empty.params["size_bytes"], metric_value(empty, "algbw")) == (0, 0)
    assert empty.notes[0].startswith("size 0: nccl-tests rounds")
    undivided = of(NCCL.replace("0.05    0.08", "inf     -nan"))[0]
    assert (undivided.printed["algbw"], undivided.printed["busbw"]) == (None, None)


def test_text_of_other_options_is_read() -> None:
    blocking = NCCL.replace(
        "# Using", "# Blocking Enabled: wait for completion and barrier\n# Using"
    )
    assert {found.params["mode"] for found in of(blocking)} == {"blocking"}
    assert metric_value(of(NCCL.replace("    time", " cputime"))[0], "time") == pytest.approx(
        18.93e-6
    )
    names = "size count type redop root " + "time algbw busbw #wrong i_min i_max i_p99 i_cv% " * 2
    row = "1024 256 float sum -1 18.93 0.05 0.08 0 1.1 1.2 1.3 1.4 17.02 0.06 0.09 0 2.1 2.2 2.3 2.4\n"
    per_iteration = of(f"{NCCL_HEAD}# {names}\n{row}{NCCL_FOOT}")
    assert [metric_value(one, "time") for one in per_iteration] == pytest.approx(
        [18.93e-6, 17.02e-6]
    )


def test_text_without_summary_or_ranks_is_read() -> None:
    foreign = parse_nccl(NO_RANKS.partition("# Out of bounds")[0], "f", 4)
    assert (foreign.ranks, foreign.nodes, foreign.hosts, len(foreign.found)) == (4, None, (), 4)
    assert "may be cut short" in foreign.left_out[0]


def test_text_with_labels_and_messages_is_read() -> None:
    noisy = NCCL.replace(
        "0\n     4194304",
        "0\nhopper1:41231:41240 [0] NCCL INFO Connected all rings\n     4194304",
        1,
    )
    assert noisy != NCCL
    for text, label in ((noisy, " 0: "), (NCCL, "[1,0]<stdout>:")):
        assert of("".join(f"{label}{line}\n" for line in text.splitlines())) == of(NCCL), label


def test_text_of_several_tables_is_read() -> None:
    names = [found.name for found in of(NCCL + NCCL.replace("all_reduce", "reduce_scatter"))]
    assert names == ["collective.all_reduce"] * 4 + ["collective.reduce_scatter"] * 4
    # an older version names its program on the shell's command line alone
    told = ("nccl-tests version", "Collective")
    old = (
        "\n".join(line for line in NCCL.splitlines() if not any(word in line for word in told))
        + "\n"
    )
    old = old.replace("#wrong ", "#wrong").replace("# Out", "#  Out", 1)
    text = f"$ mpirun -np 4 ./build/all_reduce_perf -b 1K\n{old}$ ./build/alltoall_perf\n{old}"
    foreign = parse_nccl(text, "f", None)
    assert foreign.version is None
    assert [found.name for found in foreign.found] == ["collective.all_reduce"] * 4 + [
        "collective.all_to_all"
    ] * 4
    assert foreign.found[0].metrics["time"].method.endswith("nccl-tests of unknown version")


def test_damaged_text_is_refused_with_its_line() -> None:
    unnamed = "f, line 13 does not say which operation it measured; add the line that newer nccl-tests print: "
    # a table without a program is not taken for more of the last one either
    second = NCCL.replace(NCCL_FOOT, "") + NO_PROGRAM.replace("# nccl-tests version", "# ")
    small = "\n".join(line for line in NCCL.splitlines() if "hopper2" not in line)
    heading = "f, line 14: the heading before this row names no "
    for text, told in (
        (NO_PROGRAM, unnamed + "'# Collective test starting: all_reduce_perf'"),
        (second, "does not say which operation it measured"),
        (
            NCCL.replace("all_reduce", "hypercube"),
            "f, line 14: hypercube_perf is not known; known are all_reduce_perf,",
        ),
        (
            NCCL[: NCCL.index("   70.80")],
            "f, line 15: 9 of 13 values, so the file seems to be cut short",
        ),
        (NCCL.replace(" root ", " rot  "), heading + "column root"),
        (NCCL.replace("algbw   busbw", "busbw   algbw"), heading + "algbw with busbw beside it"),
        (NCCL.replace("18.93", "18.x3"), "f, line 14: '18.x3' is not a number"),
        (
            NCCL.replace("18.93", "-18.9"),
            "f, line 14: time -18.9 at 1024 B is negative, and nccl-tests prints numbers",
        ),
        (NCCL_HEAD, "f holds no table of nccl-tests: no line names its columns"),
        (NO_RANKS, "f, line 10 does not say on how many ranks it ran"),
        (NCCL + small, "f holds tables of 2 or 4 ranks: import them one by one"),
    ):
        assert told in parse_error(parse_nccl, text), told


def test_json_results_are_read() -> None:
    foreign = parse_nccl(report(), "f", None)
    assert (foreign.ranks, foreign.nodes, foreign.hosts) == (4, 2, ("hopper0", "hopper1"))
    assert foreign.variables == {"NCCL_ALGO": "Ring"}
    first, second = foreign.found
    assert first.name == "collective.all_reduce"
    assert [one.params["placement"] for one in foreign.found] == ["out_of_place", "in_place"]
    assert (metric_value(first, "busbw"), first.iterations) == (pytest.approx(88.16e9), 20)
    assert (first.check.passed, second.check.passed) == (True, None)
    # iterations are samples, but for the tool's own warm-up
    assert first.samples == pytest.approx((70e-6, 72e-6))
    assert first.notes == ("the first 1 iterations are warm-up, by --per_iter_skip",)
    assert second.samples == ()


def test_json_variants_are_read() -> None:
    (found,) = of(
        report(
            {"out_of_place": None, "in_place": {"cpu_time": 3.5, "alg_bw": "nan", "bus_bw": None}}
        )
    )
    assert metric_value(found, "time") == pytest.approx(3.5e-6)
    assert found.printed == {"time": 3.5, "algbw": None, "busbw": None, "#wrong": None}
    assert metric_value(found, "algbw") == pytest.approx(4194304 / 3.5e-6)
    other = {**nccl_report()["config"], "blocking_collectives": "true", "nthreads": 3}
    foreign = parse_nccl(report(config=other), "f", None)
    assert (foreign.found[0].params["mode"], foreign.ranks) == ("blocking", 12)
    assert parse_nccl(report(config={"devices": []}), "f", 4).ranks == 4
    several = json.dumps(nccl_report(), indent=2) + "\n\n" + report(args=["alltoall_perf"]) + "\n"
    names = [found.name for found in of("\n" + several)]
    assert names == ["collective.all_reduce"] * 2 + ["collective.all_to_all"] * 2


def test_damaged_json_is_refused_with_its_line() -> None:
    text = json.dumps(nccl_report(), indent=1)
    cut = text[: text.index('"out_of_bounds"')]
    newer = json.dumps({"version": 4, "results": "moved"})  # its fields are not looked at
    shape = "f, line 1 is not what nccl-tests writes: "
    for content, told in (
        (newer, "f, line 1: JSON version 4 of nccl-tests is newer than 3, the newest we read"),
        (cut, f"f, line {cut.count(chr(10)) + 1}: this is no whole JSON ("),
        (report({"size": "big"}), shape + "Expected `int`, got `str` - at `$.results"),
        (report(config=None), shape + "Expected `object`, got `null` - at `$.config`"),
        (report(args=[]), "f, line 1 does not say which operation it measured"),
        (report(config={"devices": []}), "add --nproc N"),
    ):
        assert told in parse_error(parse_nccl, content), told
