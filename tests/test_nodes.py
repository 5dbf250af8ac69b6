"""Ranks on the nodes of a real SLURM cluster on this machine: bandwidth, bytes and a dead link against the truth."""

import json
from pathlib import Path

import pytest
from clusters import PARBENCH, in_cluster
from conftest import environment

from bench.records import Record
from bench.runs import Run, load_run
from bench.setting import FUNCTIONAL_ONLY

pytestmark = [pytest.mark.slow, pytest.mark.measures]

LINK_BITS_PER_SECOND = 200e6
MIB = 1 << 20
RUN = f"{PARBENCH} run --launcher srun --set mode=blocking --launches 1"
WIRE = f"{RUN} --target wire:counted --set size_bytes=2M --budget 10s"


def only_run(folder: Path) -> Run:
    (path,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return load_run(path)


def busbw(record: Record) -> float:
    """Return the bus bandwidth over the link's."""
    value = record.metrics["busbw"].value
    assert value is not None, record
    return value * 8 / LINK_BITS_PER_SECOND


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All reduces over links of 200 mbit: 4 nodes, 2 nodes, and 2 ranks on each of 2 nodes in both orders."""
    folder = tmp_path_factory.mktemp("shaped")
    asked = f"{RUN} --only all_reduce --sizes 4M --budget 12s"
    script = "\n".join(
        [
            f"salloc -Q -N4 --ntasks-per-node=1 {asked} --out four",
            f"salloc -Q -N2 --ntasks-per-node=1 {asked} --out two",
            f"salloc -Q -N2 --ntasks-per-node=2 {asked} --placement block --out block",
            f"salloc -Q -N2 --ntasks-per-node=2 {asked} --placement cyclic --out cyclic",
            f"salloc -Q -N4 --ntasks-per-node=1 {WIRE} --out wire",
        ]
    )
    done = in_cluster(["sh", "-ec", script], link="200mbit", cwd=folder, timeout=170, variables=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("nodes", ["four", "two"])
def test_bus_bandwidth_reads_the_links(shaped: Path, nodes: str) -> None:
    (record,) = only_run(shaped / nodes).records
    assert 0.85 <= busbw(record) <= 1.03


def test_cyclic_placement_halves_the_bandwidth_of_a_ring(shaped: Path) -> None:
    (block,), (cyclic,) = only_run(shaped / "block").records, only_run(shaped / "cyclic").records
    assert busbw(cyclic) / busbw(block) == pytest.approx(0.5, abs=0.06)


def test_a_run_tells_where_its_ranks_sat_and_that_its_nodes_are_emulated(shaped: Path) -> None:
    run = only_run(shaped / "cyclic")
    assert run.info.environment is not None
    assert run.info.environment["hosts"] == ["n1", "n2", "n1", "n2"]
    assert run.info.environment["slurm"]["placement"] == "cyclic"
    assert run.info.environment["switches"]["n1"].endswith(".n1")
    assert run.info.plan.spread is not None
    (record,) = run.records
    assert (record.world.size, record.world.nodes) == (4, 2)
    assert record.check.passed
    assert record.notes[0].startswith("emulated: 4 nodes on one machine")
    assert "200mbit" in record.notes[0]
    assert any(note.startswith(FUNCTIONAL_ONLY) for note in record.notes)


def test_bytes_on_the_interfaces_are_ours(shaped: Path) -> None:
    """The ring sends 2 (n - 1) / n of the size from every rank; headers are a few bytes of each 64 KiB here."""
    logs = sorted((only_run(shaped / "wire").path / "logs" / "gang-0").glob("rank-*.log"))
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
        {PARBENCH} slurm local-fault cut n3; touch cut
        until grep -q hang run/*/records.jsonl; do sleep 0.05; done
        {PARBENCH} slurm local-fault heal n3
        wait $run
    """
    done = in_cluster(["sh", "-c", script], cwd=tmp_path, timeout=170, variables=environment())
    assert done.returncode == 4, done.stdout + done.stderr
    hung, after = only_run(tmp_path / "run").records
    assert (hung.status, hung.reason) == ("hang", "no end within 5 s: rank 2 (n3) did not arrive")
    assert hung.seconds < 5 + 5
    assert {state.host for state in hung.ranks if state.state == "no answer"} == {"n3"}
    assert (after.status, after.check.passed) == ("ok", True)
