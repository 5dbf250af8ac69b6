"""Faults on purpose: a cut link is silent and heals, a rate changes, SLURM loses a node and has it back."""

import re
from pathlib import Path

import msgspec
import pytest
from clusters import PARBENCH, in_cluster, tool

from bench.errors import UserError
from slurm.cluster import FOLDER_VARIABLE
from slurm.daemons import nodes_file
from slurm.fabric import Node
from slurm.rehearsal import break_or_mend

FAULT = f"{PARBENCH} slurm local-fault"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster's folder as far as it takes to be found."""
    nodes_file(tmp_path).parent.mkdir()
    nodes_file(tmp_path).write_bytes(msgspec.json.encode([Node(name=f"n{number}", pid=number) for number in (1, 2)]))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "first").write_bytes(b"python\0-m\0slurm.cluster\0" + str(tmp_path).encode())
    monkeypatch.setattr("slurm.rehearsal.FIRST_PROCESS", tmp_path / "first")
    return tmp_path


def test_outside_of_a_cluster_there_is_nothing_to_break(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"^PARBENCH_CLUSTER is not set: .* parbench slurm local$"):
        break_or_mend("cut", "n1", None)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=f"^PARBENCH_CLUSTER={re.escape(str(tmp_path))} holds no running cluster"):
        break_or_mend("cut", "n1", None)


def test_a_kept_folder_is_no_running_cluster(folder: Path) -> None:
    (folder / "first").write_bytes(b"/sbin/init")
    with pytest.raises(UserError, match="holds no running cluster"):
        break_or_mend("cut", "n1", None)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("action", "node", "rate", "sentence"),
    [
        ("cut", "n3", None, "'n3' is none of the cluster's nodes n1 to n2"),
        ("rate", "n1", None, "local-fault rate n1 needs a rate, such as 50mbit"),
        ("heal", "n1", "50mbit", "local-fault heal n1 takes no rate"),
        ("rate", "n1", "fast", "rate 'fast' is no rate: write a whole number"),
    ],
)
def test_what_cannot_be_is_one_sentence(action: str, node: str, rate: str | None, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        break_or_mend(action, node, rate)


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize("delay", [None, "1ms"])
def test_a_stream_stands_still_while_its_link_is_cut_and_goes_on_when_it_heals(delay: str | None) -> None:
    done = in_cluster(tool("stall", "n2"), nodes=2, link="200mbit", delay=delay)
    assert done.returncode == 0, done.stderr
    assert "ticks lost 0" in done.stdout
    found = re.search(r"longest silence seconds (\S+)", done.stdout)
    assert found is not None
    assert 0.9 <= float(found[1]) <= 5.0


@pytest.mark.slow
@pytest.mark.measures
def test_a_rate_changes_while_the_cluster_runs_and_outlives_a_cut() -> None:
    script = f"{FAULT} rate n2 50mbit; {FAULT} cut n2; {FAULT} heal n2; exec {' '.join(tool('between', 'n1', 'n2'))}"
    done = in_cluster(["sh", "-c", script], nodes=2, link="200mbit")
    found = re.search(r"bits per second (\S+)", done.stdout)
    assert found is not None, done.stderr
    assert 0.8 * 50e6 <= float(found[1]) <= 1.05 * 50e6


@pytest.mark.slow
@pytest.mark.measures
def test_slurm_loses_a_node_and_has_it_back_said_from_within_a_job() -> None:
    script = (
        f"srun --nodes 1 --nodelist n1 {FAULT} down n2; sinfo --noheader --nodes n2 --format=%T/%E;"
        f"{FAULT} up n2; srun --nodes 1 --nodelist n2 hostname; {FAULT} up n2"
    )
    done = in_cluster(["sh", "-c", script], nodes=2)
    assert done.stdout.splitlines() == ["down/rehearsal", "n2"]
    assert done.returncode == 2
    assert "parbench: scontrol refuses n2 state=RESUME: " in done.stderr.splitlines()[-1]
