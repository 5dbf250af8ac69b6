import pytest

from bench.errors import UserError
from reports.exchange.foreign import Found
from reports.exchange.import_osu import parse_osu

ALLREDUCE = """\

# OSU MPI Allreduce Latency Test v7.5
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations        Validation
4                       3.17              2.90              3.51        1000              Pass
1048576               812.44            800.02            830.91         100              Fail
"""
ALLTOALL = """\
# OSU MPI-CUDA All-to-All Personalized Exchange Latency Test v7.5
# Size       Avg Latency(us)
1024                   22.07
"""


def value(found: Found, name: str) -> float:
    known = found.metrics[name].value
    assert known is not None
    return known


def one(text: str, nproc: int = 4) -> Found:
    (found,) = parse_osu(text, "f", nproc).found
    return found


def of(title: str) -> str:
    return f"# OSU MPI {title} Latency Test v5.8\n# Size       Avg Latency(us)\n1000                   10.00\n"


def test_rows_are_results_in_our_convention() -> None:
    foreign = parse_osu(ALLREDUCE, "f", 4)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("osu", "7.5", 4, None)
    assert (foreign.backend, foreign.device) == ("mpi", "cpu")
    small, large = foreign.found
    assert (small.name, dict(small.params)) == (
        "collective.all_reduce",
        {"size_bytes": 4, "mode": "blocking", "dtype": "float32"},
    )
    assert value(large, "time") == pytest.approx(812.44e-6)
    assert value(large, "algbw") == pytest.approx(1048576 / 812.44e-6)
    assert value(large, "busbw") == pytest.approx(1048576 / 812.44e-6 * 1.5)
    assert (small.iterations, small.check.passed, large.check.passed, large.check.wrong) == (1000, True, False, None)
    assert small.metrics["time"].method == "mean over iterations and ranks, OSU micro-benchmarks 7.5"


@pytest.mark.parametrize(
    ("title", "name", "size", "factor"),
    [
        ("Allreduce", "collective.all_reduce", 1000, 1.5),
        ("Allgather", "collective.all_gather", 4000, 0.75),
        ("All-to-All Personalized Exchange", "collective.all_to_all", 4000, 0.75),
        ("Reduce_scatter", "collective.reduce_scatter", 1000, 0.75),
        ("Broadcast", "collective.broadcast", 1000, 1.0),
        ("Reduce", "collective.reduce", 1000, 1.0),
        ("Gather", "collective.gather", 4000, 0.75),
        ("Scatter", "collective.scatter", 4000, 0.75),
    ],
)
def test_the_size_of_one_rank_becomes_the_whole(title: str, name: str, size: int, factor: float) -> None:
    found = one(of(title))
    assert (found.name, found.params["size_bytes"]) == (name, size)
    assert value(found, "busbw") == pytest.approx(size / 10e-6 * factor)
    assert ("S is 4 times that" in " ".join(found.notes)) is (size == 4000)
    assert found.printed["size"] == "1000"


def test_a_ping_pong_is_half_a_round_trip() -> None:
    found = one("# OSU MPI Latency Test v5.8\n# Size          Latency (us)\n8                       1.25\n", 2)
    assert found.name == "p2p.pingpong"
    assert value(found, "time") == pytest.approx(1.25e-6)
    assert found.metrics["time"].method.startswith("half a round trip")


def test_accelerators_are_in_the_title() -> None:
    assert parse_osu(ALLTOALL, "f", 4).device == "cuda"
    assert parse_osu(ALLREDUCE + ALLTOALL, "f", 4).device == "unknown"


def test_several_benchmarks_in_a_file_are_told_apart() -> None:
    names = [found.name for found in parse_osu(ALLREDUCE + ALLTOALL, "f", 4).found]
    assert names == ["collective.all_reduce"] * 2 + ["collective.all_to_all"]


def test_an_unknown_type_is_absent_and_a_strange_one_keeps_its_name() -> None:
    assert "dtype" not in one(ALLTOALL).params
    assert one(ALLTOALL.replace("# Size", "# Datatype: MPI_CHAR.\n# Size")).params["dtype"] == "char"
    assert one(ALLTOALL.replace("# Size", "# Datatype: MPI_LONG.\n# Size")).params["dtype"] == "MPI_LONG"


def test_what_has_no_counterpart_is_left_out_and_told() -> None:
    bandwidth = "# OSU MPI Bandwidth Test v5.8\n# Size      Bandwidth (MB/s)\n8                      28.51\n"
    foreign = parse_osu(ALLREDUCE + bandwidth, "f", 4)
    assert len(foreign.found) == 2
    assert foreign.left_out == ("OSU Bandwidth: no case of ours measures the same",)


def test_ranks_must_be_given() -> None:
    with pytest.raises(UserError, match=r"f does not say on how many ranks it ran, .*: add --nproc N"):
        parse_osu(ALLREDUCE, "f", None)


def test_a_row_cut_short_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"^f, line 6: 4 of 6 values, so the file seems to be cut short$"):
        parse_osu(ALLREDUCE[: ALLREDUCE.index("         100 ")], "f", 4)


def test_a_table_without_latency_is_refused() -> None:
    with pytest.raises(UserError, match=r"f, line 3: the columns size, overall\(us\) hold no latency"):
        parse_osu(ALLTOALL.replace("Avg Latency(us)", "Overall(us)"), "f", 4)


def test_a_table_without_sizes_is_refused() -> None:
    with pytest.raises(UserError, match="f, line 3: the heading before this row names no column size"):
        parse_osu(ALLTOALL.replace("# Size  ", "# Sizes "), "f", 4)
