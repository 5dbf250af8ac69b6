"""Text and JSON of nccl-tests become results of parbench, or are refused with their line."""

import json
from typing import Any

import pytest

from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.imported import OPERATIONS_BY_NAME, ImportedResult, ImportedRun
from parbench.reports.formats.nccl_tests import PROGRAMS
from tests.support.refusals import usage_error
from tests.support.reports.exchange_fixtures import NCCL, nccl_report

LINES = NCCL.splitlines(keepends=True)
SMALL_ROW, LARGE_ROW = (line for line in LINES if line.lstrip()[:1].isdigit())
NO_PROGRAM = NCCL.replace("# Collective test starting: all_reduce_perf\n", "")
NO_RANKS = "".join(line for line in LINES if " Rank " not in line)


RANKS = "".join(
    f"#  Rank {rank} Group 0 Pid {rank} on a device {rank} GPU\n" for rank in range(4)
)
HEADING = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
OLD_HEADING = "# size count type redop time algbw busbw error time algbw busbw error\n"


def make_table(operation: str, header: str = RANKS, seconds: float = 1e-4) -> str:
    """Return a table of two sizes on four ranks, as nccl-tests prints it since 2.13."""
    spec = OPERATIONS_BY_NAME[operation]
    assert spec.busbw is not None
    redop = "sum" if spec.is_reduction else "none"
    text = f"# Collective test starting: {PROGRAMS[operation]}\n{header}{HEADING}"
    for size in (1 << 20, 1 << 26):
        count = size // 4 // (4 if spec.sharded else 1)
        algbw = size / seconds / 1e9
        cells = f"{seconds * 1e6:.2f} {algbw:.2f} {algbw * spec.busbw.compute(4):.2f} 0"
        text += f"{size} {count} float {redop} -1 {cells} {cells}\n"
    return text + "# Out of bounds values : 0 OK\n"


def parse(text: str, nproc: int | None = None) -> ImportedRun:
    return parse_nccl(text, "f", nproc)


def parse_row(row: str, operation: str = "all_reduce") -> list[ImportedResult]:
    """Return the results by placement of a table with one row."""
    text = NCCL.replace("all_reduce", operation).replace(LARGE_ROW, "")
    return list(parse(text.replace(SMALL_ROW, f"{row}\n")).results)


def write_report(result: dict[str, Any] | None = None, **overrides: Any) -> str:
    document = nccl_report(**overrides)
    document["results"][0] |= result or {}
    return json.dumps(document)


def test_text_rows_are_results_by_placement() -> None:
    run = parse(NCCL)
    assert run.version == "2.19.6"
    assert run.device == "cuda"
    assert run.num_ranks == 4
    assert run.hosts == ["hopper1", "hopper2"]
    out_of_place, in_place = run.results[2:]
    assert in_place.name == "collective.all_reduce"
    assert dict(in_place.params) == {
        "size_bytes": 4194304,
        "dtype": "float32",
        "mode": "pipelined",
        "placement": "in_place",
        "redop": "sum",
    }
    assert in_place.check.wrong == 2
    assert in_place.check.passed is False
    assert out_of_place.check.passed is True
    times = [result.metrics["time"].value for result in run.results]
    assert times == pytest.approx([18.93e-6, 17.02e-6, 71.36e-6, 70.80e-6])
    assert out_of_place.metrics["algbw"].value == pytest.approx(58.78e9)
    assert out_of_place.metrics["busbw"].value == pytest.approx(88.16e9)


def test_rounded_rates_are_computed_from_the_time() -> None:
    small = parse(NCCL).results[0]
    assert small.metrics["algbw"].value == pytest.approx(1024 / 18.93e-6)
    assert small.metrics["busbw"].value == pytest.approx(1024 / 18.93e-6 * 1.5)


