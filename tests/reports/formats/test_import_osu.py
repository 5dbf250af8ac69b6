"""Text of the OSU micro-benchmarks becomes results of parbench, or is refused with its line."""

import pytest

from parbench.reports.formats.import_osu import parse_osu
from tests.support.refusals import usage_error
from tests.support.reports.exchange_fixtures import OSU, OSU_CUDA


def test_rows_become_results() -> None:
    run = parse_osu(OSU, "f", 4)
    assert run.version == "7.5"
    assert run.backend == "mpi"
    assert run.device == "cpu"
    small, large = run.results
    assert small.operation.name == "collective.all_reduce"
    assert dict(small.params) == {"size_bytes": 4, "mode": "blocking", "dtype": "float32"}
    assert small.check.passed is True
    assert large.seconds == pytest.approx(812.44e-6)
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
    assert result.operation.name == f"collective.{operation}"
    assert result.params["size_bytes"] == total_bytes
    assert result.seconds == pytest.approx(10e-6)


@pytest.mark.parametrize(
    ("title", "rows", "name", "seconds"),
    [
        ("Latency", "Latency (us)\n8 1.25", "pingpong", 1.25e-6),
        ("Bandwidth", "Bandwidth (MB/s)\n1000000 500.00", "unidirectional", 2e-3),
        ("Bi-Directional Bandwidth", "Bandwidth (MB/s)\n1000000 500.0", "bidirectional", 4e-3),
    ],
)
def test_point_to_point_needs_no_nproc(
    title: str, rows: str, name: str, seconds: float
) -> None:
    run = parse_osu(f"[1,0]<stdout>:# OSU MPI {title} Test v5.8\n# Size   {rows}\n", "f", None)
    assert run.num_ranks == 2
    assert run.results[0].operation.name == f"p2p.{name}"
    assert run.results[0].seconds == pytest.approx(seconds)


def test_unknown_benchmark_is_noted() -> None:
    text = "# OSU MPI Barrier Latency Test v7.4\n# Avg Latency(us)\n  1.25\n"
    run = parse_osu(text, "f", None)
    assert not run.results
    assert run.notes == ["not imported: OSU Barrier Latency has no equivalent case"]


def test_device_is_read_from_the_title_and_options() -> None:
    assert parse_osu(OSU_CUDA, "f", 4).device == "cuda"
    option = "# Send Buffer on HOST (H) and Receive Buffer on HOST (H)\n# Size"
    assert parse_osu(OSU_CUDA.replace("# Size", option), "f", 4).device == "cpu"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (OSU[: OSU.index("               812")], "line 6: the row has only a size"),
        (OSU_CUDA.replace("Avg Latency(us)", "Overall(us)"), "line 3: no heading"),
        (OSU.replace("3.17", "1e999"), "line 5: '1e999'"),
        ("# OSU MPI Latency Test (Version 2.1)\n1 2.0\n", "no title of OSU 5 or newer"),
        (OSU + OSU_CUDA, "on one kind of device"),
    ],
)
def test_damaged_text_is_refused(text: str, fact: str) -> None:
    assert fact in usage_error(parse_osu, text, "f", 4)


def test_text_without_ranks_needs_nproc() -> None:
    assert "--nproc" in usage_error(parse_osu, OSU, "f", None)
