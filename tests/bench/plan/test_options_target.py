"""A step of the user's own: its parameters are those of its function, and what cannot be used is one sentence."""

import math
import os
import re
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, cast

import pytest

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
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error as error_of


def simple(
    world: object, *, depth: int = 3, share: float = 0.5, fused: bool = True, size_bytes: int = 9
) -> None: ...


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
        *((taking(name, 1), f"'{name}' {own}") for name in OF_THE_RUNNER),
        (taking("limit", math.inf), "'limit' has the default inf: give it a finite one"),
        (taking("limit", math.nan), "'limit' has the default nan: give it a finite one"),
        (taking("limit", 1 << 63), "is not allowed: whole numbers have at most 64 bits"),
    ):
        assert told in error_of(params_of, function)


STEP = """
import tabnanny
import torch
from typing import Literal
print("a module may print while it is imported")

def prepare(world: "for.a.type.checker.alone", *, depth: int = 3, kind: Literal["ring", "tree"] = "ring"):
    ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's current folder, whose modules are forgotten after the test."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_define_imports_a_target_from_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "steps").mkdir()
    (folder / "steps/mine.py").write_text(f"import os\nos.environ['RANK'] = '7'\n{STEP}")
    (folder / "tabnanny.py").write_text("raise RuntimeError('shadowed')")
    definition = define("steps.mine:prepare", folder)
    assert (definition.name, definition.target) == ("custom.mine", "steps.mine:prepare")
    assert [param.name for param in definition.params] == ["mode", "depth", "kind"]
    assert definition.params[0] == MODE
    assert capsys.readouterr().out == "", "the standard output is for what --json prints"
    assert "RANK" not in os.environ, "what a module sets at import is for the ranks"
    request = Options(settings={"kind": "tree", "mode": "blocking,pipelined"})
    plan = make_plan(request, (definition,), WorldSpec(nproc=2, backend="gloo", device="cpu"))
    assert [case.params for case in plan.cases] == [
        {"mode": "blocking", "depth": 3, "kind": "tree"},
        {"mode": "pipelined", "depth": 3, "kind": "tree"},
    ]


def test_define_refuses_a_broken_target_in_one_sentence(folder: Path) -> None:
    for number, (text, reason) in enumerate(
        (
            ("def prepare(world, *, depth): ...", "parameter 'depth' has no default"),
            ("raise OSError('no such device')", "OSError: no such device"),
            ("import nothing_here", "No module named 'nothing_here'"),
            ("raise SystemExit(3)", "SystemExit: 3"),
            ("def prepare(world:", "SyntaxError: '(' was never closed"),
            ("", "has no function 'prepare'"),
        )
    ):
        (folder / f"mine{number}.py").write_text(text)
        message = error_of(define, f"mine{number}:prepare", folder)
        assert message.startswith(f"--target 'mine{number}:prepare' cannot be used: ")
        assert reason in message
    assert error_of(define, "mine", folder).endswith(
        "names no function: write package.module:function"
    )


def measure_target(world: World, folder: str, **params: Value) -> Outcome:
    sys.path.append(folder)
    sys.modules.pop("mystep", None)
    try:
        case = make_case("custom.mystep", "mystep:prepare", {**params, "mode": "blocking"})
        run = CaseRun(case, Subgroups(world), Measure(max_iterations=8), Progress(), None)
        return run.visit(30.0)
    finally:
        sys.path.remove(folder)


def test_readme_step_is_right_and_can_fail(two_ranks: Ranks, tmp_path: Path) -> None:
    readme = (ROOT / "workloads" / "README.md").read_text()
    match = re.search(r"^```python\n(# mystep\.py\n.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert match is not None
    code, file = match.group(1), tmp_path / "mystep.py"

    def measure() -> Outcome:
        call = "tests.bench.plan.test_options_target:measure_target"
        outcome, _ = two_ranks.call(call, folder=str(tmp_path), num_elements=1024)
        return cast(Outcome, outcome)

    file.write_text(code)
    right = measure()
    assert (right.status, right.check.passed) == ("ok", True)
    assert right.details["num_elements"] == 1024
    file.write_text(code.replace("dist.all_reduce(self.buffer, group=self.world.group)", "pass"))
    wrong = measure()
    assert (wrong.status, wrong.check.wrong) == ("wrong", 2048)