def test_row_keeps_root_and_type() -> None:
    row = "1024 512 bfloat16 none 3 18.93 0.05 0.05 0 17.02 0.06 0.06 0"
    result = parse_row(row, "broadcast")[0]
    assert result.name == "collective.broadcast"
    assert result.params["root"] == 3
    assert result.params["dtype"] == "bfloat16"
    assert "redop" not in result.params


def test_blocking_option_is_a_mode() -> None:
    note = "# Blocking Enabled: wait for completion and barrier\n# Using"
    results = parse(NCCL.replace("# Using", note)).results
    assert {result.params["mode"] for result in results} == {"blocking"}


def test_text_without_summary_may_be_cut_short() -> None:
    run = parse(NO_RANKS.partition("# Out of bounds")[0], nproc=4)
    assert run.num_ranks == 4
    assert len(run.results) == 4
    assert "cut short" in run.omissions[0]


@pytest.mark.parametrize(
    "prefix",
    [
        " 0: ",
        "[1,0]<stdout>:",
        "2026-02-16T10:00:01.123456789Z ",
        "[pod/bench-launcher-x7/launcher] ",
        "2026-02-16T10:00:01.1Z stdout F ",
        "Feb 16 10:00:01 node1 slurmd[42]: ",
        "worker-0  | ",
        "(Worker pid=7) ",
        "INFO:root:",
        "@@ job-7 ## ",
    ],
)
def test_prefixes_and_messages_are_skipped(prefix: str) -> None:
    messages = (
        "hopper1:41231:41240 [0] NCCL INFO Connected all rings\n15 more processes sent help\n"
    )
    noisy = NCCL.replace(LARGE_ROW, messages + LARGE_ROW)
    lines = [prefix + line for line in noisy.splitlines(keepends=True)]
    wrapped = [json.dumps({"log": line}) for line in lines]
    for text in ("".join(lines), "\n".join(wrapped)):
        assert parse(text).results == parse(NCCL).results


def test_columns_of_old_versions_are_read() -> None:
    """Until 2.13 there was no root, and the largest error instead of a count of wrong values."""
    row = "4194304 1048576 float sum 71.36 58.78 88.16 5e-07 70.80 59.24 88.86 1e-02\n"
    out_of_place, in_place = parse(RANKS + OLD_HEADING + row).results
    assert out_of_place.name == "collective.all_reduce"
    assert out_of_place.check.passed is True
    assert in_place.check.passed is False
    assert out_of_place.metrics["busbw"].value == pytest.approx(88.16e9)


def test_algbw_before_2020_is_computed() -> None:
    heading = "# size count type time algbw busbw error time algbw busbw error\n"
    row = "67108864 4194304 float 1000.0 50.33 50.33 0e+00 1000.0 50.33 50.33 0e+00\n"
    result = parse(f"$ all_gather_perf\n{RANKS}{heading}{row}").results[0]
    assert result.metrics["algbw"].value == pytest.approx(67.108864e9)
    assert result.metrics["busbw"].value == pytest.approx(50.33e9)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "sendrecv"])
def test_operation_is_inferred_from_the_rows(operation: str) -> None:
    ranks = RANKS.replace("Group 0 ", "")  # Until 2025 rccl-tests printed no group.
    _, _, text = make_table(operation, ranks).partition("\n")
    run = parse(text)
    assert run.num_ranks == 4
    assert {result.name.partition(".")[2] for result in run.results} == {operation}
    assert "does not name its program" in run.notes[0]


def test_ambiguous_operation_is_read_from_the_file_name() -> None:
    _, _, text = make_table("all_gather").partition("\n")
    assert (
        parse_nccl(text, "logs/alltoall.log", None).results[0].name == "collective.all_to_all"
    )
    assert "all_gather_perf, alltoall_perf" in usage_error(parse, text)


def test_several_operations_are_read_from_one_file() -> None:
    run = parse(make_table("all_reduce") + make_table("all_gather"))
    assert [result.name for result in run.results[::4]] == [
        "collective.all_reduce",
        "collective.all_gather",
    ]
    assert all(result.metrics["time"].value == pytest.approx(1e-4) for result in run.results)


