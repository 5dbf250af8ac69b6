"""``parbench slurm screen``: which nodes and links are slow, by rounds of pairs, with suspects measured again."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from parbench.bench.check.hosts import HostResult
from parbench.bench.check.hosts import render as render_check
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.text import UserError, format_table, parse_duration, parse_size, pluralize
from parbench.slurm.screen.fit import (
    SUSPECT,
    Effect,
    Exchange,
    Slow,
    confirm,
    find_slow,
    link_effects,
    node_effects,
)
from parbench.slurm.screen.run import Options, check_nodes, confirmation, measure, tournament
from parbench.slurm.system import SLURM, Slurm, format_limit

LEAST_NODES = 3
Judgment = Literal["fine", "slow", "bad device", "unconfirmed", "did not answer", "cannot tell"]
_CODES: Mapping[Judgment, ExitCode] = {
    "fine": ExitCode.OK,
    "slow": ExitCode.BAD,
    "bad device": ExitCode.BAD,
    "unconfirmed": ExitCode.DID_NOT_RUN,
    "did not answer": ExitCode.DID_NOT_RUN,
    "cannot tell": ExitCode.DID_NOT_RUN,
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node (or the two of a link): fine, slow, bad device, unconfirmed, did not answer or cannot tell, and why.

    ``factor`` is how many times longer its exchanges take than the others', with a 95 % interval; None is unknown.
    """

    nodes: tuple[str, ...]
    verdict: Judgment
    factor: float | None = None
    low: float | None = None
    high: float | None = None
    evidence: str = ""

    @property
    def name(self) -> str:
        return "-".join(self.nodes)


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on all nodes, on the links that are not fine, and what else there is to say."""

    nodes: tuple[Verdict, ...]
    links: tuple[Verdict, ...] = ()
    least_factor: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    checked: tuple[HostResult, ...] = ()

    @property
    def exclude(self) -> str:
        """The option that keeps Slurm from the nodes that are slow, bad or did not answer; empty if there is none."""
        bad = [
            verdict.name
            for verdict in self.nodes
            if verdict.verdict in ("slow", "bad device", "did not answer")
        ]
        return f"--exclude={','.join(bad)}" if bad else ""

    @property
    def code(self) -> int:
        codes = [_CODES[verdict.verdict] for verdict in (*self.nodes, *self.links)]
        if self.problems:
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)


def screening(
    hosts: tuple[str, ...],
    exchanges: tuple[Exchange, ...],
    suspects: Slow,
    confirmed: Slow | None,
    silent: Mapping[str, str],
) -> Screening:
    """Return the verdicts; ``confirmed`` is None where suspects could not be measured again, so nobody is blamed.

    Those that are fine are weighed by all exchanges, those made to confirm suspects too.
    """
    blamed = suspects if confirmed is None else confirmed
    effects = node_effects(exchanges, blamed, SUSPECT)
    confirmed_effects = {effect.ranks: effect for effect in (*blamed.nodes, *blamed.links)}

    def verdict(
        ranks: tuple[int, ...], word: Judgment, effect: Effect | None, evidence: str
    ) -> Verdict:
        names = tuple(hosts[rank] for rank in ranks)
        if effect is None:
            return Verdict(nodes=names, verdict=word, evidence=evidence)
        factor, low, high = (round(value, 4) for value in (effect.factor, effect.low, effect.high))
        return Verdict(
            nodes=names, verdict=word, factor=factor, low=low, high=high, evidence=evidence
        )

    def met(effect: Effect) -> str:
        return f"with {', '.join(hosts[rank] for rank in effect.partners)} in {pluralize(effect.turns, 'exchange')}"

    def of_suspect(effect: Effect, alone: Effect | None) -> Verdict:
        is_node, again = len(effect.ranks) == 1, confirmed_effects.get(effect.ranks)
        others = f"in {pluralize(effect.turns, 'exchange')} beyond what either node is with others"
        looked = f"{effect.factor:.2f}x {met(effect) if is_node else others}"
        if confirmed is None:
            return verdict(effect.ranks, "unconfirmed", effect, f"{looked}; not measured again")
        if again is None:
            return verdict(
                effect.ranks, "fine", alone, f"{looked} at first; not when measured again"
            )
        more = met(again) if is_node else f"in {again.turns} more"
        return verdict(effect.ranks, "slow", again, f"{looked}; again {more}")

    nodes = [
        Verdict(nodes=(host,), verdict="did not answer", evidence=reason)
        for host, reason in silent.items()
    ]
    nodes += [of_suspect(effect, effects.get(effect.ranks[0])) for effect in suspects.nodes]
    for rank in set(range(len(hosts))) - suspects.ranks:
        if effect := effects.get(rank):
            nodes.append(verdict((rank,), "fine", effect, met(effect)))
        else:
            nodes.append(
                verdict((rank,), "cannot tell", None, "it met fewer than two nodes that are fine")
            )
    alone = link_effects(exchanges, blamed, SUSPECT)
    return Screening(
        nodes=tuple(sorted(nodes, key=_in_order)),
        links=tuple(of_suspect(effect, alone.get(effect.pair)) for effect in suspects.links),
        least_factor=max((effect.least for effect in effects.values()), default=None),
    )


def _in_order(verdict: Verdict) -> tuple[str, int, str]:
    """Order n2 before n10."""
    stem = verdict.name.rstrip("0123456789")
    return stem, int(verdict.name[len(stem) :] or 0), verdict.name


def render(found: Screening) -> str:
    rows = [("node", "verdict", "time", "evidence")]
    for one in (*found.nodes, *found.links):
        times = "-" if one.factor is None else f"{one.factor:.2f}x ({one.low:.2f}-{one.high:.2f})"
        rows.append((one.name, one.verdict, times, one.evidence))
    lines = [format_table(rows)]
    if found.least_factor is not None:
        lines.append(
            f"a node would have been suspected from {found.least_factor:.2f} times the others' time"
        )
    lines += [f"not measured: {problem}" for problem in found.problems]
    slow_links = [link.name for link in found.links if link.verdict == "slow"]
    lines += [
        f"link {name} is slow, its nodes are not: leave out one of them" for name in slow_links
    ]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"run: {run}" for run in found.runs]
    lines += [render_check(found.checked)] if found.checked else []
    return "\n".join([*lines, found.exclude or "nothing to exclude"])


def screen(options: Options, environ: Mapping[str, str]) -> tuple[int, str]:
    """Screen the nodes of this allocation, or of a new one, and return the exit code and what to print.

    A new allocation is salloc's: it runs this command again inside, which prints by itself.
    """
    check(options)
    if "SLURM_JOB_ID" not in environ:
        if options.nodes is None:
            raise UserError("outside an allocation --nodes says how many nodes to screen")
        SLURM.check_program("salloc")
        return subprocess.run(salloc_command(options), check=False).returncode, ""
    nodes = allocated(options, environ, SLURM)
    # before the rounds: while a node measures by itself, none measures with it
    answers = check_nodes(nodes, options.out / "check", environ) if options.devices else ()
    found = with_devices(screen_nodes(nodes, options), answers)
    if not options.as_json:
        return found.code, render(found)
    return found.code, msgspec.json.encode(
        {**msgspec.structs.asdict(found), "exclude": found.exclude}
    ).decode()


def check(options: Options) -> None:
    """Refuse what cannot be meant before anything starts."""
    if options.rounds < 3:
        raise UserError(
            f"--rounds {options.rounds}: at least 3 are needed to tell a node from a link"
        )
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
    words = [
        "salloc",
        "--quiet",
        "--no-kill",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
    ]
    words += ["--job-name=parbench-screen", f"--time={format_limit(parse_duration(options.time))}"]
    words += [f"--partition={options.partition}"] if options.partition else []
    words += [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    words += [*PARBENCH, "slurm", "screen", "--nodes", str(options.nodes)]
    words += ["--rounds", str(options.rounds), "--size", options.size, "--timeout", options.timeout]
    words += ["--budget", options.budget] if options.budget else []
    words += [] if options.devices else ["--no-devices"]
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
    left = [node for node in nodes if node not in silent]
    if silent and len(left) >= LEAST_NODES:
        seen = measure(left, tournament(len(left), options.rounds), options)
        silent, runs = {**silent, **seen.silent}, [*runs, str(seen.run)]
    problems, exchanges = seen.problems, seen.exchanges
    if seen.silent or not exchanges:  # nothing tells nodes apart, but that some did not answer
        told = Screening(nodes=tuple(_unmeasured(node, silent.get(node)) for node in nodes))
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


def with_devices(found: Screening, answers: Sequence[HostResult]) -> Screening:
    """Return the screening with what each node's own check says: of a bad device, or that there is none."""
    bad = {
        answer.host: ", ".join(answer.health.bad_names)
        for answer in answers
        if answer.health and answer.health.bad_names
    }
    nodes = [
        msgspec.structs.replace(
            node,
            verdict="bad device" if node.verdict in ("fine", "cannot tell") else node.verdict,
            evidence=f"{bad[node.name]}; {node.evidence}",
        )
        if node.name in bad
        else node
        for node in found.nodes
    ]
    problems = []
    for answer in answers:
        told = (answer.problem,) if answer.health is None else answer.health.problems
        problems += [f"{answer.host}'s own check: {problem}" for problem in told]
    return msgspec.structs.replace(
        found, nodes=tuple(nodes), problems=(*found.problems, *problems), checked=tuple(answers)
    )


def _unmeasured(node: str, reason: str | None) -> Verdict:
    if reason is None:
        return Verdict(nodes=(node,), verdict="cannot tell", evidence="no rounds without trouble")
    return Verdict(nodes=(node,), verdict="did not answer", evidence=reason)
