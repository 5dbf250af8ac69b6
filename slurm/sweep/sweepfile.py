"""The sweep file: what is measured on how many nodes, in which order of things, and what Slurm is told."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from parbench.bench.files import read_toml
from parbench.bench.machine.world_spec import BACKENDS, DEVICES, check_known
from parbench.bench.plan.groups import MOST_RANKS
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import Entry, PlanFile
from parbench.bench.text import UserError, parse_duration, parse_link
from parbench.slurm.sweep.folder import Distribution, Mode, OnDeadNode

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
Counts = Annotated[list[Count], msgspec.Meta(min_length=1)]

_OURS = (
    *(
        "array",
        "chdir",
        "error",
        "job-name",
        "nodes",
        "no-kill",
        "no-requeue",
        "ntasks",
        "ntasks-per-node",
        "output",
    ),
    *(
        "open-mode",
        "parsable",
        "partition",
        "requeue",
        "signal",
        "test-only",
        "time",
        "wait",
        "wrap",
    ),
)
"""Options of sbatch that parbench sets or does not support."""


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[environment.NAME]``: the variables that every point is measured with, in turn with the other ones."""

    variables: dict[str, bool | int | float | str] = {}

    def texts(self) -> dict[str, str]:
        """Return the variables as the ranks' processes get them."""
        return {
            name: str(v).lower() if isinstance(v, bool) else str(v)
            for name, v in self.variables.items()
        }


class SlurmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[slurm]``: ``time`` is the limit of each job, ``options`` are further long options of sbatch."""

    partition: str | None = None
    time: str | None = None
    options: dict[str, bool | int | str] = {}
    requeue: bool = True
    on_dead_node: OnDeadNode = "fail"

    def all_options(self) -> dict[str, str | bool]:
        """Return ``options`` as text; an option without a value is True, and one that is false is left out."""
        texts = {
            name: value if isinstance(value, bool) else str(value)
            for name, value in self.options.items()
        }
        return {name: value for name, value in texts.items() if value is not False}


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; without ``name`` it is the file's own."""

    name: str | None = None
    out: str = "sweeps"
    mode: Mode = "one"
    nodes: Count | Counts | None = None
    ntasks_per_node: Count | Counts | None = None
    distribution: (
        Distribution | Annotated[list[Distribution], msgspec.Meta(min_length=1)] | None
    ) = None
    repeat: Count | None = None
    preset: str | None = None
    repetitions: Count | None = None
    budget: str | float | None = None
    timeout: str | float | None = None
    backend: str | None = None
    device: str | None = None
    link: str | None = None
    case: tuple[Entry, ...] = ()
    matrix: dict[str, list[Value]] = {}
    zip: tuple[dict[str, list[Value]], ...] = ()
    exclude: tuple[dict[str, Value | list[Value]], ...] = ()
    environment: dict[str, Environment] = {}
    slurm: SlurmTable = SlurmTable()
    prologue: tuple[str, ...] = ()
    container: str | None = None
    python: str | None = None

    def plan(self) -> PlanFile:
        """Return what every point's plan file contains, without its cases."""
        names = (name for name in PlanFile.__struct_fields__ if name not in ("nproc", "case"))
        return PlanFile(**{name: getattr(self, name) for name in names})


@contextmanager
def at(place: str) -> Iterator[None]:
    """Begin what is refused within the block with the place that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def read_sweep_file(path: Path) -> SweepFile:
    """Return the file's contents; ``UserError`` names the file and the place in it that is wrong."""
    file = read_toml(path, "sweep file", SweepFile)
    with at(f"sweep file {path}"):
        _check(file)
        _check_job(file)
    return file


def _check(file: SweepFile) -> None:
    """Refuse what has the right type and no meaning; each sentence begins with the place."""
    texts = {
        "budget": file.budget,
        "timeout": file.timeout,
        "slurm.time": file.slurm.time,
        "link": file.link,
    }
    for name, text in texts.items():
        with at(f"$.{name}"):
            if text is not None:
                (parse_link if name == "link" else parse_duration)(str(text))
    check_known("$.backend:", file.backend, BACKENDS)
    check_known("$.device:", file.device, DEVICES)
    if file.backend == "nccl" and file.device == "cpu":
        raise UserError(
            "$.backend: 'nccl' moves data between GPUs, and $.device is 'cpu'; allowed: gloo"
        )
    for name, environment in file.environment.items():
        for variable in environment.variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise UserError(
                    f"$.environment.{name}.variables: {variable!r} is no name of an environment variable"
                )


def _check_job(file: SweepFile) -> None:
    for name, value in file.slurm.options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(
                f"$.slurm.options: {name!r} is not a long option of sbatch; write it without dashes"
            )
        if name in _OURS:
            raise UserError(
                f"$.slurm.options: parbench sets {name!r} itself or does not support it; leave it out"
            )
        if not str(value).isprintable():
            raise UserError(f"$.slurm.options: {name} = {value!r} is not one printable line")
    partition = file.slurm.partition
    if partition is not None and (not partition.isprintable() or not partition.strip()):
        raise UserError(f"$.slurm.partition: {partition!r} is not one printable line")
    for index, line in enumerate(file.prologue):
        if "\n" in line:
            raise UserError(
                f"$.prologue[{index}]: {line!r} is more than one line: write each as its own"
            )
