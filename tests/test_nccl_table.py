import msgspec
import pytest
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective, make_plan, make_run, ok, step

from bench.cases import make_case
from bench.plan import Skipped
from bench.records import Check, Record
from bench.runs import Run
from reports.exchange.nccl_table import IN_PLACE, OUT_OF_PLACE, PROGRAMS, Table, devices, nccl_code, tables
from reports.exchange.nccl_table import step as distance


def run_of(*records: Record, environment: dict[str, object] | None = None) -> Run:
    cases = dict.fromkeys(record.case.id for record in records)
    first = {record.case.id: record.case for record in reversed(records)}
    launches = max(record.launch for record in records) + 1
    return make_run(make_plan([first[one] for one in cases], launches=launches), records, environment)


def table_of(*records: Record) -> Table:
    found, left_out = tables(run_of(*records))
    assert left_out == ()
    (table,) = found
    return table


def test_sizes_of_one_series_are_lines_in_order() -> None:
    table = table_of(ok(collective(size_bytes=4096)), ok(collective(size_bytes=1024)))
    assert [line.size for line in table.lines] == [1024, 4096]
    assert (table.program.name, table.type, table.redop, table.root) == ("all_reduce_perf", "float", "sum", -1)
    assert (table.mode, table.ranks, table.nodes, table.backend, table.device) == ("blocking", 4, 1, "gloo", "cpu")


@pytest.mark.parametrize(
    "other",
    [
        collective("broadcast"),
        collective(mode="pipelined"),
        collective(dtype="float64"),
        collective(redop="max"),
        collective(root=1),
        collective(group="node"),
    ],
)
def test_what_differs_in_more_than_size_and_placement_is_another_table(other: object) -> None:
    found, _ = tables(run_of(ok(collective()), ok(other)))  # type: ignore[arg-type]
    assert len(found) == 2


def test_another_world_is_another_table() -> None:
    other = msgspec.structs.replace(WORLD, size=2)
    found, _ = tables(run_of(ok(collective()), ok(collective(size_bytes=4096), world=other)))
    assert [table.ranks for table in found] == [4, 2]


def on_pairs(size_bytes: int = 4096) -> Record:
    """Return an all_gather of a pair of the four ranks; its busbw is that of two."""
    record = ok(collective("all_gather", size_bytes, group="pairs", member=0))
    algbw = record.metrics["algbw"].value or 0
    busbw = msgspec.structs.replace(record.metrics["busbw"], value=algbw / 2)
    details = {"group_size": 2, "group_ranks": [0, 1]}
    return msgspec.structs.replace(record, metrics={**record.metrics, "busbw": busbw}, details=details)


def test_a_group_is_a_table_of_its_own_ranks() -> None:
    found = table_of(on_pairs())
    assert (found.ranks, found.world, found.lines[0].count) == (2, 4, 512)
    assert len(devices(run_of(on_pairs()), found)) == 2
    whole = table_of(ok(collective("all_gather", 4096, group="world")))
    assert (whole.ranks, whole.world, whole.lines[0].count) == (4, 4, 256)


def test_what_failed_stays_in_the_table_of_its_group() -> None:
    failed = bad(collective("all_gather", 8192, group="pairs", member=0))
    for records in ((on_pairs(), failed), (failed, on_pairs())):
        found = table_of(*records)
        assert (found.ranks, len(found.lines), len(found.left_out)) == (2, 1, 1)


def test_both_placements_share_a_line() -> None:
    table = table_of(
        ok(collective(placement="out_of_place"), seconds=2e-6), ok(collective(placement="in_place"), seconds=4e-6)
    )
    (line,) = table.lines
    assert {name: placed.time_us for name, placed in line.placed.items()} == {
        OUT_OF_PLACE: pytest.approx(2),
        IN_PLACE: pytest.approx(4),
    }


@pytest.mark.parametrize(
    ("operation", "placed", "count", "redop"),
    [
        ("all_reduce", IN_PLACE, 1024, "sum"),
        ("broadcast", IN_PLACE, 1024, "none"),
        ("all_gather", OUT_OF_PLACE, 256, "none"),
        ("reduce_scatter", OUT_OF_PLACE, 256, "sum"),
        ("all_to_all", OUT_OF_PLACE, 256, "none"),
        ("gather", OUT_OF_PLACE, 256, "none"),
        ("reduce", OUT_OF_PLACE, 1024, "sum"),
        ("sendrecv", OUT_OF_PLACE, 1024, "none"),
    ],
)
def test_defaults_and_counts_are_the_operations(operation: str, placed: str, count: int, redop: str) -> None:
    table = table_of(ok(collective(operation, 4096)))
    (line,) = table.lines
    assert (list(line.placed), line.count, table.redop) == ([placed], count, redop)


def test_counts_are_of_elements() -> None:
    assert table_of(ok(collective(size_bytes=4096, dtype="float64"))).lines[0].count == 512


