"""Tests on a real Slurm cluster: its links, screening, a cut link, and sweeps with faults."""

import sys
from pathlib import Path

import pytest

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run
from tests.support.slurm.clusters import (
    LOCAL_CLUSTER,
    PARBENCH,
    run_in_cluster,
)
from tests.support.slurm.sweep_scenarios import SCENARIOS

pytestmark = pytest.mark.full

FAULT = f"{' '.join(LOCAL_CLUSTER)} fault"
LINK_BITS_PER_SECOND = 200e6
RUN = f"{PARBENCH} run --launcher srun --set mode=blocking --repetitions 1"
RUN_CUT = f"{RUN} tests.support.faults:waiting"


@pytest.mark.measures
def test_screen_names_the_slow_node(tmp_path: Path) -> None:
    options = "--nodes 4 --no-devices --size 512K --rounds 3 --timeout 10s"
    command = [PARBENCH, "slurm", "screen", *options.split()]
    result = run_in_cluster(
        command,
        cwd=tmp_path,
        timeout=300,
        link="200mbit",
        slow="n4:50mbit",
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout.splitlines()[-1] == "--exclude=n4"


def load_only_run(folder: Path) -> Run:
    [path] = [entry for entry in folder.iterdir() if entry.is_dir()]
    return load_run(path)


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure all-reduces over links of 200 Mbit/s, and return the folder of their runs."""
    folder = tmp_path_factory.mktemp("measured")
    all_reduce = f"{RUN} all_reduce --sizes 4M --budget 6s"
    script = f"""
        four_nodes="salloc -Q -wn[1-4] --ntasks-per-node=1"
        two_nodes="salloc -Q -wn[1-2] --ntasks-per-node=2"
        $four_nodes {all_reduce} --out four
        $two_nodes {all_reduce} --distribution block --out block
        $two_nodes {all_reduce} --distribution cyclic --out cyclic
    """
    result = run_in_cluster(["sh", "-ec", script], cwd=folder, timeout=240, link="200mbit")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def link_share(record: Record) -> float:
    """Return the bus bandwidth relative to the rate of the links."""
    bytes_per_second = record.metrics["busbw"].value
    assert bytes_per_second is not None
    return bytes_per_second * 8 / LINK_BITS_PER_SECOND


@pytest.mark.measures
def test_busbw_is_the_link_rate_and_cyclic_halves_it(runs_folder: Path) -> None:
    [four] = load_only_run(runs_folder / "four").records
    [block] = load_only_run(runs_folder / "block").records
    [cyclic] = load_only_run(runs_folder / "cyclic").records
    assert 0.85 <= link_share(four) <= 1.03
    assert link_share(cyclic) / link_share(block) == pytest.approx(0.5, abs=0.06)


@pytest.mark.measures
def test_run_records_distribution_and_emulation(runs_folder: Path) -> None:
    run = load_only_run(runs_folder / "cyclic")
    environment = run.info.environment
    assert environment is not None
    assert environment["hosts"] == ["n1", "n2", "n1", "n2"]
    assert environment["switches"]["n1"].endswith(".n1")
    [record] = run.records
    assert record.world.nodes == 2
    assert record.check.passed
    assert record.emulation.startswith("4 nodes on one machine")


@pytest.mark.measures
def test_cut_link_is_a_hang_that_names_the_node(tmp_path: Path) -> None:
    """The link of n3 is cut from step 3 of the first case until that case has a record."""
    options = "--set at=3,0 --budget 30s --timeout 5s --out run"
    script = f"""
        salloc -Q -N4 --ntasks-per-node=1 {RUN_CUT} {options} & run=$!
        until test -e begun; do sleep 0.05; done
        {FAULT} cut n3; touch cut
        until grep -q hang run/*/records.jsonl; do sleep 0.05; done
        {FAULT} heal n3
        wait $run
    """
    result = run_in_cluster(["sh", "-c", script], cwd=tmp_path, timeout=170)
    assert result.returncode == 4, result.stdout + result.stderr
    hang, second = load_only_run(tmp_path / "run").records
    assert hang.status == "hang"
    assert "rank 2 (n3) did not arrive" in hang.reason
    silent = {rank.host for rank in hang.ranks if rank.is_silent}
    assert silent == {"n3"}
    assert second.status == "ok"


@pytest.mark.parametrize("name", SCENARIOS)
def test_sweep_on_a_real_cluster(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.slurm.sweep_scenarios", name, str(tmp_path)]
    result = run_in_cluster(command, timeout=170)
    paths = tmp_path.glob("**/logs/**/*.*")
    logs = [f"{path}\n{path.read_text(errors='replace')}" for path in paths]
    output = "\n".join([*logs, result.stdout, result.stderr])
    assert result.returncode == 0, output[-12_000:]
