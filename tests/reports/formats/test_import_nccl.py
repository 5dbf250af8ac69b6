"""Text and JSON of nccl-tests become results of parbench, or are refused with their line."""

import json
from typing import Any

import pytest

from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.imported import OPERATIONS_BY_NAME, ImportedResult, ImportedRun
from parbench.reports.formats.nccl_tests import PROGRAMS
from tests.support.exchange_fixtures import NCCL, nccl_report
from tests.support.refusals import usage_error

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


@pytest.mark.parametrize("label", [" 0: ", "[1,0]<stdout>:"])
def test_labels_and_messages_are_skipped(label: str) -> None:
    message = "hopper1:41231:41240 [0] NCCL INFO Connected all rings\n"
    noisy = NCCL.replace(LARGE_ROW, message + LARGE_ROW)
    labeled = "".join(label + line for line in noisy.splitlines(keepends=True))
    assert parse(labeled).results == parse(NCCL).results


def test_program_is_read_from_the_command_line() -> None:
    """Older versions of nccl-tests print neither their version nor their program."""
    _, _, text = make_table("all_gather").partition("\n")
    run = parse(f"$ mpirun -np 4 ./build/alltoall_perf -b 1K\n{text}")
    assert {result.name for result in run.results} == {"collective.all_to_all"}


@pytest.mark.parametrize(
    ("text", "line", "fact"),
    [
        (NCCL[: NCCL.index("   70.80")], "line 15", "9 of 13 values"),
        (NCCL.replace("18.93", "-18.9"), "line 14", "-18.9"),
        (NCCL[:200], "f contains no table", "nccl-tests"),
        (NO_RANKS, "line 10", "number of ranks"),
    ],
)
def test_damaged_text_is_refused(text: str, line: str, fact: str) -> None:
    message = usage_error(parse, text)
    assert line in message
    assert fact in message


def test_json_results_are_read() -> None:
    run = parse(write_report())
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
