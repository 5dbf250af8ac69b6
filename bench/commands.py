"""The commands that measure: run, list, doctor and check.

A case is a benchmark with values for its parameters. A run is a folder with the records of its
cases.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from parbench.bench.command_line import (
    FILE_PATH,
    OUT_HELP,
    RUNS_FOLDER,
    CountRange,
    RunPath,
    format_option,
)
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.text import UserError

if TYPE_CHECKING:
    from parbench.bench.plan.options import Options
    from parbench.bench.results.tables import Document


@dataclass(frozen=True, kw_only=True)
class AppHooks:
    """The benchmarks and the functions of other packages that the commands use.

    ``bench`` does not import these packages. The program passes this object to every command
    instead.
    """

    modules: Sequence[str]
    """The names of the Python modules that define the benchmarks."""
    report_modules: Sequence[str]
    """The names of the modules that ``show_run`` needs, which a run imports while torch loads."""
    show_run: Callable[[Path, str, Path | None], int]
    """A function that prints the results of a run and returns the exit code of the command.

    Its arguments are the folder of the run, the format (``tables``, ``nccl-tests`` or ``json``),
    and a file of limits to check, None without one. In format ``json`` it prints no records,
    because they were printed during the run.
    """
    write_report: Callable[[Sequence[Path], Path], None]
    """A function that writes one HTML page about one or several runs.

    Its arguments are the folders of the runs and the path of the page.
    """
    render_document: "Callable[[Document, str], bytes]"
    """A function that returns a document with tables and figures, such as a plan, as bytes.

    Its arguments are the document and the format: ``tables`` (text), or a format of
    ``parbench report``.
    """
    write_figures: "Callable[[Document, Path, Sequence[str]], None]"
    """A function that writes each figure of a document to a folder.

    Its arguments are the document, the folder, and the file formats, such as ``png``.
    """


_RUN_EXAMPLES = """\b
Examples:
  parbench run                                      measure this node, in under 2 min
  parbench run --preset smoke 'collective.*'
  parbench run all_reduce --sizes 1M                one operation at one size, in 10 s
  parbench run all_reduce ddp p2p.sendrecv          several cases
  parbench run all_reduce --sizes 1K:64M:x4 --set dtype=float32,bfloat16
  parbench run all_reduce --sizes 1K:64M:x4 --env NCCL_ALGO=Ring,Tree,NVLS
  parbench run ddp --set layers=2,4 --repetitions 3
  parbench run 'all_*' --group dp=2,tp=2:tp --nproc 4
  parbench run hybrid --mesh dp=2,pp=2,tp=2         one step on a mesh of 8 ranks
  parbench run all_reduce --sizes 1K:64M:x4 --format nccl-tests
  parbench run --launcher srun --nodes 4 --nproc 8  8 ranks on each of 4 nodes
  parbench run mypackage.mystep:prepare             a custom step
  parbench run ddp --limits limits.toml             exit code 1 if a metric exceeds its limit
  parbench run --resume runs/20260101T000000Z-host-1a2b3c

\b
Exit codes: 0 fine; 1 a wrong result, or a limit that is not met; 2 bad input;
3 the metric of a limit is unknown; 4 something did not run.
"""
"""The text after the options in the help of ``parbench run``."""
_RESUME_OPTIONS = ("resume", "nodes", "budget", "form", "limits")
"""The names of the parameters that ``--resume`` allows."""
limits_option = click.option(
    "--limits",
    metavar="FILE",
    type=FILE_PATH,
    help='Check limits of a TOML file, such as "workload.ddp" = { exposed_fraction = "<=10%" }.',
)
"""A decorator that adds ``--limits``, a file of limits on metrics, to a command."""


def complete_cases(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of the benchmarks that begin with the text ``incomplete`` of a shell.

    The names have no kind, such as ``collective.``, unless the text contains a dot.
    """
    from parbench.bench.plan.cases import load_catalogue

    names = [
        definition.name if "." in incomplete else definition.short_name
        for definition in load_catalogue(context.obj.modules)
    ]
    return [name for name in names if name.startswith(incomplete)]


