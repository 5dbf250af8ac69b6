"""A step of the user's own: its parameters are those of its function, and what cannot be used is one sentence."""

import math
import re
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal

import pytest
from paths import ROOT
from ranks import Ranks
from refusals import refusal as error_of

from parbench.bench.launch.control_channel import Outcome
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.catalogue import MODE, OF_THE_RUNNER
from parbench.bench.plan.options import Options, define, make_plan, params_of
from parbench.bench.plan.params import Param, Value
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress
from parbench.bench.world.world import Subgroups, World

README = (ROOT / "workloads" / "README.md").read_text()


def simple(world: object, *, depth: int = 3, share: float = 0.5, fused: bool = True, size_bytes: int = 9) -> None: ...


def chosen(world: object, kind: Literal["ring", "tree"] = "ring") -> None: ...


def plain(world, depth=3):  # type: ignore[no-untyped-def]
    ...


def of_everything(world: object, **params: int) -> None: ...


def taking(name: str, default: object = Parameter.empty) -> Callable[..., Any]:
    """Return a function that takes a parameter of a name, with a default if one is given."""

    def prepare(world: object, **_: object) -> None: ...

    world = Parameter("world", Parameter.POSITIONAL_OR_KEYWORD)
    taken = Parameter(name, Parameter.KEYWORD_ONLY, default=default)
    prepare.__signature__ = Signature([world, taken])  # type: ignore[attr-defined]
    return prepare


def test_parameters_are_those_of_the_function_with_their_kinds_defaults_and_choices() -> None:
    assert {param.name: (param.kind, param.default) for param in params_of(simple)} == {
        "depth": ("int", 3),
        "share": ("float", 0.5),
        "fused": ("bool", True),
        "size_bytes": ("size", 9),
    }
    [kind] = params_of(chosen)
    assert kind == Param(name="kind", kind="str", default="ring", help="", choices=("ring", "tree"))
    assert "ring or tree" in error_of(kind.parse, "star")
    assert [(param.name, param.kind) for param in params_of(plain)] == [("depth", "int")]


def test_a_parameter_that_cannot_be_set_on_a_command_line_is_refused() -> None:
    own = "is parbench's own, as are mode, group, group_index, concurrent or background: give it another name"
    assert sorted(OF_THE_RUNNER) == ["background", "concurrent", "group", "group_index", "mode"]
    for function, told in (
        (taking("depth"), "'depth' has no default: give it one"),
        (taking("sizes", (1, 2)), "'sizes' is no bool, int, float or str"),
        (taking("depth", None), "'depth' is no bool, int, float or str"),
        (of_everything, "'params' has no default"),
        *((taking(name, 1), f"'{name}' {own}") for name in (*OF_THE_RUNNER, "ways", "member")),
        (taking("limit", math.inf), "'limit' has the default inf: give it a finite one"),
        (taking("limit", math.nan), "'limit' has the default nan: give it a finite one"),
        (taking("limit", 1 << 63), "is not allowed: whole numbers have at most 64 bits"),
    ):
        assert told in error_of(params_of, function)


STEP = """
import tabnanny
import torch
from typing import Literal
import atexit
print("a module may talk while it is imported")
atexit.register(print, "and as Python ends")

def prepare(world: "for.a.type.checker.alone", *, depth: int = 3, kind: Literal["ring", "tree"] = "ring"):
    ...
"""


def refusal(target: str, folder: Path) -> str:
    told = error_of(define, target, folder)
    assert "\n" not in told
    assert told.startswith(f"--target {target!r}")
    return told


def test_a_target_in_the_folder_is_defined_and_can_be_planned_and_no_module_there_shadows_pythons(
    tmp_path: Path,
) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/mine.py").write_text(STEP)
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('shadowed')")
    definition = define("steps.mine:prepare", tmp_path)
    assert (definition.name, definition.target) == ("custom.mine", "steps.mine:prepare")
    assert [param.name for param in definition.params] == ["mode", "depth", "kind"]
    assert definition.params[0] == MODE
    request = Options(settings={"kind": "tree", "mode": "blocking,pipelined"})
    plan = make_plan(request, (definition,), WorldSpec(nproc=2, backend="gloo", device="cpu"))
    assert [asked.params for asked in plan.cases] == [
        {"mode": "blocking", "depth": 3, "kind": "tree"},
        {"mode": "pipelined", "depth": 3, "kind": "tree"},
    ]
    assert "mine" not in sys.modules


@pytest.mark.full
def test_a_target_that_cannot_be_used_is_one_sentence_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, told in (
        ("def prepare(world, *, depth): ...", "parameter 'depth' has no default"),
        ("raise OSError('no such device')", "OSError: no such device"),
        ("import atexit; atexit.register(print, 'the end')\nimport nothing_here", "No module named 'nothing_here'"),
        ("raise SystemExit", "its import ended Python: exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its import ended Python: ended by SIGSEGV"),
    ):
        (tmp_path / "mine.py").write_text(text)
        assert told in refusal("mine:prepare", tmp_path)
    monkeypatch.setattr("parbench.bench.plan.options._LOAD_SECONDS", 0.5)
    (tmp_path / "mine.py").write_text("import time; time.sleep(60)")
    assert refusal("mine:prepare", tmp_path).endswith("took more than 0.5 s to import")
    monkeypatch.setattr(sys, "executable", "/nowhere")  # nothing is started
    assert refusal("mine", tmp_path).endswith("names no function: write package.module:function")


def measured_from(world: World, folder: str, module: str = "mystep", **params: Value) -> Outcome:
    """Measure a step of the README's, which lies in a folder."""
    sys.path.append(folder)
    sys.modules.pop(module, None)
    try:
        case = make_case(f"custom.{module}", f"{module}:prepare", {**params, "mode": "blocking"})
        return CaseRun(case, Subgroups(world), Measure(max_iterations=8), Progress(), None).visit(30.0)
    finally:
        sys.path.remove(folder)


@pytest.fixture
def mystep(tmp_path: Path) -> Path:
    """The README's examples as files, as a reader would copy them."""
    for code, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", README, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_readmes_own_step_is_measured_and_right_and_its_check_can_fail(two_ranks: Ranks, mystep: Path) -> None:
    assert "--set num_elements=1024,65536" in README
    for num_elements in (1024, 65536):
        outcome, _ = two_ranks.call("test_options_target:measured_from", folder=str(mystep), num_elements=num_elements)
        assert (outcome.status, outcome.check.passed) == ("ok", True)
        assert outcome.details["num_elements"] == num_elements
        assert len(outcome.seconds) >= 6
    for module, params in (("mycnn", {"channels": 8}), ("myblocks", {"layers": 1, "sequence": 16})):
        outcome, _ = two_ranks.call("test_options_target:measured_from", folder=str(mystep), module=module, **params)
        assert (outcome.status, outcome.check.passed) == ("ok", True)
    file = mystep / "mystep.py"
    file.write_text(file.read_text().replace("dist.all_reduce(self.buffer, group=self.world.group)", "pass"))
    outcome, _ = two_ranks.call("test_options_target:measured_from", folder=str(mystep), num_elements=1024)
    assert (outcome.status, outcome.check.wrong) == ("wrong", 2048)
