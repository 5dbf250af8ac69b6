"""A run in the layout of nccl-tests' text: its tables, and what has no place in them."""

from typing import Any

import msgspec

from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Check, Record
from parbench.bench.results.runs import Run
from parbench.reports.formats.nccl_tests import render_text
from parbench.reports.formats.nccl_tests import step as step_of
from tests.support.exchange_fixtures import make_pairs_record
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    HOSTILE_TEXT,
    WORLD,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
)


def run_of(*records: Record, environment: dict[str, object] | None = None) -> Run:
    cases = {record.case.id: record.case for record in records}.values()
    return make_run(
        make_plan(cases, launches=max(one.launch for one in records) + 1), records, environment
    )


def text_of(*records: Record, environment: dict[str, Any] | None = None) -> str:
    return render_text(run_of(*records, environment=environment))


def tables_of(*records: Record) -> list[str]:
    return text_of(*records).split("# nccl-tests version")[1:]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def both(size_bytes: int, out_of_place: float, in_place: float) -> tuple[Record, Record]:
    return (
        ok_record(
            collective_case(size_bytes=size_bytes, placement="out_of_place"), seconds=out_of_place
        ),
        ok_record(collective_case(size_bytes=size_bytes, placement="in_place"), seconds=in_place),
    )


def test_sizes_of_a_series_are_lines_in_order() -> None:
    first, second = (
        line.split()
        for line in rows(
            text_of(ok_record(collective_case(size_bytes=4096)), *both(1024, 2e-6, 4e-6))
        )
    )
    assert (first[0], first[5], first[9]) == ("1024", "2.00", "4.00")
    assert (second[0], second[5]) == ("4096", "N/A")


def test_table_is_split_by_what_has_no_column() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"mode": "pipelined"},
        {"group": "node"},
        {"operation": "broadcast"},
    )
    for change in changes:
        assert (
            len(tables_of(ok_record(collective_case()), ok_record(collective_case(**change)))) == 2
        ), change
    columns: tuple[dict[str, Any], ...] = ({}, {"dtype": "float64"}, {"redop": "max"}, {"root": 1})
    records = [
        ok_record(collective_case(size_bytes=size, **change))
        for size in (4096, 1024)
        for change in columns
    ]
    lines = [line.split() for line in rows(text_of(*records))]
    kinds = [
        ["float", "sum", "-1"],
        ["double", "sum", "-1"],
        ["float", "max", "-1"],
        ["float", "sum", "1"],
    ]
    assert [line[2:5] for line in lines[::2]] == kinds
    assert [line[0] for line in lines] == ["1024", "4096"] * 4
    for change in ({"size": 2}, {"nodes": 2}):
        world = msgspec.structs.replace(WORLD, **change)
        tables = tables_of(
            ok_record(collective_case()), ok_record(collective_case(size_bytes=4096), world=world)
        )
        assert [table.count("#  Rank") for table in tables] == [4, world.size]
        assert f"nodes={world.nodes}\n" in tables[1]


def test_cuda_tables_hold_modes_of_nccl_tests() -> None:
    cuda = msgspec.structs.replace(WORLD, device="cuda", backend="nccl")
    modes = ("blocking", "graph", "async", "pipelined")
    records = [ok_record(collective_case(mode=mode), world=cuda) for mode in modes]
    other = ok_record(collective_case(operation="broadcast"), world=cuda)
    tables = tables_of(*records, other)
    for table, words in zip(
        tables,
        (
            ("mode=graph", "graph: 1"),
            ("mode=pipelined", "graph: 0"),
            ("mode=blocking", "broadcast"),
        ),
        strict=True,
    ):
        assert all(word in table for word in words), words
    why = "mode graph or pipelined compares with nccl-tests, and is here"
    label = "collective.all_reduce size_bytes=1024 dtype=float32 mode="
    lines = text_of(*records, other).splitlines()
    assert [line for line in lines if "Not in" in line] == [
        f"# Not in any table: {label}{mode}: {why}" for mode in ("blocking", "async")
    ]
    assert (
        len(tables_of(records[0], failed_record(collective_case(mode="graph"), world=cuda))) == 2
    ), "a failed case replaces nothing"
    assert len(tables_of(*(ok_record(collective_case(mode=mode)) for mode in modes))) == 4, (
        "a CPU run has all modes"
    )


