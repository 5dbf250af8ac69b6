"""The commands that measure: run, list, doctor and check."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from parbench.bench.choices import (
    BACKENDS,
    DEVICES,
    DISTRIBUTIONS,
    LAUNCHERS,
    PRESET_NAMES,
)
from parbench.bench.command_line import RUNS_FOLDER, CaseName, RunPath
from parbench.bench.exit_codes import ExitCode
from parbench.bench.text import UserError

if TYPE_CHECKING:
    from parbench.bench.results.tables import Document


@dataclass(frozen=True, kw_only=True)
class AppHooks:
    """The functions of other packages that the commands call."""

    modules: Sequence[str]
    """The modules with definitions of cases."""
    show_run: Callable[[Path, str, bool, Path | None], int]
    """Prints a run in one of ``FORMATS``, with all tables or the first page, and how it meets a
    file of limits. Returns the exit code."""
    compute_exit_code: Callable[[Path, Path | None], int]
    """Prints how a run meets a file of limits, and returns the exit code."""
    write_report: Callable[[Sequence[Path], Path], None]
    """Writes one page of several runs."""
    render_document: "Callable[[Document, str], bytes]"
    """Returns a plan in a form of reports, or as ``tables``."""


FORMATS = ("tables", "nccl-tests")
_NCCL_TESTS_OVERRIDES = {"mode": "pipelined", "placement": "out_of_place,in_place"}
_RUN_EXAMPLES = """\b
Examples:
  parbench run                                        measure this node, in under 2 min
  parbench run --preset smoke --only 'collective.*'
  parbench run --only all_reduce --sizes 1M           one operation at one size, in 10 s
  parbench run --only all_reduce --sizes 1K:64M:x4 --dtype float32,bfloat16
  parbench run --only ddp --set layers=2,4 --repetitions 3
  parbench run --only 'all_*' --mesh dp=2,tp=2 --group tp --nproc 4
  parbench run --only hybrid --mesh dp=2,pp=2,tp=2    one step on a mesh of 8 ranks
  parbench run --only all_reduce --inject late:1:3ms
  parbench run --only all_reduce --sizes 1K:64M:x4 --format nccl-tests
  parbench run --launcher srun --nodes 4 --ntasks-per-node 8    within an allocation
  parbench run --target mypackage.mystep:prepare      a custom step
  parbench run --only ddp --limits limits.toml      exit code 1 if a metric exceeds its limit
  parbench run --resume runs/20260101T000000Z-host-1a2b3c

