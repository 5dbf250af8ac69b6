"""The runs of a screening: rounds of pairs on all nodes, and their exchanges."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.files import encode_json, write_output
from parbench.bench.launch.processes import PARBENCH, run_child
from parbench.bench.plan.groups import format_pairs, parse_pairs
from parbench.bench.plan.plan import CasesFile, Entry
from parbench.bench.results.records import Record
from parbench.bench.results.runs import (
    Run,
    list_runs,
    load_rank_samples,
    load_run,
    make_samples_path,
)
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, parse_duration, strip_domain
from parbench.slurm.screen.ratios import Exchange
from parbench.slurm.screen.rounds import Round

_BLAMED_CAUSES = ("died", "absent", "waiting")
"""The values of ``Culprit.cause`` in a record for which the node of the rank is blamed."""
_START_SECONDS = 60  # the time budget for the start of all ranks


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of the runs of ``parbench run`` that measure the rounds of one screening.

    All runs of the screening have the same settings.
    """

    size: str
    """The bytes that each of two ranks sends to the other in an exchange, such as ``128M``."""
    rails: int
    """The number of ranks on each node: one for each GPU with its NIC, or 1 without GPUs."""
    timeout: str
    """The time after which a round counts as hung, as text such as ``20s``."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The data exchanges between pairs of nodes that one run of ``parbench run`` measured.

    It also has the nodes that did not answer and the reasons for missing rounds.
    """

    nodes: tuple[str, ...]
    """The names of the nodes in the order of ranks. Exchanges have indices into this tuple."""
    exchanges: tuple[Exchange, ...] = ()
    """The measured exchanges of all rounds, one for each pair of ranks in a round."""
    silent: Mapping[str, str]
    """The reason why a round failed, by the name of each node that caused the failure.

    These nodes did not answer, or their ranks died or blocked others. See ``find_blamed_nodes``.
    Empty if all rounds were measured or no node can be blamed.
    """
    problems: tuple[str, ...] = ()
    """The reasons why rounds were not measured, equal reasons once. Empty if all were measured."""
    notes: tuple[str, ...] = ()
    """The notes in the plan of the run, such as that nodes or links were emulated."""


def measure_rounds(
    nodes: Sequence[str], rounds: Sequence[Round], setup: Setup, folder: Path
) -> Measurement:
    """Measure data exchanges between pairs of ``nodes`` with ``parbench run``.

    The result has the seconds of each exchange, and the nodes and rounds without a measurement.
    The time budget of the run is 60 s plus the timeout of each round. Raises ``UserError`` if
    ``parbench run`` ends without a folder of results, or if its results cannot be read.

    Args:
        nodes: Slurm's names of the nodes.
        rounds: the rounds to measure. Each pair has the indices of two nodes in ``nodes``.
        setup: the size, ranks per node and timeout of the measurement.
        folder: the folder to create, for the file of cases and the results.
    """
    folder.mkdir(parents=True)
    cases = folder / "cases.json"
    write_output(cases, encode_json(CasesFile(case=make_cases(rounds, setup))))
    budget = _START_SECONDS + parse_duration(setup.timeout) * len(rounds)
    command = [*PARBENCH, "run", "--launcher", "srun", "--nodes", ",".join(nodes)]
    command += ["--nproc", str(setup.rails), "--distribution", "block"]
    command += ["--cases", str(cases), "--out", str(folder), "--format=json"]
    command += ["--preset", "smoke", "--repetitions", "1"]
    command += ["--budget", str(budget), "--timeout", setup.timeout]
    code = run_child(command).returncode
    runs = list_runs(folder)
    if not runs:
        raise UserError(f"parbench run ended with {code} and left no run in {folder}; see above")
    return read_measurement(load_run(runs[0]), nodes, setup)


def make_cases(rounds: Sequence[Round], setup: Setup) -> tuple[Entry, ...]:
    """Return the cases of a run that measures ``rounds``, each a set of pairs of nodes.

    Each round is one ``p2p.pairwise`` case. Local rank i of a node exchanges data with local rank i
    of the other node of its pair. ``setup`` has the size of an exchange and the ranks per node.
    """
    cases = []
    repeats: Counter[Round] = Counter()
    for pairs in rounds:
        rank_pairs = []
        for first, second in pairs:
            for rail in range(setup.rails):
                rank_pairs.append((first * setup.rails + rail, second * setup.rails + rail))
        params: dict[str, str | int] = {
            "size_bytes": setup.size,
            # Both directions at once would let acknowledgements wait behind data, or not.
            "direction": "in_turn",
            "pairs": format_pairs(tuple(rank_pairs)),
            "repeat": repeats[pairs],
        }
        repeats[pairs] += 1
        cases.append(Entry(name="p2p.pairwise", set=params))
    return tuple(cases)


