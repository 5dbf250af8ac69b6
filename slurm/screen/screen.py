"""``parbench slurm screen``: which nodes and links are slow, by rounds of pairs, with suspects measured again."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from bench.text import UserError, parse_duration, parse_size
from slurm.screen.fit import Slow, confirm, find_slow
from slurm.screen.run import Options, confirmation, measure, short, tournament
from slurm.screen.verdict import Screening, Verdict, render, screening
from slurm.system import Slurm, format_limit

LEAST_NODES = 3


def screen(options: Options, environ: Mapping[str, str]) -> tuple[int, str]:
    """Screen the nodes of this allocation, or of a new one, and return the exit code and what to print.

    A new allocation is salloc's: it runs this command again inside, which prints by itself.
    """
    check(options)
    if "SLURM_JOB_ID" not in environ:
        if options.nodes is None:
            raise UserError("outside an allocation --nodes says how many nodes to screen")
        Slurm().check_program("salloc")
        return subprocess.run(salloc_command(options), check=False).returncode, ""
    found = screen_nodes(allocated(options, environ, Slurm()), options)
    if not options.as_json:
        return found.code, render(found)
    return found.code, msgspec.json.encode({**msgspec.structs.asdict(found), "exclude": found.exclude}).decode()


def check(options: Options) -> None:
    """Refuse what cannot be meant before anything starts."""
    if options.rounds < 3:
        raise UserError(f"--rounds {options.rounds}: at least 3 are needed to tell a node from a link")
    if parse_size(options.size) < 1:
        raise UserError("--size 0: nothing moves")
    for text in (options.time, options.budget, options.timeout):
        if text is not None:
            parse_duration(text)
    if options.nodes is not None:
        _check_nodes(options.nodes)


def _check_nodes(nodes: int) -> None:
    if nodes < LEAST_NODES:
        why = "of one pair nobody can tell which of its two nodes is slow; give it more"
        raise UserError(f"nodes({nodes}) < {LEAST_NODES}: {why}")


def salloc_command(options: Options) -> list[str]:
    """Return salloc's words: nodes are not shared, for a neighbour's traffic would be taken for slowness.

    An allocation outlives a node that fails, so that the others can still be screened.
    """
    words = ["salloc", "--quiet", "--no-kill", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--exclusive"]
    words += ["--job-name=parbench-screen", f"--time={format_limit(parse_duration(options.time))}"]
    words += [f"--partition={options.partition}"] if options.partition else []
    words += [sys.executable, "-m", "parbench", "slurm", "screen", "--nodes", str(options.nodes)]
    words += ["--rounds", str(options.rounds), "--size", options.size, "--timeout", options.timeout]
    words += ["--budget", options.budget] if options.budget else []
    return [*words, "--out", str(options.out), *(["--json"] if options.as_json else [])]


def allocated(options: Options, environ: Mapping[str, str], slurm: Slurm) -> tuple[str, ...]:
    """Return the nodes to screen of this allocation; ``UserError`` if there are too few."""
    nodes = slurm.host_names(environ.get("SLURM_JOB_NODELIST", ""))
    if options.nodes is not None and options.nodes > len(nodes):
        raise UserError(f"--nodes {options.nodes}: job {environ['SLURM_JOB_ID']} has {len(nodes)}")
    wanted = nodes[: options.nodes]
    _check_nodes(len(wanted))
    return wanted


def screen_nodes(nodes: Sequence[str], options: Options) -> Screening:
    """Measure rounds of all nodes, without those that do not answer, and once more with those that look slow."""
    seen = measure(nodes, tournament(len(nodes), options.rounds), options)
    silent, runs = dict(seen.silent), [str(seen.run)]
    left = [node for node in nodes if short(node) not in silent]
    if silent and len(left) >= LEAST_NODES:
        seen = measure(left, tournament(len(left), options.rounds), options)
        silent, runs = {**silent, **seen.silent}, [*runs, str(seen.run)]
    problems, exchanges = seen.problems, seen.exchanges
    if seen.silent or not exchanges:  # nothing tells nodes apart, but that some did not answer
        told = Screening(nodes=tuple(_unmeasured(node, silent.get(short(node))) for node in nodes))
    else:
        suspects = find_slow(exchanges)
        confirmed: Slow | None = Slow()
        if suspects:
            turns = confirmation(len(left), suspects.ranks, suspects.pairs, options.rounds)
            again = measure(left, turns, options)
            # ranks that have changed places, or rounds that are missing, confirm nothing
            is_whole = again.hosts == seen.hosts and not again.problems
            confirmed = confirm(again.exchanges, suspects) if is_whole else None
            exchanges += again.exchanges if is_whole else ()
            runs, problems = [*runs, str(again.run)], (*problems, *again.problems)
        told = screening(seen.hosts, exchanges, suspects, confirmed, silent)
    return msgspec.structs.replace(told, problems=problems, notes=seen.notes, runs=tuple(runs))


def _unmeasured(node: str, reason: str | None) -> Verdict:
    if reason is None:
        return Verdict(nodes=(node,), verdict="cannot tell", evidence="no rounds without trouble")
    return Verdict(nodes=(node,), verdict="did not answer", evidence=reason)
