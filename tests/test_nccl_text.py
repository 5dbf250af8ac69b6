import pytest
from reports_fixtures import HOSTILE, bad, collective, make_plan, make_run, ok, sample_run, step

from bench.records import Check, Record
from reports.exchange.nccl_text import fit, render_text


def text_of(*records: Record) -> str:
    return render_text(make_run(make_plan([record.case for record in records]), records))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


BOTH = (
    ok(collective(size_bytes=1 << 20, placement="out_of_place"), seconds=21.37e-6),
    ok(collective(size_bytes=1 << 20, placement="in_place"), seconds=21.10e-6),
)

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


def test_it_is_printed_as_nccl_tests_does() -> None:
    assert text_of(*BOTH) == EXPECTED


def test_every_line_has_13_tokens_whatever_was_measured() -> None:
    found = rows(render_text(sample_run()))
    assert len(found) == 49
    assert {len(line.split()) for line in found} == {13}


def test_every_column_stands_where_it_stands_with_numbers() -> None:
    full, partial = rows(text_of(*BOTH))[0], rows(text_of(BOTH[1]))[0]
    assert len(partial) == len(full)
    assert partial[:52] == full[:52]
    assert partial[85:] == full[85:]
    assert partial[52:85].split() == ["N/A"] * 4


@pytest.mark.parametrize(("placement", "absent"), [("in_place", "out-of-place"), ("out_of_place", "in-place")])
def test_a_placement_that_was_not_measured_is_no_number(placement: str, absent: str) -> None:
    text = text_of(ok(collective(placement=placement)))
    words = rows(text)[0].split()
    blank, full = (words[5:9], words[9:]) if placement == "in_place" else (words[9:], words[5:9])
    assert blank == ["N/A"] * 4
    assert "N/A" not in full
    assert f"# N/A under {absent}: not measured\n" in text
    assert text.count("not measured") == 1


def test_unchecked_is_not_zero_wrong() -> None:
    words = rows(text_of(ok(collective(), check=Check())))[0].split()
    assert words[12] == "N/A"
    assert rows(text_of(ok(collective(), check=Check())))[0].endswith("0.00    N/A")
    assert "validation: 0 " in text_of(ok(collective(), check=Check()))


def test_each_series_has_a_header_of_its_own() -> None:
    text = text_of(ok(collective()), ok(collective("broadcast", root=2)), ok(collective(mode="pipelined")))
    starts = [line.rpartition(" ")[2] for line in text.splitlines() if "starting" in line]
    assert starts == ["all_reduce_perf", "broadcast_perf", "all_reduce_perf"]
    assert [word for line in text.splitlines() for word in line.split() if word.startswith("mode=")] == [
        "mode=blocking",
        "mode=blocking",
        "mode=pipelined",
    ]
    assert rows(text)[1].split()[3:5] == ["none", "2"]


def test_a_wrong_result_fails_the_table_and_has_no_line() -> None:
    wrong = bad(collective(), 0, "wrong", "3 results differ", check=Check(passed=False, wrong=3))
    text = text_of(wrong)
    assert rows(text) == []
    assert "# Out of bounds values : 3 FAILED\n" in text
    assert "# Avg bus bandwidth    : N/A \n" in text
    assert "# Left out: collective.all_reduce size_bytes=1024 dtype=float32 mode=blocking: wrong: 3 results" in text


def test_what_is_in_no_table_is_a_comment() -> None:
    text = text_of(ok(step()))
    assert text == "# Not in any table: step.ddp layers=4: nccl-tests measures no such thing\n"


def test_a_hostile_reason_stays_in_its_comment() -> None:
    text = text_of(bad(collective(), 0, "failed", HOSTILE + "\n1 2 3"))
    assert rows(text) == []
    assert "\x1b" not in text


def test_parameters_without_a_column_are_named() -> None:
    assert "nodes=1 group=node\n" in text_of(ok(collective(group="node")))


def test_a_run_without_records_is_empty() -> None:
    assert render_text(make_run(make_plan([]), [])) == ""


@pytest.mark.parametrize(
    ("value", "width", "expected"),
    [
        (0.0, 7, "   0.00"),
        (0.004, 6, "  0.00"),
        (21.374, 7, "  21.37"),
        (9999.5, 7, "9999.50"),
        (99999.4, 7, "99999.4"),
        (123456.7, 7, " 123457"),
        (1234567.0, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
        (999.99, 6, "999.99"),
        (1234.56, 6, "1234.6"),
        (123456.0, 6, "123456"),
        (1234567.0, 6, " 1e+06"),
    ],
)
def test_numbers_lose_decimals_to_fit(value: float, width: int, expected: str) -> None:
    assert fit(value, width) == expected
