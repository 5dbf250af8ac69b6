"""The text output of nccl-tests becomes results of parbench, or is refused with its line."""

import pytest

from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.imported import ImportedRun
from tests.support.refusals import usage_error
from tests.support.reports.exchange_fixtures import NCCL

START = "# Collective test starting: all_reduce_perf\n"
NO_PROGRAM = NCCL.replace("all_reduce_perf", "")
ONE_RANK = "".join(
    line
    for line in NCCL.splitlines(keepends=True)
    if not any(f"Rank  {rank}" in line for rank in (1, 2, 3))
)
NO_RANKS = "".join(line for line in NCCL.splitlines(keepends=True) if " Rank " not in line)


def parse(text: str, nproc: int | None = None) -> ImportedRun:
    return parse_nccl(text, "f", nproc)


def test_text_rows_are_results_by_placement() -> None:
    run = parse(NCCL)
    assert (run.version, run.device, run.num_ranks) == ("2.19.6", "cuda", 4)
    assert run.hosts == ["hopper1", "hopper2"]
    assert run.environment == {"gpu": "NVIDIA H100 80GB HBM3", "nccl": "2.29.7"}
    out_of_place, in_place = run.results[2:]
    assert in_place.operation.name == "collective.all_reduce"
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
    times = [result.seconds for result in run.results]
    assert times == pytest.approx([18.93e-6, 17.02e-6, 71.36e-6, 70.80e-6])


def test_row_keeps_root_type_and_missing_numbers() -> None:
    heading = NCCL.partition("# Out of bounds")[0].replace("all_reduce", "broadcast")
    row = "1024 512 bfloat16 none 3 18.93 0.05 0.05 N/A N/A N/A N/A N/A\n"
    result = parse(heading + row).results[-1]
    assert result.operation.name == "collective.broadcast"
    assert result.params["root"] == 3
    assert result.params["dtype"] == "bfloat16"
    assert result.params["placement"] == "out_of_place"
    assert "redop" not in result.params
    assert result.check.passed is None


def test_blocking_option_is_a_mode() -> None:
    note = "# Blocking Enabled: wait for completion and barrier\n# Using"
    results = parse(NCCL.replace("# Using", note)).results
    assert {result.params["mode"] for result in results} == {"blocking"}


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "0: ",
        " 3: ",
        "2026-07-01T10:00:00.123456789Z ",
        "[pod/nccl-launcher-x7/main] ",
        "[pod/nccl-launcher-x7/main] 2026-07-01T10:00:00Z [1,0]<stdout>:",
    ],
)
def test_prefixes_of_lines_are_skipped(prefix: str) -> None:
    message = "hopper1:41231:41240 [0] NCCL INFO Connected\n15 more processes sent help\n# Out"
    lines = NCCL.replace("# Out", message).splitlines(keepends=True)
    text = "".join(f"{prefix}{line}" for line in lines)
    assert parse(text).results == parse(NCCL).results


def test_several_operations_are_read_from_one_file() -> None:
    run = parse(NCCL + NCCL.replace("all_reduce", "all_gather"))
    operations = [result.operation.short_name for result in run.results]
    assert operations == ["all_reduce"] * 4 + ["all_gather"] * 4


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (NCCL[: NCCL.index("   70.80")], "line 15: 9 values for 13 columns"),
        (NCCL.replace("18.93", "-18.9"), "line 14: '-18.9'"),
        (NCCL.replace("18.93", "18,93"), "line 14: '18,93'"),
        (
            NCCL.replace("#wrong", "error"),
            "line 14: the heading of this row has no column #wrong, which nccl-tests 2.13",
        ),
        (NCCL[:200], "contains no table of nccl-tests"),
        (NO_PROGRAM, f"Add the line '{START.strip()}'"),
        (NCCL.replace("all_reduce", "hypercube"), "hypercube_perf has no equivalent case"),
        (NO_RANKS, "--nproc"),
        (NCCL.replace("Rank  1", "Rank  0"), "make MPI=1"),
        (ONE_RANK + ONE_RANK, "make MPI=1"),
        (NCCL + NCCL.replace("hopper2", "hopper3"), "make MPI=1"),
        (NCCL.replace("Rank  1 Group  0", "Rank  1 Group  1"), "line 7: groups"),
        (NCCL + NO_RANKS, "has tables of 0 and 4 ranks"),
        (NCCL.replace("# Using", "# Written by parbench 0.2.0: a=1\n# Using"), "run itself"),
    ],
)
def test_damaged_file_is_refused(text: str, fact: str) -> None:
    assert fact in usage_error(parse, text)


def test_other_nproc_is_refused() -> None:
    assert "leave --nproc out" in usage_error(parse, NCCL, 8)
