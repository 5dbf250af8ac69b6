import json
from typing import Any

import msgspec
import pytest
from reports_fixtures import collective, make_plan, make_run, ok, sample_run
from test_nccl_table import on_pairs

from bench.errors import UserError
from bench.runs import Run
from reports.exchange.foreign import Found
from reports.exchange.import_nccl import parse_nccl
from reports.exchange.nccl_json import render_json
from reports.exchange.nccl_text import render_text
from reports.summary import Row, summarize

HEAD = """\
# nccl-tests version 2.19.6 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 4194304 step: 64(factor) warmup iters: 1 iters: 20 agg iters: 1 \
validation: 1 graph: 0 unalign: 0
#
# Using devices
#  Rank  0 Group  0 Pid  41231 on     hopper1 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  41231 on     hopper1 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  50117 on     hopper2 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  50117 on     hopper2 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
"""
COLUMNS = """\
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
"""  # noqa: W291
ROWS = """\
        1024           256     float     sum      -1    18.93    0.05    0.08       0    17.02    0.06    0.09       0
     4194304       1048576     float     sum      -1    71.36   58.78   88.16       0    70.80   59.24   88.86       2
"""
FOOT = """\
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 44.2975 
#
# Collective test concluded: all_reduce_perf
#
"""  # noqa: W291
TEXT = HEAD + COLUMNS + ROWS + FOOT


def value(found: Found, name: str) -> float:
    known = found.metrics[name].value
    assert known is not None
    return known


