"""Text of the OSU micro-benchmarks becomes results of parbench, or is refused with its line."""

import pytest

from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.reports.formats.import_osu import parse_osu
from tests.support.refusals import usage_error
from tests.support.reports.exchange_fixtures import OSU, OSU_CUDA


def test_rows_become_results() -> None:
    run = parse_osu(OSU, "f", 4)
    assert run.version == "7.5"
    assert run.backend == "mpi"
    assert run.device == "cpu"
    small, large = run.results
    assert small.name == "collective.all_reduce"
    assert dict(small.params) == {"size_bytes": 4, "mode": "blocking", "dtype": "float32"}
    assert small.iterations == 1000
    assert small.check.passed is True
    assert large.metrics["time"].value == pytest.approx(812.44e-6)
    assert large.metrics["algbw"].value == pytest.approx(1048576 / 812.44e-6)
    assert large.check.passed is False


@pytest.mark.parametrize(
    ("title", "operation", "total_bytes"),
    [
        ("Allreduce", "all_reduce", 1000),
        ("Reduce_scatter", "reduce_scatter", 1000),
        ("Allgather", "all_gather", 4000),
        ("All-to-All Personalized Exchange", "all_to_all", 4000),
    ],
)
def test_size_of_one_rank_is_scaled_to_the_total(
    title: str, operation: str, total_bytes: int
) -> None:
    text = f"# OSU MPI {title} Latency Test v5.8\n# Size       Avg Latency(us)\n1000        10.00\n"
    (result,) = parse_osu(text, "f", 4).results
    assert result.name == f"collective.{operation}"
    assert result.params["size_bytes"] == total_bytes
    factor = get_busbw_factor(operation, 4) or 0
    assert result.metrics["busbw"].value == pytest.approx(factor * total_bytes / 10e-6)


@pytest.mark.parametrize(
    ("title", "rows", "name", "seconds"),
    [
        ("Latency Test (Version 2.1)", "Latency (us)\n8 1.25", "pingpong", 1.25e-6),
        ("Bandwidth Test v7.4", "Bandwidth (MB/s)\n1000000 500.00", "unidirectional", 2e-3),
        ("Bi-Directional Bandwidth Test v5.8", "MB/s\n1000000 500.0", "bidirectional", 4e-3),
        (
            "Multiple Bandwidth / Message Rate Test v5.7\n# [ pairs: 1 ] [ window size: 64 ]",
            "MB/s  Messages/s\n1000000  500.00  500.00",
            "unidirectional",
            2e-3,
        ),
    ],
)
def test_point_to_point_needs_no_nproc(
    title: str, rows: str, name: str, seconds: float
) -> None:
    text = f"[1,0]<stdout>:# OSU MPI {title}\n# Size   {rows}\n"
    run = parse_osu(text, "f", None)
    assert run.num_ranks == 2
    assert run.results[0].name == f"p2p.{name}"
    assert run.results[0].metrics["time"].value == pytest.approx(seconds)


def test_several_pairs_are_not_imported() -> None:
    text = "# OSU MPI Multi Latency Test v7.4\n# [ pairs: 2 ]\n# Size  Latency (us)\n8  1.25\n"
    run = parse_osu(text, "f", None)
    assert not run.results
    assert "2 pairs at once" in run.omissions[0]


def test_last_line_without_end_is_left_out() -> None:
    run = parse_osu(OSU_CUDA + "2048    23.1", "f", 4)
    assert len(run.results) == 1
    assert "line 4" in run.omissions[0]


def test_device_is_read_from_the_title() -> None:
    assert parse_osu(OSU_CUDA, "f", 4).device == "cuda"
    run = parse_osu(OSU + OSU_CUDA, "f", 4)
    assert run.device == "unknown"
    assert run.results[-1].name == "collective.all_to_all"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (OSU[: OSU.index("         100 ")], "line 6: 4 of 6 values"),
        (OSU_CUDA.replace("Avg Latency(us)", "Overall(us)"), "overall(us)"),
        (OSU.replace("3.17", "1e999"), "line 5: '1e999'"),
        (OSU.replace("3.17", "7.17"), "line 5: minimum 2.90, mean 7.17"),
        (OSU + OSU_CUDA.partition("\n")[2], "line 7: no title"),
        (OSU + "4  3.17  2.90  3.51  1000  Pass\n", "line 7: the size does not ascend"),
    ],
)
def test_damaged_text_is_refused(text: str, fact: str) -> None:
    assert fact in usage_error(parse_osu, text, "f", 4)


def test_text_without_ranks_needs_nproc() -> None:
    assert "--nproc" in usage_error(parse_osu, OSU, "f", None)
