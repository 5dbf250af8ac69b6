import pytest

from bench.errors import UserError
from reports.exchange.foreign import busbw_factor, fields, number, only, time_and_rates, whole, world_size


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("sendrecv", 1.0),
        ("pingpong", 1.0),
        ("barrier", None),
    ],
)
def test_bus_bandwidth_has_nccl_tests_factors(operation: str, factor: float | None) -> None:
    assert busbw_factor(operation, 4) == factor


def test_the_world_is_the_files_or_the_users() -> None:
    assert world_size(8, None, "f") == 8
    assert world_size(None, 4, "f") == 4
    assert world_size(4, 4, "f") == 4


def test_a_world_that_nobody_tells_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"^f does not say on how many ranks it ran, .*: add --nproc N$"):
        world_size(None, None, "f")


def test_two_worlds_that_differ_are_refused() -> None:
    with pytest.raises(UserError, match="f was measured on 8 ranks, and --nproc says 4; leave --nproc out"):
        world_size(8, 4, "f")


def test_rates_are_as_printed_where_enough_digits_were() -> None:
    found = time_and_rates("all_reduce", 4, 1000, 1e-6, method="m", algbw=1.01e9, busbw=1.52e9, last_decimal=0.01e9)
    assert found["algbw"].value == 1.01e9
    assert found["busbw"].value == 1.52e9
    assert found["algbw"].method == "as printed; m"


def test_rates_are_computed_where_rounding_took_their_digits() -> None:
    found = time_and_rates("all_reduce", 4, 1000, 1e-5, method="m", algbw=0.1e9, busbw=0.15e9, last_decimal=0.01e9)
    assert found["algbw"].value == pytest.approx(1e8)
    assert found["busbw"].value == pytest.approx(1.5e8)
    assert found["busbw"].method == "size over time; m"


def test_what_nobody_knows_is_none() -> None:
    found = time_and_rates("all_reduce", 4, 1000, None, method="m")
    assert [metric.value for metric in found.values()] == [None, None, None]
    assert found["algbw"].method == "unknown; m"
    assert time_and_rates("barrier", 4, 1000, 1.0, method="m")["busbw"].value is None


def test_a_metric_has_no_interval() -> None:
    time = time_and_rates("all_reduce", 4, 1000, 1e-3, method="m")["time"]
    assert (time.value, time.unit, time.low, time.high, time.method) == (1e-3, "s", None, None, "m")


def test_a_row_with_too_few_words_is_cut_short() -> None:
    assert fields(["1", "2", "3"], ["a", "b"], ["a"], "f") == {"a": "1", "b": "2"}
    with pytest.raises(UserError, match="f, line 3: 1 of 2 values, so the file seems to be cut short"):
        fields(["1"], ["a", "b"], [], "f, line 3")


def test_a_column_that_is_needed_must_be_named() -> None:
    with pytest.raises(UserError, match="f: the heading before this row names no column c or d"):
        fields(["1"], ["a"], ["a", "c", "d"], "f")


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e999", ""])
def test_what_is_not_finite_is_no_number(word: str) -> None:
    with pytest.raises(UserError, match="is not a number"):
        number(word, "f")


def test_words_are_numbers_or_refused() -> None:
    assert number("1.5", "f") == 1.5
    assert whole("12", "f") == 12
    with pytest.raises(UserError, match=r"f: '1\.x' is not a number"):
        number("1.x", "f")
    with pytest.raises(UserError, match="f: '-1' is not a whole number from 0 up"):
        whole("-1", "f")


def test_one_value_needs_agreement() -> None:
    assert only([4, 4]) == 4
    assert only([4, 8]) is None
    assert only([]) is None
