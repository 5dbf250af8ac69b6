"""``parbench slurm screen``: finds bad devices, slow nodes and slow rails."""

import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from parbench.bench.check.health import Health
from parbench.bench.check.show import render as render_checks
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_write_errors
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.machine.slurm_allocation import Allocation, inspect_rank_machine
from parbench.bench.text import UserError, format_table, parse_duration, parse_size, pluralize
from parbench.slurm.screen.devices import check_nodes, estimate_check_seconds
from parbench.slurm.screen.measure import Measurement, Setup, measure_rounds
from parbench.slurm.screen.ratios import Endpoint, Ratio, compare, confirm_slow, find_slow
from parbench.slurm.screen.rounds import plan_confirmation, plan_tournament
from parbench.slurm.system import SLURM, Slurm, format_limit

MIN_NODES = 3  # of a screening, because two nodes do not show which of them is slow
_MAX_CORE_GROUPS = 8  # groups of cores that count as devices on a node without GPUs
_SIZES = {"cuda": "128M", "cpu": "4M"}
"""The bytes that each of two ranks sends to the other in an exchange, by device of the ranks.

The size is large enough that bandwidth decides about the duration.
"""
Judgment = Literal["fine", "slow", "bad device", "unconfirmed", "did not answer", "unknown"]
"""The verdict on a node or rail.

``fine``: not slow, or slow in the first of two measurements only. ``slow``: slow in both.
``unconfirmed``: slow in the first, and the second failed. ``bad device``: ``parbench check`` found
a bad GPU or group of cores. ``did not answer``: the node made a round fail. ``unknown``: the node
could not be compared with other nodes.
"""
_CODES = {"fine": ExitCode.OK, "slow": ExitCode.BAD, "bad device": ExitCode.BAD}
"""The exit code by verdict. Verdicts without an entry have ``ExitCode.DID_NOT_RUN`` (4)."""
_EXCLUDED = ("slow", "bad device", "did not answer")
"""The verdicts whose nodes are in the ``--exclude`` option."""