def test_group_has_a_table_of_its_own_ranks() -> None:
    [table] = tables_of(make_pairs_record())
    assert ("world=4" in table, rows(table)[1].split()[1]) == (True, "512")
    assert table.count("#  Rank") == 2
    [table] = tables_of(ok_record(collective_case("all_gather", 4096, group="world")))
    assert (table.count("#  Rank"), rows(table)[1].split()[1], " world=" in table) == (
        4,
        "256",
        False,
    )


def test_programs_types_and_counts_are_those_of_nccl_tests() -> None:
    shares = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter")
    shorter = {"all_to_all": "alltoall_perf", "all_to_all_v": "alltoallv_perf"}
    for operation in ("all_reduce", "broadcast", "reduce", "sendrecv", *shares):
        text = text_of(ok_record(collective_case(operation, 4096)))
        redop = "sum" if operation in ("all_reduce", "reduce_scatter", "reduce") else "none"
        assert f"test starting: {shorter.get(operation, f'{operation}_perf')}\n" in text
        [line] = rows(text)
        assert (line.split()[1], line.split()[3]) == (
            "256" if operation in shares else "1024",
            redop,
        ), operation
        has_one_placement = operation not in ("all_reduce", "all_gather", "reduce_scatter")
        assert ("repeats" in text) is has_one_placement, operation
    for dtype, theirs, count in (
        ("float64", "double", 512),
        ("bfloat16", "bfloat16", 2048),
        ("uint8", "uint8", 4096),
    ):
        [line] = rows(text_of(ok_record(collective_case(size_bytes=4096, dtype=dtype))))
        assert line.split()[1:3] == [str(count), theirs]


def test_times_are_merged_and_bandwidths_averaged() -> None:
    text = text_of(ok_record(collective_case(), 0, 1e-3), ok_record(collective_case(), 1, 4e-3))
    assert (rows(text)[0].split()[9], " iters: 240 " in text) == ("2000.00", True)
    text = text_of(
        *both(1024, 1e-6, 2e-6),
        ok_record(collective_case(size_bytes=2048, placement="in_place"), seconds=1e-6),
    )
    assert f"# Avg bus bandwidth    : {(1.536 + 0.768 + 3.072) / 3:g} \n" in text


def test_cases_without_a_counterpart_are_comments() -> None:
    cases = (
        (step_case(), "no nccl-tests equivalent"),
        (collective_case(dtype="complex64"), "nccl-tests has no type complex64"),
        (make_case("collective.reduce", "import:osu", {"size_bytes": 8}), "its type is unknown"),
        (collective_case(placement="sideways"), "nccl-tests has no placement sideways"),
        (collective_case(redop="xor"), "nccl-tests has no reduction xor"),
        (
            make_case("collective.reduce", "x:y", {"size_bytes": "1K", "dtype": "float32"}),
            "it has no size",
        ),
    )
    told = text_of(*(failed_record(case, status="ok") for case, _ in cases)).splitlines()
    assert told == [f"# Not in any table: {case.label}: {reason}" for case, reason in cases]
    skipped = Skipped(case=collective_case("all_gather", 1001), reason="1001 B do not divide")
    run = make_run(
        make_plan([collective_case()], launches=2, skipped=[skipped]),
        [ok_record(collective_case())],
    )
    text = render_text(run)
    assert len(rows(text)) == 1
    assert f"# Not in any table: {skipped.case.label}: skipped: 1001 B do not divide\n" in text
    assert text.endswith(": no record of 1 of 2 launches\n")


def test_step_is_printed_where_it_is_constant() -> None:
    expected: dict[tuple[int, ...], str] = {(8, 16, 32): "2(factor)", (1, 4, 16): "4(factor)"}
    expected |= {
        (100, 200, 300): "100(bytes)",
        (8, 16, 33): "0(bytes)",
        (8, 8): "0(bytes)",
        (): "0(bytes)",
    }
    assert {sizes: step_of(sizes) for sizes in expected} == expected


