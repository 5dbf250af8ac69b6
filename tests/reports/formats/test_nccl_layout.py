"""A run in nccl-tests' layout: its tables, as text and as JSON, what has no place in them, and what they never say."""

import json
from typing import Any

import msgspec
import pytest
from exchange_fixtures import on_pairs
from reports_fixtures import ENVIRONMENT, HOSTILE, WORLD, bad, collective, make_plan, make_run, ok, sample_run, step

from parbench.bench.plan.cases import make_case
from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Check, Record
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.formats.nccl_tests import fit, render_json, render_text
from parbench.reports.formats.nccl_tests import step as distance

IN_PLACE_ALONE = ("broadcast", "reduce")


def run_of(*records: Record, environment: dict[str, object] | None = None) -> Run:
    cases = {record.case.id: record.case for record in records}.values()
    return make_run(make_plan(cases, launches=max(one.launch for one in records) + 1), records, environment)


def text_of(*records: Record) -> str:
    return render_text(run_of(*records))


def documents_of(*records: Record, environment: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    found = render_json(run_of(*records, environment=environment)).splitlines()
    return [json.loads(line, parse_float=lambda word: round(float(word), 6)) for line in found]


def json_of(*records: Record, environment: dict[str, Any] | None = None) -> dict[str, Any]:
    [found] = documents_of(*records, environment=environment)
    return found


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def both(size_bytes: int, out_of_place: float, in_place: float) -> tuple[Record, Record]:
    return (
        ok(collective(size_bytes=size_bytes, placement="out_of_place"), seconds=out_of_place),
        ok(collective(size_bytes=size_bytes, placement="in_place"), seconds=in_place),
    )


def test_sizes_of_one_series_are_lines_in_order_with_both_placements() -> None:
    first, second = json_of(ok(collective(size_bytes=4096)), *both(1024, 2e-6, 4e-6))["results"]
    assert (first["size"], second["size"], second[OUT_OF_PLACE]) == (1024, 4096, None)
    assert (first[OUT_OF_PLACE]["time"], first[IN_PLACE]["time"]) == (2, 4)


def test_what_the_layout_has_no_column_for_is_another_table() -> None:
    changes: tuple[dict[str, Any], ...] = ({"mode": "pipelined"}, {"group": "node"}, {"operation": "broadcast"})
    for change in changes:
        assert len(documents_of(ok(collective()), ok(collective(**change)))) == 2, change
    of_columns: tuple[dict[str, Any], ...] = ({}, {"dtype": "float64"}, {"redop": "max"}, {"root": 1})
    records = [ok(collective(size_bytes=size, **change)) for size in (4096, 1024) for change in of_columns]
    lines = [[line[name] for name in ("type", "redop", "root", "size")] for line in json_of(*records)["results"]]
    assert [[words[0], words[1], int(words[2])] for words in lines[::2]] == [
        ["float", "sum", -1], ["double", "sum", -1], ["float", "max", -1], ["float", "sum", 1],
    ]  # fmt: skip
    assert [words[3] for words in lines] == [1024, 4096] * 4
    for of_world in ({"size": 2}, {"nodes": 2}):
        world = msgspec.structs.replace(WORLD, **of_world)
        found = documents_of(ok(collective()), ok(collective(size_bytes=4096), world=world))
        devices = [len(one["config"]["devices"]) for one in found]
        assert (devices, [one["args"][-1] for one in found]) == ([4, world.size], ["nodes=1", f"nodes={world.nodes}"])


def test_on_cuda_the_modes_that_nccl_tests_has_are_taken_where_they_were_measured() -> None:
    cuda = msgspec.structs.replace(WORLD, device="cuda", backend="nccl")
    modes = ("blocking", "graph", "async", "pipelined")
    records = [ok(collective(mode=mode), world=cuda) for mode in modes]
    other = ok(collective(operation="broadcast"), world=cuda)
    found = documents_of(*records, other)
    assert [(one["args"][0], one["args"][2], one["config"]["graph"]) for one in found] == [
        ("all_reduce_perf", "mode=graph", 1),
        ("all_reduce_perf", "mode=pipelined", 0),
        ("broadcast_perf", "mode=blocking", 0),
    ]
    why = "mode graph or pipelined compares with nccl-tests, and is here"
    label = "collective.all_reduce size_bytes=1024 dtype=float32 mode="
    lines = text_of(*records, other).splitlines()
    assert [line for line in lines if "Not in" in line] == [
        f"# Not in any table: {label}{mode}: {why}" for mode in ("blocking", "async")
    ]
    assert len(documents_of(records[0], bad(collective(mode="graph"), world=cuda))) == 2, "what failed replaces nothing"
    doubles = ok(collective(dtype="float64"), world=cuda)
    assert len(documents_of(doubles, *records)) == 3, "another type was not measured so"
    assert len(documents_of(*(ok(collective(mode=mode)) for mode in modes))) == 4, "on a CPU all are told"


def test_a_group_is_a_table_of_its_own_ranks_with_what_failed_in_it() -> None:
    found = json_of(on_pairs())
    assert ("world=4" in found["args"], found["results"][0]["count"]) == (True, 512)
    assert len(found["config"]["devices"]) == 2
    whole = json_of(ok(collective("all_gather", 4096, group="world")))
    assert (len(whole["config"]["devices"]), whole["results"][0]["count"]) == (4, 256)
    assert not any(word.startswith("world=") for word in whole["args"])
    failed = bad(collective("all_gather", 8192, group="pairs", group_index=0))
    for records in ((on_pairs(), failed), (failed, on_pairs())):
        found = json_of(*records)
        assert [len(of) for of in (found["config"]["devices"], found["results"], found["errors"])] == [2, 1, 1]


def test_programs_defaults_and_counts_of_elements_are_the_operations() -> None:
    shares = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter")
    shorter = {"all_to_all": "alltoall_perf", "all_to_all_v": "alltoallv_perf"}
    for operation in ("all_reduce", "broadcast", "reduce", "sendrecv", *shares):
        found = json_of(ok(collective(operation, 4096)))
        (line,) = found["results"]
        redop = "sum" if operation in ("all_reduce", "reduce_scatter", "reduce") else "none"
        assert (found["args"][0], line["redop"]) == (shorter.get(operation, f"{operation}_perf"), redop)
        assert (
            (line[IN_PLACE] is not None)
            is (operation in ("all_reduce", *IN_PLACE_ALONE))
            is (line[OUT_OF_PLACE] is None)
        )
        assert line["count"] == (256 if operation in shares else 1024), operation
    for dtype, theirs, count in (("float64", "double", 512), ("bfloat16", "bfloat16", 2048), ("uint8", "uint8", 4096)):
        (line,) = json_of(ok(collective(size_bytes=4096, dtype=dtype)))["results"]
        assert (line["type"], line["count"]) == (theirs, count)


def test_times_are_merged_over_launches_and_averaged_over_lines_and_placements() -> None:
    found = json_of(ok(collective(), 0, 1e-3), ok(collective(), 1, 4e-3))
    placed = found["results"][0][IN_PLACE]
    assert (placed["time"], placed["alg_bw"]) == (pytest.approx(2000), pytest.approx(1024 / 2e-3 / 1e9, abs=1e-6))
    assert found["config"]["iterations"] == 240
    found = json_of(*both(1024, 1e-6, 2e-6), ok(collective(size_bytes=2048, placement="in_place"), seconds=1e-6))
    assert found["average_bus_bandwidth"]["bandwidth"] == pytest.approx((1.536 + 0.768 + 3.072) / 3)


def test_what_has_no_counterpart_was_skipped_or_is_missing_is_told() -> None:
    cases = (
        (step(), "no nccl-tests equivalent"),
        (collective(dtype="complex64"), "nccl-tests has no type complex64"),
        (make_case("collective.reduce", "import:osu", {"size_bytes": 8}), "its type is unknown"),
        (collective(placement="sideways"), "nccl-tests has no placement sideways"),
        (collective(redop="xor"), "nccl-tests has no reduction xor"),
        (make_case("collective.reduce", "x:y", {"size_bytes": "1K", "dtype": "float32"}), "it has no size"),
    )
    told = text_of(*(bad(case, status="ok") for case, _ in cases)).splitlines()
    assert told == [f"# Not in any table: {case.label}: {reason}" for case, reason in cases]
    skipped = Skipped(case=collective("all_gather", 1001), reason="1001 B do not divide")
    run = make_run(make_plan([collective()], launches=2, skipped=[skipped]), [ok(collective())])
    text = render_text(run)
    assert len(rows(text)) == 1
    assert f"# Not in any table: {skipped.case.label}: skipped: 1001 B do not divide\n" in text
    assert text.endswith(": no record of 1 of 2 launches\n")


def test_a_step_is_told_where_it_is_constant() -> None:
    factors: dict[tuple[int, ...], int] = {(8, 16, 32): 2, (1, 4, 16): 4}
    gaps: dict[tuple[int, ...], int] = {(100, 200, 300): 100, (8, 16, 33): 0, (8, 8): 0, (8,): 0, (): 0}
    for name, told in (("step_factor", factors), ("step_bytes", gaps)):
        assert {sizes: distance(sizes) for sizes in told} == {sizes: {name: value} for sizes, value in told.items()}


def test_devices_and_the_number_of_nccl_are_told_as_far_as_known() -> None:
    spread = ok(collective(), world=msgspec.structs.replace(WORLD, nodes=2))
    for record, environment, told in (
        (ok(collective()), ENVIRONMENT, ("node-a", "Example CPU")),
        (spread, ENVIRONMENT, (None, "Example CPU")),
        (spread, None, (None, None)),
    ):
        devices = json_of(record, environment=environment)["config"]["devices"]
        found = [(one["rank"], one["hostname"], one["device_info"]) for one in devices]
        assert found == [(rank, *told) for rank in range(4)]
    assert json_of(ok(collective()))["nccl_version"] is None
    for nccl, code in (("2.28.9", 22809), ("2.19", None), ("2.x.1", None), (None, None)):
        assert json_of(ok(collective()), environment={"torch": {"nccl": nccl}})["nccl_version"] == code, nccl


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
    found = rows(render_text(sample_run()))
    assert len(found) == 49
    assert {len(line.split()) for line in found} == {13}
    assert render_text(make_run(make_plan([]), [])) == ""


def test_a_placement_that_was_not_measured_is_no_number_in_its_columns() -> None:
    measured = both(1 << 20, 21.37e-6, 21.10e-6)
    full = rows(text_of(*measured))[0]
    slices = {"out-of-place": slice(52, 85), "in-place": slice(85, None)}
    for record, (absent, columns) in zip(reversed(measured), slices.items(), strict=True):
        text = text_of(record, *both(1 << 21, 1e-3, 1e-3))
        partial, whole = rows(text)
        assert "N/A" not in whole
        assert partial[columns].split() == ["N/A"] * 4
        assert len(partial) == len(full)
        assert partial.replace(partial[columns], full[columns]) == full
        assert f"# N/A under {absent}: not measured\n" in text
        assert text.count("not measured") == 1


def test_each_series_has_a_header_of_its_own() -> None:
    third = collective(mode="pipelined", group="node")
    text = text_of(ok(collective()), ok(collective("broadcast", root=2)), ok(third))
    starts = [line.rpartition(" ")[2] for line in text.splitlines() if "starting" in line]
    assert starts == ["all_reduce_perf", "broadcast_perf", "all_reduce_perf"]
    assert rows(text)[1].split()[3:5] == ["none", "2"]
    assert text.count("nodes=1 group=node\n") == 1, "a parameter without a column is named"


def test_what_did_not_run_rightly_has_no_line_but_a_comment_however_hostile_its_reason() -> None:
    wrong = bad(collective(size_bytes=2048), 0, "wrong", "7 differ", check=Check(passed=False, wrong=7))
    unknown = bad(collective(size_bytes=3072), 0, "wrong", "many differ", check=Check(passed=False))
    hang = bad(collective(size_bytes=4096), 0, "hang", "rank 1\nis lost")
    hostile = bad(collective(size_bytes=5120), 0, "failed", HOSTILE + "\n1 2 3")
    untimed = ok(collective(size_bytes=6144), metrics={})
    text = text_of(ok(collective()), wrong, unknown, hang, hostile, untimed)
    assert [row.split()[0] for row in rows(text)] == ["1024"]
    told = [line for line in text.splitlines() if line.startswith("# Left out: ")]
    label = "# Left out: collective.all_reduce size_bytes={} dtype=float32 mode=blocking: "
    assert told[0] == label.format(2048) + "wrong: 7 differ"
    assert told[2] == label.format(4096) + "hang: rank 1 is lost"
    assert told[4] == label.format(6144) + "it has no time"
    assert len(told) == 5
    assert "# Out of bounds values : 8 FAILED\n" in text, "a wrong result of unknown count counts once"
    assert "\x1b" not in text
    text = text_of(wrong)
    assert (rows(text), "# Avg bus bandwidth    : N/A \n" in text, "validation: 1 " in text) == ([], True, True)


def test_numbers_lose_decimals_to_fit() -> None:
    seven = {0.0: "0.00", 21.374: "21.37", 9999.5: "9999.50", 99999.4: "99999.4", 123456.7: "123457"}
    seven |= {1234567.0: "1234567", 12345678.0: "1.2e+07"}
    six = {0.004: "0.00", 999.99: "999.99", 1234.56: "1234.6", 123456.0: "123456", 1234567.0: "1e+06"}
    for width, told in ((7, seven), (6, six)):
        for value, text in told.items():
            assert fit(value, width) == text.rjust(width), (value, width)


# version 3 of the document, its words for true and false and its root in blanks; every line break is a blank
EXPECTED_JSON = """\
{"version": 3, "start_time": "2026-01-02 03:04:05",
"args": ["all_reduce_perf", "parbench=0.1.0", "mode=blocking", "backend=gloo", "device=cpu", "nodes=1"],
"env": ["NCCL_ALGO=Ring"], "nccl_version": 22809,
"config": {"nthreads": 1, "ngpus": 1, "minimum_bytes": 1024, "maximum_bytes": 1024, "step_bytes": 0,
"warmup_iters": 5, "iterations": 120, "aggregated_iterations": 1, "validation": 1, "graph": 0,
"blocking_collectives": "true", "per_iter_timing": "false", "per_iter_skip": 0, "parallel_init": "false",
"devices": [
{"rank": 0, "group": 0, "pid": null, "hostname": "node-a", "device": null, "device_hex": null, "device_info": "C"},
{"rank": 1, "group": 0, "pid": null, "hostname": "node-a", "device": null, "device_hex": null, "device_info": "C"},
{"rank": 2, "group": 0, "pid": null, "hostname": "node-a", "device": null, "device_hex": null, "device_info": "C"},
{"rank": 3, "group": 0, "pid": null, "hostname": "node-a", "device": null, "device_hex": null, "device_info": "C"}]},
"results": [{"size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1",
"out_of_place": {"time": 2.0, "alg_bw": 0.512, "bus_bw": 0.768, "nwrong": 0.0},
"in_place": {"time": 4.0, "alg_bw": 0.256, "bus_bw": 0.384, "nwrong": 0.0},
"actual_iterations": 120, "experiment_name": ""}],
"out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": {"bandwidth": 0.576, "okay": "unchecked"},
"errors": [], "end_time": "2026-01-02 03:04:05"}"""


def test_json_has_nccl_tests_keys_in_its_order_and_keeps_its_quirks() -> None:
    environment = {"host": {"cpu_model": "C"}, "torch": {"nccl": "2.28.9"}, "variables": {"NCCL_ALGO": "Ring"}}
    found = json_of(*both(1024, 2e-6, 4e-6), environment=environment)
    assert json.dumps(found) == EXPECTED_JSON.replace("[\n", "[").replace("\n", " ")


def test_what_was_not_measured_checked_or_finite_is_null_in_json_and_unchecked_is_not_right_in_text() -> None:
    unchecked = ok(collective(), check=Check())
    text = text_of(unchecked)
    assert rows(text)[0].endswith("0.00    N/A")
    assert (len(rows(text)[0].split()), "validation: 0 " in text) == (13, True)
    result = json_of(unchecked)["results"][0]
    assert (result["out_of_place"], result["in_place"]["nwrong"]) == (None, None)
    time = MetricValue(value=1e-6, unit="s", better="lower")
    busbw = MetricValue(value=float("nan"), unit="B/s", better="higher")
    content = render_json(run_of(ok(collective(), metrics={"time": time, "busbw": busbw})))
    assert b"nan" not in content.lower()
    assert json.loads(content)["results"][0]["in_place"]["bus_bw"] is None


def test_json_tells_allowed_variables_alone_steps_by_a_factor_and_what_is_wrong() -> None:
    variables = {"NCCL_ALGO": "Ring", "HOME": "/root", "NCCL_TOKEN": "s3cret"}
    for environment, told in (({"variables": variables}, ["NCCL_ALGO=Ring"]), (None, []), ({"variables": "none"}, [])):
        assert json_of(ok(collective()), environment=environment)["env"] == told
    config = json_of(ok(collective(size_bytes=1024)), ok(collective(size_bytes=4096)))["config"]
    assert (config["step_factor"], "step_bytes" in config) == (4, False)
    found = json_of(bad(collective(), 0, "wrong", "2 differ", check=Check(passed=False, wrong=2)))
    assert (found["out_of_bounds"], found["results"]) == ({"count": 2, "okay": "false"}, [])
    assert found["errors"][0].endswith(": wrong: 2 differ")
    assert found["average_bus_bandwidth"]["bandwidth"] is None


def test_each_series_is_a_document_on_its_line_and_a_run_without_any_is_refused() -> None:
    programs = [json.loads(line)["args"][0] for line in render_json(sample_run()).splitlines()]
    assert (len(programs), len(set(programs))) == (12, 6)
    with pytest.raises(UserError, match=r"holds no collective .*: step.ddp layers=4: no nccl-tests equivalent"):
        render_json(run_of(ok(step())))
