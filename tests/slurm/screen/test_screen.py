"""Screening: what is measured, asked for, read and said of it, on simulated nodes and from runs as they are written."""

import io
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import click.testing
import msgspec
import numpy as np
import pytest

from parbench.bench.check.check import document
from parbench.bench.check.health import Device, Health, Reason
from parbench.bench.check.hosts import Answer
from parbench.bench.commands import parse_settings
from parbench.bench.commands import run as run_of_the_command_line
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.options import Options as RunOptions
from parbench.bench.plan.options import make_plan
from parbench.bench.results.records import RankState, Record, Status, WorldInfo
from parbench.bench.results.runs import Run, create_run, load_run, open_writer, write_info
from parbench.bench.text import UserError
from parbench.slurm.commands import slurm
from parbench.slurm.screen import run as screen_run
from parbench.slurm.screen import screen as screening_command
from parbench.slurm.screen.run import (
    Options,
    Seen,
    Turns,
    exchanges_of,
    measure,
    read,
    run_command,
    silent_hosts,
    tournament,
)
from parbench.slurm.screen.screen import (
    Screening,
    allocated,
    check,
    salloc_command,
    screen,
    screen_nodes,
)
from parbench.slurm.system import Slurm
from tests.studies.screen_study import Cluster, simulate
from tests.support.fakes import make_plan as make_fake_plan
from tests.support.trees import write_tool

NODES = ("n1", "n2", "n3", "n4")
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
ONLY_N3_IS_SLOW = {"n1": "fine", "n2": "fine", "n3": "slow", "n4": "fine"}
UNSURE = ("unconfirmed", 4)
Change = Callable[[Seen, int], Seen]


