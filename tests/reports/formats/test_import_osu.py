"""The importer of the OSU micro-benchmarks, and what every importer shares."""

import pytest

from parbench.bench.plan.catalogue import OPERATIONS, busbw_factor
from parbench.bench.results.metrics import MetricValue
from parbench.reports.formats.foreign import ImportedResult, time_and_rates
from parbench.reports.formats.import_osu import parse_osu
from tests.support.exchange_fixtures import OSU, OSU_CUDA, metric_value, parse_error


def test_rates_are_printed_or_computed() -> None:
    operations = {spec.short_name: spec for spec in OPERATIONS}
    for seconds, algbw, busbw, expected, how in (
        (1e-6, 1.01e9, 1.52e9, (1.01e9, 1.52e9), "as printed"),
        (
            1e-6,
            1.00e9,
            1.00e9,
            (1.00e9, 1.00e9),
            "as printed",
        ),  # just 100 steps of the last decimal
        (1e-6, 0.99e9, 0.99e9, (1.00e9, 1.50e9), "size over time"),
        (1e-5, None, None, (1e8, 1.5e8), "size over time"),
        (None, 0.01e9, 0.01e9, (0.01e9, 0.01e9), "as printed"),
        (None, None, None, (None, None), "unknown"),
    ):
        metrics = time_and_rates(
            operations["all_reduce"], 4, 1000, seconds, "m", (algbw, busbw), 0.01e9
        )
        assert metrics["time"] == MetricValue(value=seconds, unit="s", better="lower", method="m")
        assert (metrics["algbw"].value, metrics["busbw"].value) == pytest.approx(expected), (
            seconds,
            algbw,
        )
        for name in ("algbw", "busbw"):
            assert (metrics[name].method, metrics[name].unit, metrics[name].better) == (
                f"{how}; m",
                "B/s",
                "higher",
            )
    assert time_and_rates(operations["barrier"], 4, 1000, 1.0, "m")["busbw"].value is None


def parse_single(text: str, nproc: int = 4) -> ImportedResult:
    (result,) = parse_osu(text, "f", nproc).found
    return result


def test_osu_rows_become_results() -> None:
    foreign = parse_osu(OSU, "f", 4)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("osu", "7.5", 4, None)
    assert (foreign.backend, foreign.device) == ("mpi", "cpu")
    small, large = foreign.found
    assert small.name == "collective.all_reduce"
    assert dict(small.params) == {"size_bytes": 4, "mode": "blocking", "dtype": "float32"}
    assert metric_value(large, "time") == pytest.approx(812.44e-6)
    assert metric_value(large, "algbw") == pytest.approx(1048576 / 812.44e-6)
    assert (small.iterations, small.check.passed, large.check.passed, large.check.wrong) == (
        1000,
        True,
        False,
        None,
    )
    assert (
        small.metrics["time"].method == "mean over iterations and ranks, OSU micro-benchmarks 7.5"
    )


def test_osu_size_of_one_rank_is_scaled_to_the_total() -> None:
    table = "# OSU MPI {} Latency Test v5.8\n# Size       Avg Latency(us)\n1000                   10.00\n"
    totals = {"Reduce_scatter": "reduce_scatter", "Broadcast": "broadcast", "Reduce": "reduce"}
    totals["Allreduce"] = "all_reduce"
    shares = {
        "Allgather": "all_gather",
        "Gather": "gather",
        "Scatter": "scatter",
        "Alltoall": "all_to_all",
    }
    shares["All-to-All Personalized Exchange"] = "all_to_all"
    for title, name in (totals | shares).items():
        result = parse_single(table.format(title))
        size = 1000 if title in totals else 4000
        assert (result.name, result.params["size_bytes"]) == (f"collective.{name}", size)
        assert metric_value(result, "busbw") == pytest.approx(
            size / 10e-6 * (busbw_factor(name, 4) or 0)
        ), name
    pair = parse_single(
        "# OSU MPI Latency Test v5.8\n# Size          Latency (us)\n8                       1.25\n",
        2,
    )
    assert (pair.name, metric_value(pair, "time")) == ("p2p.pingpong", pytest.approx(1.25e-6))
    assert pair.metrics["time"].method.startswith("half a round trip")


def test_osu_titles_and_types_are_read() -> None:
    both = parse_osu(OSU + OSU_CUDA, "f", 4)
    assert [result.name for result in both.found] == ["collective.all_reduce"] * 2 + [
        "collective.all_to_all"
    ]
    assert (both.device, parse_osu(OSU_CUDA, "f", 4).device) == ("unknown", "cuda")
    assert "dtype" not in parse_single(OSU_CUDA).params
    for theirs, ours in (("MPI_CHAR", "char"), ("MPI_LONG", "MPI_LONG")):
        text = OSU_CUDA.replace("# Size", f"# Datatype: {theirs}.\n# Size")
        assert parse_single(text).params["dtype"] == ours
    bandwidth = "# OSU MPI Bandwidth Test v5.8\n# Size      Bandwidth (MB/s)\n8                      28.51\n"
    foreign = parse_osu(OSU + bandwidth, "f", 4)
    assert (len(foreign.found), foreign.left_out) == (
        2,
        ("OSU Bandwidth: no case of ours measures the same",),
    )


def test_osu_text_that_cannot_be_read_is_refused() -> None:
    slow, sizes = (
        OSU_CUDA.replace("Avg Latency(us)", "Overall(us)"),
        OSU_CUDA.replace("# Size  ", "# Sizes "),
    )
    cut = OSU[: OSU.index("         100 ")]
    for text, sentence in (
        (cut, "f, line 6: 4 of 6 values, so the file seems to be cut short"),
        (slow, "f, line 3: the columns size, overall(us) hold no latency"),
        (sizes, "f, line 3: the heading before this row names no column size"),
        (OSU.replace("1000  ", "1.e3  "), "f, line 5: '1.e3' is not a whole number from 0 up"),
        (OSU.replace("3.17", "nan "), "f, line 5: 'nan' is not a number"),
        (OSU.replace("3.17", "1e999"), "f, line 5: '1e999' is not a number"),
    ):
        assert parse_error(parse_osu, text, 4) == sentence
    assert parse_error(parse_osu, OSU).endswith("add --nproc N")
