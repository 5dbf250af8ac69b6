"""PARAM, the OSU micro-benchmarks and gloo's benchmark as results of ours, and what is common to every parser."""

import exchange_fixtures as fixtures
import pytest
from exchange_fixtures import GLOO, OSU, OSU_CUDA, PARAM, PARAM_TABLE, Parser, refusal, value

from parbench.bench.plan.catalogue import OPERATIONS, busbw_factor
from parbench.bench.results.metrics import MetricValue
from parbench.reports.formats.foreign import ImportedResult, time_and_rates
from parbench.reports.formats.import_tables import parse_gloo, parse_osu, parse_param

PARAM_OLD = """\
\tCOMMS-RES\tsize (B)\t num-elements\t Latency(us):p50\tp75\t\tp95\tmin\tmax\t algBW(GB/s)\t busBW(GB/s)
\tCOMMS-RES-all_gather\t65536\t4096\t40.0\t41.0\t42.0\t39.0\t43.0\t1.638\t1.229
"""


def test_rates_are_as_printed_where_enough_digits_were_and_computed_where_rounding_took_them() -> None:
    operations = {spec.short_name: spec for spec in OPERATIONS}
    for seconds, algbw, busbw, expected, how in (
        (1e-6, 1.01e9, 1.52e9, (1.01e9, 1.52e9), "as printed"),
        (1e-6, 1.00e9, 1.00e9, (1.00e9, 1.00e9), "as printed"),  # just 100 steps of the last decimal
        (1e-6, 0.99e9, 0.99e9, (1.00e9, 1.50e9), "size over time"),
        (1e-5, None, None, (1e8, 1.5e8), "size over time"),
        (None, 0.01e9, 0.01e9, (0.01e9, 0.01e9), "as printed"),
        (None, None, None, (None, None), "unknown"),
    ):
        found = time_and_rates(operations["all_reduce"], 4, 1000, seconds, "m", (algbw, busbw), 0.01e9)
        assert found["time"] == MetricValue(value=seconds, unit="s", better="lower", method="m")
        assert (found["algbw"].value, found["busbw"].value) == pytest.approx(expected), (seconds, algbw)
        for name in ("algbw", "busbw"):
            assert (found[name].method, found[name].unit, found[name].better) == (f"{how}; m", "B/s", "higher")
    assert time_and_rates(operations["barrier"], 4, 1000, 1.0, "m")["busbw"].value is None


def test_what_has_no_counterpart_is_left_out_and_told() -> None:
    quantised = "\tCOMMS-RES-QUANT-all_reduce-float32\t 4096 1024 1.0 1.0 1.0 1.0\n"
    pt2pt = "\tCOMMS-RES-pt2pt-float32 4096 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0\n"
    paired = PARAM.replace("  nElementsPerRank", "  nElementsPerRank  nElementsPairPerRank")
    bandwidth = "# OSU MPI Bandwidth Test v5.8\n# Size      Bandwidth (MB/s)\n8                      28.51\n"
    pairwise = GLOO.replace("ALLREDUCE_RING", "PAIRWISE_EXCHANGE")
    parsers: tuple[tuple[Parser, str, int | None, int, str], ...] = (
        (parse_param, PARAM + quantised, None, 2, "quantised collectives: their time holds quantisation too"),
        (parse_param, PARAM + pt2pt, None, 2, "pt2pt: no case of ours measures the same"),
        (parse_param, paired, None, 0, "all_reduce with another collective at the same time: the row is both together"),
        (parse_osu, OSU + bandwidth, 4, 2, "OSU Bandwidth: no case of ours measures the same"),
        (parse_gloo, GLOO + pairwise, None, 2, "gloo's pairwise_exchange: no case of ours measures the same"),
    )
    for parse, text, nproc, count, told in parsers:
        foreign = parse(text, "f", nproc)
        assert (len(foreign.found), foreign.left_out) == (count, (told,)), told


