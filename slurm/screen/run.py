"""One run of rounds as a child, and what it saw: exchanges of pairs, and the nodes that did not answer."""

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from bench.launch.processes import run_child
from bench.plan.groups import Pair, format_pairs, num_rounds, parse_pairs, round_pairs
from bench.results.records import Record
from bench.results.runs import Run, load_rank_samples, load_run, samples_name
from bench.results.stats import median
from bench.text import UserError
from slurm.screen.fit import Exchange


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Rounds to be measured, as the values of the parameters of ``p2p.pairwise``; all rounds come ``repeats`` times."""

    parameter: str
    values: tuple[str, ...]
    repeats: int

    def settings(self) -> list[str]:
        """Return the words of ``--set``, repeats outermost: what disturbs one time spares another."""
        repeat = ",".join(map(str, range(self.repeats)))
        return [f"repeat={repeat}", f"{self.parameter}={','.join(self.values)}"]

    def __len__(self) -> int:
        return len(self.values) * self.repeats


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


_REPEATS_OF_THREE = 4
_MEETINGS = 4  # of a suspect link: two may be disturbed by chance


def tournament(n: int, rounds: int) -> Turns:
    """Return at least ``rounds`` rounds of ``n`` nodes: some of a large tournament, a small one as a whole and often.

    Three nodes meet one pair at a time, and need more to tell noise.
    """
    turns = num_rounds(n)
    indices = tuple(str(index) for index in range(min(turns, rounds)))
    return Turns(parameter="round", values=indices, repeats=_repeats(n, -(-rounds // turns)))


def _repeats(n: int, wanted: int) -> int:
    return max(wanted, _REPEATS_OF_THREE) if n == 3 else wanted


def confirmation(n: int, nodes: Set[int], links: Set[Pair], rounds: int) -> Turns:
    """Return rounds in which each suspect node meets good partners only, and each suspect link stands by itself.

    Beside them good nodes meet, to be measured against; where too few are left for that they meet in rounds between.
    """
    good = [rank for rank in range(n) if rank not in nodes]
    at_once = min(len(nodes), max(1, len(good) - 2))
    turns: list[tuple[Pair, ...]] = []
    for k in range(min(rounds, len(good))):
        rotated = [*good[k:], *good[:k]]
        for some in _parts(sorted(nodes), at_once):
            turns.append((*zip(some, rotated, strict=False), *_couples(rotated[len(some) :])))
        for apart in _disjoint(links):
            left = [rank for rank in rotated if all(rank not in pair for pair in apart)]
            turns.append((*apart, *_met(left, k)))
        if links or len(good) - at_once < 2:
            turns.append(_met(good, k))
    ordered = (tuple(sorted((min(pair), max(pair)) for pair in turn)) for turn in turns)
    texts = tuple(dict.fromkeys(format_pairs(turn) for turn in ordered if turn))
    rarest = min((sum(format_pairs((link,)) in text.split() for text in texts) for link in links), default=_MEETINGS)
    wanted = max(2 if len(good) < rounds else 1, -(-_MEETINGS // max(rarest, 1)))
    return Turns(parameter="pairs", values=texts, repeats=_repeats(n, wanted))


def _met(ranks: Sequence[int], index: int) -> tuple[Pair, ...]:
    return tuple((ranks[a], ranks[b]) for a, b in round_pairs(len(ranks), index % num_rounds(len(ranks))))


def _parts(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[i : i + size] for i in range(0, len(ranks), max(size, 1))]


def _couples(ranks: Sequence[int]) -> list[Pair]:
    return list(zip(ranks[::2], ranks[1::2], strict=False))


def _disjoint(links: Iterable[Pair]) -> list[list[Pair]]:
    """Return the links in groups in which no node is twice."""
    groups: list[list[Pair]] = []
    for pair in sorted(links):
        free = next((group for group in groups if not any(set(pair) & set(other) for other in group)), None)
        if free is None:
            groups.append([pair])
        else:
            free.append(pair)
    return groups
