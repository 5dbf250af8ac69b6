"""What can be measured, and the words in which a setting refuses it."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS
from bench.dtypes import DTYPES

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
SHARDED = ("all_gather", "reduce_scatter", "all_to_all")
WHOLE = ("all_reduce", "broadcast", "sendrecv")
GB = 1_000_000_000


def gloo(nproc: int = 4, rank_bytes: int | None = None) -> Setting:
    return Setting(nproc=nproc, backend="gloo", device="cpu", rank_bytes=rank_bytes)


def nccl(nproc: int = 4, rank_bytes: int | None = None) -> Setting:
    return Setting(nproc=nproc, backend="nccl", device="cuda", rank_bytes=rank_bytes)


def refusal(name: str, setting: Setting, **given_params: object) -> str | None:
    definition = BY_NAME[name]
    return definition.refuse(definition.case(given_params).params, setting)


def test_names_are_unique_and_every_operation_is_held_by_a_test_below() -> None:
    assert sorted(BY_NAME) == sorted((*SHARDED, *WHOLE))
    assert len(BY_NAME) == len(DEFINITIONS)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.name)
def test_every_default_is_a_value_that_its_own_parameter_accepts(definition: Definition) -> None:
    for param in definition.params:
        assert param.parse(param.default) == param.default
        assert param.parse(str(param.default)) == param.default


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.name)
def test_every_definition_explains_itself_and_its_parameters(definition: Definition) -> None:
    assert definition.help
    assert all(param.help for param in definition.params)


@pytest.mark.parametrize(
    ("name", "target"),
    [("collective.all_to_all", "bench.collectives:all_to_all"), ("p2p.sendrecv", "bench.p2p:sendrecv")],
)
def test_a_target_is_the_function_of_the_same_name(name: str, target: str) -> None:
    assert next(definition.target for definition in DEFINITIONS if definition.name == name) == target


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_defaults_run_on_any_power_of_two_of_ranks(name: str, nproc: int) -> None:
    assert refusal(name, gloo(nproc)) is None
    assert refusal(name, nccl(nproc)) is None


def test_only_a_broadcast_has_a_root() -> None:
    rooted = [name for name, definition in BY_NAME.items() if any(p.name == "root" for p in definition.params)]
    assert rooted == ["broadcast"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_refused_on_gloo_in_words_and_carried_by_nccl(dtype: str) -> None:
    expected = f"gloo carries no {dtype}" if dtype.startswith("float8") else None
    assert refusal("all_reduce", gloo(), dtype=dtype) == expected
    assert refusal("all_reduce", nccl(), dtype=dtype) is None


@pytest.mark.parametrize("name", WHOLE)
def test_an_odd_size_is_refused_with_the_nearest_whole_elements(name: str) -> None:
    expected = "size 1001 B is not a multiple of 4 B (float32); nearest are 1000 and 1004"
    assert refusal(name, gloo(), size_bytes=1001) == expected


@pytest.mark.parametrize("name", SHARDED)
def test_a_size_that_does_not_divide_among_ranks_is_refused_with_the_nearest_that_do(name: str) -> None:
    expected = "size 1002 B is not a multiple of 4 ranks x 2 B (float16); nearest are 1000 and 1008"
    assert refusal(name, gloo(4), size_bytes=1002, dtype="float16") == expected


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_sharded_takes_any_number_of_elements(name: str) -> None:
    assert refusal(name, gloo(4), size_bytes=1002, dtype="float16") is None


def test_a_size_below_the_least_is_told_the_least_and_never_zero() -> None:
    assert refusal("all_reduce", gloo(), size_bytes=2) == "size 2 B is not a multiple of 4 B (float32); the least is 4"
    assert str(refusal("all_gather", gloo(4), size_bytes=4)).endswith("the least is 16")


@settings(deadline=None)
@given(st.sampled_from(sorted(BY_NAME)), st.sampled_from(sorted(DTYPES)), st.integers(1, 1 << 22), st.integers(1, 12))
def test_a_size_runs_exactly_when_it_divides_and_what_is_named_instead_runs(
    name: str, dtype: str, size: int, nproc: int
) -> None:
    unit = DTYPES[dtype].itemsize * (nproc if name in SHARDED else 1)
    reason = refusal(name, nccl(nproc), size_bytes=size, dtype=dtype)
    assert (reason is None) == (size % unit == 0)
    assume(reason is not None)
    nearest = [int(number) for number in re.findall(r"\d+", str(reason).partition(";")[2])]
    assert all(refusal(name, nccl(nproc), size_bytes=other, dtype=dtype) is None for other in nearest)
    assert nearest[-1] > size > nearest[-1] - unit


@pytest.mark.parametrize("name", BY_NAME)
def test_a_size_that_does_not_fit_in_memory_is_refused_with_both_amounts(name: str) -> None:
    expected = "size 1G needs about 6.4 GB a rank; a rank can have 2.0 GB"
    assert refusal(name, gloo(4, rank_bytes=2 * GB), size_bytes="1G") == expected


def test_memory_that_just_suffices_suffices() -> None:
    needed = (1 << 20) * 6
    assert refusal("all_reduce", gloo(2, rank_bytes=needed), size_bytes="1M") is None
    assert refusal("all_reduce", gloo(2, rank_bytes=needed - 1), size_bytes="1M") is not None


@pytest.mark.parametrize(("root", "expected"), [(0, None), (3, None), (4, "root 4 is not one of the 4 ranks")])
def test_a_root_is_one_of_the_ranks(root: int, expected: str | None) -> None:
    assert refusal("broadcast", gloo(4), root=root) == expected


def test_a_refusal_looks_at_the_parameters_it_is_given_and_not_at_defaults() -> None:
    params: Mapping[str, int | str] = {"size_bytes": 3, "dtype": "uint8", "mode": "blocking"}
    assert BY_NAME["all_reduce"].refuse(params, gloo()) is None