def test_every_placement_of_every_row_is_a_result() -> None:
    foreign = parse_nccl(TEXT, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("nccl-tests", "2.19.6", 4, 2)
    assert (foreign.backend, foreign.device, foreign.hosts) == ("nccl", "cuda", ("hopper1", "hopper2"))
    assert foreign.left_out == ()
    assert [dict(found.params) for found in foreign.found[:2]] == [
        {"size_bytes": 1024, "dtype": "float32", "mode": "pipelined", "placement": placement, "redop": "sum"}
        for placement in ("out_of_place", "in_place")
    ]
    assert [found.name for found in foreign.found] == ["collective.all_reduce"] * 4


def test_numbers_are_the_tools_and_say_so() -> None:
    found = parse_nccl(TEXT, "f", None).found[2]
    assert value(found, "time") == pytest.approx(71.36e-6)
    assert value(found, "algbw") == pytest.approx(58.78e9)
    assert value(found, "busbw") == pytest.approx(88.16e9)
    assert found.metrics["time"].method == "mean over iterations and ranks, nccl-tests 2.19.6"
    assert (found.metrics["time"].low, found.samples) == (None, ())


def test_a_rate_whose_digits_were_rounded_away_is_computed() -> None:
    found = parse_nccl(TEXT, "f", None).found[0]
    assert value(found, "algbw") == pytest.approx(1024 / 18.93e-6)
    assert value(found, "busbw") == pytest.approx(1024 / 18.93e-6 * 1.5)
    assert found.printed == {"time": 18.93, "algbw": 0.05, "busbw": 0.08, "#wrong": 0}


def test_the_check_is_the_tools() -> None:
    checks = [(found.check.passed, found.check.wrong) for found in parse_nccl(TEXT, "f", None).found]
    assert checks == [(True, 0), (True, 0), (True, 0), (False, 2)]


def test_unchecked_is_unknown() -> None:
    row = "1024  256  float  sum  -1  18.93  0.05  0.08    N/A  17.02  0.06  0.09    N/A\n"
    found = parse_nccl(HEAD + COLUMNS + row + FOOT, "f", None).found
    assert [one.check.passed for one in found] == [None, None]


def test_a_root_and_no_reduction_are_kept() -> None:
    row = "1024  256  bfloat16  none  3  18.93  0.05  0.08  0  17.02  0.06  0.09  0\n"
    text = HEAD.replace("all_reduce", "broadcast") + COLUMNS + row + FOOT
    (found, _) = parse_nccl(text, "f", None).found
    assert found.name == "collective.broadcast"
    assert (found.params["root"], found.params["dtype"]) == (3, "bfloat16")
    assert "redop" not in found.params


def test_rows_of_size_zero_stay_with_a_note() -> None:
    row = "0  0  float  none  -1  0.27  0.00  0.00  0  0.20  0.00  0.00  0\n"
    text = HEAD.replace("all_reduce", "all_gather") + COLUMNS + row + FOOT
    (found, _) = parse_nccl(text, "f", None).found
    assert found.params["size_bytes"] == 0
    assert found.notes[0].startswith("size 0: nccl-tests rounds")
    assert value(found, "algbw") == 0


def test_blocking_is_told_from_pipelined() -> None:
    text = HEAD + "# Blocking Enabled: wait for completion and barrier\n" + COLUMNS + ROWS + FOOT
    assert {found.params["mode"] for found in parse_nccl(text, "f", None).found} == {"blocking"}


def test_labels_and_messages_between_rows_do_no_harm() -> None:
    noisy = ROWS.replace("\n", "\nhopper1:41231:41240 [0] NCCL INFO Connected all rings\n", 1)
    text = "".join(f" 0: {line}\n" for line in (HEAD + COLUMNS + noisy + FOOT).splitlines())
    assert parse_nccl(text, "f", None).found == parse_nccl(TEXT, "f", None).found
    text = "".join(f"[1,0]<stdout>:{line}\n" for line in TEXT.splitlines())
    assert parse_nccl(text, "f", None).found == parse_nccl(TEXT, "f", None).found


def test_several_tables_are_told_apart() -> None:
    second = TEXT.replace("all_reduce", "reduce_scatter")
    names = [found.name for found in parse_nccl(TEXT + second, "f", None).found]
    assert names == ["collective.all_reduce"] * 4 + ["collective.reduce_scatter"] * 4


def test_an_older_version_names_its_program_on_the_command_line() -> None:
    old = "\n".join(line for line in TEXT.splitlines() if "nccl-tests version" not in line and "Collective" not in line)
    old = old.replace("#wrong ", "#wrong").replace("# Out", "#  Out", 1) + "\n"
    foreign = parse_nccl(
        f"$ mpirun -np 4 ./build/all_reduce_perf -b 1K\n{old}$ ./build/alltoall_perf\n{old}", "f", None
    )
    assert foreign.version is None
    assert [found.name for found in foreign.found] == ["collective.all_reduce"] * 4 + ["collective.all_to_all"] * 4
    assert foreign.found[0].metrics["time"].method.endswith("nccl-tests of unknown version")


def test_a_table_that_names_no_program_is_refused() -> None:
    text = TEXT.replace("# Collective test starting: all_reduce_perf\n", "")
    with pytest.raises(UserError, match=r"^f, line 13 does not say which operation it measured; add the line"):
        parse_nccl(text, "f", None)
    # neither is the next table taken for more of the last one
    with pytest.raises(UserError, match="does not say which operation"):
        parse_nccl(TEXT.replace(FOOT, "") + text.replace("# nccl-tests version", "# "), "f", None)


def test_a_program_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match=r"f, line 14: hypercube_perf is not known; known are all_reduce_perf, .* or "):
        parse_nccl(TEXT.replace("all_reduce", "hypercube"), "f", None)


def test_a_row_cut_short_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"^f, line 15: 9 of 13 values, so the file seems to be cut short$"):
        parse_nccl(TEXT[: TEXT.index("   70.80")], "f", None)


def test_what_nccl_tests_could_not_divide_is_none() -> None:
    found = parse_nccl(TEXT.replace("0.05    0.08", "inf     -nan"), "f", None).found[0]
    assert (found.printed["algbw"], found.printed["busbw"]) == (None, None)