@click.command(epilog=_RUN_EXAMPLES, context_settings={"show_default": True})
@click.argument("cases", metavar="[CASE]...", nargs=-1, shell_complete=complete_cases)
@click.option(
    "--preset",
    type=click.Choice(("smoke", "node", "full")),
    help="Cases and duration: 90 s, under 2 min or 10 min. Default without CASE: node.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Set a parameter. Several values: measure each.",
)
@click.option("--sizes", metavar="SIZES", help="Short for --set size_bytes=: 1K:64M:x4 or 1K,3M.")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Set an environment variable of all ranks. Several values: measure each. NAME= removes "
    "it.",
)
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="Mesh of the step hybrid, outermost axis first: dp=2,tp=4. ep and etp lie inside other "
    "axes.",
)
@click.option(
    "--group",
    metavar="GROUP[,...]",
    help="Groups of ranks: node, across, pairs, or an axis of a mesh of all ranks: dp=2,tp=4:tp.",
)
@click.option(
    "--cases",
    "cases_file",
    metavar="FILE",
    type=FILE_PATH,
    help="TOML or JSON file of cases, instead of CASE.",
)
@click.option(
    "--repetitions",
    type=CountRange(65_536),  # NumRepetitions
    help="Restarts of all ranks, from which intervals are computed. Default: the preset's, 3 for "
    "named cases without --preset and --budget.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time for the whole run: 90s, 10m. Default: the preset's, about 1 s per named operation, "
    "9 s per custom step and 18 s per training step, at least 6 s.",
)
@click.option(
    "--timeout", metavar="TIME", help="Time without a new step after which a case counts as hung."
)
@click.option(
    "--resume", type=RunPath(), metavar="RUN", help="Continue a run: measure what it lacks."
)
@click.option(
    "--nproc",
    type=int,
    help="Ranks on each node. Default: the mesh's, one per GPU, or one per core up to 8.",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="Default: cuda with at least two GPUs (one with --nproc 1), otherwise cpu.",
)
@click.option(
    "--backend", type=click.Choice(("gloo", "nccl")), help="Default: nccl on GPUs, otherwise gloo."
)
@click.option(
    "--launcher",
    type=click.Choice(("local", "srun")),
    default="local",
    help="What starts the ranks: parbench on this node, or srun in a Slurm allocation.",
)
@click.option(
    "--nodes",
    metavar="NUMBER|NODES",
    help="With srun: number of nodes, or nodes such as n1,n[3-4]. Default: the allocation's.",
)
@click.option(
    "--distribution",
    type=click.Choice(("block", "cyclic")),
    help="With srun: block fills a node first. Default: block.",
)
@click.option("--inject", hidden=True, help="Disturb a rank: late:1:3ms, slow:1:10%, corrupt:1.")
@format_option(
    type=click.Choice(("tables", "json", "nccl-tests")),
    default="tables",
    help="What to print. json: a line for each record. nccl-tests: its table, and its mode "
    "(pipelined) unless set.",
)
@click.option("--out", type=FILE_PATH, default=RUNS_FOLDER, help=OUT_HELP)
@limits_option
@click.option(
    "--link",
    metavar="SPEED",
    help="Speed of the links, such as 400Gbit. Efficiency is relative to it.",
)
@click.pass_obj
def run(
    hooks: AppHooks,
    /,
    *,
    cases: tuple[str, ...],
    limits: Path | None,
    out: Path,
    resume: Path | None,
    form: str,
    **options: Any,
) -> None:
    """Measure collectives, point-to-point and training steps.

    CASE is a name or a glob, such as ddp or 'p2p.*', or module:function for a custom step. parbench
    list shows all names. Without a CASE the preset chooses.

    Results are verified before timing counts. The last line printed is the run's folder, which
    holds report.html.
    """
    from parbench.bench.launch.measure import run_options
    from parbench.bench.launch.processes import convert_sigterm_to_interrupt, exit_now

    click.get_current_context().with_resource(convert_sigterm_to_interrupt())
    if resume is not None:
        # The run has its own plan, whatever the environment variables are.
        refuse_options_of_plan()
        options = {name: options[name] for name in ("budget", "nodes") if _is_typed(name)}
    defaults = {"mode": "pipelined"} if form == "nccl-tests" else {}
    path = run_options(
        make_options(cases, options, defaults),
        hooks.modules,
        out=out,
        resume_path=resume,
        as_json=form == "json",
        limits=limits,
        report_modules=() if form == "json" else hooks.report_modules,
    )
    if path is None:
        return
    if form == "json":
        click.echo(path, err=True)
    code = hooks.show_run(path, form, limits)
    if "RANK" in os.environ:
        exit_now(code)
    sys.exit(code)


