import pytest

from bench.errors import UserError
from reports.exchange.foreign import Found
from reports.exchange.import_param import parse_param

HELLO = """\
[Rank   0] host trainer01, device: cuda:0, local_rank: 0 world_size: 4, master_ip: 127.0.0.1
[Rank   1] host trainer01, device: cuda:1, local_rank: 1 world_size: 4, master_ip: 127.0.0.1
[Rank   2] host trainer02, device: cuda:0, local_rank: 0 world_size: 4, master_ip: 127.0.0.1
"""
HEADING = (
    "\n\tCOMMS-RES                                size (B)  nElementsPerRank   Latency(us):p50         p75         p95"
    "         Min         Max    AlgBW(GB/s) BusBW(GB/s)\n"
)
ROWS = """\
\tCOMMS-RES-all_reduce-float32             4096              1024              31.5        33.0        36.2        30.1        37.0          0.130       0.195
\tCOMMS-RES-all_reduce-float32         16777216           4194304             512.8       520.0       530.9       505.3       533.0         32.717      49.075
"""  # noqa: E501
TEXT = HELLO + HEADING + ROWS

OLD = """\
\tCOMMS-RES\tsize (B)\t num-elements\t Latency(us):p50\tp75\t\tp95\tmin\tmax\t algBW(GB/s)\t busBW(GB/s)
\tCOMMS-RES-all_gather\t65536\t4096\t40.0\t41.0\t42.0\t39.0\t43.0\t1.638\t1.229
"""


def value(found: Found, name: str) -> float:
    known = found.metrics[name].value
    assert known is not None
    return known


def test_rows_are_results_in_our_convention() -> None:
    foreign = parse_param(TEXT, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("param", None, 4, 2)
    assert foreign.hosts == ("trainer01", "trainer02")
    assert (foreign.backend, foreign.device) == ("unknown", "unknown")
    small, large = foreign.found
    assert large.name == "collective.all_reduce"
    assert large.params == {"size_bytes": 16777216, "dtype": "float32"}
    assert value(large, "time") == pytest.approx(512.8e-6)
    assert value(large, "algbw") == pytest.approx(32.717e9)
    assert value(large, "busbw") == pytest.approx(49.075e9)
    assert value(small, "algbw") == pytest.approx(0.130e9)


def test_the_percentile_is_named_for_what_it_is() -> None:
    found = parse_param(TEXT, "f", None).found[0]
    assert found.metrics["time"].method.startswith("p50 over ranks of each rank's mean over iterations, PARAM")
    assert "says nothing of single iterations" in found.notes[0]
    assert found.check.passed is None


def test_a_rate_without_digits_is_computed() -> None:
    text = TEXT.replace("0.130       0.195", "0.001       0.002")
    assert value(parse_param(text, "f", None).found[0], "busbw") == pytest.approx(4096 / 31.5e-6 * 1.5)


def test_older_columns_and_names_are_read() -> None:
    (found,) = parse_param(OLD, "f", 4).found
    assert (found.name, dict(found.params)) == ("collective.all_gather", {"size_bytes": 65536})
    assert value(found, "busbw") == pytest.approx(1.229e9)


def test_columns_after_the_rates_are_passed_over() -> None:
    text = TEXT.replace("BusBW(GB/s)", "BusBW(GB/s)  TotalLatency(us):p50  TFlops").replace(
        "49.075", "49.075  600.0  1.0"
    )
    assert len(parse_param(text, "f", None).found) == 2


def test_a_tag_is_a_parameter() -> None:
    (found, _) = parse_param(TEXT.replace("-float32 ", "-torch.bfloat16-night ", 1), "f", None).found
    assert (found.params["dtype"], found.params["tag"]) == ("bfloat16", "night")


def test_labels_of_a_launcher_do_no_harm() -> None:
    text = "".join(f"0: {line}\n" for line in TEXT.splitlines())
    assert parse_param(text, "f", None).found == parse_param(TEXT, "f", None).found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("\tCOMMS-RES-QUANT-all_reduce-float32\t 4096 1024 1.0 1.0 1.0 1.0\n", "quantised collectives"),
        ("\tCOMMS-RES-pt2pt-float32 4096 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0\n", "pt2pt: no case of ours"),
        ("\tCOMMS-RES-incast-float32 4096 1024 1.0 1.0 1.0 1.0 1.0 1.0 1.0\n", "incast: no case of ours"),
    ],
)
def test_what_has_no_counterpart_is_left_out_and_told(row: str, reason: str) -> None:
    foreign = parse_param(TEXT + row, "f", None)
    assert len(foreign.found) == 2
    assert foreign.left_out[0].startswith(reason)


def test_a_pair_of_collectives_is_left_out() -> None:
    text = TEXT.replace("  nElementsPerRank", "  nElementsPerRank  nElementsPairPerRank")
    foreign = parse_param(text, "f", None)
    assert foreign.found == ()
    assert "with another collective" in foreign.left_out[0]


def test_ranks_are_told_or_asked_for() -> None:
    assert parse_param(HEADING + ROWS, "f", 8).ranks == 8
    with pytest.raises(UserError, match="f does not say on how many ranks it ran"):
        parse_param(HEADING + ROWS, "f", None)
    with pytest.raises(UserError, match="measured on 4 ranks, and --nproc says 8"):
        parse_param(TEXT, "f", 8)
    environment = "\t MPI environment: {'world_size': 2, 'local_size': 2, 'global_rank': 0}\n"
    assert parse_param(environment + HEADING + ROWS, "f", None).ranks == 2


def test_a_row_cut_short_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"^f, line 7: 7 of 9 values, so the file seems to be cut short$"):
        parse_param(TEXT[: TEXT.index("         32.717")], "f", None)


def test_a_row_before_its_columns_is_refused() -> None:
    with pytest.raises(
        UserError, match="f, line 1: the heading before this row names no column size, p50, algbw or busbw"
    ):
        parse_param(ROWS, "f", 4)
