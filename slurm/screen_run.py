"""One run of rounds as a child, and what it saw: exchanges of pairs, and the nodes that did not answer."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.launch.processes import run_child
from bench.plan.groups import parse_pairs
from bench.results.records import Record
from bench.results.runs import Run, load_rank_samples, load_run, samples_name
from bench.results.stats import median
from bench.text import UserError
from slurm.screen_fit import Exchange
from slurm.screen_rounds import Turns

_START_SECONDS, _ROUND_SECONDS = 60, 2
_BAD = ("failed", "hang", "wrong")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a run of rounds saw: ranks by host, their exchanges, hosts that did not answer and what told of it.

    ``problems`` say in words why rounds were not measured, each once; ``notes`` what the run cannot claim.
    """

    run: Path
    hosts: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    silent: Mapping[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Means:
    """How rounds are measured: the size of a message as text, times as text or None, and where runs go."""

    size: str
    budget: str | None
    timeout: str
    out: Path


def measure(nodes: Sequence[str], turns: Turns, means: Means) -> Seen:
    """Measure rounds on these nodes, one rank each, and return what was seen; ``UserError`` if no run came of it."""
    before = set(means.out.glob("*/run.json"))
    code = run_child(run_command(nodes, turns, means)).returncode
    fresh = sorted(set(means.out.glob("*/run.json")) - before)
    if not fresh:
        raise UserError(f"parbench run ended with {code} and left no run in {means.out}; it said why above")
    return read(load_run(fresh[-1].parent), nodes)


def run_command(nodes: Sequence[str], turns: Turns, means: Means) -> list[str]:
    """Return the words of ``parbench run``; without a given budget there is time for ranks that start slowly.

    A round ends when its time is known to 5 % (the preset's), long before a budget is spent.
    """
    budget = means.budget or f"{_START_SECONDS + _ROUND_SECONDS * len(turns):.0f}s"
    words = [sys.executable, "-m", "parbench", "run", "--launcher", "srun", "--nodes", str(len(nodes))]
    words += ["--ntasks-per-node", "1", "--placement", "block", "--nodelist", ",".join(nodes)]
    words += ["--preset", "smoke", "--only", "p2p.pairwise", "--sizes", means.size]
    words += [
        "--set",
        "direction=in_turn",
    ]  # at once, one's acknowledgements wait behind the other's data, or do not
    for setting in turns.settings():
        words += ["--set", setting]
    words += ["--launches", "1", "--budget", budget, "--timeout", means.timeout, "--out", str(means.out)]
    return [*words, "--json"]  # records go nowhere, and no report is made


def read(run: Run, nodes: Sequence[str]) -> Seen:
    """Return what a run saw; ``UserError`` if it does not tell which rank was on which host."""
    hosts = tuple((run.info.environment or {}).get("hosts", ()))
    known = hosts or tuple(nodes)
    if any(record.status == "ok" for record in run.records) and len(hosts) != run.info.plan.nproc:
        raise UserError(f"{run.path} does not tell the hosts of its ranks: ranks({run.info.plan.nproc})")
    bad = [record for record in run.records if record.status in _BAD]
    unread = run.info.plan.launches * len(run.info.plan.cases) - len(run.records)
    reasons = [record.reason for record in run.records if record.status != "ok"]
    return Seen(
        run=run.path,
        hosts=tuple(short(host) for host in known),
        exchanges=tuple(e for record in run.records if record.status == "ok" for e in exchanges_of(run, record)),
        silent=next(filter(None, (silent_hosts(record, nodes) for record in bad)), {}),  # later ones follow from it
        problems=tuple(dict.fromkeys([*reasons, *([f"rounds not reached: {unread}"] if unread else [])])),
        notes=run.info.plan.notes,
    )


def exchanges_of(run: Run, record: Record) -> list[Exchange]:
    """Return each pair's median time in a round, of every iteration that of its slower rank."""
    durations = _durations(run, record)
    pairs = parse_pairs(str(record.details.get("pairs", "")), record.world.size)
    found = []
    for one, other in pairs:
        both = [max(a, b) for a, b in zip(durations[one], durations[other], strict=True)]
        found.append(Exchange(turn=record.case.id, pair=(one, other), seconds=median(both)))
    return found


def _durations(run: Run, record: Record) -> dict[int, list[float]]:
    """Return each rank's durations in seconds; ``UserError`` if the samples cannot be read."""
    samples = load_rank_samples(run, record)
    if "duration_ns" not in samples or "steps_per_sample" not in samples:
        raise UserError(f"{run.path / samples_name(record)} holds no samples that can be read")
    seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
    return dict(zip(samples["ranks"].tolist(), seconds.tolist(), strict=True))


def silent_hosts(record: Record, nodes: Sequence[str]) -> dict[str, str]:
    """Return the hosts that a bad record holds responsible, with its words; none where it does not tell them apart.

    A rank that raised is not one, nor one that was told to end: it may only have suffered from another.
    """
    told = {short(state.host) for state in record.ranks}
    missing = {short(node) for node in nodes} - told
    no_answer = {short(state.host) for state in record.ranks if state.state.startswith("no answer")}
    silent = (missing if told else set()) or no_answer or _named(record)
    everyone = told | {short(node) for node in nodes}
    return dict.fromkeys(sorted(silent), record.reason) if silent < everyone else {}


def _named(record: Record) -> set[str]:
    """Return the hosts that the reason names as late, or as where the first rank died by itself."""
    culprits, died, how = record.reason.partition(" died: ")
    if record.status != "hang" and (not died or "SIGTERM" in how):
        return set()
    return {short(state.host) for state in record.ranks if f"({state.host})" in culprits}


def short(host: str) -> str:
    """Return a host's name without its domain, as Slurm names nodes."""
    return host.partition(".")[0]
