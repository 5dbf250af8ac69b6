"""What a screening measures, in children: each node's own check; and rounds of pairs, with what a run of them saw."""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.check.hosts import OVERHEAD_SECONDS, HostResult, compare_hosts, parse_result
from parbench.bench.launch.processes import PARBENCH, convert_sigterm_to_interrupt, run_child
from parbench.bench.machine.slurm_allocation import build_srun_command
from parbench.bench.plan.groups import (
    Pair,
    count_rounds,
    format_pairs,
    list_round_pairs,
    parse_pairs,
)
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run
from parbench.bench.results.samples import load_rank_samples, make_samples_path
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, get_last_line, parse_duration, strip_domain
from parbench.slurm.screen.fit import Exchange

_CHECK_BUDGET = "40s"
_BLAMED_CAUSES = ("died", "absent", "waiting")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to screen, and how; None is what the allocation or the defaults decide. Sizes and times are as written."""

    nodes: int | None = None
    partition: str | None = None
    rounds: int = 5
    size: str = "4M"
    time: str = "5m"
    budget: str | None = None
    timeout: str = "20s"
    out: Path = Path("runs/screen")
    as_json: bool = False
    devices: bool = True
    gpus_per_node: int | None = None


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


def measure(nodes: Sequence[str], turns: Turns, options: Options) -> Seen:
    """Measure rounds on these nodes, one rank each, and return what was seen; ``UserError`` if no run came of it."""
    before = set(options.out.glob("*/run.json"))
    code = run_child(run_command(nodes, turns, options)).returncode
    fresh = sorted(set(options.out.glob("*/run.json")) - before)
    if not fresh:
        raise UserError(
            f"parbench run ended with {code} and left no run in {options.out}; it said why above"
        )
    return read(load_run(fresh[-1].parent), nodes)


def run_command(nodes: Sequence[str], turns: Turns, options: Options) -> list[str]:
    """Return the words of ``parbench run``; without a given budget there is time for ranks that start slowly.

    A round ends when its time is known to 5 % (the preset's), long before a budget is spent.
    """
    words = [*PARBENCH, "run", "--launcher", "srun", "--nodes", str(len(nodes))]
    words += ["--ntasks-per-node", "1", "--distribution", "block", "--nodelist", ",".join(nodes)]
    words += ["--preset", "smoke", "--only", "p2p.pairwise", "--sizes", options.size]
    # at once, one's acknowledgements wait behind the other's data, or do not
    for setting in ("direction=in_turn", *turns.settings()):
        words += ["--set", setting]
    words += [
        "--repetitions",
        "1",
        "--budget",
        options.budget or f"{60 + 2 * len(turns)}s",
        "--timeout",
        options.timeout,
    ]
    return [
        *words,
        "--out",
        str(options.out),
        "--json",
    ]  # records go nowhere, and no report is made


def read(run: Run, nodes: Sequence[str]) -> Seen:
    """Return what a run saw; ``UserError`` if it does not tell which rank was on which host."""
    hosts = tuple((run.info.environment or {}).get("hosts") or ())
    good = [record for record in run.records if record.status == "ok"]
    if good and len(hosts) != run.info.plan.nproc:
        raise UserError(
            f"{run.path} does not tell the hosts of its ranks: ranks({run.info.plan.nproc})"
        )
    bad = (
        silent_hosts(record, nodes)
        for record in run.records
        if record.status in ("failed", "hang", "wrong")
    )
    problems = [record.reason for record in run.records if record.status != "ok"]
    if unread := run.info.plan.repetitions * len(run.info.plan.cases) - len(run.records):
        problems.append(f"rounds not reached: {unread}")
    return Seen(
        run=run.path,
        hosts=tuple(name_node(host, nodes) for host in hosts or nodes),
        exchanges=tuple(exchange for record in good for exchange in exchanges_of(run, record)),
        silent=next(filter(None, bad), {}),  # later ones follow from it
        problems=tuple(dict.fromkeys(problems)),
        notes=run.info.plan.limitations,
    )


def exchanges_of(run: Run, record: Record) -> Iterator[Exchange]:
    """Yield each pair's median time in a round, of every iteration that of its slower rank.

    ``UserError`` if the samples cannot be read.
    """
    samples = load_rank_samples(run, record)
    if "duration_ns" not in samples or "steps_per_sample" not in samples:
        raise UserError(f"{run.path / make_samples_path(record)} holds no samples that can be read")
    seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
    by_rank = dict(zip(samples["ranks"].tolist(), seconds.tolist(), strict=True))
    for one, other in parse_pairs(str(record.details.get("pairs", "")), record.world.size):
        both = median(list(map(max, by_rank[one], by_rank[other])))
        yield Exchange(turn=record.case.id, pair=(one, other), seconds=both)


def name_node(host: str, nodes: Sequence[str]) -> str:
    """Return Slurm's name of a host: the same name, or the only one that is equal without domains."""
    if host in nodes:
        return host
    matches = [node for node in nodes if strip_domain(node) == strip_domain(host)]
    return matches[0] if len(matches) == 1 else host


def silent_hosts(record: Record, nodes: Sequence[str]) -> dict[str, str]:
    """Return the nodes that a bad record holds responsible, with its words; none where it does not tell them apart.

    A rank that raised is not one, nor one that was told to end: it may only have suffered from another.
    """
    node_by_host = {state.host: name_node(state.host, nodes) for state in record.ranks}
    told, asked = set(node_by_host.values()), set(nodes)
    silent = asked - told if told else set()
    silent = silent or {node_by_host[state.host] for state in record.ranks if state.is_silent}
    if not silent:
        culprits = [culprit for culprit in record.culprits if culprit.cause in _BLAMED_CAUSES]
        silent = {name_node(culprit.host, nodes) for culprit in culprits}
    return dict.fromkeys(sorted(silent), record.reason) if silent < told | asked else {}


_MEETINGS = 4  # of a suspect link: two may be disturbed by chance
_LEAST_REPEATS = {3: 4}  # three nodes meet one pair at a time, and need more to tell noise


def tournament(n: int, rounds: int) -> Turns:
    """Return at least ``rounds`` rounds of ``n`` nodes: some of a large tournament, a small one whole and often."""
    values = tuple(map(str, range(min(count_rounds(n), rounds))))
    repeats = max(-(-rounds // count_rounds(n)), _LEAST_REPEATS.get(n, 1))
    return Turns(parameter="round", values=values, repeats=repeats)


def confirmation(n: int, nodes: Set[int], links: Set[Pair], rounds: int) -> Turns:
    """Return rounds in which each suspect node meets good partners only, and each suspect link stands by itself.

    Beside them good nodes meet, to be measured against; where too few are left for that they meet in rounds between.
    """
    suspects, good = sorted(nodes), [rank for rank in range(n) if rank not in nodes]
    at_once = max(1, min(len(nodes), len(good) - 2))
    turns: list[tuple[Pair, ...]] = []
    for k in range(min(rounds, len(good))):
        rotated = [*good[k:], *good[:k]]
        for some in (suspects[i : i + at_once] for i in range(0, len(suspects), at_once)):
            left = rotated[len(some) :]
            turns.append(
                (*zip(some, rotated, strict=False), *zip(left[::2], left[1::2], strict=False))
            )
        for apart in _disjoint(links):
            left = [rank for rank in rotated if all(rank not in pair for pair in apart)]
            turns.append((*apart, *_met(left, k)))
        if links or len(good) - min(len(nodes), at_once) < 2:
            turns.append(_met(good, k))
    ordered = (tuple(sorted((min(pair), max(pair)) for pair in turn)) for turn in turns)
    texts = tuple(dict.fromkeys(format_pairs(turn) for turn in ordered if turn))
    rarest = min(
        (sum(format_pairs((link,)) in text.split() for text in texts) for link in links),
        default=_MEETINGS,
    )
    repeats = max(
        2 if len(good) < rounds else 1, -(-_MEETINGS // max(rarest, 1)), _LEAST_REPEATS.get(n, 1)
    )
    return Turns(parameter="pairs", values=texts, repeats=repeats)


def _met(ranks: Sequence[int], index: int) -> tuple[Pair, ...]:
    return tuple(
        (ranks[a], ranks[b])
        for a, b in list_round_pairs(len(ranks), index % count_rounds(len(ranks)))
    )


def _disjoint(links: Set[Pair]) -> list[list[Pair]]:
    """Return the links in groups in which no node is twice."""
    groups: list[list[Pair]] = []
    for pair in sorted(links):
        for group in groups:
            if not any(set(pair) & set(other) for other in group):
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


def check_nodes(
    nodes: Sequence[str], out: Path, environ: Mapping[str, str]
) -> tuple[HostResult, ...]:
    """Run ``parbench check`` on all nodes at once and compare their devices; one that did not answer says why.

    There is one task a node, bound to no core, whose output is a file of the node's name.
    """
    with (
        tempfile.TemporaryDirectory(prefix="parbench-check-", dir=Path.cwd()) as folder,
        convert_sigterm_to_interrupt(),
    ):
        words = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        words += [f"--nodelist={','.join(nodes)}", "--cpu-bind=none"]
        words += [f"--output={folder}/%N.out", f"--error={folder}/%N.err"]
        command = [
            *build_srun_command(environ, *words),
            *PARBENCH,
            "check",
            "--json",
            "--budget",
            _CHECK_BUDGET,
        ]
        seconds = parse_duration(_CHECK_BUDGET) + OVERHEAD_SECONDS
        try:
            done = subprocess.run(
                [*command, "--out", str(out)], env=environ, capture_output=True, timeout=seconds
            )
            problem = get_last_line(done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            problem = f"no answer within {seconds:.0f} s"
        return compare_hosts([_answer(node, Path(folder), problem) for node in nodes])


def _answer(node: str, folder: Path, problem: str) -> HostResult:
    out, err = (folder / f"{node}.{kind}" for kind in ("out", "err"))
    errors = err.read_bytes() if err.exists() else b""
    return parse_result(
        node, out.read_bytes() if out.exists() else b"", errors or problem.encode(), 4
    )
