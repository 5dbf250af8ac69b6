"""The sweep file: what is measured on how many nodes, in which order of things, and what Slurm is told."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from bench.machine.world_spec import BACKENDS, DEVICES
from bench.plan.aliases import present_params
from bench.plan.params import Value
from bench.plan.plan import FileCase
from bench.text import UserError, did_you_mean, listed, parse_duration, parse_link, read_toml
from slurm.sweep.points import Mode, OnDeadNode, Placement

Count = Annotated[int, msgspec.Meta(ge=1)]
Counts = Annotated[list[Count], msgspec.Meta(min_length=1)]

OURS = (
    *("array", "chdir", "error", "job-name", "nodes", "no-kill", "no-requeue", "ntasks", "ntasks-per-node", "output"),
    *("open-mode", "parsable", "requeue", "signal", "test-only", "time", "wait", "wrap"),
)
"""Options of sbatch that parbench sets itself."""


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[environment.NAME]``: the variables that every point is measured with, in turn with the other ones."""

    variables: dict[str, bool | int | float | str] = {}

    def texts(self) -> dict[str, str]:
        """Return the variables as the ranks' processes get them."""
        return {name: _text(value) for name, value in self.variables.items()}


class SlurmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[slurm]``: what sbatch is told; ``time`` is for each job, ``options`` are passed through as they are."""

    partition: str | None = None
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    gres: str | None = None
    options: dict[str, bool | int | str] = {}
    requeue: bool = True
    signal_seconds: Count = 120
    on_dead_node: OnDeadNode = "fail"

    def all_options(self) -> dict[str, str | bool]:
        """Return sbatch's long options, without those that parbench sets itself."""
        named = ("account", "qos", "constraint", "exclude", "nodelist", "reservation", "gres")
        given = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        passed = {name: value if isinstance(value, bool) else str(value) for name, value in self.options.items()}
        return {**given, **{name: value for name, value in passed.items() if value is not False}}


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; without ``name`` it is the file's own."""

    name: str | None = None
    out: str = "sweeps"
    mode: Mode = "one"
    nodes: Count | Counts | None = None
    ntasks_per_node: Count | Counts | None = None
    placement: Placement | Annotated[list[Placement], msgspec.Meta(min_length=1)] | None = None
    repeat: Count = 1
    preset: str | None = None
    launches: Count | None = None
    budget: str | float | None = None
    timeout: str | float | None = None
    backend: str | None = None
    device: str | None = None
    link: str | None = None
    case: tuple[FileCase, ...] = ()
    matrix: dict[str, list[Value]] = {}
    zip: tuple[dict[str, list[Value]], ...] = ()
    exclude: tuple[str, ...] = ()
    environment: dict[str, Environment] = {}
    slurm: SlurmTable = SlurmTable()
    prologue: tuple[str, ...] = ()
    container: str | None = None
    python: str | None = None


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)


def read_sweep_file(path: Path) -> SweepFile:
    """Return the file's contents; ``UserError`` names the file and the place in it that is wrong."""
    file = read_toml(path, "sweep file", SweepFile)
    try:
        file = _by_present_names(file)
        _check(file)
    except UserError as error:
        raise UserError(f"sweep file {path}: {error}") from error
    return file


def _by_present_names(file: SweepFile) -> SweepFile:
    replace = msgspec.structs.replace
    return replace(
        file,
        matrix=present_params(file.matrix, "$.matrix"),
        zip=tuple(present_params(table, "$.zip") for table in file.zip),
        case=tuple(replace(case, set=present_params(case.set, case.name)) for case in file.case),
    )


def _check(file: SweepFile) -> None:
    """Refuse what has the right type and no meaning; each sentence begins with the place."""
    for name, text in (("budget", file.budget), ("timeout", file.timeout), ("slurm.time", file.slurm.time)):
        _parsed(f"$.{name}", text, parse_duration)
    _parsed("$.link", file.link, parse_link)
    _check_where(file)
    for name, environment in file.environment.items():
        for variable in environment.variables:
            if not _NAME.fullmatch(variable):
                raise UserError(f"$.environment.{name}.variables: {variable!r} is no name of an environment variable")
    _check_options(file.slurm)
    for index, line in enumerate(file.prologue):
        if "\n" in line:
            raise UserError(f"$.prologue[{index}]: {line!r} is more than one line: write each as its own")


def _check_where(file: SweepFile) -> None:
    for name, given, allowed in (("backend", file.backend, BACKENDS), ("device", file.device, DEVICES)):
        if given is not None and given not in allowed:
            raise UserError(
                f"$.{name}: {given!r} is not known{did_you_mean(given, allowed)}; allowed: {listed(allowed)}"
            )
    if file.backend == "nccl" and file.device == "cpu":
        raise UserError("$.backend: 'nccl' moves data between GPUs, and $.device is 'cpu'; allowed: gloo")


def _check_options(table: SlurmTable) -> None:
    for name, value in table.options.items():
        if not _OPTION.fullmatch(name):
            raise UserError(f"$.slurm.options: {name!r} is no long option of sbatch; write it without dashes")
        if name in OURS:
            raise UserError(f"$.slurm.options: {name!r} is for parbench to set; leave it out")
        if name in SlurmTable.__struct_fields__:
            raise UserError(f"$.slurm.options: {name!r} has a key of its own: write $.slurm.{name}")
        if not str(value).isprintable():
            raise UserError(f"$.slurm.options: {name} = {value!r} is not one printable line")
    for name in ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "gres"):
        value = getattr(table, name)
        if value is not None and (not value.isprintable() or not value.strip()):
            raise UserError(f"$.slurm.{name}: {value!r} is not one printable line")


def _parsed(place: str, found: str | float | None, parse: Callable[[str], float]) -> None:
    """Refuse what cannot be parsed, with the place before what is wrong."""
    try:
        if found is not None:
            parse(str(found))
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _text(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