def make_options(
    cases: Sequence[str], options: Mapping[str, Any], defaults: Mapping[str, str]
) -> "Options":
    """Return the options of a run from the arguments of the command line.

    Args:
        cases: names and globs of benchmarks, and custom steps as ``module:function``.
        options: the values of the other arguments, by the name that click passes to the command.
        defaults: the values of benchmark parameters that the user did not set, by name.
    """
    from parbench.bench.machine.slurm_allocation import parse_nodes
    from parbench.bench.plan.groups import join_mesh_axes
    from parbench.bench.plan.options import Options
    from parbench.bench.plan.plan import read_cases_file

    fields = dict(options)
    cases_file = fields.pop("cases_file", None)
    if cases_file is not None:
        if any(":" not in case for case in cases):
            raise UserError("--cases and CASE both name cases", hint="leave out one of them")
        fields["entries"] = read_cases_file(cases_file)
    nodes = fields.pop("nodes", None)
    if nodes is not None:
        fields["nodes"], fields["nodelist"] = parse_nodes(nodes)
    settings = [*fields.pop("settings", ()), *fields.pop("env", ())]
    for option, parameter in (("sizes", "size_bytes"), ("mesh", "mesh"), ("group", "group")):
        text = fields.pop(option, None)
        if text is not None:
            settings.append(f"{parameter}={join_mesh_axes(text)}")
    return Options(
        names=tuple(case for case in cases if ":" not in case),
        targets=tuple(case for case in cases if ":" in case),
        settings={**defaults, **parse_settings(settings)},
        **fields,
    )


def refuse_options_of_plan() -> None:
    """Raise ``UserError`` if the command line has an option that ``--resume`` does not allow.

    The plan of the resumed run already sets the values of such options.
    """
    for param in click.get_current_context().command.params:
        if _is_typed(str(param.name)) and param.name not in _RESUME_OPTIONS:
            name = "CASE" if param.name == "cases" else param.opts[-1]
            raise UserError(
                f"{name} is not allowed with --resume, which uses the plan of the run",
                hint="allowed are --budget, --nodes, --limits and --format",
            )


