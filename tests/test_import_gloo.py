import pytest

from bench.errors import UserError
from reports.exchange.foreign import Found
from reports.exchange.import_gloo import parse_gloo

RULE = "=" * 100
HEAD = f"""\
{RULE}
                                          ALLREDUCE_RING

Device:      tcp, pci=, iface=lo, speed=-1, addr=[127.0.0.1]
Options:     processes=4, inputs=1, threads=1, verify=true

{RULE}
                                        BENCHMARK RESULTS

   size (B)   elements   min (us)   p50 (us)   p99 (us)   max (us)   bandwidth (GB/s)   iterations
"""
ROWS = """\
        400        100         90        100        180        210              0.004         9000
    4000000    1000000       3500       4000       6100       7000              0.900           50
"""
TEXT = f"{HEAD}{ROWS}\n{RULE}\n"


def value(found: Found, name: str) -> float:
    known = found.metrics[name].value
    assert known is not None
    return known


def of(algorithm: str) -> Found:
    found: Found = parse_gloo(TEXT.replace("ALLREDUCE_RING", algorithm), "f", None).found[-1]
    return found


def test_rows_are_results_in_our_convention() -> None:
    foreign = parse_gloo(TEXT, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("gloo", None, 4, None)
    assert (foreign.backend, foreign.device) == ("gloo", "cpu")
    found = foreign.found[1]
    assert found.name == "collective.all_reduce"
    assert found.params == {
        "size_bytes": 4000000,
        "mode": "pipelined",
        "algorithm": "allreduce_ring",
        "dtype": "float32",
    }
    assert value(found, "time") == pytest.approx(4e-3)
    assert value(found, "algbw") == pytest.approx(1e9)
    assert value(found, "busbw") == pytest.approx(1.5e9)
    assert found.metrics["time"].method.startswith("median of rank 0's iterations")
    assert "rank 0 alone" in found.notes[0]


def test_its_gigabytes_are_gibibytes() -> None:
    found = parse_gloo(TEXT, "f", None).found[1]
    assert value(found, "algbw_mean") == pytest.approx(0.9 * 2**30)
    assert found.printed["bandwidth"] == "0.900"
    assert value(of("ALLGATHER"), "algbw_mean") == pytest.approx(4 * 0.9 * 2**30)


def test_a_99th_percentile_needs_a_hundred_iterations() -> None:
    many, few = parse_gloo(TEXT, "f", None).found
    assert value(many, "time_p99") == pytest.approx(180e-6)
    assert "time_p99" not in few.metrics


@pytest.mark.parametrize(
    ("algorithm", "name", "size", "factor"),
    [
        ("NEW_ALLREDUCE_RING", "all_reduce", 4000000, 1.5),
        ("CUDA_ALLREDUCE_HALVING_DOUBLING", "all_reduce", 4000000, 1.5),
        ("ALLGATHER_RING", "all_gather", 16000000, 0.75),
        ("ALLTOALL", "all_to_all", 32000000, 0.75),
        ("BROADCAST_ONE_TO_ALL", "broadcast", 4000000, 1.0),
        ("REDUCE", "reduce", 4000000, 1.0),
        ("REDUCE_SCATTER", "reduce_scatter", 4000000, 0.75),
        ("SCATTER", "scatter", 16000000, 0.75),
    ],
)
def test_the_size_of_one_rank_becomes_the_whole(algorithm: str, name: str, size: int, factor: float) -> None:
    found = of(algorithm)
    assert (found.name, found.params["size_bytes"]) == (f"collective.{name}", size)
    assert value(found, "busbw") == pytest.approx(size / 4e-3 * factor)
    assert (len(found.notes) == 2) is (size != 4000000)


def test_all_to_all_moves_eight_bytes_an_element() -> None:
    found = of("ALLTOALL")
    assert found.params["dtype"] == "uint64"
    assert "8-byte elements" in found.notes[1]


def test_nanoseconds_and_halves_are_read() -> None:
    text = TEXT.replace("(us)", "(ns)").replace("    4000000    1000000", "    4000000    2000000")
    found = parse_gloo(text, "f", None).found[1]
    assert value(found, "time") == pytest.approx(4e-6)
    assert found.params["dtype"] == "float16"


def test_a_mismatch_makes_the_last_row_wrong() -> None:
    text = f"{TEXT}\n{RULE}\n{'VERIFY ERRORS':>56}\n\nRank: 0 Mismatch at index: 3\n\n{RULE}\n"
    assert [found.check.passed for found in parse_gloo(text, "f", None).found] == [True, False]


def test_unverified_is_unknown() -> None:
    found = parse_gloo(TEXT.replace("verify=true", "verify=false"), "f", None).found
    assert [one.check.passed for one in found] == [None, None]


def test_several_inputs_or_threads_are_noted() -> None:
    found = parse_gloo(TEXT.replace("inputs=1, threads=1", "inputs=2, threads=3"), "f", None).found[0]
    assert [note.split(":")[0] for note in found.notes[1:]] == ["gloo ran with inputs=2", "gloo ran with threads=3"]


def test_what_has_no_counterpart_is_left_out_and_told() -> None:
    foreign = parse_gloo(TEXT + TEXT.replace("ALLREDUCE_RING", "PAIRWISE_EXCHANGE"), "f", None)
    assert len(foreign.found) == 2
    assert foreign.left_out == ("gloo's pairwise_exchange: no case of ours measures the same",)


def test_cuda_is_in_the_algorithms_name() -> None:
    assert parse_gloo(TEXT.replace("ALLREDUCE_RING", "CUDA_ALLREDUCE_RING"), "f", None).device == "cuda"


def test_ranks_are_told_or_asked_for() -> None:
    text = TEXT.replace("processes=4, ", "")
    assert parse_gloo(text, "f", 4).ranks == 4
    with pytest.raises(UserError, match="does not say on how many ranks"):
        parse_gloo(text, "f", None)
    with pytest.raises(UserError, match="f holds tables of 2 or 4 ranks: import them one by one"):
        parse_gloo(TEXT + TEXT.replace("processes=4", "processes=2"), "f", None)


def test_a_row_cut_short_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"^f, line 12: 5 of 8 values, so the file seems to be cut short$"):
        parse_gloo(TEXT[: TEXT.index("       7000  ")], "f", None)


def test_text_without_an_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match="f holds no results of gloo's benchmark"):
        parse_gloo(ROWS, "f", None)


def test_a_table_without_its_columns_is_refused() -> None:
    with pytest.raises(UserError, match="f, line 11: the heading before this row names no column p50 or bandwidth"):
        parse_gloo(TEXT.replace("p50", "p51").replace("bandwidth", "rate"), "f", None)
