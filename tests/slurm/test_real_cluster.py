"""What only a real Slurm cluster shows: screening, bandwidth of shaped links, a cut link, and sweeps with faults."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parbench.bench.machine.world_spec import FUNCTIONAL_ONLY
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run
from tests.support.clusters import (
    LOCAL_CLUSTER,
    PARBENCH,
    Cluster,
    cluster_command,
    run_in_cluster,
    tool_command,
)
from tests.support.fakes import wait_until
from tests.support.paths import IMPORT_PATH, ROOT, SUPPORT, environment
from tests.support.sweep_scenarios import SCENARIOS

pytestmark = [pytest.mark.full, pytest.mark.measures]

FAULT = f"{' '.join(LOCAL_CLUSTER)} fault"
LINK, SLOW = 200e6, 50e6
MIB = 1 << 20
RUN = f"{PARBENCH} run --launcher srun --set mode=blocking --launches 1"
WIRE = f"{RUN} --target tests.support.wire:counted --set size_bytes=2M --budget 10s"


@pytest.fixture(scope="module")
def shaped() -> Iterator[Cluster]:
    with Cluster(nodes=5, cpus=3, link="200mbit", slow=["n5:50mbit"]) as cluster:
        yield cluster


def found(cluster: Cluster, *words: str) -> dict[str, float]:
    done = cluster.run(tool_command(*words))
    assert done.returncode == 0, done.stderr
    return {
        name: float(value) for name, value in re.findall(r"^(.+) (\S+)$", done.stdout, re.MULTILINE)
    }


def assert_rate(cluster: Cluster, sender: str, receiver: str, rate: float) -> None:
    assert (
        0.8 * rate <= found(cluster, "between", sender, receiver)["bits per second"] <= 1.05 * rate
    )


def test_local_cluster_gives_each_node_its_own_host(shaped: Cluster) -> None:
    facts = "$(hostname) $(hostname -I) $(ip -o link | grep -c eth) $(ls /dev/shm | wc -l) $SLURM_TOPOLOGY_ADDR"
    done = shaped.run(["sh", "-c", f"srun --nodes 5 sh -c 'echo {facts}'"])
    assert sorted(done.stdout.splitlines()) == [
        f"n{number} 10.77.0.{number} 1 0 spine.leaf{1 if number < 3 else 2}.n{number}"
        for number in range(1, 6)
    ]


def test_local_cluster_shapes_links(shaped: Cluster) -> None:
    for sender, receiver, rate in (("n1", "n2", LINK), ("n1", "n5", SLOW), ("n5", "n1", SLOW)):
        assert_rate(shaped, sender, receiver, rate)
    with Cluster(nodes=2, link="100mbit", delay="5ms") as delayed:
        values = found(delayed, "between", "n1", "n2")
    assert 0.010 <= values["round trip seconds"] < 0.020
    assert 0.8e8 <= values["bits per second"] <= 1.05e8


def test_local_cluster_leaves_nothing_when_killed() -> None:
    script = "srun --nodes 2 sleep 1000 & setsid sleep 1000 & echo $PARBENCH_CLUSTER; sleep 1000"
    with subprocess.Popen(
        [*cluster_command(nodes=2), "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        assert processes_of(folder)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(folder).exists() and not processes_of(folder), 20)
    assert folder not in Path("/proc/mounts").read_text()


def processes_of(folder: str) -> list[int]:
    """Return the processes that have a cluster's folder among their arguments or variables."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if folder.encode() in (path / name).read_bytes():
                    numbers.append(int(path.name))
            except OSError:  # it has ended
                continue
    return numbers


def test_local_cluster_returns_the_exit_code() -> None:
    done = run_in_cluster(["sh", "-c", "srun hostname; exit 7"], nodes=1)
    assert (done.returncode, done.stdout) == (7, "n1\n")