def test_split_groups_have_their_own_factor() -> None:
    ranks = RANKS.replace("1 Group 0", "1 Group 1").replace("3 Group 0", "3 Group 1")
    row = "1024 256 float sum -1 20.00 0.05 0.05 0 20.00 0.05 0.05 0\n"
    run = parse(f"# Collective test starting: all_reduce_perf\n{ranks}{HEADING}{row}")
    assert run.num_ranks == 4
    assert run.results[0].group_size == 2
    assert run.results[0].params["group"] == "strided:2"
    assert run.results[0].metrics["busbw"].value == pytest.approx(1024 / 20e-6)


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (" 58.78 ", " 88.16 ", "line 15: out-of-place algbw 88.16 GB/s contradicts 4194304 B"),
        ("1048576  ", "1048567  ", "line 15: the size is 4194304 B, but 1048567 elements"),
        (" 88.16 ", " 90.16 ", "line 15: out-of-place busbw 90.16 GB/s contradicts 88.1"),
        ("44.2975", "54.2975", "rows may be missing"),
        ("1 FAILED", "0 OK", "line 16: 0 values are wrong, but some rows are wrong"),
    ],
)
def test_contradiction_is_named_with_its_line(old: str, new: str, fact: str) -> None:
    assert any(fact in note for note in parse(NCCL.replace(old, new)).notes)


def test_bandwidths_of_another_world_stay_as_printed() -> None:
    lines = [line for line in LINES if "Rank  3" not in line]
    run = parse("".join(lines))
    assert "agree with 4 ranks, but the file lists 3" in run.notes[0]
    assert run.results[2].metrics["busbw"].value == pytest.approx(88.16e9)


@pytest.mark.parametrize(
    ("text", "line", "fact"),
    [
        (NCCL[: NCCL.index("   70.80")], "line 15", "9 of 13 values"),
        (NCCL.replace("18.93", "-18.9"), "line 14", "-18.9"),
        (NCCL[:200], "f contains no table", "nccl-tests"),
        (NO_RANKS, "line 10", "only with --nproc 4"),
        (NCCL.replace("Rank  1", "Rank  0"), "line 7", "make MPI=1"),
        (NCCL.replace(LINES[6], ""), "line 8", "no line lists rank 1"),
        (NCCL.replace(" root ", "      "), "line 14", "13 values for 12 columns"),
        (NCCL.replace(" time ", "      "), "line 14", "no column time"),
    ],
)
def test_damaged_text_is_refused(text: str, line: str, fact: str) -> None:
    message = usage_error(parse, text)
    assert line in message
    assert fact in message


@pytest.mark.parametrize("version", [3, 4])
def test_json_results_are_read(version: int) -> None:
    run = parse(write_report({"tuning": {"algo": "RING"}}, version=version))
    assert run.num_ranks == 4
    assert run.hosts == ["hopper0", "hopper1"]
    assert run.variables == {"NCCL_ALGO": "Ring"}
    out_of_place, in_place = run.results
    assert out_of_place.name == "collective.all_reduce"
    assert out_of_place.metrics["busbw"].value == pytest.approx(88.16e9)
    assert out_of_place.check.passed is True
    # The first of three iterations is warm-up.
    assert out_of_place.samples == pytest.approx((70e-6, 72e-6))
    assert in_place.check.passed is None


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (json.dumps({"version": 5, "results": "moved"}), "as text"),
        (json.dumps(nccl_report(), indent=1)[:-20], "line 73"),
        (write_report({"size": "big"}), "`$.results"),
        (write_report(config={"devices": []}), "--nproc"),
    ],
)
def test_damaged_json_is_refused(text: str, fact: str) -> None:
    assert fact in usage_error(parse, text)