def test_times_are_merged_over_launches_and_rates_are_gigabytes() -> None:
    table = table_of(ok(collective(), 0, 1e-3), ok(collective(), 1, 4e-3))
    placed = table.lines[0].placed[IN_PLACE]
    assert placed.time_us == pytest.approx(2000)
    assert placed.algbw == pytest.approx(1024 / 2e-3 / 1e9)
    assert table.iterations == 240


def test_the_average_is_over_lines_and_placements() -> None:
    table = table_of(
        ok(collective(placement="out_of_place"), seconds=1e-6),
        ok(collective(placement="in_place"), seconds=2e-6),
        ok(collective(size_bytes=2048, placement="in_place"), seconds=1e-6),
    )
    assert table.average_busbw == pytest.approx((1.536 + 0.768 + 3.072) / 3)


def test_unchecked_is_not_right() -> None:
    checked, unchecked = table_of(ok(collective())), table_of(ok(collective(), check=Check()))
    assert (checked.lines[0].placed[IN_PLACE].wrong, checked.checked) == (0, True)
    assert (unchecked.lines[0].placed[IN_PLACE].wrong, unchecked.checked) == (None, False)


def test_what_did_not_run_rightly_is_left_out_with_its_reason() -> None:
    wrong = bad(collective(size_bytes=2048), 0, "wrong", "7 results differ", check=Check(passed=False, wrong=7))
    table = table_of(ok(collective()), wrong, bad(collective(size_bytes=4096), 0, "hang", "rank 1\nis lost"))
    assert [line.size for line in table.lines] == [1024]
    assert table.wrong == 7
    first, second = table.left_out
    assert first == "collective.all_reduce size_bytes=2048 dtype=float32 mode=blocking: wrong: 7 results differ"
    assert second.endswith(": hang: rank 1 is lost")


def test_a_wrong_result_of_unknown_count_counts() -> None:
    assert table_of(bad(collective(), 0, "wrong", check=Check(passed=False))).wrong == 1


def test_a_row_without_time_is_left_out() -> None:
    table = table_of(ok(collective(), metrics={}))
    assert table.lines == ()
    assert table.left_out[0].endswith(": it has no time")
    assert table.average_busbw is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (step(), "nccl-tests measures no such thing"),
        (collective(dtype="complex64"), "nccl-tests has no type complex64"),
        (make_case("collective.reduce", "import:osu", {"size_bytes": 8}), "its type is unknown"),
        (collective(placement="sideways"), "nccl-tests has no placement sideways"),
        (collective(redop="xor"), "nccl-tests has no reduction xor"),
        (collective(size_bytes="1K"), "it has no size"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_counterpart_is_told(case: object, reason: str) -> None:
    found, left_out = tables(run_of(bad(case, status="ok")))  # type: ignore[arg-type]
    assert found == ()
    assert left_out[0].endswith(f": {reason}")


def test_skipped_cases_and_missing_records_are_told() -> None:
    skipped = Skipped(case=collective("all_gather", 1001), reason="1001 B do not divide")
    run = make_run(make_plan([collective()], launches=2, skipped=[skipped]), [ok(collective())])
    found, (first, second) = tables(run)
    assert len(found) == 1
    assert first.endswith(": skipped: 1001 B do not divide")
    assert second.endswith(": no record of 1 of 2 launches")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8, 16, 32], ("factor", 2)),
        ([1, 4, 16], ("factor", 4)),
        ([100, 200, 300], ("bytes", 100)),
        ([8, 16, 33], ("bytes", 0)),
        ([8], ("bytes", 0)),
        ([], ("bytes", 0)),
    ],
)
def test_a_step_is_told_where_it_is_constant(sizes: list[int], expected: tuple[str, int]) -> None:
    assert distance(sizes) == expected


def test_devices_are_named_as_far_as_known() -> None:
    run = run_of(ok(collective()), environment=ENVIRONMENT)
    found = devices(run, table_of(ok(collective())))
    assert [device.rank for device in found] == [0, 1, 2, 3]
    assert (found[0].host, found[0].info) == ("node-a", "Example CPU")
    spread = table_of(ok(collective(), world=msgspec.structs.replace(WORLD, nodes=2)))
    assert devices(run, spread)[0].host is None
    assert devices(run_of(ok(collective())), spread)[0].info is None


@pytest.mark.parametrize(("nccl", "code"), [("2.28.9", 22809), ("2.19", None), ("2.x.1", None), (None, None)])
def test_nccl_is_numbered_as_its_headers_do(nccl: str | None, code: int | None) -> None:
    assert nccl_code(run_of(ok(collective()), environment={"torch": {"nccl": nccl}})) == code


def test_nccl_is_unknown_without_an_environment() -> None:
    assert nccl_code(run_of(ok(collective()))) is None


def test_programs_have_names_of_their_own() -> None:
    assert len({program.name for program in PROGRAMS.values()}) == len(PROGRAMS)
