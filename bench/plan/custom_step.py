"""Definitions of custom steps, from the functions ``module:function`` that a run names."""

import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from parbench.bench.plan.cases import BenchmarkDefinition
from parbench.bench.plan.catalogue import MODE, RUNNER_PARAMS
from parbench.bench.plan.params import Kind, Param, is_variable
from parbench.bench.text import UserError, format_list

_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
"""The type that a parameter of a custom step declares, by the Python type of its default."""


def define_custom_step(target: str, folder: Path) -> BenchmarkDefinition:
    """Import a user's function ``package.module:function`` and declare it as a benchmark.

    Its parameters after ``world`` become parameters of the benchmark. Modules in ``folder`` can be
    imported too. Raises ``UserError`` if the import fails or a parameter has no usable default.
    """
    from parbench.bench.rank.runner import load_target  # Other runs start without torch.

    _add_to_path(folder)
    environment = dict(os.environ)
    try:
        # The output of a module is in the logs of the ranks, which import it themselves.
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            params = list_params(load_target(target))
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"custom step {target!r} cannot be used: {kind}{error}") from error
    finally:
        # Variables that the module sets are for the ranks, which import it themselves.
        os.environ.clear()
        os.environ.update(environment)
    module = target.partition(":")[0].rpartition(".")[2]
    return BenchmarkDefinition(
        name=f"custom.{module}",
        target=target,
        help="a custom step",
        params=(MODE, *params),
        tags=("smoke", "node"),
    )


def hash_source(target: str, folder: Path) -> str:
    """Return the SHA-256, in hex, of the file that defines ``package.module:function``.

    Modules in ``folder`` are found too. Returns an empty text if there is no such file.
    """
    _add_to_path(folder)
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _add_to_path(folder: Path) -> None:
    """Append a folder to ``sys.path``, so that the modules in the folder can be imported.

    Nothing is done if ``sys.path`` already has the folder.
    """
    if str(folder) not in sys.path:
        # At the end, so that no module of the folder shadows one of Python's.
        sys.path.append(str(folder))


def list_params(prepare: Callable[..., object]) -> tuple[Param, ...]:
    """Return declarations of the parameters of a user's function, except the first, ``world``.

    Raises ``UserError`` if a parameter has no default, or a default that is not a bool, int, float
    or str.
    """
    _, *parameters = inspect.signature(prepare).parameters.values()
    return tuple(_make_param(parameter.name, parameter.default) for parameter in parameters)


def _make_param(name: str, default: Any) -> Param:
    """Return the declaration of a user function's parameter, with a type from its default.

    Raises ``UserError`` if the name is reserved or the default is missing or not allowed.
    """
    if name in RUNNER_PARAMS:
        names = format_list(RUNNER_PARAMS)
        raise UserError(f"parameter {name!r} is parbench's own, as are {names}: rename it")
    if is_variable(name):
        raise UserError(f"parameter {name!r} has the name of an environment variable: rename it")
    if default is inspect.Parameter.empty:
        raise UserError(f"parameter {name!r} has no default: give it one, --set changes it")
    kind = _KINDS.get(type(default))
    if kind is None:
        raise UserError(
            f"parameter {name!r} has the default {default!r}: use a bool, int, float or str"
        )
    if kind == "int" and name.endswith("_bytes"):
        kind = "size"
    param = Param(name, kind, default, help="")
    param.parse(default)
    return param
