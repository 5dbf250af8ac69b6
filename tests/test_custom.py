"""A step of the user's own: its parameters are those of its function, and what cannot be used is one sentence."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from bench.cases import Setting
from bench.custom import define, params_of
from bench.definitions import MODE
from bench.errors import UserError
from bench.params import Param
from bench.planning import Request, make_plan


def simple(
    world: object, *, depth: int = 3, share: float = 0.5, name: str = "a", fused: bool = True, size_bytes: int = 1024
) -> None: ...


def chosen(world: object, kind: Literal["ring", "tree"] = "ring") -> None: ...


def plain(world, depth=3):  # type: ignore[no-untyped-def]
    ...


def none_but_world(world: object) -> None: ...


def without_default(world: object, *, depth: int) -> None: ...


def of_a_list(world: object, *, sizes: tuple[int, ...] = (1, 2)) -> None: ...


def of_none(world: object, *, depth: int | None = None) -> None: ...


def of_everything(world: object, **params: int) -> None: ...


def with_mode(world: object, *, mode: str = "fast") -> None: ...


def with_group(world: object, *, group: int = 8) -> None: ...


def with_member(world: object, *, member: int = 0) -> None: ...


def with_together(world: object, *, together: bool = True) -> None: ...


def with_beside(world: object, *, beside: str = "gemm") -> None: ...


def of_infinity(world: object, *, limit: float = float("inf")) -> None: ...


def of_no_number(world: object, *, limit: float = float("nan")) -> None: ...


OWN = "is parbench's own, as are mode, group, member, together or beside: give it another name"


def test_parameters_are_those_of_the_function_with_their_kinds_and_defaults() -> None:
    found = {param.name: (param.kind, param.default) for param in params_of(simple)}
    assert found == {
        "depth": ("int", 3),
        "share": ("float", 0.5),
        "name": ("str", "a"),
        "fused": ("bool", True),
        "size_bytes": ("size", 1024),
    }


def test_a_literal_gives_the_choices() -> None:
    [kind] = params_of(chosen)
    assert kind == Param(name="kind", kind="str", default="ring", help="", choices=("ring", "tree"))
    with pytest.raises(UserError, match="ring or tree"):
        kind.parse("star")


def test_annotations_are_not_needed() -> None:
    assert [(param.name, param.kind) for param in params_of(plain)] == [("depth", "int")]
    assert params_of(none_but_world) == ()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (without_default, "'depth' has no default: give it one"),
        (of_a_list, "'sizes' is no bool, int, float or str"),
        (of_none, "'depth' is no bool, int, float or str"),
        (of_everything, "'params' has no default"),
        (with_mode, f"'mode' {OWN}"),
        (with_group, f"'group' {OWN}"),
        (with_member, f"'member' {OWN}"),
        (with_together, f"'together' {OWN}"),
        (with_beside, f"'beside' {OWN}"),
        (of_infinity, "'limit' has the default inf: give it a finite one"),
        (of_no_number, "'limit' has the default nan: give it a finite one"),
    ],
)
def test_a_parameter_that_cannot_be_set_on_a_command_line_is_refused(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        params_of(function)
    assert told in str(caught.value)


# --- in a process of its own ---

STEP = """
import torch
from typing import Literal
print("a module may talk while it is imported")

def prepare(world, *, depth: int = 3, kind: Literal["ring", "tree"] = "ring"):
    ...
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def refusal(target: str, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        define(target, folder)
    told = str(caught.value)
    assert "\n" not in told
    assert told.startswith(f"--target {target!r}")
    return told


def test_a_target_in_the_folder_is_defined_and_can_be_planned(tmp_path: Path) -> None:
    write(tmp_path, "steps/mine.py", STEP)
    definition = define("steps.mine:prepare", tmp_path)
    assert (definition.name, definition.target) == ("custom.mine", "steps.mine:prepare")
    assert [param.name for param in definition.params] == ["mode", "depth", "kind"]
    assert definition.params[0] == MODE
    request = Request(settings={"kind": "tree", "mode": "blocking,pipelined"})
    plan = make_plan(request, (definition,), Setting(nproc=2, backend="gloo", device="cpu"))
    assert [asked.params for asked in plan.cases] == [
        {"mode": "blocking", "depth": 3, "kind": "tree"},
        {"mode": "pipelined", "depth": 3, "kind": "tree"},
    ]
    assert "mine" not in sys.modules


def test_a_module_of_the_folder_shadows_none_of_pythons(tmp_path: Path) -> None:
    write(tmp_path, "tabnanny.py", "raise RuntimeError('shadowed')")
    write(tmp_path, "mine.py", f"import tabnanny\n{STEP}")
    assert define("mine:prepare", tmp_path).name == "custom.mine"


def test_a_target_without_a_function_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert refusal("mine", tmp_path).endswith("names no function: write package.module:function")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def prepare(world, *, depth): ...", "parameter 'depth' has no default"),
        ("def prepare(world, *, depth=float('inf')): ...", "parameter 'depth' has the default inf"),
        ("raise OSError('no such device')", "OSError: no such device"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("prepare = 3", "has no function 'prepare'"),
        ("raise SystemExit", "its import failed"),
    ],
)
def test_a_target_that_cannot_be_used_is_one_sentence_with_the_reason(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path, "mine.py", text)
    assert told in refusal("mine:prepare", tmp_path)


def test_a_target_that_takes_for_ever_to_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.custom._LOAD_SECONDS", 0.5)
    write(tmp_path, "mine.py", "import time; time.sleep(60)")
    assert refusal("mine:prepare", tmp_path).endswith("took more than 0.5 s to import")
