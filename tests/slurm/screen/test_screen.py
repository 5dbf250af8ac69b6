"""The verdicts of a screening on simulated nodes, and the command line around them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.check.health import Device, Fault, Health, Rate
from parbench.bench.check.hosts import make_failed_check
from parbench.slurm.screen import screen as screen_module
from parbench.slurm.screen.measure import Measurement, Setup
from parbench.slurm.screen.ratios import Endpoint
from parbench.slurm.screen.rounds import Round
from parbench.slurm.screen.screen import (
    Screening,
    ScreenOptions,
    build_salloc_command,
    check_options,
    format_screening,
    list_nodes,
    screen,
    screen_nodes,
)
from tests.support.refusals import usage_error
from tests.support.slurm.screening import Cluster, simulate
from tests.support.slurm.sweeps import FakeSlurm
from tests.support.trees import write_tool

NODES = ("n1", "n2", "n3", "n10")
ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": ",".join(NODES),
    "SLURMD_NODENAME": "n1",
}
SETUP = Setup(size="1M", rails=2, timeout="20s")
FOLDER = Path("out")


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """One run of rounds on nodes with two rails."""

    slow: Mapping[str, float] = field(default_factory=dict)  # speeds relative to good nodes
    slow_rails: Mapping[str, float] = field(default_factory=dict)  # of rail 1
    silent: Sequence[str] = ()
    problem: str = ""
    nodes: tuple[str, ...] = ()  # if ranks have moved


class SimulatedNodes:
    """Replaces the runs of a screening; the last of ``runs`` repeats."""

    def __init__(self) -> None:
        self.runs: list[SimulatedRun] = [SimulatedRun()]
        self.answers: Sequence[Health] = ()
        self.measured: list[tuple[str, ...]] = []
        self.folders: list[Path] = []
        self._rng = random.Random(5)

    def check(self, *args: object) -> Sequence[Health]:
        return self.answers

    def measure(
        self,
        nodes: Sequence[str],
        rounds: Sequence[Round],
        setup: Setup,
        folder: Path,
    ) -> Measurement:
        run = self.runs[min(len(self.measured), len(self.runs) - 1)]
        self.measured.append(tuple(nodes))
        self.folders.append(folder)
        speeds = {Endpoint(nodes.index(node)): speed for node, speed in run.slow.items()}
        for node, speed in run.slow_rails.items():
            speeds[Endpoint(nodes.index(node), 1)] = speed
        cluster = Cluster(num_nodes=len(nodes), rails=2, speeds=speeds, noise=0.02)
        exchanges = tuple(simulate(cluster, rounds, self._rng))
        is_complete = not run.silent and not run.problem
        return Measurement(
            nodes=run.nodes or tuple(nodes),
            exchanges=exchanges if is_complete else (),
            silent=dict.fromkeys(run.silent, "did not arrive"),
            problems=() if is_complete else (run.problem or "did not arrive",),
            notes=("emulated",),
        )


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedNodes:
    nodes = SimulatedNodes()
    monkeypatch.setattr(screen_module, "measure_rounds", nodes.measure)
    monkeypatch.setattr(screen_module, "check_nodes", nodes.check)
    return nodes


def run_screen_nodes(nodes: Sequence[str] = NODES) -> Screening:
    return screen_nodes(nodes, 5, SETUP, FOLDER)


def run_screen(**options: Any) -> tuple[int, str]:
    return screen(ScreenOptions(**options), ENVIRON, [], FakeSlurm())


def verdicts(screening: Screening) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in screening.verdicts}


ALL_FINE = dict.fromkeys(NODES, "fine")
N3_SLOW = SimulatedRun(slow={"n3": 0.25})


def test_good_nodes_are_measured_once(simulated: SimulatedNodes) -> None:
    screening = run_screen_nodes()
    assert verdicts(screening) == ALL_FINE
    assert screening.exit_code == 0
    assert screening.exclude_option == ""
    assert simulated.measured == [NODES]


def test_slow_node_is_confirmed_and_excluded(simulated: SimulatedNodes) -> None:
    simulated.runs = [N3_SLOW, SimulatedRun(slow={"n3": 0.5})]
    screening = run_screen_nodes()
    assert verdicts(screening) == {**ALL_FINE, "n3": "slow"}
    assert screening.exit_code == 1
    assert screening.exclude_option == "--exclude=n3"
    assert simulated.folders == [FOLDER / "rounds", FOLDER / "confirmation"]
    n1, _, n3, n10 = screening.verdicts
    assert n10.node == "n10", "n3 comes before n10"
    assert n1.ratio == pytest.approx(1, rel=0.1)
    assert n3.ratio == pytest.approx(2, rel=0.1), "the ratio of the confirmation"
    assert n3.evidence.startswith("with n1, n2, n10 (first measurement: 4.")


@pytest.mark.parametrize(
    ("confirmation", "verdict", "code"),
    [
        (SimulatedRun(), "fine", 0),
        (SimulatedRun(slow={"n3": 0.25}, nodes=NODES[::-1]), "unconfirmed", 4),
        (SimulatedRun(slow={"n3": 0.25}, problem="it broke"), "unconfirmed", 4),
    ],
    ids=["fast-again", "ranks-moved", "run-broken"],
)
def test_suspect_without_confirmation_is_not_excluded(
    confirmation: SimulatedRun, verdict: str, code: int, simulated: SimulatedNodes
) -> None:
    simulated.runs = [N3_SLOW, confirmation]
    screening = run_screen_nodes()
    assert verdicts(screening)["n3"] == verdict
    assert screening.exit_code == code
    assert screening.exclude_option == ""


def test_slow_rail_excludes_its_node(simulated: SimulatedNodes) -> None:
    simulated.runs = [SimulatedRun(slow_rails={"n10": 0.25})]
    screening = run_screen_nodes()
    assert verdicts(screening) == {**ALL_FINE, "n10 rail 1": "slow"}
    assert screening.exit_code == 1
    assert screening.exclude_option == "--exclude=n10"


def test_silent_node_is_excluded_and_the_others_screened(simulated: SimulatedNodes) -> None:
    nodes = (*NODES, "n11")
    simulated.runs = [SimulatedRun(silent=["n2"]), SimulatedRun(slow={"n1": 0.25})]
    screening = run_screen_nodes(nodes)
    expected = {**ALL_FINE, "n1": "slow", "n2": "did not answer", "n11": "fine"}
    assert verdicts(screening) == expected
    assert screening.exit_code == 1, "a slow node is certain, whatever did not answer"
    assert screening.exclude_option == "--exclude=n1,n2"
    answering = ("n1", "n3", "n10", "n11")
    assert simulated.measured == [nodes, answering, answering]


def test_broken_run_judges_no_node(simulated: SimulatedNodes) -> None:
    simulated.runs = [SimulatedRun(problem="it broke")]
    screening = run_screen_nodes()
    assert verdicts(screening) == dict.fromkeys(NODES, "unknown")
    assert screening.exit_code == 4
    assert screening.exclude_option == ""
    assert "not measured: it broke" in format_screening(screening)


def test_screen_prints_verdicts_of_the_allocation(
    simulated: SimulatedNodes, tmp_path: Path
) -> None:
    simulated.runs = [N3_SLOW]
    code, text = run_screen(out=tmp_path)
    assert code == 1
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(NODES)
    assert "note: emulated" in lines
    assert lines[-1] == "--exclude=n3"
    run_screen(out=tmp_path)
    folders = {folder.parent for folder in simulated.folders}
    assert len(folders) == 2, "each screening has its own folder"


def test_allocation_limits_the_nodes() -> None:
    slurm = FakeSlurm()
    assert list_nodes(ScreenOptions(nodes=3), ENVIRON, slurm) == NODES[:3]
    error = usage_error(list_nodes, ScreenOptions(nodes=5), ENVIRON, slurm)
    assert "--nodes 5: job 7 has 4" in error
    error = usage_error(list_nodes, ScreenOptions(), {"SLURM_JOB_ID": "7"}, slurm)
    assert "0 nodes: at least 3 are needed" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ScreenOptions(size="0"), "--size 0"),
        (ScreenOptions(time="soon"), "'soon'"),
    ],
)
def test_bad_options_are_refused(options: ScreenOptions, message: str) -> None:
    assert message in usage_error(check_options, options)


def test_salloc_command_repeats_the_arguments() -> None:
    options = ScreenOptions(nodes=4, partition="lab", time="90s", gpus_per_node=8)
    args = ["slurm", "screen", "--nodes", "4", "--size", "1M"]
    command = " ".join(build_salloc_command(options, args))
    assert command.startswith("salloc --quiet --no-kill --exclusive --nodes=4")
    assert "--ntasks-per-node=8 --time=0:02:00" in command
    assert "--partition=lab --gpus-per-node=8" in command
    assert command.endswith("-m parbench slurm screen --nodes 4 --size 1M")


def test_screen_outside_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--nodes" in usage_error(screen, ScreenOptions(), {}, [])
    monkeypatch.setenv("PATH", str(tmp_path))
    options = ScreenOptions(nodes=4)
    assert "salloc cannot be started" in usage_error(screen, options, {}, [])
    write_tool(tmp_path, "salloc", "echo nothing to exclude; exit 1")
    assert screen(options, {}, []) == (1, "nothing to exclude"), "of the screening inside"


def test_failed_allocation_is_not_a_bad_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_tool(tmp_path, "salloc", "echo salloc: error: no >&2; exit 1")
    assert screen(ScreenOptions(nodes=4), {}, []) == (4, "")


def make_answer(host: str, *reasons: Fault) -> Health:
    rates = {"copy": Rate(unit="B/s", value=1.0, repetitions={})}
    device = Device(
        host=host,
        name="GPU 5",
        kind="H100",
        rank=0,
        rates=rates,
        reasons=reasons,
    )
    return Health(host=host, seconds=41.0, device="cuda", devices=(device,))


def test_node_with_a_bad_device_is_excluded(simulated: SimulatedNodes) -> None:
    reason = Fault(text="wrong results in compute.gemm", fix="drain the host")
    simulated.answers = [make_answer("n1"), make_answer("n2", reason), make_answer("n3")]
    code, text = run_screen()
    assert code == 1
    assert text.splitlines()[-1] == "--exclude=n2"
    assert "n2: GPU 5: wrong results in compute.gemm" in text
    code, _ = run_screen(devices=False)
    assert code == 0


def test_failed_device_check_is_not_a_success(simulated: SimulatedNodes) -> None:
    simulated.answers = [make_answer("n1"), make_failed_check("n2", "no torch")]
    code, text = run_screen()
    assert code == 4
    assert text.splitlines()[-1] == "nothing to exclude"
    assert "no torch" in text
