"""The runs of a screening: rounds of pairs, their command, and the records they leave."""

import io
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np
import pytest

from parbench.bench.check.check import document
from parbench.bench.check.health import Device, Health
from parbench.bench.commands import parse_settings
from parbench.bench.commands import run as run_cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.groups import Pair, parse_pairs
from parbench.bench.plan.options import Options as RunOptions
from parbench.bench.plan.options import make_plan as plan_run
from parbench.bench.results.records import RankState, Record, Status, WorldInfo
from parbench.bench.results.runs import Run, create_run, load_run, open_writer, write_info
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


@pytest.mark.parametrize(
    ("num_nodes", "rounds", "num_values", "repeats"),
    [(3, 5, 3, 4), (4, 5, 3, 2), (6, 12, 5, 3), (64, 5, 5, 1)],
)
def test_tournament_has_enough_rounds(
    num_nodes: int, rounds: int, num_values: int, repeats: int
) -> None:
    turns = tournament(num_nodes, rounds)
    assert turns.values == tuple(str(value) for value in range(num_values))
    assert turns.repeats == repeats


def meetings(num_nodes: int, turns: Turns) -> Counter[Pair]:
    """Count how often each pair of a confirmation exchanges."""
    pairs: Counter[Pair] = Counter()
    for text in turns.values:
        for pair in parse_pairs(text, num_nodes):
            pairs[pair] += turns.repeats
    return pairs


@pytest.mark.parametrize(
    ("num_nodes", "suspects"),
    [(3, {2}), (5, {0, 4}), (16, {1, 2, 3, 4, 5, 6, 7})],
)
def test_confirmation_pairs_suspects_with_good_nodes(num_nodes: int, suspects: set[int]) -> None:
    pairs = meetings(num_nodes, confirmation(num_nodes, suspects, set(), 5))
    for suspect in suspects:
        partners = {sum(pair) - suspect for pair in pairs if suspect in pair}
        assert not partners & suspects
        assert len(partners) == min(5, num_nodes - len(suspects))
    good_pairs = {pair: count for pair, count in pairs.items() if not suspects & set(pair)}
    assert sum(good_pairs.values()) >= 3, "suspects are compared with good pairs"


@pytest.mark.parametrize(
    ("num_nodes", "links"),
    [(4, {(0, 3)}), (8, {(0, 3), (0, 5)}), (64, {(2 * i, 2 * i + 1) for i in range(11)})],
)
def test_confirmation_repeats_suspect_links(num_nodes: int, links: set[Pair]) -> None:
    pairs = meetings(num_nodes, confirmation(num_nodes, set(), links, 5))
    for link in links:
        assert pairs[link] >= 4, "two exchanges may be disturbed by chance"
        for rank in link:
            assert any(rank in pair for pair in pairs if pair not in links)


def test_run_command_plans_repeats_slowest() -> None:
    turns = Turns(parameter="pairs", values=("0-3 1-2", "0-1 2-3"), repeats=2)
    args = run_command(NODES, turns, Options(out=Path("out")))
    with run_cli.make_context("run", args[4:]) as context:
        params = context.params
    settings = {**parse_settings(params["settings"]), "size_bytes": params["sizes"]}
    options = RunOptions(preset=params["preset"], only=params["only"], settings=settings)
    world = WorldSpec(nproc=4, backend="gloo", device="cpu")
    plan = plan_run(options, DEFINITIONS, world)
    assert plan.skipped == ()
    assert {case.params["direction"] for case in plan.cases} == {"in_turn"}
    assert [case.params.get("repeat", 0) for case in plan.cases] == [0, 0, 1, 1]
    assert [case.params["pairs"] for case in plan.cases] == [*turns.values, *turns.values]


def test_run_command_has_one_rank_per_node() -> None:
    line = " ".join(run_command(NODES, tournament(4, 5), Options(out=Path("out"))))
    assert "--launcher srun --nodes 4 --ntasks-per-node 1" in line
    assert "--nodelist n1,n2,n3,n4" in line
    assert "--budget 72s --timeout 20s" in line, "60 s and 2 s for each of 6 rounds"
    options = Options(out=Path("out"), budget="9s")
    assert "--budget 9s" in " ".join(run_command(NODES, tournament(4, 5), options))


def make_case(index: int) -> Case:
    return PAIRWISE.case({"size_bytes": 1 << 20, "round": index, "direction": "in_turn"})


def make_record(index: int, status: Status = "ok", **fields: Any) -> Record:
    """Build the record of a round; one that is ok lists its pairs."""
    defaults = {
        "world": WORLD,
        "launch": 0,
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
    plan = make_plan([make_case(index) for index in range(3)], nproc=4, notes=("emulated",))
    path, info = create_run(parent, plan, "1")
    write_info(path, msgspec.structs.replace(info, environment={"hosts": list(hosts)}))
    with open_writer(path) as writer:
        for record in records:
            writer.write(record)
        if samples is not None:
            writer.write_file(f"samples/{make_case(0).id}-0.npz", samples)
    return load_run(path)


def test_exchange_takes_the_median_of_the_slower_rank(tmp_path: Path) -> None:
    samples = encode_samples([[10, 30, 20], [5, 5, 5], [7, 5, 6], [20, 10, 30]])
    run = write_run(tmp_path, [make_record(0)], samples)
    exchanges = list(exchanges_of(run, run.records[0]))
    assert [exchange.pair for exchange in exchanges] == [(0, 3), (1, 2)]
    assert [exchange.seconds for exchange in exchanges] == [0.015, 0.003], "the time of one step"
    assert {exchange.turn for exchange in exchanges} == {make_case(0).id}


@pytest.mark.parametrize("samples", [b"damaged", None])
def test_unreadable_samples_are_refused(samples: bytes | None, tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_record(0)], samples)
    with pytest.raises(UserError, match=rf"{make_case(0).id}-0\.npz"):
        list(exchanges_of(run, run.records[0]))