def test_ranks_are_the_files_or_the_users_and_asked_for_where_nobody_tells() -> None:
    world = "\t MPI environment: {'world_size': 2, 'local_size': 2, 'global_rank': 0}\n"
    gloo, two = GLOO.replace("processes=4, ", ""), GLOO.replace("processes=4", "processes=2")
    assert parse_param(PARAM_TABLE, "f", 8).ranks == 8
    assert parse_param(world + PARAM_TABLE, "f", None).ranks == 2
    assert (parse_param(PARAM, "f", 4).ranks, parse_gloo(gloo, "f", 4).ranks) == (4, 4)
    ask = "f does not say on how many ranks it ran, which its bandwidths depend on: add --nproc N"
    refused: tuple[tuple[Parser, str, int | None, str], ...] = (
        (parse_param, PARAM_TABLE, None, ask),
        (parse_param, fixtures.PARAM_HELLO + world + PARAM_TABLE, None, ask),  # it tells two numbers, so none
        (parse_param, PARAM, 8, "f was measured on 4 ranks, and --nproc says 8; leave --nproc out"),
        (parse_osu, OSU, None, ask),
        (parse_gloo, gloo, None, ask.replace("f does", "f, line 11 does")),
        (parse_gloo, GLOO + two, None, "f holds tables of 2 or 4 ranks: import them one by one"),
    )
    for parse, text, nproc, sentence in refused:
        assert refusal(parse, text, nproc) == sentence


def test_what_cannot_be_read_is_refused_with_its_line() -> None:
    cut = ", so the file seems to be cut short"
    columns = "the heading before this row names no column"
    inf, nan = (PARAM.replace("31.5", word) for word in ("inf", "nan"))
    slow, sizes = OSU_CUDA.replace("Avg Latency(us)", "Overall(us)"), OSU_CUDA.replace("# Size  ", "# Sizes ")
    other = GLOO.replace("p50", "p51").replace("bandwidth", "rate")
    refused: tuple[tuple[Parser, str, str], ...] = (
        (parse_param, PARAM[: PARAM.index("         32.717")], f"f, line 7: 7 of 9 values{cut}"),
        (parse_param, fixtures.PARAM_ROWS, f"f, line 1: {columns} size, p50, algbw or busbw"),
        (parse_param, inf, "f, line 6: 'inf' is not a number"),
        (parse_param, nan, "f, line 6: 'nan' is not a number"),
        (parse_param, PARAM.replace("0.130", "1e999"), "f, line 6: '1e999' is not a number"),
        (parse_osu, OSU[: OSU.index("         100 ")], f"f, line 6: 4 of 6 values{cut}"),
        (parse_osu, slow, "f, line 3: the columns size, overall(us) hold no latency"),
        (parse_osu, sizes, f"f, line 3: {columns} size"),
        (parse_osu, OSU.replace("1000  ", "1.e3  "), "f, line 5: '1.e3' is not a whole number from 0 up"),
        (parse_gloo, GLOO[: GLOO.index("       7000  ")], f"f, line 12: 5 of 8 values{cut}"),
        (parse_gloo, other, f"f, line 11: {columns} p50 or bandwidth"),
        (parse_gloo, GLOO.replace(" 9000", " -900"), "f, line 11: '-900' is not a whole number from 0 up"),
        (parse_gloo, "400 100\n", "f holds no results of gloo's benchmark: no line names an algorithm"),
    )
    for parse, text, sentence in refused:
        assert refusal(parse, text, 4) == sentence