class Lab:
    """Nodes of which some are slow, or do not answer, or measure nothing the ``quits``-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[tuple[str, ...], Turns]] = []
        self.slow: Mapping[str, float] = {}
        self.silent: Sequence[str] = ()
        self.quits: int | None = None
        self.change: Change = lambda seen, number: seen
        self._rng = random.Random(5)
        self.answers: Sequence[Answer] = ()
        monkeypatch.setattr(screening_command, "measure", self.measure)
        monkeypatch.setattr(screening_command, "check_nodes", lambda *_: self.answers)
        monkeypatch.setattr(
            Slurm, "host_names", lambda self, text: NODES if text == "n[1-4]" else ()
        )

    def measure(self, nodes: Sequence[str], turns: Turns, options: Options) -> Seen:
        self.asked.append((tuple(nodes), turns))
        speeds = {i: self.slow[node] for i, node in enumerate(nodes) if node in self.slow}
        silent = {
            node: f"rank {i} ({node}) did not arrive"
            for i, node in enumerate(nodes)
            if node in self.silent
        }
        broken = silent or len(self.asked) == self.quits
        exchanges = simulate(Cluster(n=len(nodes), nodes=speeds, noise=0.02), turns, self._rng)
        seen = Seen(
            run=Path(f"runs/{len(self.asked)}"),
            hosts=tuple(nodes),
            exchanges=() if broken else tuple(exchanges),
            silent=silent,
            problems=("it broke",) if broken else (),
            notes=("emulated",),
        )
        return self.change(seen, len(self.asked))


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def words(found: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in (*found.nodes, *found.links)}


def test_fine_nodes_are_measured_once_and_a_slow_one_again_with_good_partners_and_blamed(
    lab: Lab,
) -> None:
    found = screen_nodes(NODES, Options())
    assert words(found) == dict.fromkeys(NODES, "fine")
    assert (found.code, found.exclude, found.runs) == (0, "", ("runs/1",))
    assert [turns.parameter for _, turns in lab.asked] == ["round"]
    lab.slow = {"n3": 0.25}
    for options in (
        Options(),
        Options(rounds=3),
    ):  # with few rounds what confirmed n3 weighs the others too
        found = screen_nodes(NODES, options)
        assert words(found) == ONLY_N3_IS_SLOW
        assert (found.code, found.exclude) == (1, "--exclude=n3")
        assert [(nodes, turns.parameter) for nodes, turns in lab.asked[-2:]] == [
            (NODES, "round"),
            (NODES, "pairs"),
        ]
        assert found.runs == tuple(
            f"runs/{number}" for number in (len(lab.asked) - 1, len(lab.asked))
        )


def test_a_suspect_that_is_not_measured_slow_again_is_not_blamed(lab: Lab) -> None:
    moved, broken = {"hosts": NODES[::-1]}, {"exchanges": (), "problems": ("it broke",)}
    for speeds, again, told in (
        ({}, {}, ("fine", 0)),
        ({"n3": 0.25}, moved, UNSURE),
        ({"n3": 0.25}, broken, UNSURE),
    ):

        def change(seen: Seen, number: int, speeds: Any = speeds, again: Any = again) -> Seen:
            lab.slow = speeds
            return seen if number == 1 else replace(seen, **again)

        lab.slow, lab.change = {"n3": 0.25}, change
        lab.asked.clear()
        found = screen_nodes(NODES, Options())
        assert (words(found)["n3"], found.code, found.exclude, len(found.runs)) == (*told, "", 2)


def test_who_does_not_answer_is_left_out_and_the_others_are_screened(lab: Lab) -> None:
    lab.slow, lab.silent = {"n1": 0.25}, ["n2"]
    nodes, left = (*NODES, "n5"), ("n1", "n3", "n4", "n5")
    found = screen_nodes(nodes, Options())
    assert words(found) == {
        "n1": "slow",
        "n2": "did not answer",
        "n3": "fine",
        "n4": "fine",
        "n5": "fine",
    }
    assert (found.code, found.exclude) == (4, "--exclude=n1,n2")
    assert [asked for asked, _ in lab.asked] == [nodes, left, left]


def test_with_too_few_left_or_where_nothing_ran_nobody_is_blamed(lab: Lab) -> None:
    lab.silent = ["n2", "n3"]
    found = screen_nodes(NODES, Options())
    assert words(found) == {
        "n1": "cannot tell",
        "n2": "did not answer",
        "n3": "did not answer",
        "n4": "cannot tell",
    }
    assert (found.code, found.exclude, len(lab.asked)) == (4, "--exclude=n2,n3", 1)
    lab.slow, lab.silent, lab.quits = {"n3": 0.25}, (), 2
    found = screen_nodes(NODES, Options())
    assert words(found) == dict.fromkeys(NODES, "cannot tell")
    assert (found.code, found.exclude, found.problems) == (4, "", ("it broke",))


def test_inside_an_allocation_its_nodes_are_screened_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.slow = {"n3": 0.25}
    code, text = screen(Options(), INSIDE)
    assert (code, text.splitlines()[-1]) == (1, "--exclude=n3")
    assert "note: emulated" in text
    assert lab.asked[0][0] == NODES
    code, text = screen(Options(as_json=True), INSIDE)
    told = json.loads(text)
    assert (code, told["exclude"]) == (1, "--exclude=n3")
    assert [one["verdict"] for one in told["nodes"]] == list(ONLY_N3_IS_SLOW.values())
    assert told["nodes"][2]["low"] < told["nodes"][2]["factor"] < told["nodes"][2]["high"]
    assert told["nodes"][2]["factor"] == pytest.approx(4, rel=0.05)
    assert allocated(Options(nodes=3), INSIDE, Slurm()) == NODES[:3], (
        "fewer nodes may be screened than there are"
    )
    with pytest.raises(UserError, match="--nodes 5: job 7 has 4"):
        allocated(Options(nodes=5), INSIDE, Slurm())
    with pytest.raises(UserError, match=r"nodes\(0\) < 3"):
        allocated(Options(), {"SLURM_JOB_ID": "7"}, Slurm())
    monkeypatch.setattr("os.environ", {**INSIDE, "PATH": ""})
    done = click.testing.CliRunner().invoke(slurm, ["screen", "--size", "1M"])
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, "--exclude=n3")


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    for options, told in (
        (
            Options(nodes=2),
            r"nodes\(2\) < 3: of one pair nobody can tell which of its two nodes is slow",
        ),
        (Options(rounds=2), "--rounds 2: at least 3"),
        (Options(size="0"), "--size 0: nothing moves"),
        (Options(time="soon"), "duration 'soon' is not understood"),
    ):
        with pytest.raises(UserError, match=told):
            check(options)
    with pytest.raises(
        UserError, match="outside an allocation --nodes says how many nodes to screen"
    ):
        screen(Options(), {})


def test_the_same_is_done_inside_an_allocation_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        nodes=4, partition="lab", rounds=7, size="1M", time="90s", budget="9s", as_json=True
    )
    line = " ".join(salloc_command(options))
    assert line.startswith("salloc --quiet --no-kill --nodes=4 --ntasks-per-node=1 --exclusive ")
    assert "--time=0:02:00 --partition=lab" in line
    inside = line[line.index("-m parbench slurm") :]
    assert (
        "--nodes 4 --rounds 7 --size 1M --timeout 20s --budget 9s --out runs/screen --json"
        in inside
    )
    assert "--partition" not in inside
    known = {opt for param in slurm.commands["screen"].params for opt in param.opts}
    assert {word for word in inside.split() if word.startswith("--")} <= known
    assert "--partition" not in " ".join(salloc_command(Options(nodes=4)))
    fake = tmp_path / "salloc"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert screen(Options(nodes=4), {}) == (1, ""), "the code is that of the screening inside"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="salloc is not in the PATH"):
        screen(Options(nodes=4), {})


[ROUND] = [definition for definition in DEFINITIONS if definition.name == "p2p.pairwise"]
PAIRS = ("0-3 1-2", "0-2 1-3", "0-1 2-3")
WORLD = WorldInfo(size=4, nodes=4, backend="gloo", device="cpu")


def case(index: int) -> Case:
    return ROUND.case({"size_bytes": 1 << 20, "round": index, "direction": "in_turn"})


def npz(durations_ms: list[list[int]], steps: int = 1) -> bytes:
    with io.BytesIO() as file:
        stamps = np.array(durations_ms, dtype=np.int64) * 10**6
        np.savez_compressed(
            file, ranks=np.arange(len(stamps)), duration_ns=stamps, steps_per_sample=np.int64(steps)
        )
        return file.getvalue()


def record(index: int, status: Status = "ok", **more: Any) -> Record:
    given = {
        "details": {"pairs": PAIRS[index]} if status == "ok" else {},
        "started": "2026-01-02T03:04:05.678Z",
    }
    return Record(
        case=case(index), world=WORLD, launch=0, status=status, seconds=1.0, **{**given, **more}
    )


def states(**of: str) -> list[RankState]:
    return [
        RankState(rank=i, host=host, pid=1, state=of.get(host, "alive"))
        for i, host in enumerate(NODES)
    ]


def a_run(
    out: Path,
    records: list[Record],
    hosts: Sequence[str] | None = NODES,
    samples: dict[int, bytes] | None = None,
) -> Run:
    """Return a run of three rounds with these records; samples by round."""
    path, info = create_run(
        out,
        make_fake_plan(map(case, range(3)), nproc=4, notes=("emulated: 4 nodes on one machine",)),
        "1",
    )
    write_info(
        path,
        msgspec.structs.replace(info, environment={} if hosts is None else {"hosts": list(hosts)}),
    )
    with open_writer(path) as writer:
        for one in records:
            writer.write(one)
        for index, content in (samples or {}).items():
            writer.write_file(f"samples/{case(index).id}-0.npz", content)
    return load_run(path)


def test_a_run_is_asked_for_with_one_rank_on_each_node_and_every_round_and_parbench_run_plans_it() -> (
    None
):
    words = run_command(NODES, tournament(4, 5), Options(out=Path("out")))
    assert words[:4] == [sys.executable, "-m", "parbench", "run"]
    line = " ".join(words)
    assert (
        "--launcher srun --nodes 4 --ntasks-per-node 1 --placement block --nodelist n1,n2,n3,n4"
        in line
    )
    assert (
        "--only p2p.pairwise --sizes 4M --set direction=in_turn --set repeat=0,1 --set round=0,1,2 --launches 1"
        in line
    )
    assert "--budget 72s --timeout 20s --out out --json" in line
    assert "--budget 9s " in " ".join(
        run_command(NODES, tournament(4, 5), Options(out=Path("out"), budget="9s"))
    )
    turns = Turns(parameter="pairs", values=("0-3 1-2", "0-1 2-3"), repeats=2)
    words = run_command(NODES, turns, Options(out=Path("out")))
    settings = parse_settings([words[i + 1] for i, word in enumerate(words) if word == "--set"])
    request = RunOptions(
        preset="smoke", only=("p2p.pairwise",), settings={**settings, "size_bytes": "4M"}
    )
    planned = make_plan(request, DEFINITIONS, WorldSpec(nproc=4, backend="gloo", device="cpu"))
    params = [(case.params.get("repeat", 0), case.params["pairs"]) for case in planned.cases]
    assert params == [(0, "0-3 1-2"), (0, "0-1 2-3"), (1, "0-3 1-2"), (1, "0-1 2-3")]
    assert {case.params["direction"] for case in planned.cases} == {"in_turn"}
    assert planned.skipped == ()
    known = {opt for param in run_of_the_command_line.params for opt in param.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_a_pair_takes_what_its_slower_rank_took_in_the_middle_iteration(tmp_path: Path) -> None:
    durations = [[10, 30, 20], [5, 5, 5], [7, 5, 6], [20, 10, 30]]
    run = a_run(tmp_path, [record(0)], samples={0: npz(durations)})
    found = list(exchanges_of(run, run.records[0]))
    assert [(e.pair, e.seconds) for e in found] == [((0, 3), 0.03), ((1, 2), 0.006)]
    assert {e.turn for e in found} == {case(0).id}
    run = a_run(tmp_path, [record(0)], samples={0: npz([[8]] * 4, steps=4)})
    assert [e.seconds for e in exchanges_of(run, run.records[0])] == [0.002, 0.002], "of one step"
    run = a_run(tmp_path, [record(0), record(1)], samples={0: b"nothing"})
    for one in run.records:
        with pytest.raises(
            UserError, match=rf"{one.case.id}-0.npz holds no samples that can be read"
        ):
            list(exchanges_of(run, one))


def test_a_run_is_read_with_the_hosts_of_its_ranks_and_what_is_missing(tmp_path: Path) -> None:
    left_out = record(1, "skipped", reason="out of time")
    samples = {0: npz([[1]] * 4)}
    seen = read(
        a_run(tmp_path, [record(0), left_out], ["n1.cluster", "n3", "n2", "n4"], samples), NODES
    )
    assert seen.hosts == ("n1", "n3", "n2", "n4")
    assert len(seen.exchanges) == 2
    assert seen.problems == ("out of time", "rounds not reached: 1")
    assert (seen.silent, seen.notes) == ({}, ("emulated: 4 nodes on one machine",))
    first = record(0, "hang", reason="rank 1 (n2) did not arrive", ranks=states(n2="no answer"))
    then = record(1, "failed", reason="rank 2 (n3) died: ended by SIGKILL", ranks=states())
    seen = read(a_run(tmp_path, [first, then]), NODES)
    assert seen.silent == {"n2": first.reason}, "and not what follows from it"
    assert seen.problems[:2] == (first.reason, then.reason)
    with pytest.raises(UserError, match=r"does not tell the hosts of its ranks: ranks\(4\)"):
        read(a_run(tmp_path, [record(0)], None, samples), NODES)


def test_who_did_not_answer_is_named_and_who_only_noticed_is_not() -> None:
    late, everyone = "no end within 10 s: rank 2 (n3) did not arrive", list(NODES)
    known: list[tuple[Status, str, dict[str, str], set[str]]] = [
        ("hang", late, {"n3": "no answer (process is stopped)"}, {"n3"}),
        ("hang", late, {}, {"n3"}),
        ("hang", "no end within 10 s: every rank arrived and waits; see their stacks", {}, set()),
        (
            "hang",
            "no end within 10 s: no rank answers",
            dict.fromkeys(everyone, "no answer"),
            set(),
        ),
        (
            "failed",
            "rank 1 (n2) died: ended by SIGKILL",
            dict.fromkeys(everyone, "died: ended by SIGTERM"),
            {"n2"},
        ),
        (
            "failed",
            "rank 2 (n3) died: ended by SIGTERM",
            dict.fromkeys(everyone, "died: ended by SIGTERM"),
            set(),
        ),
        ("failed", "rank 1 (n2) raised RuntimeError: Connection closed by peer (n3)", {}, set()),
        ("failed", "rank 1 (n2) died: ended by SIGABRT after (n4) left", {}, {"n2"}),
    ]
    for status, reason, of, silent in known:
        bad = record(0, status, reason=reason, ranks=states(**of))
        assert silent_hosts(bad, NODES) == dict.fromkeys(silent, reason), reason
    reason = "rank 3 did not start within 60 s"
    assert silent_hosts(record(0, "failed", reason=reason, ranks=states()[:3]), NODES) == {
        "n4": reason
    }
    assert silent_hosts(record(0, "failed", reason=reason), NODES) == {}, (
        "nobody started: it tells nobody apart"
    )
    reason = "rank 2 (n3) died: ended by SIGTERM; n2 did not answer when the last gang hung"
    told = [state for state in states(n3="died: ended by SIGTERM") if state.host != "n2"]
    assert silent_hosts(record(1, "failed", reason=reason, ranks=told), NODES) == {"n2": reason}, (
        "n3 was told to end"
    )


def test_a_run_is_found_by_what_it_leaves_and_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(command: list[str]) -> CompletedProcess[str]:
        a_run(tmp_path, [record(0)], samples={0: npz([[1]] * 4)})
        return CompletedProcess(command, 0)

    a_run(tmp_path, [])
    monkeypatch.setattr(screen_run, "run_child", leave)
    assert len(measure(NODES, tournament(4, 5), Options(out=tmp_path)).exchanges) == 2
    monkeypatch.setattr(screen_run, "run_child", lambda command: CompletedProcess(command, 2))
    with pytest.raises(UserError, match="parbench run ended with 2 and left no run in"):
        measure(NODES, tournament(4, 5), Options(out=tmp_path))


def health(host: str, *reasons: Reason) -> Health:
    device = Device(host=host, name="GPU 5", uuid=host, kind="H100", rank=0, reasons=reasons)
    return Health(host=host, started="2026", seconds=41.0, device="cuda", devices=(device,))


def test_a_node_with_a_bad_device_is_left_out_whatever_its_links_do(lab: Lab) -> None:
    wrong = Reason(text="wrong results in compute.gemm", remedy="drain the host")
    lab.answers = [
        Answer(host=node, health=health(node, *[wrong] * (node == "n2"))) for node in NODES
    ]
    code, text = screen(Options(), INSIDE)
    assert code == 1
    assert text.splitlines()[-1] == "--exclude=n2"
    assert "n2    bad device" in text
    assert "bad  n2 GPU 5: wrong results in compute.gemm\n     -> drain the host" in text
    lab.answers = [Answer(host=node, health=health(node)) for node in NODES[:3]] + [
        Answer(host="n4", problem="no torch")
    ]
    code, text = screen(Options(), INSIDE)
    assert (code, text.splitlines()[-1]) == (4, "nothing to exclude")
    assert "not measured: n4's own check: no torch" in text
    lab.answers = [Answer(host="n1", problem="not to be asked")]
    assert screen(Options(devices=False), INSIDE)[0] == 0
    assert "--no-devices" in salloc_command(Options(nodes=4, devices=False))
    assert "--gpus-per-node=8" in salloc_command(Options(nodes=4, gpus_per_node=8))


def test_every_node_is_checked_by_one_task_and_one_that_says_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = json.dumps(document(health("n1")))
    script = f"""
for word; do case $word in --output=*) out=${{word#--output=}};; --error=*) err=${{word#--error=}};; esac; done
echo "$@" >asked
echo '{said}' >$(echo $out | sed s/%N/n1/)
echo no module named torch >$(echo $err | sed s/%N/n2/)
echo srun: error: n3: task 2: Exited with exit code 1 >&2
"""
    write_tool(tmp_path, "srun", script)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PARBENCH_SRUN_OPTIONS": "--container-image=x"}
    monkeypatch.setenv("PATH", environ["PATH"])
    found = screen_run.check_nodes(("n1", "n2", "n3"), Path("out"), environ)
    assert [answer.host for answer in found] == ["n1", "n2", "n3"]
    assert found[0].health == health("n1")
    problems = ["no module named torch", "srun: error: n3: task 2: Exited with exit code 1"]
    assert [answer.problem for answer in found[1:]] == problems
    asked = (tmp_path / "asked").read_text()
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3 --cpu-bind=none" in asked
    assert (
        f"--container-image=x {sys.executable} -m parbench check --json --budget 40s --out out"
        in asked
    )
    assert list(tmp_path.glob("parbench-check-*")) == []
