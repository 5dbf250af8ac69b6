"""The sweep file: what is measured, on how many nodes, and how Slurm runs it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from parbench.bench.files import read_toml
from parbench.bench.plan.groups import MOST_RANKS
from parbench.bench.plan.params import Value, is_variable
from parbench.bench.plan.plan import Entry, PlanFile
from parbench.bench.text import UserError, parse_duration, parse_link

Distribution = Literal["block", "cyclic"]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
Counts = Annotated[list[Count], msgspec.Meta(min_length=1)]
_RESERVED_OPTIONS = (
    "array chdir error job-name nodes no-kill no-requeue ntasks ntasks-per-node open-mode output",
    "parsable partition requeue signal test-only time wait wrap",
)
"""The options of sbatch that parbench sets or does not support."""


class SlurmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[slurm]``."""

    partition: str | None = None
    time: str | None = None  # the limit of each job
    options: dict[str, bool | int | str] = {}  # long options of sbatch
    requeue: bool = True
    on_dead_node: Literal["fail", "go-on"] = "fail"

    def format_options(self) -> dict[str, str | bool]:
        """Return the sbatch options by name, without those that are false.

        The value is True for an option without a value.
        """
        texts: dict[str, str | bool] = {}
        for name, value in self.options.items():
            if value is not False:
                texts[name] = value if value is True else str(value)
        return texts


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a sweep file."""

    name: str | None = None  # by default the name of the file
    out: str = "sweeps"
    mode: Literal["one", "array"] = "one"
    nodes: Count | Counts
    ntasks_per_node: Count | Counts = 1
    distribution: Distribution | list[Distribution] = "block"
    repeat: Count = 1
    preset: str | None = None
    repetitions: Count | None = None
    budget: str | float | None = None
    timeout: str | float | None = None
    backend: Literal["gloo", "nccl"] | None = None
    device: Literal["cpu", "cuda"] | None = None
    link: str | None = None
    case: tuple[Entry, ...] = ()
    matrix: dict[str, list[Value]] = {}
    exclude: tuple[dict[str, Value | list[Value]], ...] = ()
    environment: dict[str, Value | list[Value]] = {}
    slurm: SlurmTable = SlurmTable()
    prologue: tuple[str, ...] = ()
    container: str | None = None

    def make_plan_file(self) -> PlanFile:
        """Return the plan file with the settings that all points share, without their cases."""
        names = [name for name in PlanFile.__struct_fields__ if name not in ("nproc", "case")]
        return PlanFile(**{name: getattr(self, name) for name in names})


@contextmanager
def locate_errors(place: str) -> Iterator[None]:
    """Prefix the message of a ``UserError`` in the block with the place in the sweep file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def read_sweep_file(path: Path) -> SweepFile:
    """Return the content of a sweep file.

    Raises ``UserError`` with the file and the place that is wrong.
    """
    file = read_toml(path, "sweep file", SweepFile)
    with locate_errors(f"sweep file {path}"):
        _check(file)
    return file


def _check(file: SweepFile) -> None:
    """Raise ``UserError`` for a value that its type allows and parbench does not."""
    if file.slurm.time is not None:
        with locate_errors("$.slurm.time"):
            parse_duration(file.slurm.time)
    if file.link is not None:
        with locate_errors("$.link"):
            parse_link(file.link)
    for name in file.environment:
        if not is_variable(name):
            hint = "write capital letters, digits and underscores"
            raise UserError(f"$.environment: {name!r} is not allowed as a variable; {hint}")
    for name in file.slurm.options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            hint = "write it without dashes in front"
            raise UserError(f"$.slurm.options: {name!r} is not a long option of sbatch; {hint}")
        if name in " ".join(_RESERVED_OPTIONS).split():
            problem = "is set by parbench, or not supported; leave it out"
            raise UserError(f"$.slurm.options: {name!r} {problem}")