def read_measurement(run: Run, nodes: Sequence[str], setup: Setup) -> Measurement:
    """Return the data exchanges between nodes that a run measured, and the nodes without answer.

    ``nodes`` are the nodes on which the run was started, and ``setup`` has the settings with which
    it was started. Raises ``UserError`` if samples cannot be read, or if the ranks are not in
    blocks of ``setup.rails`` consecutive ranks per node.
    """
    good = [record for record in run.records if record.status == "ok"]
    problems = [record.reason for record in run.records if record.status != "ok"]
    num_unread = len(run.info.plan.cases) - len(run.records)
    if num_unread > 0:
        problems.append(f"rounds not reached: {num_unread}")
    exchanges: list[Exchange] = []
    for index, record in enumerate(good):
        exchanges += read_exchanges(run, record, index, setup.rails)
    silent: dict[str, str] = {}
    for record in run.records:
        # Later failures follow from the first one that distinguishes nodes.
        if not silent and record.status in ("failed", "hang", "wrong"):
            silent = find_blamed_nodes(record, nodes)
    return Measurement(
        nodes=_read_nodes(run, setup) if good else tuple(nodes),
        exchanges=tuple(exchanges),
        silent=silent,
        problems=tuple(dict.fromkeys(problems)),
        notes=run.info.plan.limitations,
    )


def _read_nodes(run: Run, setup: Setup) -> tuple[str, ...]:
    """Return Slurm's names of the nodes of a run in the order of ranks, each once.

    Raises ``UserError`` if a node does not have ``setup.rails`` consecutive ranks.
    """
    hosts = (run.info.environment or {}).get("hosts") or []
    first_hosts = hosts[:: setup.rails]
    blocks = [host for host in first_hosts for _ in range(setup.rails)]
    if len(hosts) != run.info.plan.nproc or blocks != hosts:
        layout = f"{setup.rails} ranks on each host"
        raise UserError(f"{run.path}: the hosts of its ranks are not in blocks of {layout}")
    return tuple(map(strip_domain, first_hosts))


def read_exchanges(run: Run, record: Record, index: int, rails: int) -> Iterator[Exchange]:
    """Yield the exchanges of one round, one for each pair of ranks.

    Both ranks of a pair have several samples, each a duration in seconds per exchange. For each
    sample, the longer duration of the two ranks counts. ``Exchange.seconds`` is the median of these
    longer durations over the samples. Raises ``UserError`` if the samples cannot be read.

    Args:
        run: the run that measured the round.
        record: the result of the round.
        index: the value of ``Exchange.round``: the number of the round among measured ones.
        rails: the number of ranks on each node.
    """
    samples = load_rank_samples(run, record)
    if "duration_ns" not in samples or "steps_per_sample" not in samples:
        raise UserError(f"{run.path / make_samples_path(record)} holds no samples that can be read")
    seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
    by_rank = dict(zip(samples["ranks"].tolist(), seconds.tolist(), strict=True))
    for first, second in parse_pairs(str(record.details.get("pairs", "")), record.world.size):
        duration = median(list(map(max, by_rank[first], by_rank[second])))
        nodes = (first // rails, second // rails)
        yield Exchange(round=index, nodes=nodes, rail=first % rails, seconds=duration)


def find_blamed_nodes(record: Record, nodes: Sequence[str]) -> dict[str, str]:
    """Return the nodes that caused the failure of a round, as a dict from name to reason.

    The reason is ``record.reason`` for each of these nodes. They are the nodes that did not answer.
    If all answered, they are the nodes whose ranks died, did not arrive where others waited, or
    wait for one another. A rank that raised an error does not count, because another rank may have
    caused the error. The result is empty if no node or every node is found.

    Args:
        record: the result of the failed round.
        nodes: Slurm's names of all nodes of the run.
    """
    reported = {strip_domain(rank.host) for rank in record.ranks}
    silent_hosts = [rank.host for rank in record.ranks if rank.is_silent]
    blamed_hosts = [entry.host for entry in record.culprits if entry.cause in _BLAMED_CAUSES]
    silent = set(nodes) - reported if reported else set()
    for hosts in (silent_hosts, blamed_hosts):
        silent = silent or set(map(strip_domain, hosts))
    if silent >= set(nodes):
        return {}
    return dict.fromkeys(sorted(silent), record.reason)