def test_param_rows_are_results_in_our_convention() -> None:
    foreign = parse_param(PARAM, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("param", None, 4, 2)
    assert foreign.hosts == ("trainer01", "trainer02")
    assert (foreign.backend, foreign.device) == ("unknown", "unknown")
    small, large = foreign.found
    assert large.name == "collective.all_reduce"
    assert large.params == {"size_bytes": 16777216, "dtype": "float32"}
    assert value(large, "time") == pytest.approx(512.8e-6)
    assert (value(large, "algbw"), value(large, "busbw")) == (pytest.approx(32.717e9), pytest.approx(49.075e9))
    # what the percentile is, it says
    assert small.metrics["time"].method.startswith("p50 over ranks of each rank's mean over iterations, PARAM")
    assert "says nothing of single iterations" in small.notes[0]
    assert small.check.passed is None
    assert value(small, "algbw") == pytest.approx(0.130e9)
    digits = parse_param(PARAM.replace("0.130       0.195", "0.001       0.002"), "f", None).found[0]
    assert value(digits, "busbw") == pytest.approx(4096 / 31.5e-6 * 1.5)


def test_params_older_columns_later_columns_tags_and_labels_are_read() -> None:
    (found,) = parse_param(PARAM_OLD, "f", 4).found
    assert (found.name, dict(found.params)) == ("collective.all_gather", {"size_bytes": 65536})
    assert (value(found, "time"), value(found, "busbw")) == (pytest.approx(40e-6), pytest.approx(1.229e9))
    later = PARAM.replace("BusBW(GB/s)", "BusBW(GB/s)  TotalLatency(us):p50  TFlops").replace("49.075", "49.075 600 1")
    assert parse_param(later, "f", None).found == parse_param(PARAM, "f", None).found
    (tagged, _) = parse_param(PARAM.replace("-float32 ", "-torch.bfloat16-night ", 1), "f", None).found
    assert (tagged.params["dtype"], tagged.params["tag"]) == ("bfloat16", "night")
    labelled = "".join(f"0: {line}\n" for line in PARAM.splitlines())
    assert parse_param(labelled, "f", None).found == parse_param(PARAM, "f", None).found
    for theirs, ours in (("all_to_all_single", "all_to_all"), ("reduce_scatter_base", "reduce_scatter")):
        assert parse_param(PARAM.replace("all_reduce", theirs), "f", None).found[0].name == f"collective.{ours}"


def osu(text: str, nproc: int = 4) -> ImportedResult:
    (found,) = parse_osu(text, "f", nproc).found
    return found


def test_osu_rows_are_results_in_our_convention() -> None:
    foreign = parse_osu(OSU, "f", 4)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("osu", "7.5", 4, None)
    assert (foreign.backend, foreign.device) == ("mpi", "cpu")
    small, large = foreign.found
    assert small.name == "collective.all_reduce"
    assert dict(small.params) == {"size_bytes": 4, "mode": "blocking", "dtype": "float32"}
    assert value(large, "time") == pytest.approx(812.44e-6)
    assert value(large, "algbw") == pytest.approx(1048576 / 812.44e-6)
    assert (small.iterations, small.check.passed, large.check.passed, large.check.wrong) == (1000, True, False, None)
    assert small.metrics["time"].method == "mean over iterations and ranks, OSU micro-benchmarks 7.5"


def test_osus_size_of_one_rank_becomes_the_whole() -> None:
    table = "# OSU MPI {} Latency Test v5.8\n# Size       Avg Latency(us)\n1000                   10.00\n"
    whole = {name.capitalize(): name for name in ("reduce_scatter", "broadcast", "reduce")} | {
        "Allreduce": "all_reduce"
    }
    shares = {"Allgather": "all_gather", "Gather": "gather", "Scatter": "scatter", "Alltoall": "all_to_all"}
    for title, name in (*whole.items(), *shares.items(), ("All-to-All Personalized Exchange", "all_to_all")):
        found = osu(table.format(title))
        size = 1000 if title in whole else 4000
        assert (found.name, found.params["size_bytes"]) == (f"collective.{name}", size)
        assert value(found, "busbw") == pytest.approx(size / 10e-6 * (busbw_factor(name, 4) or 0)), name
        assert ("S is 4 times that" in " ".join(found.notes)) is (size == 4000), name
        assert found.printed["size"] == "1000"
    found = osu("# OSU MPI Latency Test v5.8\n# Size          Latency (us)\n8                       1.25\n", 2)
    assert (found.name, value(found, "time")) == ("p2p.pingpong", pytest.approx(1.25e-6))
    assert found.metrics["time"].method.startswith("half a round trip")


def test_osus_titles_tell_benchmarks_and_accelerators_apart_and_types_keep_their_names() -> None:
    both = parse_osu(OSU + OSU_CUDA, "f", 4)
    assert [found.name for found in both.found] == ["collective.all_reduce"] * 2 + ["collective.all_to_all"]
    assert (both.device, parse_osu(OSU_CUDA, "f", 4).device) == ("unknown", "cuda")
    assert "dtype" not in osu(OSU_CUDA).params
    for theirs, ours in (("MPI_CHAR", "char"), ("MPI_LONG", "MPI_LONG")):
        assert osu(OSU_CUDA.replace("# Size", f"# Datatype: {theirs}.\n# Size")).params["dtype"] == ours


def gloo(old: str, new: str) -> tuple[ImportedResult, ...]:
    return parse_gloo(GLOO.replace(old, new), "f", None).found


def test_gloo_rows_are_results_in_our_convention() -> None:
    foreign = parse_gloo(GLOO, "f", None)
    assert (foreign.tool, foreign.version, foreign.ranks, foreign.nodes) == ("gloo", None, 4, None)
    assert (foreign.backend, foreign.device) == ("gloo", "cpu")
    many, few = foreign.found
    assert few.name == "collective.all_reduce"
    params = {"size_bytes": 4000000, "mode": "pipelined", "algorithm": "allreduce_ring", "dtype": "float32"}
    assert few.params == params
    assert (value(few, "time"), value(few, "algbw")) == (pytest.approx(4e-3), pytest.approx(1e9))
    assert few.metrics["time"].method.startswith("median of rank 0's iterations")
    assert few.notes == ("gloo's benchmark sees rank 0 alone: other ranks may be slower",)
    # a 99th percentile needs a hundred iterations
    assert (value(many, "time_p99"), "time_p99" in few.metrics) == (pytest.approx(180e-6), False)
    # its gigabytes are gibibytes
    assert value(few, "algbw_mean") == pytest.approx(0.9 * 2**30)
    assert few.printed["bandwidth"] == "0.900"
    assert value(gloo("ALLREDUCE_RING", "ALLGATHER")[1], "algbw_mean") == pytest.approx(4 * 0.9 * 2**30)


def test_gloos_size_of_one_rank_becomes_the_whole() -> None:
    whole = {"NEW_ALLREDUCE_RING": "all_reduce", "CUDA_ALLREDUCE_HALVING_DOUBLING": "all_reduce", "REDUCE": "reduce"}
    whole |= {"BROADCAST_ONE_TO_ALL": "broadcast", "REDUCE_SCATTER": "reduce_scatter"}
    shares = {"ALLGATHER_RING": "all_gather", "SCATTER": "scatter", "ALLTOALL": "all_to_all"}
    for algorithm, name in (*whole.items(), *shares.items()):
        found = gloo("ALLREDUCE_RING", algorithm)[1]
        # its all_to_all sends elements of 8 bytes, whatever its size column says
        size = 4000000 if algorithm in whole else 32000000 if name == "all_to_all" else 16000000
        assert (found.name, found.params["size_bytes"]) == (f"collective.{name}", size)
        assert found.params["dtype"] == ("uint64" if name == "all_to_all" else "float32")
        assert value(found, "busbw") == pytest.approx(size / 4e-3 * (busbw_factor(name, 4) or 0)), algorithm
        told = ["8-byte elements" if name == "all_to_all" else "S is 4 times that"] * (algorithm in shares)
        assert [text in note for text, note in zip(told, found.notes[1:], strict=True)] == [True] * len(told), algorithm


def test_gloos_options_units_and_mismatches_are_read() -> None:
    text = GLOO.replace("(us)", "(ns)").replace("    4000000    1000000", "    4000000    2000000")
    found = parse_gloo(text, "f", None).found[1]
    assert (value(found, "time"), found.params["dtype"]) == (pytest.approx(4e-6), "float16")
    mismatch = f"{GLOO}\n{fixtures.RULE}\n{'VERIFY ERRORS':>56}\n\nRank: 0 Mismatch at index: 3\n\n{fixtures.RULE}\n"
    assert [one.check.passed for one in parse_gloo(GLOO, "f", None).found] == [True, True]
    assert [one.check.passed for one in parse_gloo(mismatch, "f", None).found] == [True, False]
    assert [one.check.passed for one in gloo("verify=true", "verify=false")] == [None, None]
    noted = gloo("inputs=1, threads=1", "inputs=2, threads=3")[0].notes
    assert [note.split(":")[0] for note in noted[1:]] == ["gloo ran with inputs=2", "gloo ran with threads=3"]
    assert parse_gloo(GLOO.replace("ALLREDUCE_RING", "CUDA_ALLREDUCE_RING"), "f", None).device == "cuda"