\b
Exit codes: 0 fine; 1 a wrong result, or a limit that is not met; 2 bad input; 3 a limit that is undecided;
4 something did not run.
"""
limits_option = click.option(
    "--limits",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Check the limits in this TOML file, such as "workload.ddp" = { exposed_fraction = "<=10%" }.',
)


@click.command(epilog=_RUN_EXAMPLES, context_settings={"show_default": True})
@click.argument("cases", metavar="[CASE]...", nargs=-1, type=CaseName())
@click.option(
    "--preset",
    type=click.Choice(PRESET_NAMES),
    help="smoke (90 s), node (under 2 min; the default without --only) or full (10 min).",
)
@click.option(
    "--only",
    multiple=True,
    hidden=True,
    help="Deprecated.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Set a parameter, to each value.",
)
@click.option("--sizes", help="Short for --set size_bytes=: 1K:64M:x4, 1K,3M or 1M:8M:+1M.")
@click.option("--dtype", help="Short for --set dtype=: float32, bfloat16, ...")
@click.option(
    "--nproc",
    type=int,
    help="Ranks on this node; default: the mesh's, one per GPU, or one per core up to 8.",
)
@click.option(
    "--backend", type=click.Choice(BACKENDS), help="Default: nccl on GPUs, otherwise gloo."
)
@click.option(
    "--device", type=click.Choice(DEVICES), help="Default: cuda where there are two GPUs."
)
@click.option(
    "--repetitions",
    type=int,
    help="Number of times that all ranks are restarted: the repetitions behind the intervals. "
    "Default: the preset's, 3 for named cases.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time for the whole run: 90s, 10m. Default: the preset's, about 1 s per named case.",
)
@click.option("--timeout", metavar="TIME", help="Time after which a case counts as hung.")
@click.option(
    "--allow-single",
    is_flag=True,
    help="Allow --nproc 1, where nothing is communicated.",
)
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    default="local",
    help="What starts the ranks: parbench on this node, or srun on a Slurm allocation's nodes.",
)
@click.option(
    "--nodes",
    type=int,
    help="With srun: number of nodes; default: all of the allocation.",
)
@click.option(
    "--ntasks-per-node",
    type=int,
    help="With srun: ranks on each node; default: the allocation's.",
)
@click.option(
    "--distribution",
    type=click.Choice(DISTRIBUTIONS),
    help="With srun: block fills a node first. Default: block.",
)
@click.option(
    "--nodelist",
    metavar="NODES",
    help="With srun: these nodes of the allocation, as n1,n[3-4].",
)
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="Arrange the ranks as a mesh, outermost axis first: dp=2,tp=4. With --group: its axes are "
    "groups of ranks. Without: the mesh of the training step that --only names; ep and etp lie "
    "inside other axes.",
)
@click.option(
    "--group",
    help="Groups of ranks: a mesh axis, node, across, pairs, contiguous:K or strided:K.",
)
@click.option(
    "--inject",
    metavar="WHAT",
    help="Disturb a rank as a test: late:1:3ms, slow:1:10% or corrupt:1.",
)
@click.option(
    "--link",
    metavar="SPEED",
    help="The links' speed, such as 400Gbit; efficiency is printed against it.",
)
@click.option("--target", hidden=True, help="Deprecated.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="A TOML or JSON file of cases, and of: preset, nproc, backend, device, repetitions, budget, timeout.",
)
@limits_option
@click.option("--out", type=click.Path(path_type=Path), default=RUNS_FOLDER, help="Where runs go.")
@click.option(
    "--resume",
    type=RunPath(),
    metavar="RUN",
    help="Continue a run: measure what it lacks.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print records as JSON lines instead of tables.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(FORMATS),
    default="tables",
    help="What to print. As nccl-tests: modes and placements are its own, unless set.",
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Print every table and row, not only the summary page.",
)
@click.pass_obj
def run(
    hooks: AppHooks,
    /,
    *,
    cases: tuple[str, ...],
    only: tuple[str, ...],
    target: str | None,
    limits: Path | None,
    out: Path,
    resume: Path | None,
    as_json: bool,
    output_format: str,
    show_all: bool,
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
    from parbench.bench.plan.options import Options

    click.get_current_context().with_resource(convert_sigterm_to_interrupt())
    if as_json and output_format != "tables":
        problem = f"--json and --format {output_format} are different forms of the output"
        raise UserError(f"{problem}: leave out one of them")
    names = (*only, *cases)
    targets = tuple(name for name in names if ":" in name)
    if target is not None:
        targets = (*targets, target)
    if resume is not None:
        # It has its own plan, whatever the defaults of the project are.
        options = {name: value for name, value in options.items() if _is_typed(name)}
    settings = list(options.pop("settings", ()))
    for option, name in (("sizes", "size_bytes"), ("dtype", "dtype")):
        text = options.pop(option, None)
        if text is not None:
            settings.append(f"{name}={text}")
    plan_options = Options(
        only=tuple(name for name in names if ":" not in name),
        targets=targets,
        settings=parse_settings(settings),
        preset_overrides=_NCCL_TESTS_OVERRIDES if output_format == "nccl-tests" else {},
        **options,
    )
    path = run_options(
        plan_options,
        hooks.modules,
        out=out,
        resume_path=resume,
        as_json=as_json,
        limits=limits,
    )
    if path is None:
        return
    if as_json:
        click.echo(path, err=True)
        code = hooks.compute_exit_code(path, limits)
    else:
        code = hooks.show_run(path, output_format, show_all, limits)
    if "RANK" in os.environ:
        exit_now(code)
    sys.exit(code)


def _is_typed(name: str) -> bool:
    """Return whether an option is on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` options by name.

    Raises ``UserError`` if one has no equals sign or a name occurs twice.
    """
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            hint = "write NAME=VALUE, or NAME=VALUE,VALUE"
            raise UserError(f"--set {setting!r} is not understood", hint=hint)
        if name in texts:
            hint = f"write its values together: {name}=VALUE,VALUE"
            raise UserError(f"--set {name} is given twice", hint=hint)
        texts[name] = text
    return texts


_LIST_EXAMPLES = """\b
Examples:
  parbench list
  parbench list ddp
  parbench list 'p2p.*' --markdown
"""


@click.command("list", epilog=_LIST_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=CaseName())
@click.option("--markdown", is_flag=True, help="Print tables of names and parameters as Markdown.")
@click.pass_obj
def list_cases(hooks: AppHooks, names: tuple[str, ...], markdown: bool) -> None:
    """List what can be measured; with a name, its parameters."""
    from parbench.bench.plan import listing
    from parbench.bench.plan.cases import load_catalogue, select_definitions

    definitions = select_definitions(load_catalogue(hooks.modules), names)
    if markdown:
        text = listing.render_markdown(definitions)
    elif names:
        width = shutil.get_terminal_size((100, 24)).columns
        text = listing.render_details(definitions, width)
    else:
        text = listing.render_names(definitions)
    click.echo(text)


@click.command(epilog="Example: parbench doctor --selftest")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--selftest",
    is_flag=True,
    help="Disturb one rank as a test, and check that parbench names it.",
)
@click.option("--nproc", type=int, help="Ranks for --selftest; default: as parbench run.")
@click.pass_obj
def doctor(hooks: AppHooks, /, *, as_json: bool, selftest: bool, nproc: int | None) -> None:
    """Check this machine for disturbances of a measurement.

    Prints the hardware and settings, what disturbs, and how to fix it.
    """
    if selftest:
        from parbench.bench import selftest as selftest_module

        results = selftest_module.selftest(hooks.modules, nproc)
        click.echo(selftest_module.render(results))
        sys.exit(ExitCode.OK if all(result.is_proved for result in results) else ExitCode.BAD)
    import msgspec

    from parbench.bench.machine import doctor as doctor_module

    findings = doctor_module.examine_this_host(os.environ)
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        click.echo(doctor_module.render(findings))


_CHECK_EXAMPLES = """\b
Examples:
  parbench check                          this host, in about a minute
  parbench check --hosts n1,n2,n3         several over ssh, at the same time
  parbench check --inject slow:1:20%      does it name a slow device?
  parbench slurm screen --nodes 64        every node of a Slurm cluster, and the links between them

\b
Exit codes: 0 all fine; 1 a device, link or port is bad; 2 bad input; 4 something did not run.
"""


@click.command(epilog=_CHECK_EXAMPLES, context_settings={"show_default": True})
@click.option("--device", type=click.Choice(DEVICES), help="Default: cuda where there is a GPU.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="GPUs, or groups of cores; default: all GPUs, up to 8 groups.",
)
@click.option("--budget", metavar="TIME", default="60s", help="Time for all repetitions.")
@click.option(
    "--timeout",
    metavar="TIME",
    default="20s",
    help="Time after which a case counts as hung.",
)
@click.option(
    "--hosts",
    metavar="FILE|HOST,...",
    help="Check these hosts over ssh, each separately, all at the same time. A list may be "
    "n[01-03]. The file may be a hostfile of MPI.",
)
@click.option(
    "--ssh",
    default="ssh -o BatchMode=yes -o ConnectTimeout=10",
    help="What runs a command on a host.",
)
@click.option("--inject", metavar="WHAT", help="Disturb a rank as a test: slow:1:20% or corrupt:1.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/check"),
    help="Where runs go.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the check as one line of JSON.")
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path),
    help="Also write it to this file, as JSON.",
)
@click.pass_obj
def check(
    hooks: AppHooks,
    /,
    *,
    hosts: str | None,
    ssh: str,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Check each GPU or core: is it right, and as fast as its peers?

    Matrix products with known results, copies, each pair and all together, three times; then the
    facts of the driver. One line for each device, its verdict first, and what to do.
    """
    import msgspec

    from parbench.bench.check import check as checks
    from parbench.bench.check import hosts as host_checks
    from parbench.bench.check.show import render
    from parbench.bench.files import write_output
    from parbench.bench.text import parse_duration

    report: dict[str, Any]
    if hosts is None:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the numbers of nvidia-smi
        health = checks.check(hooks.modules, os.environ, **options)
        report, text, code = checks.to_document(health), render(health), health.code
    else:
        names = host_checks.parse_hosts(hosts)
        arguments = []
        for name, value in options.items():
            if value is not None:
                arguments += [f"--{name}", str(value)]
        seconds = parse_duration(options["budget"])
        results = host_checks.check_hosts(names, arguments, agent=ssh, seconds=seconds)
        results = host_checks.compare_hosts(results)
        text, code = host_checks.render(results), host_checks.compute_exit_code(results)
        documents = []
        for result in results:
            problem = {"problem": result.problem}
            content = checks.to_document(result.health) if result.health else problem
            documents.append({"host": result.host, **content})
        report = {"code": code, "hosts": documents}
    line = msgspec.json.encode(report)
    if output is not None:
        write_output(output, line + b"\n")
    click.echo(line.decode() if as_json else text)
    sys.exit(code)
