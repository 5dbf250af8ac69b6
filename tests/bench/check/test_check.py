"""A real check of this machine: fine twice in a row, and a slow or a wrong rank is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.runs import load_run
from tests.support.clusters import PARBENCH, run_in_cluster
from tests.support.paths import environment

pytestmark = [pytest.mark.full, pytest.mark.measures]


def check(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "parbench", "check", "--json", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_check_passes_a_good_machine_and_names_a_bad_device(tmp_path: Path) -> None:
    code, found = check(tmp_path)
    assert (code, found["verdict"]) == (0, "ok"), found
    assert found["seconds"] < 60
    own = load_run(tmp_path / found["run"]).records[0].environment
    bound = [own[f"rank {device['rank']}"]["process"]["affinity"] for device in found["devices"]]
    assert [f"core{'s' * (not cores.isdecimal())} {cores}" for cores in bound] == [
        one["name"] for one in found["devices"]
    ]
    code, found = check(tmp_path, "--inject", "slow:1:20%")
    assert code == 1
    assert [device["verdict"] == "bad" for device in found["devices"]][:2] == [False, True], found
    assert "under its peers in" in found["devices"][1]["reasons"][0]["text"]
    code, found = check(tmp_path, "--inject", "corrupt:1", "--budget", "20s")
    assert code == 1
    assert found["devices"][1]["reasons"][0]["text"].startswith("wrong results in ")
    assert [device["verdict"] == "bad" for device in found["devices"]][:2] == [False, True], found


def test_hosts_are_checked_over_an_agent_and_by_a_screening_with_all_that_they_have(
    tmp_path: Path,
) -> None:
    agent = tmp_path / "agent"
    step = "srun --overlap --mpi=none --cpu-bind=none -N1 -n1"
    agent.write_text(f'#!/bin/sh\nhost=$1; shift\n[ $host = n2 ] && more="--inject corrupt:1"\n'
                     f'exec {step} -w $host sh -c "$* $more"\n')  # fmt: skip
    agent.chmod(0o755)
    asked = f"{PARBENCH} check --hosts n1,n2 --ssh {agent} --budget 20s --json -o hosts.json"
    screened = f"{PARBENCH} slurm screen --size 512K --rounds 3"
    script = f"{asked}; echo; {screened} >screen.txt"
    done = run_in_cluster(
        ["salloc", "-Q", "-N3", "-n3", "sh", "-c", script], nodes=3, cwd=tmp_path, timeout=400
    )
    told = json.loads((tmp_path / "hosts.json").read_text())
    bad = {
        one["host"]: [device["verdict"] == "bad" for device in one["devices"]]
        for one in told["hosts"]
    }
    assert bad == {"n1": [False, False], "n2": [False, True]}, done.stderr
    assert told["code"] == 1
    text = (tmp_path / "screen.txt").read_text()
    assert "3 hosts: 0 bad" in text, done.stderr
    assert text.splitlines()[-1] == "nothing to exclude"
    assert len([line for line in text.splitlines() if line.startswith("ok       n")]) == 6
    assert "bad device" not in text
