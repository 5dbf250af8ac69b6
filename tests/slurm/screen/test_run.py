"""The runs of a screening: rounds of pairs, their command, and the records they leave."""

import io
import json
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np
import pytest

from parbench.bench.check.check import to_document
from parbench.bench.check.health import Device, Health
from parbench.bench.commands import parse_settings
from parbench.bench.commands import run as run_cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.groups import Pair, parse_pairs
from parbench.bench.plan.options import Options as RunOptions
from parbench.bench.plan.options import make_plan as plan_run
from parbench.bench.results.records import (
    Culprit,
    CulpritCause,
    RankState,
    Record,
    Status,
    WorldInfo,
)
from parbench.bench.results.runs import Run, create_run, load_run, open_writer, write_run_info
from parbench.bench.text import UserError
from parbench.slurm.screen import run as screen_run
from parbench.slurm.screen.run import (
    Options,
    Turns,
    check_nodes,
    confirmation,
    exchanges_of,
    measure,
    read,
    run_command,
    silent_hosts,
    tournament,
)
from tests.support.fakes import make_plan
from tests.support.trees import write_tool

NODES = ("n1", "n2", "n3", "n4")
PAIRWISE = next(definition for definition in DEFINITIONS if definition.name == "p2p.pairwise")
PAIRS_OF_ROUND = ("0-3 1-2", "0-2 1-3", "0-1 2-3")
WORLD = WorldInfo(size=4, nodes=4, backend="gloo", device="cpu")
OPTIONS = Options(out=Path("out"))


@pytest.mark.parametrize(
    ("num_nodes", "num_rounds", "num_repeats"),
    [(3, 3, 4), (4, 3, 2), (64, 5, 1)],
)
def test_tournament_has_enough_rounds(
    num_nodes: int, num_rounds: int, num_repeats: int
) -> None:
    turns = tournament(num_nodes, 5)
    assert turns.values == tuple(str(index) for index in range(num_rounds))
    assert turns.repeats == num_repeats


def count_exchanges(num_nodes: int, turns: Turns) -> Counter[Pair]:
    """Count how often each pair of a confirmation exchanges."""
    counts: Counter[Pair] = Counter()
    for text in turns.values:
        for pair in parse_pairs(text, num_nodes):
            counts[pair] += turns.repeats
    return counts


@pytest.mark.parametrize(
    ("num_nodes", "suspects"),
    [(3, {2}), (5, {0, 4}), (16, {1, 2, 3, 4, 5, 6, 7})],
)
def test_confirmation_pairs_suspects_with_good_nodes(
    num_nodes: int, suspects: set[int]
) -> None:
    turns = confirmation(num_nodes, suspects, set(), 5)
    counts = count_exchanges(num_nodes, turns)
    num_good = num_nodes - len(suspects)
    for suspect in suspects:
        partners = {sum(pair) - suspect for pair in counts if suspect in pair}
        assert not partners & suspects
        assert len(partners) == min(5, num_good)
    num_good_exchanges = sum(
        count for pair, count in counts.items() if suspects.isdisjoint(pair)
    )
    assert num_good_exchanges >= 3, "suspects are compared with good pairs"


@pytest.mark.parametrize(
    ("num_nodes", "links"),
    [(4, {(0, 3)}), (8, {(0, 3), (0, 5)}), (64, {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)})],
)
def test_confirmation_repeats_suspect_links(num_nodes: int, links: set[Pair]) -> None:
    turns = confirmation(num_nodes, set(), links, 5)
    counts = count_exchanges(num_nodes, turns)
    good_pairs = set(counts) - links
    ranks_in_good_pairs = {rank for pair in good_pairs for rank in pair}
    for link in links:
        assert counts[link] >= 4, "two exchanges may be disturbed by chance"
        assert ranks_in_good_pairs >= set(link)


