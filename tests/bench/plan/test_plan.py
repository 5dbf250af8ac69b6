"""Presets, settings and files of cases select, skip and refuse cases."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.files import encode_json
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition
from parbench.bench.plan.catalogue import DEFINITIONS as CATALOGUE
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import CasesFile, Entry, Plan, read_cases_file
from tests.support.refusals import usage_error

GLOO = WorldSpec(nproc=2, backend="gloo", device="cpu")
NCCL = WorldSpec(nproc=2, backend="nccl", device="cuda")
GIB = 1 << 30
NAMES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"}
DEFINITIONS = tuple(entry for entry in CATALOGUE if entry.name.partition(".")[2] in NAMES)


def plan(spec: WorldSpec = GLOO, **options: Any) -> Plan:
    """Plan six operations with the smoke preset, unless the options name another."""
    return make_plan(Options(**{"preset": "smoke", **options}), DEFINITIONS, spec)


def list_values(run_plan: Plan, name: str) -> list[Any]:
    return [case.params[name] for case in run_plan.cases]


def test_cases_are_product_in_order() -> None:
    settings = {"size_bytes": "4K,1K", "mode": "pipelined,blocking"}
    run_plan = plan(names=("p2p.sendrecv", "all_reduce"), settings=settings)
    assert list_values(run_plan, "size_bytes") == [4096, 4096, 1024, 1024] * 2
    assert list_values(run_plan, "mode") == ["pipelined", "blocking"] * 4
    assert run_plan.cases[0].name == "collective.all_reduce"
    assert run_plan.cases[-1].name == "p2p.sendrecv"


def test_setting_replaces_values_of_preset() -> None:
    settings = {"mode": "blocking", "size_bytes": "1K"}
    [case] = plan(preset="node", names=("all_reduce",), settings=settings).cases
    assert case.params == {"size_bytes": 1024, "dtype": "float32", "mode": "blocking"}


def test_overlapping_entries_are_merged() -> None:
    first = Entry(name="all_reduce", set={"size_bytes": "1K,2K"})
    second = Entry(name="all_*", set={"size_bytes": "2K,4K"})
    run_plan = plan(entries=(first, second))
    sizes = [
        case.params["size_bytes"] for case in run_plan.cases if case.short_name == "all_reduce"
    ]
    assert sizes == [1024, 2048, 4096]


def test_preset_exceeds_the_cache_of_a_gpu() -> None:
    for preset in ("node", "full"):
        run_plan = plan(NCCL, preset=preset, names=("all_reduce",))
        assert max(list_values(run_plan, "size_bytes")) == GIB


def test_operation_outside_preset_has_defaults() -> None:
    param = Param(name="depth", kind="int", default=3, help="x")
    step = BenchmarkDefinition(name="step.mine", target="m:f", help="x", params=(param,))
    [case] = make_plan(Options(names=("mine",)), (*DEFINITIONS, step), GLOO).cases
    assert case.params == {"depth": 3}


MISSPELLED_NAME = Entry(name="allreduce")
MISSPELLED_PARAM = Entry(name="all_*", set={"siz": "1K"})


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"entries": (MISSPELLED_NAME,)}, "'all_reduce'"),
        ({"entries": (MISSPELLED_PARAM,)}, "'siz'"),
        ({"settings": {"dtpye": "float16"}}, "dtype"),
        ({"names": ("all_reduce",), "settings": {"root": "0"}}, "'root'"),
    ],
)
def test_unknown_name_is_refused(options: dict[str, Any], fact: str) -> None:
    assert fact in usage_error(plan, **options)


def test_value_is_skipped_where_it_is_unusable() -> None:
    spec = replace(GLOO, nproc=4)
    run_plan = plan(spec, settings={"size_bytes": "1002", "dtype": "float16"})
    assert [case.short_name for case in run_plan.cases] == [
        "all_reduce",
        "broadcast",
        "sendrecv",
    ]
    assert "multiple of 8 B" in run_plan.skipped[0].reason


def test_plan_without_usable_case_is_refused() -> None:
    spec = replace(GLOO, rank_bytes=1)
    message = usage_error(plan, spec, names=("all_gather",))
    assert "collective.all_gather size_bytes=1024" in message


def test_only_preset_sizes_are_rounded_up() -> None:
    """Sizes of 1 KiB and 1 MiB become multiples of the ranks and the largest item."""
    run_plan = plan(replace(GLOO, nproc=3))
    assert not run_plan.skipped
    assert set(list_values(run_plan, "size_bytes")) == {1032, 1048584}
    run_plan = plan(replace(GLOO, nproc=3), settings={"size_bytes": "1K"})
    assert set(list_values(run_plan, "size_bytes")) == {1024}
    assert len(run_plan.skipped) == 3


CASES = (Entry(name="größe", set={"root": [0, 1]}),)
TOML = """
[[case]]
name = "größe"
set = { root = [0, 1] }
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("cases.toml", TOML), ("cases.json", encode_json(CasesFile(case=CASES)).decode())],
)
def test_cases_file_is_toml_or_json(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert read_cases_file(file) == CASES


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("preset = 'smoke'", "`preset`"),
        ("[[case]]\nname = 'ddp'\nsizes = '1K'", "allowed are name, set"),
        ("case = x", "line 1"),
        ("", "missing required field `case`"),
        ("case = []", "length >= 1"),
        ('a = "\xff"\n', "0xff"),
    ],
)
def test_invalid_cases_file_is_refused(tmp_path: Path, text: str, fact: str) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(text, encoding="latin-1")
    message = usage_error(read_cases_file, file)
    assert str(file) in message
    assert fact in message