@pytest.mark.parametrize(("old", "new"), [(" root ", " rot  "), ("algbw   busbw", "busbw   algbw"), ("type", "kind")])
def test_a_heading_without_its_columns_is_refused(old: str, new: str) -> None:
    with pytest.raises(UserError, match="f, line 14: the heading before this row names no "):
        parse_nccl(TEXT.replace(old, new), "f", None)


def test_a_row_that_is_no_row_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"^f, line 14: '18\.x3' is not a number$"):
        parse_nccl(TEXT.replace("18.93", "18.x3"), "f", None)


def test_a_table_without_its_summary_is_told() -> None:
    foreign = parse_nccl(HEAD + COLUMNS + ROWS, "f", None)
    assert len(foreign.found) == 4
    assert "may be cut short" in foreign.left_out[0]


def test_text_without_a_table_is_refused() -> None:
    with pytest.raises(UserError, match="f holds no table of nccl-tests"):
        parse_nccl(HEAD, "f", None)


def test_ranks_that_the_file_does_not_tell_are_the_users() -> None:
    text = "\n".join(line for line in TEXT.splitlines() if " Rank " not in line)
    with pytest.raises(UserError, match="f, line 10 does not say on how many ranks"):
        parse_nccl(text, "f", None)
    foreign = parse_nccl(text, "f", 4)
    assert (foreign.ranks, foreign.nodes, foreign.hosts) == (4, None, ())


def test_tables_of_two_worlds_are_refused() -> None:
    small = "\n".join(line for line in TEXT.splitlines() if "hopper2" not in line)
    with pytest.raises(UserError, match="f holds tables of 2 or 4 ranks: import them one by one"):
        parse_nccl(TEXT + small, "f", None)


def test_per_iteration_columns_are_passed_over() -> None:
    names = "size count type redop root " + "time algbw busbw #wrong i_min i_max i_p99 i_cv% " * 2
    row = "1024 256 float sum -1 18.93 0.05 0.08 0 1.1 1.2 1.3 1.4 17.02 0.06 0.09 0 2.1 2.2 2.3 2.4\n"
    found = parse_nccl(f"{HEAD}# {names}\n{row}{FOOT}", "f", None).found
    assert [value(one, "time") for one in found] == pytest.approx([18.93e-6, 17.02e-6])


def test_cpu_time_is_a_time() -> None:
    found = parse_nccl(TEXT.replace("    time", " cputime"), "f", None).found
    assert value(found[0], "time") == pytest.approx(18.93e-6)


# --- JSON ---


def report(**more: Any) -> dict[str, Any]:
    placed = {"time": 71.36, "alg_bw": 58.78, "bus_bw": 88.16, "nwrong": 0.0}
    per_iteration = {"skipped_iterations": 1, "min_us": 70.0, "times_us": [99.0, 70.0, 72.0]}
    result = {"size": 4194304, "count": 1048576, "type": "float", "redop": "sum", "root": "    -1"}
    result |= {"out_of_place": placed, "out_of_place_per_iter": per_iteration}
    result |= {"in_place": {**placed, "nwrong": None}, "actual_iterations": 20, "experiment_name": ""}
    devices = [{"rank": 2 * i, "group": 0, "pid": 1, "hostname": f"hopper{i}", "device": 0} for i in (0, 1)]
    document = {"version": 3, "start_time": "2026-03-04 05:06:07", "args": ["./build/all_reduce_perf", "-g", "2"]}
    document |= {"env": ["NCCL_ALGO=Ring", "HF_TOKEN=s3cret"], "nccl_version": 22907}
    document |= {"config": {"nthreads": 1, "ngpus": 2, "blocking_collectives": "false", "devices": devices}}
    document |= {"results": [result], "out_of_bounds": {"count": 0, "okay": "true"}}
    return document | {"average_bus_bandwidth": {"bandwidth": 88.16, "okay": "unchecked"}, "errors": []} | more


