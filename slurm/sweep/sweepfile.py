"""The sweep file: what is measured, on how many nodes, and how Slurm runs it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from parbench.bench.files import read_toml
from parbench.bench.plan.groups import MAX_RANKS
from parbench.bench.plan.params import Value, is_variable
from parbench.bench.plan.plan import Entry
from parbench.bench.text import UserError, parse_duration, parse_link

Distribution = Literal["block", "cyclic"]
"""The order of ranks over nodes, as for srun: see ``SweepFile.distribution``."""
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
"""A number of nodes, tasks, runs or repetitions, at least 1."""
Counts = Annotated[list[Count], msgspec.Meta(min_length=1)]
"""A list with at least one number of nodes or tasks."""
_RESERVED_OPTIONS = (
    "array chdir error job-name nodes no-kill no-requeue ntasks ntasks-per-node open-mode output",
    "parsable partition requeue signal test-only time wait wrap",
)
"""The options of sbatch that a sweep file cannot set: parbench sets or does not support them."""


class SlurmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[slurm]`` of a sweep file: the partition, time limit and other job settings."""

    partition: str | None = None
    """The partition of the jobs, None for Slurm's default."""
    time: str | None = None
    """The time limit of each job, such as ``2h``. None computes it from the points' durations."""
    options: dict[str, bool | int | str] = {}
    """Further long options of sbatch, by name without dashes. True is an option without a value.

    False leaves an option out.
    """
    requeue: bool = True
    """True if Slurm may run a job again, and a job whose time was too short requeues itself."""
    on_dead_node: Literal["fail", "go-on"] = "fail"
    """The reaction of a job to a node that dies.

    With ``fail``, the job measures no more points (runs). With ``go-on``, it measures the points
    that need no more nodes than it has left.
    """

    def format_options(self) -> dict[str, str | bool]:
        """Return the values of ``options`` for sbatch, by name without dashes, without False ones.

        The value is True for an option that has no value, otherwise text.
        """
        texts: dict[str, str | bool] = {}
        for name, value in self.options.items():
            if value is not False:
                texts[name] = value if value is True else str(value)
        return texts


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a sweep file, the settings of many runs of ``parbench run``.

    A setting with a list of values is an axis of the sweep. A run, called a point, is made for each
    combination of values.
    """

    name: str | None = None
    """The name of the sweep. None stands for the name of the file without its extension."""
    out: str = "sweeps"
    """The folder in which the folder of the sweep is created."""
    mode: Literal["one", "array"] = "one"
    """``one`` measures all points in one job, ``array`` each point in a task of a job array."""
    nodes: Count | Counts
    """The number of nodes of a run. A list is an axis of the sweep."""
    ntasks_per_node: Count | Counts = 1
    """The number of ranks on each node. A list is an axis of the sweep."""
    distribution: Distribution | list[Distribution] = "block"
    """The order of ranks over nodes.

    With ``block``, consecutive ranks fill one node after another. With ``cyclic``, consecutive
    ranks are on successive nodes. A list is an axis of the sweep.
    """
    repeat: Count = 1
    """The number of separate runs of each combination of settings."""
    preset: Literal["smoke", "node", "full"] | None = None
    """The name of a preset of cases and settings, None for the default of ``parbench run``."""
    repetitions: Count | None = None
    """The number of times that a run starts all ranks. None lets ``parbench run`` choose it."""
    budget: str | float | None = None
    """The time budget of a run, as text such as ``10m`` or in seconds.

    None is the default of ``parbench run``.
    """
    timeout: str | float | None = None
    """The time after which a case counts as hung, as text such as ``20s`` or in seconds.

    None is the default of ``parbench run``.
    """
    backend: Literal["gloo", "nccl"] | None = None
    """The backend of torch.distributed. None is ``nccl`` on GPUs and ``gloo`` on CPUs."""
    device: Literal["cpu", "cuda"] | None = None
    """The device of the ranks. None is ``cuda`` on nodes with GPUs, otherwise ``cpu``."""
    link: str | None = None
    """The speed of the links between nodes, such as ``400Gbit``.

    Reports compare measured bandwidths with it. None if the speed is unknown.
    """
    case: tuple[Entry, ...] = ()
    """The cases to measure. If there are none, the preset selects the cases."""
    matrix: dict[str, list[Value]] = {}
    """The list of values of each case parameter that is an axis of the sweep, by parameter name."""
    exclude: tuple[dict[str, Value | list[Value]], ...] = ()
    """Tables that describe combinations of settings to leave out.

    A table has one value or a list of values for some axes, keyed by axis. It leaves out each
    combination that has one of the listed values on each of these axes.
    """
    environment: dict[str, Value | list[Value]] = {}
    """The value, or the list of values, of environment variables of a run, by name.

    A list is an axis of the sweep. An empty value removes the variable.
    """
    slurm: SlurmTable = SlurmTable()
    """The partition, time limit and other settings of the jobs."""
    prologue: tuple[str, ...] = ()
    """Lines of shell that each batch script runs before parbench."""
    container: str | None = None
    """The image of a container for the ranks, the value of srun's ``--container-image``."""

    def list_run_options(self) -> list[str]:
        """Return the settings that all runs share as arguments of ``parbench run``."""
        arguments = []
        for name in ("preset", "repetitions", "budget", "timeout", "backend", "device", "link"):
            value = getattr(self, name)
            if value is not None:
                arguments += [f"--{name}", str(value)]
        return arguments


@contextmanager
def locate_errors(place: str) -> Iterator[None]:
    """Prefix the message of a ``UserError`` in the ``with`` block with ``place``.

    ``place`` is a text such as ``$.slurm.time`` that locates the error in the sweep file.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}", hint=error.hint) from error


def read_sweep_file(path: Path) -> SweepFile:
    """Return the content of a sweep file in TOML, after checking it.

    Raises ``UserError`` with the file and the place in it that is wrong, such as ``$.slurm.time``.
    """
    file = read_toml(path, "sweep file", SweepFile)
    with locate_errors(f"sweep file {path}"):
        _check(file)
    return file


def _check(file: SweepFile) -> None:
    """Raise ``UserError`` for a value of the right type that parbench does not accept.

    These are durations and link speeds that cannot be parsed, and names of environment variables
    and of sbatch options that are not allowed.
    """
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
            hint = (
                "set nodes and ntasks_per_node at the top of the file, and time, partition and "
                "requeue in [slurm]; leave out the others"
            )
            problem = f"$.slurm.options: {name!r} is set by parbench, or not supported"
            raise UserError(problem, hint=hint)
