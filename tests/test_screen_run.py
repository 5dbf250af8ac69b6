"""A run of rounds is asked for as it should be, and read as it was written."""

import io
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.cases import Case, Setting
from bench.child import Ended
from bench.commands import parse_settings
from bench.commands import run as run_of_the_command_line
from bench.definitions import DEFINITIONS
from bench.errors import UserError
from bench.plan import Plan
from bench.planning import Request, make_plan
from bench.records import RankState, Record, Status, WorldInfo
from bench.runs import Run, create_run, load_run, open_writer, write_info
from slurm import screen_run
from slurm.screen_rounds import Turns, tournament
from slurm.screen_run import Means, exchanges_of, measure, read, run_command, short, silent_hosts

[ROUND] = [definition for definition in DEFINITIONS if definition.name == "p2p.round"]
NODES = ("n1", "n2", "n3", "n4")
PAIRS = ("0-3 1-2", "0-2 1-3", "0-1 2-3")
WORLD = WorldInfo(size=4, nodes=4, backend="gloo", device="cpu")


def case(index: int) -> Case:
    return ROUND.case({"size_bytes": 1 << 20, "round": index, "ways": "in_turn"})


def npz(durations_ns: list[list[int]], steps: int = 1) -> bytes:
    with io.BytesIO() as file:
        stamps = np.array(durations_ns, dtype=np.int64)
        np.savez_compressed(file, ranks=np.arange(len(stamps)), duration_ns=stamps, steps_per_sample=np.int64(steps))
        return file.getvalue()


def record(index: int, status: Status = "ok", **more: Any) -> Record:
    details = {"pairs": PAIRS[index]} if status == "ok" else {}
    started = "2026-01-02T03:04:05.678Z"
    return Record(
        case=case(index), world=WORLD, launch=0, status=status, details=details, started=started, seconds=1.0, **more
    )


def states(**of: str) -> list[RankState]:
    """Return the states of ranks by host, all others alive."""
    return [RankState(rank=i, host=host, pid=1, state=of.get(host, "alive")) for i, host in enumerate(NODES)]


def a_run(out: Path, records: list[Record], hosts: list[str] | None, samples: dict[int, bytes] | None = None) -> Run:
    """Return a run of three rounds with these records; samples by round."""
    plan = Plan(
        preset="smoke",
        cases=tuple(case(index) for index in range(3)),
        skipped=(),
        nproc=4,
        backend="gloo",
        device="cpu",
        launches=1,
        budget_seconds=1,
        timeout_seconds=1,
        notes=("emulated: 4 nodes on one machine",),
    )
    path, info = create_run(out, plan, "1")
    write_info(path, msgspec.structs.replace(info, environment={} if hosts is None else {"hosts": hosts}))
    with open_writer(path) as writer:
        for one in records:
            writer.write(one)
        for index, content in (samples or {}).items():
            writer.write_samples(f"{case(index).id}-0.npz", content)
    return load_run(path)


def test_a_run_is_asked_for_with_one_rank_on_each_node_and_every_round() -> None:
    words = run_command(NODES, tournament(4, 5), means(Path("out")))
    assert words[:4] == [sys.executable, "-m", "parbench", "run"]
    line = " ".join(words)
    assert "--launcher srun --nodes 4 --ntasks-per-node 1 --placement block --nodelist n1,n2,n3,n4" in line
    assert "--only p2p.round --sizes 4M --set ways=in_turn --set repeat=0,1 --set round=0,1,2 --launches 1" in line
    assert "--budget 72s --timeout 20s --out out --json" in line


def means(out: Path, budget: str | None = None) -> Means:
    return Means(size="4M", budget=budget, timeout="20s", out=out)


def test_a_given_budget_is_the_budget() -> None:
    words = run_command(NODES, tournament(4, 5), means(Path("out"), "9s"))
    assert words[words.index("--budget") + 1] == "9s"


def test_what_is_asked_for_is_what_parbench_run_plans() -> None:
    turns = Turns(parameter="pairs", values=("0-3 1-2", "0-1 2-3"), repeats=2)
    words = run_command(NODES, turns, means(Path("out")))
    settings = parse_settings([words[i + 1] for i, word in enumerate(words) if word == "--set"])
    request = Request(preset="smoke", only=("p2p.round",), settings={**settings, "size_bytes": "4M"})
    plan = make_plan(request, DEFINITIONS, Setting(nproc=4, backend="gloo", device="cpu"))
    planned = [(case.params.get("repeat", 0), case.params["pairs"]) for case in plan.cases]
    assert planned == [(0, "0-3 1-2"), (0, "0-1 2-3"), (1, "0-3 1-2"), (1, "0-1 2-3")]
    assert {case.params["ways"] for case in plan.cases} == {"in_turn"}
    assert plan.skipped == ()
    known = {opt for param in run_of_the_command_line.params for opt in param.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_a_pair_takes_what_its_slower_rank_took_in_the_middle_iteration(tmp_path: Path) -> None:
    durations = [[10, 30, 20], [5, 5, 5], [7, 5, 6], [20, 10, 30]]
    run = a_run(tmp_path, [record(0)], list(NODES), {0: npz([[ns * 10**6 for ns in row] for row in durations])})
    found = exchanges_of(run, run.records[0])
    assert [(e.pair, e.seconds) for e in found] == [((0, 3), 0.03), ((1, 2), 0.006)]
    assert {e.turn for e in found} == {case(0).id}


def test_a_sample_of_several_steps_counts_as_one_step(tmp_path: Path) -> None:
    run = a_run(tmp_path, [record(0)], list(NODES), {0: npz([[8_000_000]] * 4, steps=4)})
    assert [e.seconds for e in exchanges_of(run, run.records[0])] == [0.002, 0.002]


def test_samples_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path, [record(0), record(1)], list(NODES), {0: b"nothing"})
    for one in run.records:
        with pytest.raises(UserError, match=rf"{one.case.id}-0.npz holds no samples that can be read"):
            exchanges_of(run, one)