def test_devices_and_nccl_version_are_printed_where_known() -> None:
    spread = ok_record(collective_case(), world=msgspec.structs.replace(WORLD, nodes=2))
    for record, environment, host, device in (
        (ok_record(collective_case()), ENVIRONMENT, "node-a", "Example CPU"),
        (spread, ENVIRONMENT, "unknown", "Example CPU"),
        (ok_record(collective_case()), {"host": "none"}, "node-a", "unknown"),
    ):
        text = text_of(record, environment=environment)
        for rank in range(4):
            assert (
                f"#  Rank {rank:2d} Group  0 Pid     -1 on {host:>10} device -1 [unknown] {device}\n"
                in text
            )
    for nccl, code in (("2.28.9", 22809), ("2.x.1", 0), (None, 0)):
        text = text_of(ok_record(collective_case()), environment={"torch": {"nccl": nccl}})
        assert f"nccl-headers={code} nccl-library={code}\n" in text, nccl


# the layout of version 2.19.6, with numbers of our own
EXPECTED = """\
# nccl-tests version 2.19.6 nccl-headers=0 nccl-library=0
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576 step: 0(bytes) warmup iters: 5 iters: 120 agg iters: 1 \
validation: 1 graph: 0 unalign: 0
# Written by parbench 0.1.0: mode=blocking backend=gloo device=cpu nodes=1
#
# Using devices
#  Rank  0 Group  0 Pid     -1 on     node-a device -1 [unknown] unknown
#  Rank  1 Group  0 Pid     -1 on     node-a device -1 [unknown] unknown
#  Rank  2 Group  0 Pid     -1 on     node-a device -1 [unknown] unknown
#  Rank  3 Group  0 Pid     -1 on     node-a device -1 [unknown] unknown
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
     1048576        262144     float     sum      -1    21.37   49.07   73.60       0    21.10   49.70   74.54       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 74.0724 
#
# Collective test concluded: all_reduce_perf

"""  # noqa: W291


def test_text_is_printed_as_nccl_tests_does() -> None:
    assert text_of(*both(1 << 20, 21.37e-6, 21.10e-6)) == EXPECTED
    lines = rows(render_text(sample_run()))
    assert len(lines) == 49
    assert {len(line.split()) for line in lines} == {13}
    assert render_text(make_run(make_plan([]), [])) == ""


def test_unchecked_results_are_not_available() -> None:
    text = text_of(ok_record(collective_case(), check=Check()))
    assert rows(text)[0].endswith("0.00    N/A")
    assert "validation: 0 " in text


def test_bad_results_are_comments() -> None:
    wrong = failed_record(
        collective_case(size_bytes=2048), 0, "wrong", "7 differ", check=Check(passed=False, wrong=7)
    )
    unknown = failed_record(
        collective_case(size_bytes=3072), 0, "wrong", "many differ", check=Check(passed=False)
    )
    hang = failed_record(collective_case(size_bytes=4096), 0, "hang", "rank 1\nis lost")
    hostile = failed_record(collective_case(size_bytes=5120), 0, "failed", HOSTILE_TEXT + "\n1 2 3")
    untimed = ok_record(collective_case(size_bytes=6144), metrics={})
    text = text_of(ok_record(collective_case()), wrong, unknown, hang, hostile, untimed)
    assert [row.split()[0] for row in rows(text)] == ["1024"]
    comments = [line for line in text.splitlines() if line.startswith("# Left out: ")]
    assert len(comments) == 5
    assert comments[0].endswith("wrong: 7 differ")
    assert comments[2].endswith("hang: rank 1 is lost")
    assert "# Out of bounds values : 8 FAILED\n" in text, (
        "a wrong result of unknown count counts once"
    )
    assert "\x1b" not in text
    text = text_of(wrong)
    assert (rows(text), "# Avg bus bandwidth    : N/A \n" in text, "validation: 1 " in text) == (
        [],
        True,
        True,
    )
