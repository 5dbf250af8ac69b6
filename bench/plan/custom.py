"""A step of the user's own, measured by ``--target package.module:prepare`` without registering anything.

Its parameters are those of the function: names, annotations and defaults; ``Literal`` gives the choices.
"""

import inspect
import math
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from bench.errors import UserError
from bench.plan.cases import Definition
from bench.plan.catalogue import MODE, OF_THE_RUNNER
from bench.plan.params import Kind, Param
from bench.words import listed

_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
_LOAD_SECONDS = 120


def define(target: str, folder: Path) -> Definition:
    """Return the definition of a target that is importable, or lies in ``folder``; ``UserError`` if there is none.

    Another process imports it, so that the driver stays free of torch.
    """
    if ":" not in target:
        raise UserError(f"--target {target!r} names no function: write package.module:function")
    command = [sys.executable, "-P", "-m", "bench.plan.custom", target, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"--target {target!r} took more than {_LOAD_SECONDS} s to import") from None
    if done.returncode or not done.stdout:  # a script may end well while it is imported
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"--target {target!r} cannot be used: {lines[-1] if lines else 'its import failed'}")
    params = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[Param, ...])
    module = target.partition(":")[0].rpartition(".")[2]
    return Definition(name=f"custom.{module}", target=target, help="a step of your own", params=(MODE, *params))


def params_of(prepare: Callable[..., object]) -> tuple[Param, ...]:
    """Return the parameters that follow ``world``; ``UserError`` if one has no default or no simple type."""
    hints = typing.get_type_hints(prepare)
    after_world = list(inspect.signature(prepare).parameters.values())[1:]
    return tuple(_param(parameter, hints.get(parameter.name)) for parameter in after_world)


def _param(parameter: inspect.Parameter, hint: Any) -> Param:
    if parameter.name in OF_THE_RUNNER:
        raise UserError(
            f"parameter {parameter.name!r} is parbench's own, as are {listed(OF_THE_RUNNER)}: give it another name"
        )
    if parameter.default is inspect.Parameter.empty:
        raise UserError(f"parameter {parameter.name!r} has no default: give it one, --set changes it")
    choices = get_args(hint) if get_origin(hint) is typing.Literal else ()
    kind = _KINDS.get(type(parameter.default))
    if kind is None:
        raise UserError(f"parameter {parameter.name!r} is no bool, int, float or str")
    if kind == "float" and not math.isfinite(parameter.default):
        raise UserError(f"parameter {parameter.name!r} has the default {parameter.default}: give it a finite one")
    if kind == "int" and parameter.name.endswith("_bytes"):
        kind = "size"
    return Param(name=parameter.name, kind=kind, default=parameter.default, help="", choices=choices)


def main() -> None:
    """Print the parameters of the target in argv as one line of JSON."""
    from bench.rank.runner import load_target  # imports torch, which only this process does

    target, folder = sys.argv[1:]
    sys.path.append(folder)
    try:
        params = params_of(load_target(target))
    except UserError as error:
        sys.exit(str(error))
    sys.stdout.write(f"\n{msgspec.json.encode(params).decode()}\n")


if __name__ == "__main__":
    main()
