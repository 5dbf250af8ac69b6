"""The commands that measure: run, list, doctor and check."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parbench.bench.exit_codes import ExitCode
from parbench.bench.text import UserError

if TYPE_CHECKING:
    from parbench.bench.results.document import Document


class RunPath(click.Path):
    """The folder of a run; ``latest`` is the newest in ``runs``, ``DIR/latest`` that in DIR."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder; ``UserError`` for ``latest`` without a run."""
        from parbench.bench.results.runs import list_runs

        path = Path(value)
        if path.name != "latest" or path.exists():
            return path
        folder = path.parent if path.parent != Path() else Path("runs")
        runs = list_runs(folder)
        if not runs:
            raise UserError(f"{path}: {folder} holds no run; parbench run makes one")
        return runs[-1]


@dataclass(frozen=True, kw_only=True)
class AppHooks:
    """The functions of other packages that the commands call."""

    modules: Sequence[str]  # the modules with definitions
    # Prints a run in one of ``FORMATS``, with all tables or the first page, and returns the exit code.
    show: Callable[[Path, str, bool], int]
    exit_code: Callable[[Path], int]
    report: Callable[[Sequence[Path], Path], None]  # Writes one page of several runs.
    render: "Callable[[Document, str], bytes]"  # Returns a plan in a form of reports, or as ``tables``.
    # Prints how a run keeps a file's budgets, and returns the worst of its exit code and another.
    judge: Callable[[Path, Path, int], int]


FORMATS = ("tables", "nccl-tests")
_NCCL_TESTS_OVERRIDES = {"mode": "pipelined", "placement": "out_of_place,in_place"}
_RUN_EXAMPLES = """\b
Examples:
  parbench run                                        measure this node, in under 2 min
  parbench run --preset smoke --only 'collective.*'
  parbench run --only all_reduce --sizes 1M           one operation at one size, in 10 s
  parbench run --only all_reduce --sizes 1K:64M:x4 --dtype float32,bfloat16
  parbench run --only ddp --set layers=2,4 --launches 3
  parbench run --only 'all_*' --mesh dp=2,tp=2 --group tp --nproc 4
  parbench run --only hybrid --mesh dp=2,pp=2,tp=2    one step on a mesh of 8 ranks
  parbench run --only all_reduce --inject late:1:3ms
  parbench run --only all_reduce --sizes 1K:64M:x4 --format nccl-tests
  parbench run --launcher srun --nodes 4 --ntasks-per-node 8    within an allocation
  parbench run --target mypackage.mystep:prepare      a step of your own
  parbench run --only ddp --budgets budgets.toml      fails where a metric is over its budget
  parbench run --resume runs/20260101T000000Z-host-1a2b3c

\b
Exit codes: 0 fine; 1 a wrong result, or a budget not kept; 2 bad input; 3 a budget that cannot be told; 4 something did
not run.
"""
budgets_option = click.option(
    "--budgets",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='A TOML file of what metrics have to keep: "workload.ddp" = { exposed_fraction = "<10%" }.',
)


