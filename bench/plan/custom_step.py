"""Definitions of custom steps, from the functions ``module:function`` that a run names."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from parbench.bench.plan.cases import BenchmarkDefinition, load_target
from parbench.bench.plan.catalogue import MODE, RUNNER_PARAMS
from parbench.bench.plan.params import Kind, Param, is_variable
from parbench.bench.text import UserError

_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
"""The type that a parameter of a custom step declares, by the Python type of its default."""


def define_custom_step(target: str, folder: Path) -> BenchmarkDefinition:
    """Import a user's function ``package.module:function`` and return it as a benchmark.

    The function's first parameter is ``world``, and its other parameters become parameters of the
    benchmark. ``folder`` is appended to ``sys.path``, so that the module may be there. Raises
    ``UserError`` if the import fails or a parameter has no usable default.
    """
    if str(folder) not in sys.path:
        # At the end, so that no module of the folder shadows one of Python's.
        sys.path.append(str(folder))
    try:
        # The output of a module is in the logs of the ranks, which import it themselves.
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            params = list_params(load_target(target))
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(
            f"custom step {target!r} cannot be used: {kind}{error}{_locate(error)}"
        ) from error
    module = target.partition(":")[0].rpartition(".")[2]
    return BenchmarkDefinition(
        name=f"custom.{module}",
        target=target,
        help="a custom step",
        params=(MODE, *params),
        tags=("smoke", "node"),
    )


def _locate(error: BaseException) -> str:
    """Return the file and line of a user's code or library that raised the error: `` (FILE:LINE)``.

    Empty if parbench or the import itself raised it.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[2:]  # after those of parbench
        if "importlib" not in frame.filename
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def list_params(prepare: Callable[..., object]) -> tuple[Param, ...]:
    """Return declarations of the parameters of a user's function, except the first, ``world``.

    The type and the default of each parameter are those of the default in the function's signature.
    Raises ``UserError`` if there is no parameter ``world``, if parbench reserves the name of a
    parameter, or if a default is missing or is not a bool, int, float or str.
    """
    parameters = list(inspect.signature(prepare).parameters.values())
    if not parameters:
        raise UserError("its first argument must be the world: def prepare(world)")
    params = []
    for parameter in parameters[1:]:
        name, default = parameter.name, parameter.default
        if name in RUNNER_PARAMS or is_variable(name):
            raise UserError(f"parameter {name!r} has a name that parbench reserves: rename it")
        kind = _KINDS.get(type(default))
        if kind is None:
            raise UserError(f"parameter {name!r} needs a bool, int, float or str as its default")
        if kind == "int" and name.endswith("_bytes"):
            kind = "size"
        param = Param(name, kind, default, help="")
        param.parse(default)
        params.append(param)
    return tuple(params)