def test_json_is_read_as_text_is() -> None:
    foreign = parse_nccl(json.dumps(report()), "f", None)
    assert (foreign.ranks, foreign.nodes, foreign.hosts) == (4, 2, ("hopper0", "hopper1"))
    assert foreign.variables == {"NCCL_ALGO": "Ring"}
    assert foreign.details == {"start_time": "2026-03-04 05:06:07", "nccl_version": 22907}
    first, second = foreign.found
    assert (first.name, first.params["placement"], second.params["placement"]) == (
        "collective.all_reduce",
        "out_of_place",
        "in_place",
    )
    assert value(first, "busbw") == pytest.approx(88.16e9)
    assert (first.check.passed, second.check.passed) == (True, None)
    assert first.iterations == 20
    assert first.metrics["time"].method == "mean over iterations and ranks, nccl-tests JSON version 3"


def test_iterations_are_samples_but_for_the_tools_own_warm_up() -> None:
    first, second = parse_nccl(json.dumps(report()), "f", None).found
    assert first.samples == pytest.approx((70e-6, 72e-6))
    assert first.notes == ("the first 1 iterations are warm-up, by --per_iter_skip",)
    assert second.samples == ()


def test_what_json_lacks_is_none() -> None:
    document = report()
    document["results"][0] |= {"out_of_place": None, "in_place": {"cpu_time": 3.5, "alg_bw": "nan", "bus_bw": None}}
    (found,) = parse_nccl(json.dumps(document), "f", None).found
    assert value(found, "time") == pytest.approx(3.5e-6)
    assert found.printed == {"time": 3.5, "algbw": None, "busbw": None, "#wrong": None}
    assert value(found, "algbw") == pytest.approx(4194304 / 3.5e-6)


def test_blocking_is_a_word_in_json() -> None:
    document = report()
    document["config"]["blocking_collectives"] = "true"
    assert parse_nccl(json.dumps(document), "f", None).found[0].params["mode"] == "blocking"


def test_pretty_and_several_documents_are_read() -> None:
    text = json.dumps(report(), indent=2) + "\n\n" + json.dumps(report(args=["alltoall_perf"])) + "\n"
    names = [found.name for found in parse_nccl("\n" + text, "f", None).found]
    assert names == ["collective.all_reduce"] * 2 + ["collective.all_to_all"] * 2


def test_a_newer_version_is_refused_before_its_fields_are_looked_at() -> None:
    with pytest.raises(UserError, match="f, line 1: JSON version 4 of nccl-tests is newer than 3, the newest we read"):
        parse_nccl(json.dumps({"version": 4, "results": "moved"}), "f", None)


def test_json_cut_short_is_refused_with_its_line() -> None:
    text = json.dumps(report(), indent=1)
    cut = text[: text.index('"out_of_bounds"')]
    with pytest.raises(UserError, match=rf"^f, line {cut.count(chr(10)) + 1}: this is no whole JSON .*cut short$"):
        parse_nccl(cut, "f", None)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"results": [{"size": "big"}]}, r"Expected `int`, got `str` - at `\$.results"), ({"config": None}, "config")],
)
def test_json_of_another_shape_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=rf"^f, line 1 is not what nccl-tests writes: .*{told}"):
        parse_nccl(json.dumps(report(**change)), "f", None)


def test_json_without_a_program_is_refused() -> None:
    with pytest.raises(UserError, match="does not say which operation"):
        parse_nccl(json.dumps(report(args=[])), "f", None)


def test_json_without_devices_needs_the_user() -> None:
    document = report(config={"devices": []})
    with pytest.raises(UserError, match="add --nproc N"):
        parse_nccl(json.dumps(document), "f", None)
    assert parse_nccl(json.dumps(document), "f", 4).ranks == 4


# --- our own, there and back ---


def ours(run: Run) -> dict[tuple[object, ...], Row]:
    rows = [row for row in summarize(run).rows if row.is_communication and row.status == "ok"]
    return {_key(row.case.name, row.case.params): row for row in rows}


def _key(name: str, params: Any) -> tuple[object, ...]:
    return (name, *(params.get(one) for one in ("size_bytes", "dtype", "mode", "root")))