@click.command(epilog=_RUN_EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--preset",
    help="smoke (about 90 s), node (under 2 min; the default without --only) or full (about 10 min).",
)
@click.option("--only", multiple=True, metavar="GLOB", help="Only cases of this name, such as ddp or 'p2p.*'.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE[,...]", help="Set a parameter, to each value.")
@click.option("--sizes", help="Short for --set size_bytes=: 1K:64M:x4, 1K,3M or 1M:8M:+1M.")
@click.option("--dtype", help="Short for --set dtype=: float32, bfloat16, ...")
@click.option(
    "--nproc", type=int, help="Ranks on this node; default: the mesh's, one per GPU, or one per core up to 8."
)
@click.option("--backend", help="gloo or nccl; default: what fits the device.")
@click.option("--device", help="cpu or cuda; default: cuda where there are two GPUs.")
@click.option(
    "--launches",
    type=int,
    help="Number of times that all ranks are restarted: the repetitions behind the intervals. Default: the preset's, 3 "
    "for named cases.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time for the whole run: 90s, 10m. Default: the preset's, about 1 s per named case.",
)
@click.option("--timeout", metavar="TIME", help="Time after which a case counts as hung.")
@click.option("--allow-single", is_flag=True, help="Allow --nproc 1, where nothing is communicated.")
@click.option(
    "--launcher",
    type=click.Choice(("local", "srun")),
    default="local",
    help="What starts the ranks: parbench on this node, or srun on a Slurm allocation's nodes.",
)
@click.option("--nodes", type=int, help="With srun: number of nodes; default: all of the allocation.")
@click.option("--ntasks-per-node", type=int, help="With srun: ranks on each node; default: the allocation's.")
@click.option("--distribution", metavar="ORDER", help="With srun: block (fill a node first; the default) or cyclic.")
@click.option("--nodelist", metavar="NODES", help="With srun: these nodes of the allocation, as n1,n[3-4].")
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="Arrange the ranks as a mesh, outermost axis first: dp=2,tp=4. With --group: its axes are groups of ranks. "
    "Without: the mesh of the training step that --only names; ep and etp lie inside other axes.",
)
@click.option("--group", help="Groups of ranks: a mesh axis, node, across, pairs, contiguous:K or strided:K.")
@click.option("--inject", metavar="WHAT", help="Disturb a rank as a test: late:1:3ms, slow:1:10% or corrupt:1.")
@click.option("--link", metavar="SPEED", help="The links' speed, such as 400Gbit; efficiency is printed against it.")
@click.option("--target", metavar="MODULE:FUNCTION", help="Measure a step of your own.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="A TOML or JSON file of cases, and of: preset, nproc, backend, device, launches, budget, timeout.",
)
@budgets_option
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where runs go.")
@click.option("--resume", type=RunPath(), metavar="RUN", help="Continue a run: measure what it lacks.")
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines instead of tables.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(FORMATS),
    default="tables",
    help="What to print. As nccl-tests: modes and placements are its own, unless set.",
)
@click.option("--all", "show_all", is_flag=True, help="Print every table and row, not only the summary page.")
@click.pass_obj
def run(
    hooks: AppHooks,
    /,
    *,
    preset: str | None,
    only: tuple[str, ...],
    settings: tuple[str, ...],
    sizes: str | None,
    dtype: str | None,
    nproc: int | None,
    backend: str | None,
    device: str | None,
    launches: int | None,
    budget: str | None,
    timeout: str | None,
    allow_single: bool,
    launcher: str,
    nodes: int | None,
    ntasks_per_node: int | None,
    distribution: str | None,
    nodelist: str | None,
    mesh: str | None,
    group: str | None,
    inject: str | None,
    link: str | None,
    target: str | None,
    plan_file: Path | None,
    budgets: Path | None,
    out: Path,
    resume: Path | None,
    as_json: bool,
    output_format: str,
    show_all: bool,
) -> None:
    """Measure collectives, point-to-point and training steps.

    Results are verified before timing counts. The last line printed is the run's folder, which holds report.html.
    """
    from parbench.bench.launch.measure import run_options
    from parbench.bench.launch.processes import leave, terminated_as_interrupted
    from parbench.bench.plan.options import Options

    click.get_current_context().with_resource(terminated_as_interrupted())
    if as_json and output_format != "tables":
        raise UserError(f"--json and --format {output_format} both say what to print: leave out one of them")
    short_settings = []
    if sizes is not None:
        short_settings.append(f"size_bytes={sizes}")
    if dtype is not None:
        short_settings.append(f"dtype={dtype}")
    options = Options(
        preset=preset,
        only=only,
        target=target,
        settings=parse_settings([*settings, *short_settings]),
        preset_overrides=_NCCL_TESTS_OVERRIDES if output_format == "nccl-tests" else {},
        nproc=nproc,
        backend=backend,
        device=device,
        launches=launches,
        budget=budget,
        timeout=timeout,
        allow_single=allow_single,
        mesh=mesh,
        group=group,
        inject=inject,
        link=link,
        plan_file=plan_file,
        launcher=launcher,
        nodes=nodes,
        ntasks_per_node=ntasks_per_node,
        distribution=distribution,
        nodelist=nodelist,
    )
    path = run_options(options, hooks.modules, out=out, resume_path=resume, as_json=as_json, budgets=budgets)
    if path is None:
        return
    if as_json:
        click.echo(path, err=True)
        code = hooks.exit_code(path)
    else:
        code = hooks.show(path, output_format, show_all)
    if budgets is not None:
        code = hooks.judge(path, budgets, code)
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` options by name.

    Raises ``UserError`` if one has no equals sign or a name occurs twice.
    """
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UserError(f"--set {setting!r} is not understood: write NAME=VALUE, or NAME=VALUE,VALUE")
        if name in texts:
            raise UserError(f"--set {name} is given twice; write its values together: {name}=VALUE,VALUE")
        texts[name] = text
    return texts


_LIST_EXAMPLES = """\b
Examples:
  parbench list
  parbench list ddp
  parbench list 'p2p.*' --markdown
"""


@click.command("list", epilog=_LIST_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--markdown", is_flag=True, help="Print tables of names and parameters as Markdown.")
@click.pass_obj
def list_cases(hooks: AppHooks, names: tuple[str, ...], markdown: bool) -> None:
    """List what can be measured; with a name, its parameters."""
    from parbench.bench.plan import listing
    from parbench.bench.plan.cases import load_catalogue, select

    definitions = select(load_catalogue(hooks.modules), names)
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
@click.option("--selftest", is_flag=True, help="Disturb one rank as a test, and check that parbench names it.")
@click.option("--nproc", type=int, help="Ranks for --selftest; default: as parbench run.")
@click.pass_obj
def doctor(hooks: AppHooks, /, *, as_json: bool, selftest: bool, nproc: int | None) -> None:
    """Check this machine for disturbances of a measurement.

    Prints the hardware and settings, what disturbs, and how to fix it.
    """
    if selftest:
        from parbench.bench import selftest as selftest_module

        proofs = selftest_module.selftest(hooks.modules, nproc)
        click.echo(selftest_module.render(proofs))
        sys.exit(ExitCode.OK if all(proof.found for proof in proofs) else ExitCode.BAD)
    import msgspec

    from parbench.bench.machine import doctor as doctor_module

    findings = doctor_module.examine_here(os.environ)
    click.echo(msgspec.json.encode(findings).decode() if as_json else doctor_module.render(findings))


_CHECK_EXAMPLES = """\b
Examples:
  parbench check                          this host, in under a minute
  parbench check --hosts n1,n2,n3         several over ssh, at the same time
  parbench check --inject slow:1:20%      does it name a slow device?
  parbench slurm screen --nodes 64        every node of a Slurm cluster, and the links between them

\b
Exit codes: 0 all fine; 1 a device, link or port is bad; 2 bad input; 4 something did not run.
"""


@click.command(epilog=_CHECK_EXAMPLES, context_settings={"show_default": True})
@click.option("--device", help="cpu or cuda; default: cuda where there is a GPU.")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="GPUs, or groups of cores; default: all GPUs, up to 8 groups."
)
@click.option("--budget", metavar="TIME", default="40s", help="Time for all launches.")
@click.option("--timeout", metavar="TIME", default="20s", help="Time after which a case counts as hung.")
@click.option(
    "--hosts", metavar="FILE|HOST,...", help="Check these hosts over ssh, each separately, all at the same time."
)
@click.option("--ssh", default="ssh -o BatchMode=yes -o ConnectTimeout=10", help="What runs a command on a host.")
@click.option("--inject", metavar="WHAT", help="Disturb a rank as a test: slow:1:20% or corrupt:1.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/check"), help="Where runs go.")
@click.option("--json", "as_json", is_flag=True, help="Print the check as one line of JSON.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Also write it to this file, as JSON.")
@click.pass_obj
def check(
    hooks: AppHooks,
    /,
    *,
    device: str | None,
    nproc: int | None,
    budget: str,
    timeout: str,
    hosts: str | None,
    ssh: str,
    inject: str | None,
    out: Path,
    as_json: bool,
    output: Path | None,
) -> None:
    """Check each GPU or core: is it right, and as fast as its peers?

    Matrix products with known results, copies, each pair and all together, three times; then the facts of the driver.
    One line for each device, its verdict first, and what to do.
    """
    import msgspec

    from parbench.bench.check import check as checks
    from parbench.bench.check import hosts as host_checks
    from parbench.bench.check.show import render
    from parbench.bench.files import write_output
    from parbench.bench.text import parse_duration

    report: dict[str, Any]
    if hosts is None:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs have the numbers that nvidia-smi shows.
        health = checks.check(
            hooks.modules,
            os.environ,
            device=device,
            nproc=nproc,
            budget=budget,
            timeout=timeout,
            inject=inject,
            out=out,
        )
        report, text, code = checks.to_document(health), render(health), health.code
    else:
        options = {"device": device, "nproc": nproc, "budget": budget, "timeout": timeout, "inject": inject, "out": out}
        words = []
        for name, value in options.items():
            if value is not None:
                words += [f"--{name}", str(value)]
        seconds = parse_duration(budget)
        names = host_checks.parse_hosts(hosts)
        answers = host_checks.compare_hosts(host_checks.check_hosts(names, words, agent=ssh, seconds=seconds))
        reports = []
        for answer in answers:
            content = {"problem": answer.problem} if answer.health is None else checks.to_document(answer.health)
            reports.append({"host": answer.host, **content})
        text, code = host_checks.render(answers), host_checks.compute_exit_code(answers)
        report = {"code": code, "hosts": reports}
    line = msgspec.json.encode(report)
    if output is not None:
        write_output(output, line + b"\n")
    click.echo(line.decode() if as_json else text)
    sys.exit(code)