def test_read_uses_the_hosts_of_the_ranks(tmp_path: Path) -> None:
    skipped = make_record(1, "skipped", reason="out of time")
    hosts = ["n1.cluster", "n3", "n2", "n4"]
    seen = read(write_run(tmp_path, [make_record(0), skipped], ONE_MILLISECOND, hosts), NODES)
    assert seen.hosts == ("n1", "n3", "n2", "n4")
    assert len(seen.exchanges) == 2
    assert seen.problems == ("out of time", "rounds not reached: 1")
    assert seen.silent == {}
    assert seen.notes == ("emulated",)


def test_read_blames_only_the_first_failure(tmp_path: Path) -> None:
    hang = make_record(0, "hang", reason="rank 1 (n2) did not arrive", ranks=rank_states())
    death = make_record(1, "failed", reason="rank 2 (n3) died: SIGKILL", ranks=rank_states())
    seen = read(write_run(tmp_path, [hang, death]), NODES)
    assert seen.silent == {"n2": hang.reason}
    assert seen.problems[:2] == (hang.reason, death.reason)


def rank_states(states: Mapping[str, str] | None = None) -> list[RankState]:
    """Build the state of one rank per node; nodes without a state are alive."""
    return [
        RankState(rank=rank, host=host, pid=1, state=(states or {}).get(host, "alive"))
        for rank, host in enumerate(NODES)
    ]


ALL_ENDED = dict.fromkeys(NODES, "died: ended by SIGTERM")


@pytest.mark.parametrize(
    ("status", "reason", "states", "silent"),
    [
        ("hang", "rank 2 (n3) did not arrive", {}, {"n3"}),
        ("hang", "rank 2 (n3) did not arrive", {"n4": "no answer (stopped)"}, {"n4"}),
        ("hang", "no rank answers", dict.fromkeys(NODES, "no answer"), set()),
        ("failed", "rank 1 (n2) died: ended by SIGKILL", ALL_ENDED, {"n2"}),
        ("failed", "rank 2 (n3) died: ended by SIGTERM", ALL_ENDED, set()),
        ("failed", "rank 1 (n2) raised RuntimeError: peer (n3)", {}, set()),
    ],
)
def test_silent_hosts_of_a_bad_record(
    status: Status, reason: str, states: dict[str, str], silent: set[str]
) -> None:
    record = make_record(0, status, reason=reason, ranks=rank_states(states))
    assert silent_hosts(record, NODES) == dict.fromkeys(silent, reason)


def test_measure_reads_the_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_child(command: list[str]) -> CompletedProcess[str]:
        write_run(tmp_path, [make_record(0)], ONE_MILLISECOND)
        return CompletedProcess(command, 0)

    write_run(tmp_path, [])
    monkeypatch.setattr(screen_run, "run_child", run_child)
    seen = measure(NODES, tournament(4, 5), Options(out=tmp_path))
    assert len(seen.exchanges) == 2


def test_measure_reports_a_missing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_run, "run_child", lambda command: CompletedProcess(command, 2))
    with pytest.raises(UserError, match="ended with 2"):
        measure(NODES, tournament(4, 5), Options(out=tmp_path))


def test_check_nodes_runs_one_task_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node answers, the second prints an error, and srun reports the third."""
    monkeypatch.chdir(tmp_path)
    device = Device(host="n1", name="GPU 5", uuid="n1", kind="H100", rank=0)
    health = Health(host="n1", started="2026", seconds=41.0, device="cuda", devices=(device,))
    (tmp_path / "answer.json").write_text(json.dumps(document(health)))
    script = """
    for arg; do
        case $arg in --output=*) out=${arg#--output=};; --error=*) err=${arg#--error=};; esac
    done
    echo "$@" > args
    cat answer.json > $(echo $out | sed s/%N/n1/)
    echo no module named torch > $(echo $err | sed s/%N/n2/)
    echo srun: error: n3: task 2: Exited with exit code 1 >&2
    """
    write_tool(tmp_path, "srun", script)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PARBENCH_SRUN_OPTIONS": "--container-image=x"}
    monkeypatch.setenv("PATH", environ["PATH"])
    answers = check_nodes(("n1", "n2", "n3"), Path("out"), environ)
    assert [answer.host for answer in answers] == ["n1", "n2", "n3"]
    assert answers[0].health == health
    assert answers[1].problem == "no module named torch"
    assert answers[2].problem == "srun: error: n3: task 2: Exited with exit code 1"
    args = (tmp_path / "args").read_text()
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3" in args
    assert f"--container-image=x {sys.executable} -m parbench check --json" in args
    assert list(tmp_path.glob("parbench-check-*")) == []