def _is_typed(name: str) -> bool:
    """Return True if a parameter of the running command was given on the command line.

    ``name`` is the name of the parameter in the command's function. The result is False for a
    default, also for one that an environment variable sets.
    """
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--set`` and ``--env``, written ``NAME=VALUE``, as text by name.

    ``settings`` are the arguments of the options. Raises ``UserError`` if one has no equals sign or
    a name occurs twice.
    """
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UserError(f"{setting!r} is not NAME=VALUE or NAME=VALUE,VALUE")
        if name in texts:
            hint = f"leave one out, or write several values as {name}=VALUE,VALUE"
            raise UserError(f"{name} is given twice", hint=hint)
        texts[name] = text
    return texts


@click.command("list", epilog="Example: parbench list ddp 'p2p.*'")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_cases)
@click.pass_obj
def list_cases(hooks: AppHooks, names: tuple[str, ...]) -> None:
    """List the benchmarks and presets; with a name, its parameters."""
    from parbench.bench.plan.cases import load_catalogue, select_definitions
    from parbench.bench.plan.listing import render_details, render_names

    definitions = select_definitions(load_catalogue(hooks.modules), names)
    width = shutil.get_terminal_size((100, 24)).columns
    click.echo(render_details(definitions, width) if names else render_names(definitions))


@click.command(epilog="Example: parbench doctor --selftest")
@format_option(type=click.Choice(("tables", "json")), default="tables")
@click.option(
    "--selftest",
    is_flag=True,
    help="Disturb one rank as a test, and check that parbench names it.",
)
@click.pass_obj
def doctor(hooks: AppHooks, /, *, form: str, selftest: bool) -> None:
    """Check this machine for disturbances of a measurement.

    Prints the hardware and settings, what disturbs, and how to fix it.
    """
    if selftest:
        from parbench.bench import selftest as selftest_module

        results = selftest_module.selftest(hooks.modules)
        click.echo(selftest_module.render(results))
        sys.exit(ExitCode.OK if all(result.is_proved for result in results) else ExitCode.BAD)
    import msgspec

    from parbench.bench.machine import doctor as doctor_module

    findings = doctor_module.examine_this_host(os.environ)
    if form == "json":
        click.echo(msgspec.json.encode(findings))
    else:
        click.echo(doctor_module.render(findings))


_CHECK_EXAMPLES = """\b
Examples:
  parbench check                          this host, in about a minute
  parbench check --hosts n1,n2,n3         several over ssh, at the same time
  parbench check --inject slow:1:20%      test that it names a slow device
  parbench slurm screen --nodes 64        every node of a Slurm cluster, and the links between them

\b
Exit codes: 0 all fine; 1 a device or link is bad; 2 bad input; 4 something did not run.
"""
"""The text after the options in the help of ``parbench check``."""


@click.command(epilog=_CHECK_EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), help="Default: cuda where there is a GPU."
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="GPUs that the host should have, or groups of cores. Default: its GPUs, or up to 8 groups.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time for all repetitions. Default: 60s for GPUs, 40s for cores.",
)
@click.option(
    "--hosts",
    metavar="HOST,...",
    help="Check these hosts over ssh, each separately, all at the same time. A list may be "
    "n[01-03].",
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    default="ssh -o BatchMode=yes -o ConnectTimeout=10",
    help="What runs a command on a host.",
)
@click.option("--inject", metavar="WHAT", help="Disturb a rank as a test: slow:1:20% or corrupt:1.")
@click.option(
    "--out",
    type=FILE_PATH,
    default=Path("runs/check"),
    help=OUT_HELP,
)
@format_option(type=click.Choice(("tables", "json")), default="tables")
@click.pass_obj
def check(
    hooks: AppHooks,
    /,
    *,
    hosts: str | None,
    ssh: str,
    form: str,
    **options: Any,
) -> None:
    """Check that each GPU or core computes correctly and is as fast as its peers.

    Runs GEMMs with known results, copies, and exchanges of each pair and of all, three times. Then
    reads the state of the driver. Prints a line for each device with its verdict, and what to do.
    A rate is that of the median time of samples, or of the 5 % quantile on cores.
    """
    import msgspec

    from parbench.bench.check import check as checks
    from parbench.bench.check import hosts as host_checks
    from parbench.bench.check.health import Health
    from parbench.bench.check.show import render
    from parbench.bench.text import parse_duration

    report: dict[str, Any]
    results: tuple[Health, ...]
    if hosts is None:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the numbers of nvidia-smi
        results = (checks.check(hooks.modules, os.environ, **options),)
        report = checks.to_document(results[0])
        code = results[0].exit_code
    else:
        names = host_checks.parse_hosts(hosts)
        arguments = []
        for name, value in options.items():
            if value is not None:
                arguments += [f"--{name}", str(value)]
        seconds = parse_duration(options["budget"] or checks.DEFAULT_BUDGETS["cuda"])
        results = host_checks.check_hosts(names, arguments, agent=ssh, seconds=seconds)
        results = host_checks.compare_hosts(results)
        code = combine_exit_codes(health.exit_code for health in results)
        report = {"code": code, "hosts": [checks.to_document(health) for health in results]}
    click.echo(msgspec.json.encode(report) if form == "json" else render(results))
    sys.exit(code)