def test_screen_names_the_slow_node(shaped: Cluster, tmp_path: Path) -> None:
    screen = [
        PARBENCH,
        "slurm",
        "screen",
        "--no-devices",
        "--size",
        "512K",
        "--rounds",
        "3",
        "--timeout",
        "10s",
    ]
    done = shaped.run([*screen, "--nodes", "5"], cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (1, ["--exclude=n5"]), (
        done.stdout + done.stderr
    )


def only_run(folder: Path) -> Run:
    (path,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return load_run(path)


def busbw(record: Record) -> float:
    value = record.metrics["busbw"].value
    assert value is not None, record
    return value * 8 / LINK


@pytest.fixture(scope="module")
def measured(shaped: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All reduces over links of 200 mbit: 4 nodes, and 2 ranks on each of 2 nodes in both orders."""
    folder = tmp_path_factory.mktemp("measured")
    asked = f"{RUN} --only all_reduce --sizes 4M --budget 8s"
    script = "\n".join(
        [
            f"salloc -Q -wn[1-4] --ntasks-per-node=1 {asked} --out four",
            f"salloc -Q -wn[1-2] --ntasks-per-node=2 {asked} --placement block --out block",
            f"salloc -Q -wn[1-2] --ntasks-per-node=2 {asked} --placement cyclic --out cyclic",
            f"salloc -Q -wn[1-4] --ntasks-per-node=1 {WIRE} --out wire",
        ]
    )
    done = shaped.run(["sh", "-ec", script], cwd=folder, timeout=170, variables=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_busbw_is_the_link_rate_and_cyclic_halves_it(measured: Path) -> None:
    rates = {
        name: busbw(*only_run(measured / name).records) for name in ("four", "block", "cyclic")
    }
    assert 0.85 <= rates["four"] <= 1.03
    assert rates["cyclic"] / rates["block"] == pytest.approx(0.5, abs=0.06)


def test_run_records_placement_and_emulation(measured: Path) -> None:
    run = only_run(measured / "cyclic")
    assert run.info.environment is not None
    assert run.info.environment["hosts"] == ["n1", "n2", "n1", "n2"]
    assert run.info.environment["slurm"]["placement"] == "cyclic"
    assert run.info.environment["switches"]["n1"].endswith(".n1")
    assert run.info.plan.spread is not None
    (record,) = run.records
    assert (record.world.size, record.world.nodes, record.check.passed) == (4, 2, True)
    assert record.notes[0].startswith("emulated: 5 nodes on one machine")
    assert "200mbit" in record.notes[0]
    assert any(note.startswith(FUNCTIONAL_ONLY) for note in record.notes)


def test_ring_sends_its_bytes_over_the_interfaces(measured: Path) -> None:
    """The ring sends 2 (n - 1) / n of the size from every rank; headers are a few bytes of each 64 KiB here."""
    logs = sorted((only_run(measured / "wire").path / "logs" / "gang-0").glob("rank-*.log"))
    assert len(logs) == 4
    for log in logs:
        seen = json.loads(
            next(line for line in log.read_text().splitlines() if line.startswith("{"))
        )
        assert seen["steps"] > 5
        assert seen["sent_bytes"] / seen["steps"] == pytest.approx(1.5 * 2 * MIB, rel=0.02)


def test_cut_link_is_a_hang_that_names_the_node(tmp_path: Path) -> None:
    """Node n3's link swallows all from step 3 of the first case on; it is mended once that is on record."""
    run = f"{RUN} --target tests.support.wire:awaited --set at=3,-1 --budget 30s --timeout 5s --out run"
    script = f"""
        salloc -Q -N4 --ntasks-per-node=1 {run} & run=$!
        until test -e begun; do sleep 0.05; done
        {FAULT} cut n3; touch cut
        until grep -q hang run/*/records.jsonl; do sleep 0.05; done
        {FAULT} heal n3
        wait $run
    """
    done = run_in_cluster(
        ["sh", "-c", script], cwd=tmp_path, timeout=170, delay="1ms", variables=environment()
    )
    assert done.returncode == 4, done.stdout + done.stderr
    hung, after = only_run(tmp_path / "run").records
    assert (hung.status, hung.reason) == ("hang", "no end within 5 s: rank 2 (n3) did not arrive")
    assert hung.seconds < 5 + 5
    assert {state.host for state in hung.ranks if state.state == "no answer"} == {"n3"}
    assert (after.status, after.check.passed) == ("ok", True)


BREAK_NODES = ("node_down", "node_cut")


@pytest.fixture(scope="module")
def plain() -> Iterator[Cluster]:
    with Cluster(nodes=4) as cluster:
        yield cluster


@pytest.mark.parametrize("name", SCENARIOS)
def test_sweep_on_a_real_cluster(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = run_in_cluster if name in BREAK_NODES else request.getfixturevalue("plain").run
    words = [sys.executable, str(SUPPORT / "sweep_scenarios.py"), name, str(tmp_path)]
    done = run(words, variables={"PYTHONPATH": f"{ROOT}:{IMPORT_PATH}"}, timeout=170)
    logs = "\n".join(
        path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/logs/*.*"))
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs[-6000:]}"
