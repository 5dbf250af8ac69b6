"""The command line of what is measured: run, list, doctor, check, schema."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parbench.bench.text import UserError

if TYPE_CHECKING:
    from parbench.bench.results.document import Document


class RunPath(click.Path):
    """A run's folder; ``latest`` is the newest in ``runs``, ``DIR/latest`` that in DIR."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder; ``UserError`` if there is no run to be the latest."""
        from parbench.bench.results.runs import runs_in

        path = Path(value)
        if path.name != "latest" or path.exists():
            return path
        folder = path.parent if path.parent != Path() else Path("runs")
        if not (found := runs_in(folder)):
            raise UserError(f"{path}: {folder} holds no run; parbench run makes one")
        return found[-1]


@dataclass(frozen=True, kw_only=True)
class AppHooks:
    """What other packages give these commands.

    ``show`` takes a run, one of ``FORMATS`` and whether to print all of it, and returns an exit code; ``report``
    writes one page of several runs; ``render`` returns what a plan shows in a form of reports, or as ``tables``.
    ``judge`` says how a run keeps a file's budgets, and returns the worst of its code and the one given.
    """

    modules: Sequence[str]
    show: Callable[[Path, str, bool], int]
    exit_code: Callable[[Path], int]
    report: Callable[[Sequence[Path], Path], None]
    render: "Callable[[Document, str], bytes]"
    judge: Callable[[Path, Path, int], int]


FORMATS = ("tables", "nccl-tests")
# what its readers expect in a table of an operation
_AS_NCCL_TESTS = {"mode": "pipelined", "placement": "out_of_place,in_place"}
_RUN_EXAMPLES = """\b
Examples:
  parbench run                                        measure this node, in under 2 min
  parbench run --preset smoke --only 'collective.*'
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
@click.option("--preset", help="smoke (about 90 s), node (the default, under 2 min) or full (about 10 min).")
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
    help="Number of times that all ranks are restarted: the repetitions behind the intervals.",
)
@click.option("--budget", metavar="TIME", help="Time for the whole run: 90s, 10m.")
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
@click.option("--placement", metavar="ORDER", help="With srun: block (fill a node first; the default) or cyclic.")
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
    "form",
    type=click.Choice(FORMATS),
    default="tables",
    help="What to print. As nccl-tests: modes and placements are its own, unless set.",
)
@click.option("--all", "whole", is_flag=True, help="Print every table and row, not only the summary page.")
@click.pass_obj
def run(
    hooks: AppHooks,
    /,
    *,
    settings: tuple[str, ...],
    sizes: str | None,
    dtype: str | None,
    budgets: Path | None,
    out: Path,
    resume: Path | None,
    as_json: bool,
    form: str,
    whole: bool,
    **given: Any,
) -> None:
    """Measure collectives, point-to-point and training steps.

    Results are verified before timing counts. The last line printed is the run's folder, which holds report.html.
    """
    from parbench.bench.launch.measure import run_options
    from parbench.bench.launch.processes import exit_now, terminated_as_interrupted
    from parbench.bench.plan.options import Options

    click.get_current_context().with_resource(terminated_as_interrupted())
    if as_json and form != "tables":
        raise UserError(f"--json and --format {form} both say what to print: leave out one of them")
    short = [f"{name}={text}" for name, text in (("size_bytes", sizes), ("dtype", dtype)) if text is not None]
    texts = parse_settings([*settings, *short])
    options = Options(settings=texts, usual=_AS_NCCL_TESTS if form == "nccl-tests" else {}, **given)
    path = run_options(options, hooks.modules, out=out, resume_path=resume, as_json=as_json, budgets=budgets)
    if path is None:
        return
    if as_json:
        click.echo(path, err=True)
    code = hooks.exit_code(path) if as_json else hooks.show(path, form, whole)
    if budgets is not None:
        code = hooks.judge(path, budgets, code)
    if "RANK" in os.environ:
        exit_now(code)
    sys.exit(code)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` options by name; ``UserError`` if one has no equals sign or a name comes twice."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not (name := name.strip()):
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

    found = select(load_catalogue(hooks.modules), names)
    width = shutil.get_terminal_size((100, 24)).columns
    shown = listing.render_details(found, width) if names else listing.render_names(found)
    click.echo(listing.render_markdown(found) if markdown else shown)


@click.command(epilog="Example: parbench doctor --selftest")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--selftest", is_flag=True, help="Disturb one rank as a test, and check that parbench names it.")
@click.option("--nproc", type=int, help="Ranks for --selftest; default: as parbench run.")
@click.pass_obj
def doctor(hooks: AppHooks, /, *, as_json: bool, selftest: bool, nproc: int | None) -> None:
    """Check this machine for what would disturb a measurement.

    Prints what the machine has, what disturbs, and how to mend it.
    """
    if selftest:
        from parbench.bench import selftest as proving

        proofs = proving.selftest(hooks.modules, nproc)
        click.echo(proving.render(proofs))
        sys.exit(0 if all(proof.found for proof in proofs) else 1)
    import msgspec

    from parbench.bench.machine import doctor as examination

    findings = examination.examine_here(os.environ)
    click.echo(msgspec.json.encode(findings).decode() if as_json else examination.render(findings))


_CHECK_EXAMPLES = """\b
Examples:
  parbench check                          this host, in under a minute
  parbench check --hosts n1,n2,n3         several over ssh, beside each other
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
@click.option("--hosts", metavar="FILE|HOST,...", help="Check these hosts over ssh, each by itself and at once.")
@click.option(
    "--ssh", "agent", default="ssh -o BatchMode=yes -o ConnectTimeout=10", help="What runs a command on a host."
)
@click.option("--inject", metavar="WHAT", help="Disturb a rank as a test: slow:1:20% or corrupt:1.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/check"), help="Where runs go.")
@click.option("--json", "as_json", is_flag=True, help="Print the check as one line of JSON.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Also write it to this file, as JSON.")
@click.pass_obj
def check(
    hooks: AppHooks, /, *, hosts: str | None, agent: str, as_json: bool, output: Path | None, **given: Any
) -> None:
    """Check each GPU or core: is it right, and as fast as its peers?

    Matrix products with known results, copies, each pair and all together, three times; then what the driver tells.
    One line for each device, its verdict first, and what to do.
    """
    import msgspec

    from parbench.bench.check import check as checking
    from parbench.bench.check import hosts as several
    from parbench.bench.check.show import render
    from parbench.bench.text import parse_duration, write_whole

    if hosts is None:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs are counted as nvidia-smi counts them
        health = checking.check(hooks.modules, os.environ, **given)
        told, text, code = checking.document(health), render(health), health.code
    else:
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        seconds = parse_duration(given["budget"])
        answers = several.together(several.ask(several.hosts_in(hosts), words, agent=agent, seconds=seconds))
        of = [
            {"host": one.host, **({"problem": one.problem} if one.health is None else checking.document(one.health))}
            for one in answers
        ]
        text, code = several.render(answers), several.code_of(answers)
        told = {"code": code, "hosts": of}
    line = msgspec.json.encode(told)
    if output is not None:
        write_whole(output, line + b"\n")
    click.echo(line.decode() if as_json else text)
    sys.exit(code)


@click.command(epilog="Example: parbench schema > record.schema.json")
def schema() -> None:
    """Print the JSON Schema of a record (a line of records.jsonl)."""
    import msgspec

    from parbench.bench.results.records import json_schema

    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())