@dataclass(frozen=True, kw_only=True)
class ScreenOptions:
    """The options of ``parbench slurm screen``."""

    nodes: int | None = None
    """The number of nodes to screen, None for all nodes of the current allocation."""
    partition: str | None = None
    """The partition of a new allocation, None for Slurm's default."""
    rounds: int = 5
    """The least number of rounds. In a round, the nodes exchange data in pairs, all at once."""
    size: str | None = None
    """The bytes that each of two ranks sends to the other in an exchange, as text such as ``4M``.

    None is 128M on GPUs and 4M on CPUs.
    """
    time: str = "10m"
    """The time limit of a new allocation, as text such as ``10m``. Unused in an allocation."""
    timeout: str = "20s"
    """The time after which a round counts as hung, as text such as ``20s``."""
    devices: bool = True
    """True if ``parbench check`` tests the devices of each node before the rounds."""
    gpus_per_node: int | None = None
    """The GPUs that a new allocation requests on each node, None to request none."""
    out: Path = Path("runs/screen")
    """The folder in which each screening creates a folder of results."""
    as_json: bool = False
    """True to return the verdicts as JSON instead of a table."""


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a screening on a node, or on one of its rails (a GPU and its NIC)."""

    node: str
    """Slurm's name of the node."""
    rail: int | None = None
    """The local rank of the rail, None for the whole node."""
    verdict: Judgment
    """The verdict, such as ``slow``. ``Judgment`` defines each value."""
    ratio: float | None = None
    """The median duration of the exchanges of the node or rail over that of other nodes.

    1.2 is 20 % longer, see ``Ratio.ratio``. None if the node or rail was not compared.
    """
    threshold: float | None = None
    """The ratio above which the node or rail counts as slow, None if it was not compared."""
    evidence: str = ""
    """The reason for the verdict as text.

    Examples are the nodes with which data was exchanged, a bad device, or an error.
    """

    @property
    def name(self) -> str:
        """The name of the node, and the local rank if the verdict is on a rail: ``n3 rail 1``."""
        return self.node if self.rail is None else f"{self.node} rail {self.rail}"


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a screening: the verdicts on all nodes, and the checks of their devices."""

    verdicts: tuple[NodeVerdict, ...]
    """The verdicts on all nodes, and on rails that are slow or unconfirmed, in order of nodes."""
    problems: tuple[str, ...] = ()
    """A text for each reason why a round or a device check is missing. Empty if all were made."""
    notes: tuple[str, ...] = ()
    """Sentences about limitations, such as emulated nodes or links.

    They are from the measurement in which all pairs of nodes take part. The later measurement that
    confirms slow nodes adds none.
    """
    folder: str = ""
    """The path of the folder with the runs of the rounds and the results of the device checks."""
    checks: tuple[Health, ...] = ()
    """The result of ``parbench check`` for each node, empty if devices were not checked."""

    @property
    def exclude_option(self) -> str:
        """The option for sbatch that excludes bad nodes, such as ``--exclude=n3,n7``.

        Bad nodes are slow, have a slow rail or a bad device, or did not answer. The text is empty
        if all nodes are good.
        """
        bad = [entry.node for entry in self.verdicts if entry.verdict in _EXCLUDED]
        return f"--exclude={','.join(dict.fromkeys(bad))}" if bad else ""

    @property
    def exit_code(self) -> int:
        """The exit code of ``parbench slurm screen``.

        It is 1 if a node or rail is ``slow`` or a node has a ``bad device``. Otherwise it is 4 if a
        verdict is ``did not answer``, ``unconfirmed`` or ``unknown``, or if a measurement is
        missing. It is 0 if all nodes are fine.
        """
        codes = [_CODES.get(entry.verdict, ExitCode.DID_NOT_RUN) for entry in self.verdicts]
        if self.problems:
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)


def screen(
    options: ScreenOptions,
    environ: Mapping[str, str],
    arguments: Sequence[str],
    slurm: Slurm = SLURM,
) -> tuple[int, str]:
    """Find the slow nodes and bad devices of this Slurm allocation.

    Returns the exit code and the text to print: tables, or JSON with ``options.as_json``. Outside
    of an allocation, salloc runs ``parbench`` with the same arguments inside a new allocation.

    Args:
        options: the options of the command.
        environ: the environment variables. ``SLURM_JOB_ID`` is set in an allocation.
        arguments: the arguments of this command line, which salloc passes to ``parbench``.
        slurm: the programs of Slurm.
    """
    check_options(options)
    if "SLURM_JOB_ID" not in environ:
        if options.nodes is None:
            raise UserError("--nodes is missing: outside of an allocation it is required")
        return run_in_allocation(build_salloc_command(options, arguments))
    nodes = list_nodes(options, environ, slurm)
    machine = inspect_rank_machine(environ, Allocation.find(environ))
    device = "cuda" if machine.gpus else "cpu"
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = options.out.absolute() / f"{time}-{secrets.token_hex(3)}"
    checks: tuple[Health, ...] = ()
    if options.devices:
        # Before the rounds, so that no node computes while another one measures it.
        num_devices = len(machine.gpus) or min(machine.cores, _MAX_CORE_GROUPS)
        seconds = estimate_check_seconds(device, num_devices)
        checks = check_nodes(nodes, seconds, folder / "check", environ)
    setup = Setup(
        size=options.size or _SIZES[device],
        rails=len(machine.gpus) or 1,
        timeout=options.timeout,
    )
    screening = add_checks(screen_nodes(nodes, options.rounds, setup, folder), checks)
    if not options.as_json:
        return screening.exit_code, format_screening(screening)
    document = {**msgspec.structs.asdict(screening), "exclude": screening.exclude_option}
    return screening.exit_code, msgspec.json.encode(document).decode()


def check_options(options: ScreenOptions) -> None:
    """Raise ``UserError`` for a size, time or timeout that is not allowed."""
    if options.size is not None and parse_size(options.size) < 1:
        raise UserError("--size 0: at least 1 byte is needed")
    parse_duration(options.time)
    parse_duration(options.timeout)


def build_salloc_command(options: ScreenOptions, arguments: Sequence[str]) -> list[str]:
    """Return the salloc command that runs ``parbench`` with ``arguments`` in a new allocation.

    The allocation continues if one of its nodes fails. It is exclusive, because traffic of other
    jobs would look like a slow node.
    """
    time = format_limit(parse_duration(options.time))
    command = ["salloc", "--quiet", "--no-kill", "--exclusive", f"--nodes={options.nodes}"]
    command += [f"--ntasks-per-node={options.gpus_per_node or 1}", f"--time={time}"]
    command.append("--job-name=parbench-screen")
    if options.partition:
        command.append(f"--partition={options.partition}")
    if options.gpus_per_node:
        command.append(f"--gpus-per-node={options.gpus_per_node}")
    return [*command, *PARBENCH, *arguments]


def run_in_allocation(command: Sequence[str]) -> tuple[int, str]:
    """Run the salloc command of a screening, and return its exit code and its standard output.

    Both come from the screening that salloc runs. If salloc exits with 1 and without output, it has
    made no allocation, because a screening that exits with 1 prints a table. The result is then
    ``ExitCode.DID_NOT_RUN`` (4) and an empty text.
    """
    with convert_write_errors("salloc", "cannot be started"):
        completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if completed.returncode == ExitCode.BAD and not completed.stdout:
        return ExitCode.DID_NOT_RUN, ""
    return completed.returncode, completed.stdout.rstrip("\n")


def list_nodes(options: ScreenOptions, environ: Mapping[str, str], slurm: Slurm) -> tuple[str, ...]:
    """Return the names of the nodes to screen: the first ``options.nodes`` of the allocation.

    All nodes are returned if ``options.nodes`` is None. Raises ``UserError`` if the allocation has
    fewer nodes than that, or if the result has fewer than ``MIN_NODES``. ``environ`` has the
    variable ``SLURM_JOB_NODELIST``.
    """
    nodes = slurm.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
    if options.nodes is not None and options.nodes > len(nodes):
        raise UserError(f"--nodes {options.nodes}: job {environ['SLURM_JOB_ID']} has {len(nodes)}")
    selection = nodes[: options.nodes]
    if len(selection) < MIN_NODES:
        reason = "with fewer, the measurement cannot show which one is slow"
        problem = f"{pluralize(len(selection), 'node')}: at least {MIN_NODES} are needed"
        raise UserError(f"{problem}, because {reason}; use --nodes {MIN_NODES} or more")
    return selection


def screen_nodes(nodes: Sequence[str], num_rounds: int, setup: Setup, folder: Path) -> Screening:
    """Measure data exchanges between pairs of nodes, and return the verdicts on all nodes.

    If some nodes do not answer, the other nodes are measured again without them. If nodes or rails
    look slow, a second measurement confirms or refutes this.

    Args:
        nodes: Slurm's names of the nodes.
        num_rounds: the least number of rounds in each measurement.
        setup: the size of an exchange, the ranks per node and the timeout of a round.
        folder: the folder of the screening. It gets a subfolder for each measurement: ``rounds``,
            ``answering`` (without the nodes that did not answer) and ``confirmation``.
    """
    rounds = plan_tournament(len(nodes), num_rounds)
    measurements = [measure_rounds(nodes, rounds, setup, folder / "rounds")]
    silent = dict(measurements[0].silent)
    answering = [node for node in nodes if node not in silent]
    if silent and len(answering) >= MIN_NODES:
        rounds = plan_tournament(len(answering), num_rounds)
        measurements = [measure_rounds(answering, rounds, setup, folder / "answering")]
        silent |= measurements[0].silent
    verdicts = []
    for node, reason in silent.items():
        verdicts.append(NodeVerdict(node=node, verdict="did not answer", evidence=reason))
    first = measurements[0]
    suspects: list[Ratio] = []
    if not first.silent:
        suspects = find_slow(first.exchanges)
    if suspects:
        tested = {ratio.endpoint.node for ratio in suspects}
        rounds = plan_confirmation(len(first.nodes), tested, num_rounds)
        measurements.append(measure_rounds(first.nodes, rounds, setup, folder / "confirmation"))
        verdicts += judge_suspects(suspects, *measurements)
    good = []
    for exchange in first.exchanges:
        if not any(suspect.endpoint.has(exchange) for suspect in suspects):
            good.append(exchange)
    judged_nodes = {verdict.node for verdict in verdicts if verdict.rail is None}
    silent_names = ", ".join(first.silent)
    unknown_evidence = (
        f"not compared, because {silent_names} did not answer"
        if silent_names
        else "too few exchanges with other nodes"
    )
    for index, node in enumerate(first.nodes):
        ratio = compare(Endpoint(index), good)
        if node not in judged_nodes and ratio is not None and not first.silent:
            verdicts.append(make_verdict("fine", ratio, first))
        elif node not in judged_nodes:
            verdicts.append(NodeVerdict(node=node, verdict="unknown", evidence=unknown_evidence))
    problems = [problem for entry in measurements for problem in entry.problems]
    return Screening(
        verdicts=tuple(sorted(verdicts, key=_get_sort_key)),
        problems=tuple(problems),
        notes=first.notes,
        folder=str(folder),
    )


def judge_suspects(
    suspects: Sequence[Ratio], first: Measurement, second: Measurement
) -> list[NodeVerdict]:
    """Return the verdicts on nodes and rails that were slow in the first measurement.

    A suspect is ``slow`` if it is slow in the second measurement too. Otherwise a node is ``fine``,
    and a rail has no verdict. All suspects are ``unconfirmed`` if the second measurement has other
    nodes than the first or lacks rounds.

    Args:
        suspects: the ratios in the first measurement of the nodes and rails that were slow there.
        first: the first measurement, in which all pairs of nodes take part.
        second: the measurement that repeats the comparison of the suspects.
    """
    is_repeated = second.nodes == first.nodes and not second.problems
    confirmed = {}
    if is_repeated:
        ratios = confirm_slow(second.exchanges, suspects)
        confirmed = {ratio.endpoint: ratio for ratio in ratios}
    verdicts = []
    for suspect in suspects:
        if suspect.endpoint in confirmed:
            ratio = confirmed[suspect.endpoint]
            comment = f" (first measurement: {suspect.ratio:.2f}x)"
            verdicts.append(make_verdict("slow", ratio, first, comment))
        elif not is_repeated:
            verdicts.append(make_verdict("unconfirmed", suspect, first))
        elif suspect.endpoint.rail is None:
            comment = ", slow in the first measurement only"
            verdicts.append(make_verdict("fine", suspect, first, comment))
    return verdicts


def make_verdict(
    judgment: Judgment, ratio: Ratio, measurement: Measurement, comment: str = ""
) -> NodeVerdict:
    """Return the verdict ``judgment`` on one node or rail, with its ratio and threshold.

    The evidence text names the nodes with which the node or rail exchanged data.

    Args:
        judgment: the verdict, such as ``slow``.
        ratio: the node or rail, and the relative duration of its exchanges.
        measurement: the measurement that has the names of the nodes.
        comment: a text that follows the names of the nodes.
    """
    partners = ", ".join(measurement.nodes[partner] for partner in ratio.partners)
    return NodeVerdict(
        node=measurement.nodes[ratio.endpoint.node],
        rail=ratio.endpoint.rail,
        verdict=judgment,
        ratio=round(ratio.ratio, 4),
        threshold=round(ratio.threshold, 4),
        evidence=f"with {partners}{comment}",
    )


def _get_sort_key(verdict: NodeVerdict) -> tuple[str, int, int]:
    """Return the key that sorts verdicts by node, n2 before n10, and a node before its rails.

    The key is the node's name without its number, the number, and the rail, -1 for the whole node.
    """
    stem = verdict.node.rstrip("0123456789")
    number = int(verdict.node[len(stem) :] or 0)
    return stem, number, -1 if verdict.rail is None else verdict.rail


def add_checks(screening: Screening, checks: Sequence[Health]) -> Screening:
    """Return a copy of the screening that also has the results of ``parbench check``.

    ``checks`` has one result per node. A node with a bad device gets the verdict ``bad device`` if
    its verdict was ``fine`` or ``unknown``. The problems of the checks are added to
    ``Screening.problems``.
    """
    bad_names = {}
    problems = []
    for check in checks:
        if check.bad_names:
            bad_names[check.host] = ", ".join(check.bad_names)
        problems += [f"check of {check.host}: {problem}" for problem in check.problems]
    verdicts = list(screening.verdicts)
    for index, verdict in enumerate(verdicts):
        if verdict.node in bad_names and verdict.verdict in ("fine", "unknown"):
            evidence = f"{bad_names[verdict.node]}; {verdict.evidence}"
            verdicts[index] = replace(verdict, verdict="bad device", evidence=evidence)
    return replace(
        screening,
        verdicts=tuple(verdicts),
        problems=(*screening.problems, *problems),
        checks=tuple(checks),
    )


def format_screening(screening: Screening) -> str:
    """Return the text of a screening: a table of the verdicts, problems, notes and device checks.

    The last line is the ``--exclude`` option for Slurm, or ``nothing to exclude``.
    """
    rows = [("node", "verdict", "time ratio", "threshold", "evidence")]
    for verdict in screening.verdicts:
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.2f}x"
        threshold = "-" if verdict.threshold is None else f"{verdict.threshold:.2f}x"
        rows.append((verdict.name, verdict.verdict, ratio, threshold, verdict.evidence))
    lines = [format_table(rows)]
    lines += [f"not measured: {problem}" for problem in screening.problems]
    lines += [f"note: {note}" for note in screening.notes]
    lines.append(f"runs: {screening.folder}")
    if screening.checks:
        lines.append(render_checks(screening.checks))
    return "\n".join([*lines, screening.exclude_option or "nothing to exclude"])
