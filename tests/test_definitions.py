"""What can be measured, and the words in which a setting refuses it."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS
from bench.dtypes import DTYPES
from bench.errors import UserError

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "all_reduce_two_step")
PAIRS = ("pingpong", "unidirectional", "bidirectional", "matrix")
WHOLE = ("all_reduce", "broadcast", "sendrecv", "all_to_all_v", "reduce", "copy", "round", *PAIRS)
SIZELESS = ("barrier", "gemm")
JOINING = ("all_reduce", "reduce_scatter", "reduce", "all_reduce_two_step")
GB = 1_000_000_000


def gloo(nproc: int = 4, rank_bytes: int | None = None) -> Setting:
    return Setting(nproc=nproc, backend="gloo", device="cpu", rank_bytes=rank_bytes)


def nccl(nproc: int = 4, rank_bytes: int | None = None) -> Setting:
    return Setting(nproc=nproc, backend="nccl", device="cuda", rank_bytes=rank_bytes)


def refusal(name: str, setting: Setting, **given_params: object) -> str | None:
    definition = BY_NAME[name]
    return definition.refuse(definition.case(given_params).params, setting)


def test_names_are_unique_and_every_operation_is_held_by_a_test_below() -> None:
    assert sorted(BY_NAME) == sorted((*SHARDED, *WHOLE, *SIZELESS))
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
    expected = "target 1 is not one of the 1 ranks" if name in PAIRS and nproc == 1 else None
    assert refusal(name, gloo(nproc)) == expected
    assert refusal(name, nccl(nproc)) == expected


def test_only_what_has_one_end_has_a_root() -> None:
    rooted = [name for name, definition in BY_NAME.items() if any(p.name == "root" for p in definition.params)]
    assert rooted == ["broadcast", "reduce", "gather", "scatter"]


def test_reductions_that_a_type_cannot_hold_are_refused_in_words() -> None:
    for name in JOINING:
        assert refusal(name, gloo(), dtype="bool") == "the sum of bool is no bool: use redop=max, min or product"
        assert refusal(name, gloo(), dtype="int32", redop="avg") == "the average of int32 is no int32"
        assert refusal(name, gloo(), dtype="bool", redop="max", size_bytes=64) is None
        assert refusal(name, gloo(), dtype="bfloat16", redop="avg", size_bytes=64) is None


def test_a_mode_that_an_operation_does_not_have_is_refused_in_words() -> None:
    assert refusal("all_reduce", gloo(), mode="graph") == "mode graph needs CUDA; this is cpu"
    assert refusal("all_reduce", nccl(), mode="graph") is None
    assert "mode async: pingpong" in str(refusal("pingpong", gloo(), mode="async"))
    assert "mode async: all_reduce" in str(refusal("all_reduce", gloo(), mode="async", placement="out_of_place"))
    assert refusal("broadcast", gloo(), mode="coalesced") == "mode coalesced: gloo cannot coalesce broadcast"
    assert refusal("broadcast", nccl(), mode="coalesced") is None
    assert refusal("all_reduce", gloo(), mode="coalesced") is None


def test_a_group_that_the_world_cannot_form_is_refused_with_the_equation() -> None:
    with pytest.raises(UserError, match=r"dp\(2\) \* tp\(4\) != world size\(4\)"):
        refusal("all_reduce", gloo(4), group="dp=2 tp=4:tp")
    with pytest.raises(UserError, match="member 2 is not one of the 2 groups"):
        refusal("all_reduce", gloo(4), group="pairs", member=2)
    assert "has one rank" in str(refusal("all_reduce", gloo(4), group="dp=4 tp=1:tp"))


def test_a_group_is_measured_member_by_member_alone_and_with_all_at_once() -> None:
    expand = BY_NAME["all_reduce"].expand
    made = [(case["member"], case["together"]) for case in expand({"group": "pairs"}, gloo(4))]
    assert made == [(0, False), (1, False), (0, True), (1, True)]
    assert [dict(case) for case in expand({"group": "pairs", "member": 1, "together": True}, gloo(4))] == [
        {"group": "pairs", "member": 1, "together": True}
    ]
    assert list(expand({}, gloo(4))) == [{}]


def test_a_matrix_is_every_ordered_pair() -> None:
    made = [(case["source"], case["target"]) for case in BY_NAME["matrix"].expand({}, gloo(3))]
    assert made == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_a_tournament_is_every_round_unless_it_is_said_which_or_who_meets_whom() -> None:
    expand = BY_NAME["round"].expand
    assert [case["round"] for case in expand({}, gloo(4))] == [0, 1, 2]
    assert [case["round"] for case in expand({}, gloo(5))] == [0, 1, 2, 3, 4]
    assert list(expand({"round": 2}, gloo(4))) == [{"round": 2}]
    assert list(expand({"pairs": "0-2"}, gloo(4))) == [{"pairs": "0-2"}]


def test_a_round_or_a_pair_that_there_is_not_is_refused_in_words() -> None:
    assert refusal("round", gloo(4), round=3) == "round 3 is not one of the 3 rounds of 4 ranks, 0 to 2"
    assert refusal("round", gloo(4), pairs="0-4") == "pairs '0-4': rank 4 is not one of the 4 ranks"
    assert refusal("round", gloo(4), pairs="0-3 1-2") is None
    assert refusal("round", gloo(4), mode="async") is None
    assert refusal("round", gloo(4), mode="async", ways="in_turn") == (
        "mode async: round with ways=in_turn is several calls"
    )
    assert refusal("round", gloo(4), mode="coalesced") == "mode coalesced: gloo cannot coalesce round"


def test_what_tells_measurements_of_a_round_apart_is_left_out_where_there_is_one() -> None:
    definition = BY_NAME["round"]
    assert definition.case({"repeat": 0}).id == definition.case({}).id != definition.case({"repeat": 1}).id
    assert "pairs" not in definition.case({}).params


def test_traffic_has_a_row_for_each_rank() -> None:
    assert refusal("all_to_all_v", gloo(3), traffic="1 2;3 4") == "traffic has 2 rows; 3 ranks need 3"
    assert refusal("all_to_all_v", gloo(2), traffic="1 2;3 4") is None


def test_a_rank_does_not_send_to_itself() -> None:
    assert refusal("pingpong", gloo(), source=1, target=1) == "source 1 and target 1 are one rank"


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_refused_on_gloo_in_words_and_carried_by_nccl(dtype: str) -> None:
    expected = f"gloo carries no {dtype}" if dtype.startswith("float8") else None
    assert refusal("all_gather", gloo(), dtype=dtype) == expected
    assert refusal("all_gather", nccl(), dtype=dtype) is None


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
@given(
    st.sampled_from(sorted((*SHARDED, *WHOLE))),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 1 << 22),
    st.integers(2, 12),
)
def test_a_size_runs_exactly_when_it_divides_and_what_is_named_instead_runs(
    name: str, dtype: str, size: int, nproc: int
) -> None:
    unit = DTYPES[dtype].itemsize * (nproc if name in SHARDED else 1)
    redop = {"redop": "max"} if name in JOINING else {}
    reason = refusal(name, nccl(nproc), size_bytes=size, dtype=dtype, **redop)
    assert (reason is None) == (size % unit == 0)
    assume(reason is not None)
    nearest = [int(number) for number in re.findall(r"\d+", str(reason).partition(";")[2])]
    assert all(refusal(name, nccl(nproc), size_bytes=other, dtype=dtype, **redop) is None for other in nearest)
    assert nearest[-1] > size > nearest[-1] - unit


@pytest.mark.parametrize("name", [*SHARDED, *WHOLE])
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