def test_json_there_and_back_keeps_every_number() -> None:
    run = sample_run()
    found = parse_nccl(render_json(run).decode(), "f", None)
    expected = ours(run)
    assert len(found.found) == len(expected) == 49
    for one in found.found:
        row = expected[_key(one.name, one.params)]
        for name in ("time", "algbw", "busbw"):
            assert value(one, name) == pytest.approx(row.metrics[name].value, rel=1e-12)
        assert one.check == row.check
    assert (found.backend, found.device, found.ranks, found.nodes) == ("gloo", "cpu", 4, 1)


def test_text_there_and_back_keeps_every_printed_digit() -> None:
    run = sample_run()
    found = parse_nccl(render_text(run), "f", None)
    expected = ours(run)
    assert len(found.found) == len(expected)
    for one in found.found:
        row = expected[_key(one.name, one.params)]
        assert value(one, "time") == pytest.approx(row.metrics["time"].value, abs=0.0051e-6, rel=1e-5)
        printed = row.metrics["algbw"].value
        assert printed is not None
        assert value(one, "algbw") == pytest.approx(printed, rel=1e-2)
    assert (found.backend, found.device, found.ranks, found.nodes) == ("gloo", "cpu", 4, 1)
    assert found.details == {"written_by": "parbench 0.1.0"}


def test_placements_roots_and_other_parameters_survive() -> None:
    cases = [
        collective("broadcast", root=2, placement="out_of_place", dtype="float8_e4m3fn"),
        collective("reduce_scatter", redop="product", placement="in_place", group="node"),
    ]
    run = make_run(make_plan(cases), [ok(case) for case in cases])
    for content in (render_text(run), render_json(run).decode()):
        found = parse_nccl(content, "f", None).found
        assert found[0].params == cases[0].params
        assert found[1].params == cases[1].params


def test_groups_there_and_back_keep_their_ranks_beside_those_of_the_world() -> None:
    world, pair = ok(collective("all_gather", 4096)), on_pairs()
    run = make_run(make_plan([world.case, pair.case]), [world, pair])
    for content in (render_text(run), render_json(run).decode()):
        foreign = parse_nccl(content, "f", None)
        assert foreign.ranks == 4
        whole, group = foreign.found
        assert (whole.group_ranks, group.group_ranks) == (None, 2)
        assert (group.params["group"], "world" in group.params) == ("pairs", False)
        # the text has too few digits of so low a rate, so it is computed, for two ranks and not for four
        assert value(group, "busbw") == pytest.approx(value(group, "algbw") / 2)


@pytest.mark.parametrize("name", ["time", "alg_bw", "bus_bw", "nwrong"])
def test_a_negative_number_is_refused_with_its_place(name: str) -> None:
    document = report()
    document["results"][0]["in_place"][name] = -3.5
    with pytest.raises(
        UserError, match=r"^f, line 1: \S+ -3.5 at 4194304 B is negative, and nccl-tests prints numbers"
    ):
        parse_nccl(json.dumps(document), "f", None)


def test_negative_numbers_of_text_iterations_and_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"f, line 14: time -18\.9 at 1024 B is negative"):
        parse_nccl(TEXT.replace("18.93", "-18.9"), "f", None)
    for change in (
        {"size": -1},
        {"actual_iterations": -1},
        {"out_of_place_per_iter": {"times_us": [1.0, -1.0]}},
        {"out_of_place_per_iter": {"times_us": [1.0], "skipped_iterations": -1}},
    ):
        document = report()
        document["results"][0] |= change
        with pytest.raises(UserError, match=r"is not what nccl-tests writes: Expected .* >= 0"):
            parse_nccl(json.dumps(document), "f", None)


def test_unknown_nodes_stay_as_they_are() -> None:
    record = ok(collective())
    two = msgspec.structs.replace(record, world=msgspec.structs.replace(record.world, nodes=2))
    found = parse_nccl(render_text(make_run(make_plan([two.case]), [two])), "f", None)
    assert (found.nodes, found.hosts) == (2, ())