def test_run_command_plans_repeats_slowest() -> None:
    turns = Turns(parameter="pairs", values=("0-3 1-2", "0-1 2-3"), repeats=2)
    args = run_command(NODES, turns, OPTIONS)
    with run_cli.make_context("run", args[4:]) as context:
        params = context.params
    settings = {**parse_settings(params["settings"]), "size_bytes": params["sizes"]}
    options = RunOptions(preset=params["preset"], only=params["only"], settings=settings)
    plan = plan_run(options, DEFINITIONS, WorldSpec(nproc=4, backend="gloo", device="cpu"))
    assert plan.skipped == ()
    assert {case.params["direction"] for case in plan.cases} == {"in_turn"}
    assert [case.params.get("repeat", 0) for case in plan.cases] == [0, 0, 1, 1]
    assert [case.params["pairs"] for case in plan.cases] == [*turns.values, *turns.values]


def make_case(index: int) -> Case:
    return PAIRWISE.build_case({"size_bytes": 1 << 20, "round": index, "direction": "in_turn"})


def make_record(index: int, status: Status = "ok", **fields: Any) -> Record:
    """Build the record of a round; a good record lists its pairs."""
    defaults = {
        "world": WORLD,
        "repetition": 0,
        "details": {"pairs": PAIRS_OF_ROUND[index]} if status == "ok" else {},
        "started": "2026-01-02T03:04:05.678Z",
        "seconds": 1.0,
    }
    return Record(**{**defaults, "case": make_case(index), "status": status, **fields})


def encode_samples(milliseconds: list[list[int]]) -> bytes:
    """Encode the duration of each iteration of two steps, by rank."""
    durations = np.array(milliseconds) * 1_000_000
    file = io.BytesIO()
    np.savez(file, ranks=np.arange(4), duration_ns=durations, steps_per_sample=2)
    return file.getvalue()


ONE_MILLISECOND = encode_samples([[1], [1], [1], [1]])


def write_run(
    parent: Path,
    records: Sequence[Record],
    samples: bytes | None = None,
    hosts: Sequence[str] = NODES,
) -> Run:
    """Write a run of three rounds; ``samples`` are those of the first round."""
    cases = [make_case(index) for index in range(3)]
    plan = make_plan(cases, nproc=4, notes=("emulated",))
    path, info = create_run(parent, plan, "1")
    write_run_info(path, msgspec.structs.replace(info, environment={"hosts": list(hosts)}))
    with open_writer(path) as writer:
        for record in records:
            writer.write(record)
        if samples is not None:
            writer.write_file(f"samples/{cases[0].id}-0.npz", samples)
    return load_run(path)


def test_exchange_takes_the_median_of_the_slower_rank(tmp_path: Path) -> None:
    samples = encode_samples([[10, 30, 20], [5, 5, 5], [7, 5, 6], [20, 10, 30]])
    run = write_run(tmp_path, [make_record(0)], samples)
    first, second = exchanges_of(run, run.records[0])
    assert first.pair == (0, 3)
    assert first.seconds == 0.015, "the time of one step"
    assert second.pair == (1, 2)
    assert second.seconds == 0.003
    assert first.turn == second.turn == make_case(0).id


@pytest.mark.parametrize("samples", [b"damaged", None])
def test_unreadable_samples_are_refused(samples: bytes | None, tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_record(0)], samples)
    with pytest.raises(UserError, match=rf"{make_case(0).id}-0\.npz"):
        list(exchanges_of(run, run.records[0]))


def test_read_uses_the_hosts_of_the_ranks(tmp_path: Path) -> None:
    records = [make_record(0), make_record(1, "skipped", reason="out of time")]
    hosts = ["n1.cluster", "n3", "n2", "n4"]
    observations = read(write_run(tmp_path, records, ONE_MILLISECOND, hosts), NODES)
    assert observations.hosts == ("n1", "n3", "n2", "n4")
    assert len(observations.exchanges) == 2
    assert observations.problems == ("out of time", "rounds not reached: 1")
    assert observations.silent == {}
    assert observations.notes == ("emulated",)


