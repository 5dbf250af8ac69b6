"""The verdicts of a screening on simulated nodes, and the command line around them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parbench.bench.check.health import Device, Fault, Health
from parbench.bench.check.hosts import HostResult
from parbench.slurm.commands import slurm
from parbench.slurm.screen import screen as screen_module
from parbench.slurm.screen.run import Options, Seen, Turns
from parbench.slurm.screen.screen import (
    Screening,
    allocated,
    check,
    render,
    salloc_command,
    screen,
    screen_nodes,
)
from parbench.slurm.system import Slurm
from tests.support.refusals import usage_error
from tests.support.screening import Cluster, simulate
from tests.support.trees import write_tool

NODES = ("n1", "n2", "n3", "n10")
ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,10]"}


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """One run of rounds. Without ``hosts``, every rank is on the node with its number."""

    slow: Mapping[str, float] = field(default_factory=dict)  # speeds relative to good nodes
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    silent: Sequence[str] = ()
    problem: str = ""
    hosts: tuple[str, ...] = ()


class SimulatedNodes:
    """Replaces the runs of a screening; the last of ``runs`` repeats."""

    def __init__(self) -> None:
        self.runs: list[SimulatedRun] = [SimulatedRun()]
        self.answers: Sequence[HostResult] = ()
        self.measured: list[tuple[str, ...]] = []
        self._rng = random.Random(5)

    def check(self, *args: object) -> Sequence[HostResult]:
        return self.answers

    def measure(self, nodes: Sequence[str], turns: Turns, options: Options) -> Seen:
        run = self.runs[min(len(self.measured), len(self.runs) - 1)]
        self.measured.append(tuple(nodes))
        speeds = {rank: run.slow.get(node, 1.0) for rank, node in enumerate(nodes)}
        cluster = Cluster(
            num_nodes=len(nodes), node_speeds=speeds, link_speeds=run.slow_links, noise=0.02
        )
        exchanges = tuple(simulate(cluster, turns, self._rng))
        is_complete = not run.silent and not run.problem
        return Seen(
            run=Path(f"runs/{len(self.measured)}"),
            hosts=run.hosts or tuple(nodes),
            exchanges=exchanges if is_complete else (),
            silent=dict.fromkeys(run.silent, "did not arrive"),
            problems=() if is_complete else (run.problem or "did not arrive",),
            notes=("emulated",),
        )


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedNodes:
    nodes = SimulatedNodes()
    monkeypatch.setattr(screen_module, "measure", nodes.measure)
    monkeypatch.setattr(screen_module, "check_nodes", nodes.check)
    monkeypatch.setattr(Slurm, "host_names", lambda self, text: NODES if text else ())
    return nodes


def verdicts(screening: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in (*screening.nodes, *screening.links)}


ALL_FINE = dict.fromkeys(NODES, "fine")
N3_SLOW = SimulatedRun(slow={"n3": 0.25})


def test_good_nodes_are_measured_once(simulated: SimulatedNodes) -> None:
    screening = screen_nodes(NODES, Options())
    assert verdicts(screening) == ALL_FINE
    assert screening.code == 0
    assert screening.exclude == ""
    assert simulated.measured == [NODES]


def test_slow_node_is_confirmed_and_excluded(simulated: SimulatedNodes) -> None:
    simulated.runs = [N3_SLOW, SimulatedRun(slow={"n3": 0.5})]
    screening = screen_nodes(NODES, Options())
    assert verdicts(screening) == {**ALL_FINE, "n3": "slow"}
    assert screening.code == 1
    assert screening.exclude == "--exclude=n3"
    assert screening.runs == ("runs/1", "runs/2")
    n1, _, n3, n10 = screening.nodes
    assert n10.name == "n10", "n3 comes before n10"
    assert n1.factor == pytest.approx(1, rel=0.1)
    assert n3.factor == pytest.approx(2, rel=0.1), "the factor of the confirmation"
    assert "again with n1, n2, n10" in n3.evidence


@pytest.mark.parametrize(
    ("confirmation", "verdict", "code"),
    [
        (SimulatedRun(), "fine", 0),
        (SimulatedRun(slow={"n3": 0.25}, hosts=NODES[::-1]), "unconfirmed", 4),
        (SimulatedRun(slow={"n3": 0.25}, problem="it broke"), "unconfirmed", 4),
    ],
    ids=["fast-again", "ranks-moved", "run-broken"],
)
def test_suspect_without_confirmation_is_not_excluded(
    confirmation: SimulatedRun, verdict: str, code: int, simulated: SimulatedNodes
) -> None:
    simulated.runs = [N3_SLOW, confirmation]
    screening = screen_nodes(NODES, Options())
    assert verdicts(screening)["n3"] == verdict
    assert screening.code == code
    assert screening.exclude == ""


LINK_SLOW = SimulatedRun(slow_links={(0, 3): 0.25})


@pytest.mark.parametrize(
    ("confirmation", "verdict", "code"),
    [
        (LINK_SLOW, "slow", 1),
        (SimulatedRun(), "fine", 0),
        (SimulatedRun(problem="it broke"), "unconfirmed", 4),
    ],
)
def test_slow_link_excludes_no_node(
    confirmation: SimulatedRun, verdict: str, code: int, simulated: SimulatedNodes
) -> None:
    simulated.runs = [LINK_SLOW, confirmation]
    screening = screen_nodes(NODES, Options())
    assert verdicts(screening) == {**ALL_FINE, "n1-n10": verdict}
    assert screening.code == code
    assert screening.exclude == ""
    has_advice = "link n1-n10 is slow" in render(screening)
    assert has_advice == (verdict == "slow")


def test_silent_node_is_excluded_and_the_others_screened(simulated: SimulatedNodes) -> None:
    nodes = (*NODES, "n11")
    simulated.runs = [SimulatedRun(silent=["n2"]), SimulatedRun(slow={"n1": 0.25})]
    screening = screen_nodes(nodes, Options())
    expected = {**ALL_FINE, "n1": "slow", "n2": "did not answer", "n11": "fine"}
    assert verdicts(screening) == expected
    assert screening.code == 1, "a slow node is certain, whatever did not answer"
    assert screening.exclude == "--exclude=n1,n2"
    answering = ("n1", "n3", "n10", "n11")
    assert simulated.measured == [nodes, answering, answering]


def test_broken_run_judges_no_node(simulated: SimulatedNodes) -> None:
    simulated.runs = [SimulatedRun(problem="it broke")]
    screening = screen_nodes(NODES, Options())
    assert verdicts(screening) == dict.fromkeys(NODES, "cannot tell")
    assert screening.code == 4
    assert screening.exclude == ""
    assert "not measured: it broke" in render(screening)


def test_screen_prints_verdicts_of_the_allocation(simulated: SimulatedNodes) -> None:
    simulated.runs = [N3_SLOW]
    code, text = screen(Options(), ENVIRON)
    assert code == 1
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(NODES)
    assert "note: emulated" in lines
    assert lines[-1] == "--exclude=n3"


@pytest.mark.usefixtures("simulated")
def test_allocation_limits_the_nodes() -> None:
    assert allocated(Options(nodes=3), ENVIRON, Slurm()) == NODES[:3]
    error = usage_error(allocated, Options(nodes=5), ENVIRON, Slurm())
    assert "--nodes 5: job 7 has 4" in error
    error = usage_error(allocated, Options(), {"SLURM_JOB_ID": "7"}, Slurm())
    assert "nodes(0) < 3" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(nodes=2), "nodes(2) < 3"),
        (Options(rounds=2), "--rounds 2"),
        (Options(size="0"), "--size 0"),
        (Options(time="soon"), "'soon'"),
    ],
)
def test_check_refuses_bad_options(options: Options, message: str) -> None:
    assert message in usage_error(check, options)


def test_salloc_command_repeats_the_options() -> None:
    options = Options(
        nodes=4,
        partition="lab",
        rounds=7,
        size="1M",
        time="90s",
        budget="9s",
        as_json=True,
        devices=False,
        gpus_per_node=8,
    )
    args = salloc_command(options)
    separator = args.index("slurm")
    allocation = " ".join(args[:separator])
    assert allocation.startswith("salloc --quiet --no-kill --nodes=4 --ntasks-per-node=1")
    assert "--time=0:02:00 --partition=lab --gpus-per-node=8" in allocation
    with slurm.commands["screen"].make_context("screen", args[separator + 2 :]) as context:
        params = context.params
    expected = {"nodes": 4, "rounds": 7, "size": "1M", "budget": "9s", "partition": None}
    assert expected.items() <= params.items()
    assert params["as_json"]
    assert not params["devices"]


def test_screen_outside_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--nodes" in usage_error(screen, Options(), {})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "salloc is not in the PATH" in usage_error(screen, Options(nodes=4), {})
    write_tool(tmp_path, "salloc", "exit 1")
    assert screen(Options(nodes=4), {}) == (1, ""), "the code of the screening inside"


def make_answer(host: str, *reasons: Fault) -> HostResult:
    device = Device(host=host, name="GPU 5", uuid=host, kind="H100", rank=0, reasons=reasons)
    health = Health(host=host, started="2026", seconds=41.0, device="cuda", devices=(device,))
    return HostResult(host=host, health=health)


def test_node_with_a_bad_device_is_excluded(simulated: SimulatedNodes) -> None:
    reason = Fault(text="wrong results in compute.gemm", fix="drain the host")
    simulated.answers = [make_answer("n1"), make_answer("n2", reason), make_answer("n3")]
    code, text = screen(Options(), ENVIRON)
    assert code == 1
    assert text.splitlines()[-1] == "--exclude=n2"
    assert "n2 GPU 5: wrong results in compute.gemm" in text
    code, _ = screen(Options(devices=False), ENVIRON)
    assert code == 0


def test_failed_device_check_is_not_a_success(simulated: SimulatedNodes) -> None:
    simulated.answers = [make_answer("n1"), HostResult(host="n2", problem="no torch")]
    code, text = screen(Options(), ENVIRON)
    assert code == 4
    assert text.splitlines()[-1] == "nothing to exclude"
    assert "no torch" in text
