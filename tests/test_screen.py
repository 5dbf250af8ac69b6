"""Screening from end to end, on nodes that are simulated: what is measured, again, and what is said."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest
from clusters import PARBENCH, in_cluster
from screen_study import Cluster, simulate

from bench.errors import UserError
from slurm import screen as screening
from slurm.commands import slurm
from slurm.screen import Options, allocate, allocated, check, salloc_command, screen, screen_nodes
from slurm.screen_rounds import Turns
from slurm.screen_run import Means, Seen
from slurm.screen_verdict import Screening
from slurm.system import Slurm

NODES = ("n1", "n2", "n3", "n4")
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}


class Lab:
    """Nodes of which some are slow, or do not answer; keeps what was asked of it."""

    def __init__(self, slow: Mapping[str, float], silent: Sequence[str] = (), quits: int | None = None) -> None:
        self.asked: list[tuple[tuple[str, ...], Turns]] = []
        self._slow, self._silent, self._quits = slow, silent, quits
        self._rng = random.Random(5)

    def measure(self, nodes: Sequence[str], turns: Turns, means: Means) -> Seen:
        self.asked.append((tuple(nodes), turns))
        cluster = Cluster(
            n=len(nodes), nodes={i: self._slow[node] for i, node in enumerate(nodes) if node in self._slow}, noise=0.02
        )
        silent = {node: f"rank {i} ({node}) did not arrive" for i, node in enumerate(nodes) if node in self._silent}
        broken = silent or len(self.asked) == self._quits
        return Seen(
            run=Path(f"runs/{len(self.asked)}"),
            hosts=tuple(nodes),
            exchanges=() if broken else tuple(simulate(cluster, turns, self._rng)),
            silent=silent,
            problems=("it broke",) if broken else (),
            notes=("emulated",),
        )


def in_lab(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> Lab:
    monkeypatch.setattr(screening, "measure", lab.measure)
    monkeypatch.setattr(Slurm, "host_names", lambda self, text: NODES if text == "n[1-4]" else ())
    return lab


def words(found: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in (*found.nodes, *found.links)}


def test_fine_nodes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({}))
    found = screen_nodes(NODES, Options())
    assert words(found) == dict.fromkeys(NODES, "fine")
    assert (found.code, found.exclude, found.runs) == (0, "", ("runs/1",))
    assert [turns.parameter for _, turns in lab.asked] == ["round"]


def test_a_slow_node_is_measured_again_with_good_partners_and_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({"n3": 0.25}))
    found = screen_nodes(NODES, Options())
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "slow", "n4": "fine"}
    assert (found.code, found.exclude, found.runs) == (1, "--exclude=n3", ("runs/1", "runs/2"))
    assert [(nodes, turns.parameter) for nodes, turns in lab.asked] == [(NODES, "round"), (NODES, "pairs")]


def test_with_few_rounds_the_others_are_weighed_by_what_confirmed_the_slow_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_lab(monkeypatch, Lab({"n3": 0.25}))
    found = screen_nodes(NODES, Options(rounds=3))
    assert words(found) == {"n1": "fine", "n2": "fine", "n3": "slow", "n4": "fine"}
    assert (found.code, found.exclude) == (1, "--exclude=n3")


def test_one_that_recovers_before_it_is_measured_again_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"n3": 0.25}
    lab = in_lab(monkeypatch, Lab(slow))
    measure = lab.measure

    def once(nodes: Sequence[str], turns: Turns, means: Means) -> Seen:
        seen = measure(nodes, turns, means)
        slow.clear()
        return seen

    monkeypatch.setattr(screening, "measure", once)
    found = screen_nodes(NODES, Options())
    assert (words(found)["n3"], found.code, len(found.runs)) == ("fine", 0, 2)


def test_who_does_not_answer_is_left_out_and_the_others_are_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({"n1": 0.25}, silent=["n2"]))
    nodes = (*NODES, "n5")
    found = screen_nodes(nodes, Options())
    assert words(found) == {"n1": "slow", "n2": "did not answer", "n3": "fine", "n4": "fine", "n5": "fine"}
    assert (found.code, found.exclude) == (4, "--exclude=n1,n2")
    assert [asked for asked, _ in lab.asked] == [nodes, ("n1", "n3", "n4", "n5"), ("n1", "n3", "n4", "n5")]


def test_with_too_few_left_nobody_can_be_told_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({}, silent=["n2", "n3"]))
    found = screen_nodes(NODES, Options())
    assert words(found) == {"n1": "cannot tell", "n2": "did not answer", "n3": "did not answer", "n4": "cannot tell"}
    assert (found.code, found.exclude, len(lab.asked)) == (4, "--exclude=n2,n3", 1)


def test_where_nothing_ran_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_lab(monkeypatch, Lab({"n3": 0.25}, quits=1))
    found = screen_nodes(NODES, Options())
    assert words(found) == dict.fromkeys(NODES, "cannot tell")
    assert (found.code, found.exclude, found.problems) == (4, "", ("it broke",))


def test_a_suspect_whose_second_measurement_broke_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_lab(monkeypatch, Lab({"n3": 0.25}, quits=2))
    found = screen_nodes(NODES, Options())
    assert (words(found)["n3"], found.code, found.exclude) == ("unconfirmed", 4, "")


def test_ranks_that_changed_places_confirm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({"n3": 0.25}))
    measure = lab.measure

    def moved(nodes: Sequence[str], turns: Turns, means: Means) -> Seen:
        seen = measure(nodes, turns, means)
        return seen if len(lab.asked) == 1 else replace(seen, hosts=seen.hosts[::-1])

    monkeypatch.setattr(screening, "measure", moved)
    assert words(screen_nodes(NODES, Options()))["n3"] == "unconfirmed"


def test_inside_an_allocation_its_nodes_are_screened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = in_lab(monkeypatch, Lab({"n3": 0.25}))
    code, text = screen(Options(), INSIDE)
    assert (code, text.splitlines()[-1]) == (1, "--exclude=n3")
    assert "note: emulated" in text
    assert lab.asked[0][0] == NODES


def test_json_holds_every_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    in_lab(monkeypatch, Lab({"n3": 0.25}))
    code, text = screen(Options(as_json=True), INSIDE)
    told = json.loads(text)
    assert (code, told["exclude"]) == (1, "--exclude=n3")
    assert [one["verdict"] for one in told["nodes"]] == ["fine", "fine", "slow", "fine"]
    assert told["nodes"][2]["low"] < 4 < told["nodes"][2]["high"]


def test_fewer_nodes_than_the_allocation_has_may_be_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    in_lab(monkeypatch, Lab({}))
    assert allocated(Options(nodes=3), INSIDE, Slurm()) == NODES[:3]
    with pytest.raises(UserError, match="--nodes 5: job 7 has 4"):
        allocated(Options(nodes=5), INSIDE, Slurm())
    with pytest.raises(UserError, match=r"nodes\(0\) < 3"):
        allocated(Options(), {"SLURM_JOB_ID": "7"}, Slurm())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Options(nodes=2), r"nodes\(2\) < 3: of one pair nobody can tell which of its two nodes is slow"),
        (Options(rounds=2), "--rounds 2: at least 3"),
        (Options(size="0"), "--size 0: nothing moves"),
        (Options(size="x"), "size 'x' is not understood"),
        (Options(time="soon"), "duration 'soon' is not understood"),
        (Options(budget="0s"), "duration '0s' is not understood"),
        (Options(timeout="-1"), "duration '-1' is not understood"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: Options, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check(options)


def test_outside_an_allocation_one_is_asked_for_and_the_same_is_done_inside() -> None:
    options = Options(nodes=4, partition="lab", rounds=7, size="1M", time="90s", budget="9s", as_json=True)
    line = " ".join(salloc_command(options))
    assert line.startswith("salloc --quiet --no-kill --nodes=4 --ntasks-per-node=1 --exclusive ")
    assert "--time=0:02:00 --partition=lab" in line
    inside = line[line.index("-m parbench slurm") :]
    assert "--nodes 4 --rounds 7 --size 1M --timeout 20s --budget 9s --out runs/screen --json" in inside
    assert "--partition" not in inside
    known = {opt for param in slurm.commands["screen"].params for opt in param.opts}
    assert {word for word in inside.split() if word.startswith("--")} <= known
    assert "--partition" not in " ".join(salloc_command(Options(nodes=4)))


def test_outside_an_allocation_it_must_be_said_how_many_nodes() -> None:
    with pytest.raises(UserError, match="outside an allocation --nodes says how many nodes to screen"):
        allocate(Options())


def test_the_exit_code_is_that_of_the_screening_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "salloc"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert screen(Options(nodes=4), {}) == (1, "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="salloc is not in the PATH"):
        screen(Options(nodes=4), {})


def test_the_command_prints_and_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    in_lab(monkeypatch, Lab({"n3": 0.25}))
    monkeypatch.setattr("os.environ", {**INSIDE, "PATH": ""})
    done = click.testing.CliRunner().invoke(slurm, ["screen", "--size", "1M"])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "--exclude=n3"


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize(("slow", "code", "last"), [(["n3:50mbit"], 1, "--exclude=n3"), ([], 0, "nothing to exclude")])
def test_on_a_cluster_with_shaped_links_the_slow_node_and_nobody_else_is_blamed(
    tmp_path: Path, slow: list[str], code: int, last: str
) -> None:
    command = [PARBENCH, "slurm", "screen", "--nodes", "4", "--size", "512K", "--rounds", "3", "--timeout", "10s"]
    done = in_cluster(command, nodes=4, link="200mbit", slow=slow, cwd=tmp_path, timeout=300)
    assert done.stdout.splitlines()[-1:] == [last], done.stdout + done.stderr
    assert done.returncode == code