def test_a_run_is_read_with_the_hosts_of_its_ranks_and_what_is_missing(tmp_path: Path) -> None:
    left_out = record(1, "skipped", reason="left out: the run's time was spent")
    hosts = ["n1.cluster", "n3", "n2", "n4"]
    run = a_run(tmp_path, [record(0), left_out], hosts, {0: npz([[10**6]] * 4)})
    seen = read(run, NODES)
    assert seen.hosts == ("n1", "n3", "n2", "n4")
    assert len(seen.exchanges) == 2
    assert seen.problems == ("left out: the run's time was spent", "rounds not reached: 1")
    assert seen.silent == {}
    assert seen.notes == ("emulated: 4 nodes on one machine",)


def test_a_run_that_does_not_tell_its_hosts_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, [record(0)], None, {0: npz([[10**6]] * 4)})
    with pytest.raises(UserError, match=r"does not tell the hosts of its ranks: ranks\(4\)"):
        read(run, NODES)


@pytest.mark.parametrize(
    ("status", "reason", "of", "silent"),
    [
        ("hang", "no end within 10 s: rank 2 (n3) did not arrive", {"n3": "no answer (process is stopped)"}, {"n3"}),
        ("hang", "no end within 10 s: rank 2 (n3) did not arrive", {}, {"n3"}),
        ("hang", "no end within 10 s: every rank arrived and waits; see their stacks", {}, set()),
        ("hang", "no end within 10 s: no rank answers", dict.fromkeys(NODES, "no answer"), set()),
        ("failed", "rank 1 (n2) died: ended by SIGKILL", dict.fromkeys(NODES, "died: ended by SIGTERM"), {"n2"}),
        ("failed", "rank 2 (n3) died: ended by SIGTERM", dict.fromkeys(NODES, "died: ended by SIGTERM"), set()),
        ("failed", "rank 1 (n2) raised RuntimeError: Connection closed by peer (n3)", {}, set()),
        ("failed", "rank 1 (n2) died: ended by SIGABRT after (n4) left", {}, {"n2"}),
    ],
)
def test_who_did_not_answer_is_named_and_who_only_noticed_is_not(
    status: Status, reason: str, of: dict[str, str], silent: set[str]
) -> None:
    bad = record(0, status, reason=reason, ranks=states(**of))
    assert silent_hosts(bad, NODES) == dict.fromkeys(silent, reason)


def test_a_node_whose_rank_never_started_did_not_answer() -> None:
    reason = "rank 3 did not start within 60 s"
    bad = record(0, "failed", reason=reason, ranks=states()[:3])
    assert silent_hosts(bad, NODES) == {"n4": reason}
    assert silent_hosts(record(0, "failed", reason=reason), NODES) == {}, "nobody started: it tells nobody apart"


def test_who_is_missing_is_held_responsible_and_not_who_was_told_to_end_for_it() -> None:
    reason = "rank 2 (n3) died: ended by SIGTERM; n2 did not answer when the last gang hung"
    told = [state for state in states(n3="died: ended by SIGTERM") if state.host != "n2"]
    assert silent_hosts(record(1, "failed", reason=reason, ranks=told), NODES) == {"n2": reason}


def test_the_first_trouble_is_blamed_and_not_what_follows_from_it(tmp_path: Path) -> None:
    first = record(0, "hang", reason="rank 1 (n2) did not arrive", ranks=states(n2="no answer"))
    then = record(1, "failed", reason="rank 2 (n3) died: ended by SIGKILL", ranks=states())
    seen = read(a_run(tmp_path, [first, then], list(NODES)), NODES)
    assert seen.silent == {"n2": "rank 1 (n2) did not arrive"}
    assert seen.problems[:2] == (first.reason, then.reason)


def test_a_host_is_known_by_its_first_name() -> None:
    assert short("n3.cluster.example") == short("n3") == "n3"


def test_a_run_is_found_by_what_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    a_run(out, [], list(NODES))

    def leave(command: list[str]) -> Ended:
        a_run(out, [record(0)], list(NODES), {0: npz([[10**6]] * 4)})
        return Ended(code=0)

    monkeypatch.setattr(screen_run, "run_child", leave)
    assert len(measure(NODES, tournament(4, 5), means(out)).exchanges) == 2


def test_a_child_that_leaves_no_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_run, "run_child", lambda command: Ended(code=2))
    with pytest.raises(UserError, match="parbench run ended with 2 and left no run in"):
        measure(NODES, tournament(4, 5), means(tmp_path))