def make_states(silent: Collection[str] = ()) -> list[RankState]:
    """Build the state of one rank per node."""
    return [
        RankState(rank=rank, host=host, pid=1, state="alive", is_silent=host in silent)
        for rank, host in enumerate(NODES)
    ]


def blame(rank: int, cause: CulpritCause) -> tuple[Culprit]:
    return (Culprit(rank=rank, host=NODES[rank], cause=cause),)


def test_read_blames_only_the_first_failure(tmp_path: Path) -> None:
    ranks = make_states()
    hang = make_record(0, "hang", reason="late", ranks=ranks, culprits=blame(1, "absent"))
    death = make_record(1, "failed", reason="dead", ranks=ranks, culprits=blame(2, "died"))
    observations = read(write_run(tmp_path, [hang, death]), NODES)
    assert observations.silent == {"n2": hang.reason}
    assert observations.problems[:2] == (hang.reason, death.reason)


@pytest.mark.parametrize(("silent", "blamed"), [([], {"n3"}), (["n4"], {"n4"}), (NODES, set())])
def test_hang_blames_hosts_without_an_answer(silent: Sequence[str], blamed: set[str]) -> None:
    ranks = make_states(silent)
    record = make_record(0, "hang", reason="late", ranks=ranks, culprits=blame(2, "absent"))
    assert silent_hosts(record, NODES) == dict.fromkeys(blamed, "late")


@pytest.mark.parametrize(
    ("cause", "blamed"), [("died", {"n2"}), ("terminated", set()), ("raised", set())]
)
def test_failure_blames_only_a_host_that_died(cause: CulpritCause, blamed: set[str]) -> None:
    culprits = blame(1, cause)
    record = make_record(0, "failed", reason="it broke", ranks=make_states(), culprits=culprits)
    assert silent_hosts(record, NODES) == dict.fromkeys(blamed, "it broke")


def test_measure_reads_the_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_child(command: list[str]) -> CompletedProcess[str]:
        write_run(tmp_path, [make_record(0)], ONE_MILLISECOND)
        return CompletedProcess(command, 0)

    write_run(tmp_path, [])
    monkeypatch.setattr(screen_run, "run_child", run_child)
    observations = measure(NODES, tournament(4, 5), Options(out=tmp_path))
    assert len(observations.exchanges) == 2


FAKE_SRUN = """
for arg; do
    case $arg in --output=*) out=${arg#--output=};; --error=*) err=${arg#--error=};; esac
done
echo "$@" > args
cat answer.json > $(echo $out | sed s/%N/n1/)
echo no module named torch > $(echo $err | sed s/%N/n2/)
echo srun: error: n3: task 2: Exited with exit code 1 >&2
"""


def test_check_nodes_runs_one_task_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node answers, the second prints an error, and srun reports the third."""
    monkeypatch.chdir(tmp_path)
    device = Device(host="n1", name="GPU 5", uuid="n1", kind="H100", rank=0)
    health = Health(host="n1", started="2026", seconds=41.0, device="cuda", devices=(device,))
    Path("answer.json").write_text(json.dumps(to_document(health)))
    write_tool(tmp_path, "srun", FAKE_SRUN)
    path = f"{tmp_path}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    environ = {"PATH": path, "PARBENCH_SRUN_OPTIONS": "--container-image=x"}
    n1, n2, n3 = check_nodes(("n1", "n2", "n3"), Path("out"), environ)
    assert n1.health == health
    assert n2.host == "n2"
    assert n2.problem == "no module named torch"
    assert n3.problem == "srun: error: n3: task 2: Exited with exit code 1"
    args = Path("args").read_text()
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3" in args
    assert f"--container-image=x {sys.executable} -m parbench check --json" in args
    assert list(tmp_path.glob("parbench-check-*")) == []
