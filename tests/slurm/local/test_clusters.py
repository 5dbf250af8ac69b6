"""Inside clusters on one machine: links as asked for, faults, ranks that see them, and sweeps that no end spoils."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import PARBENCH, Cluster, in_cluster, tool
from paths import IMPORT_PATH, ROOT, SUPPORT, environment
from sweep_scenarios import SCENARIOS

from parbench.bench.machine.world_spec import FUNCTIONAL_ONLY
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run

pytestmark = [pytest.mark.full, pytest.mark.measures]

FAULT = f"{PARBENCH} slurm local-fault"
LINK, SLOW = 200e6, 50e6
MIB = 1 << 20
RUN = f"{PARBENCH} run --launcher srun --set mode=blocking --launches 1"
WIRE = f"{RUN} --target wire:counted --set size_bytes=2M --budget 10s"


@pytest.fixture(scope="module")
def shaped() -> Iterator[Cluster]:
    with Cluster(nodes=5, cpus=3, link="200mbit", slow=["n5:50mbit"]) as cluster:
        yield cluster


def found(cluster: Cluster, *words: str) -> dict[str, float]:
    done = cluster.run(tool(*words))
    assert done.returncode == 0, done.stderr
    return {name: float(value) for name, value in re.findall(r"^(.+) (\S+)$", done.stdout, re.MULTILINE)}


def assert_rate(cluster: Cluster, sender: str, receiver: str, rate: float) -> None:
    assert 0.8 * rate <= found(cluster, "between", sender, receiver)["bits per second"] <= 1.05 * rate


def test_every_node_has_its_name_its_address_its_shared_memory_and_its_place(shaped: Cluster) -> None:
    look = "$(hostname) $(hostname -I) $(ip -o link | grep -c eth) $(ls /dev/shm | wc -l) $SLURM_TOPOLOGY_ADDR"
    script = (
        f"hostname; touch /dev/shm/parbench-ctl; srun --nodes 5 sh -c 'echo {look}'; rm /dev/shm/parbench-ctl;"
        "sinfo --noheader --format='%P %D %c'; env | grep ^PARB"
    )
    done = shaped.run(["sh", "-c", script])
    first, *lines = done.stdout.splitlines()
    assert first == "ctl", done.stderr
    assert sorted(lines[:5]) == [
        f"n{number} 10.77.0.{number} 1 0 spine.leaf{1 if number < 3 else 2}.n{number}" for number in range(1, 6)
    ]
    assert lines[5] == "lab* 5 3"
    assert any(line.endswith(", links of 200mbit, n5 of 50mbit") for line in lines[6:])


def test_a_link_has_its_rate_and_a_slow_node_is_slow_both_ways(shaped: Cluster) -> None:
    for sender, receiver, rate in (("n1", "n2", LINK), ("n1", "n5", SLOW), ("n5", "n1", SLOW)):
        assert_rate(shaped, sender, receiver, rate)


def test_a_real_delay_is_in_every_round_trip_and_leaves_the_rate_alone() -> None:
    with Cluster(nodes=2, link="100mbit", delay="5ms") as delayed:
        values = found(delayed, "between", "n1", "n2")
    assert 0.010 <= values["round trip seconds"] < 0.020
    assert 0.8e8 <= values["bits per second"] <= 1.05e8


def test_a_rate_changes_while_the_cluster_runs_and_outlives_a_cut(shaped: Cluster) -> None:
    try:
        shaped.run(["sh", "-ec", f"{FAULT} rate n2 50mbit; {FAULT} cut n2; {FAULT} heal n2"])
        assert_rate(shaped, "n1", "n2", SLOW)
    finally:
        shaped.run([*FAULT.split(), "rate", "n2", "200mbit"])


def test_slurm_loses_a_node_and_has_it_back_said_from_within_a_job(shaped: Cluster) -> None:
    script = (
        f"srun --nodes 1 --nodelist n1 {FAULT} down n2; sinfo --noheader --nodes n2 --format=%T/%E;"
        f"{FAULT} up n2; srun --nodes 1 --nodelist n2 hostname; {FAULT} up n2"
    )
    done = shaped.run(["sh", "-c", script])
    assert done.stdout.splitlines() == ["down/rehearsal", "n2"]
    assert done.returncode == 2
    assert "parbench: scontrol refuses n2 state=RESUME: " in done.stderr.splitlines()[-1]


def test_screening_blames_the_slow_node_and_nobody_else(shaped: Cluster, tmp_path: Path) -> None:
    screen = [PARBENCH, "slurm", "screen", "--no-devices", "--size", "512K", "--rounds", "3", "--timeout", "10s"]
    done = shaped.run([*screen, "--nodes", "5"], cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (1, ["--exclude=n5"]), done.stdout + done.stderr


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


def test_bus_bandwidth_reads_the_links_and_cyclic_placement_halves_it(measured: Path) -> None:
    rates = {name: busbw(*only_run(measured / name).records) for name in ("four", "block", "cyclic")}
    assert 0.85 <= rates["four"] <= 1.03
    assert rates["cyclic"] / rates["block"] == pytest.approx(0.5, abs=0.06)


def test_a_run_tells_where_its_ranks_sat_and_that_its_nodes_are_emulated(measured: Path) -> None:
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


def test_bytes_on_the_interfaces_are_ours(measured: Path) -> None:
    """The ring sends 2 (n - 1) / n of the size from every rank; headers are a few bytes of each 64 KiB here."""
    logs = sorted((only_run(measured / "wire").path / "logs" / "gang-0").glob("rank-*.log"))
    assert len(logs) == 4
    for log in logs:
        seen = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))
        assert seen["steps"] > 5
        assert seen["sent_bytes"] / seen["steps"] == pytest.approx(1.5 * 2 * MIB, rel=0.02)


def test_a_node_that_vanishes_in_a_collective_is_a_hang_that_names_it_and_the_others_go_on(tmp_path: Path) -> None:
    """Node n3's link swallows all from step 8 of the first case on; it is mended once that is on record."""
    run = f"{RUN} --target wire:awaited --set at=8,-1 --budget 30s --timeout 5s --out run"
    script = f"""
        salloc -Q -N4 --ntasks-per-node=1 {run} & run=$!
        until test -e begun; do sleep 0.05; done
        {FAULT} cut n3; touch cut
        until grep -q hang run/*/records.jsonl; do sleep 0.05; done
        {FAULT} heal n3
        wait $run
    """
    done = in_cluster(["sh", "-c", script], cwd=tmp_path, timeout=170, delay="1ms", variables=environment())
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
def test_a_sweep_on_a_real_cluster(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = in_cluster if name in BREAK_NODES else request.getfixturevalue("plain").run
    words = [sys.executable, str(SUPPORT / "sweep_scenarios.py"), name, str(tmp_path)]
    done = run(words, variables={"PYTHONPATH": f"{ROOT}:{IMPORT_PATH}"}, timeout=170)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/logs/*.*")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs[-6000:]}"
