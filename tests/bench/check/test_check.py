"""A real check of this machine: fine twice in a row, and a slow or a wrong rank is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import environment

pytestmark = [pytest.mark.full, pytest.mark.measures]


def check(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "parbench", "check", "--json", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_machine_that_is_well_is_fine_twice_and_what_is_not_is_named(tmp_path: Path) -> None:
    for _ in range(2):
        code, found = check(tmp_path)
        assert (code, found["verdict"]) == (0, "ok"), found
        assert found["seconds"] < 60
    kept = [
        json.loads(line) for file in tmp_path.glob("runs/check/history/*") for line in file.read_text().splitlines()
    ]
    assert len(kept) == 2 * len(found["devices"])
    assert {line["uuid"] for line in kept} == {device["uuid"] for device in found["devices"]}
    code, found = check(tmp_path, "--inject", "slow:1:20%")
    assert code == 1
    assert [device["verdict"] == "bad" for device in found["devices"]][:2] == [False, True], found
    assert "under its peers in" in found["devices"][1]["reasons"][0]["text"]
    code, found = check(tmp_path, "--inject", "corrupt:1", "--budget", "20s")
    assert code == 1
    assert found["devices"][1]["reasons"][0]["text"].startswith("wrong results in ")
    assert [device["verdict"] == "bad" for device in found["devices"]][:2] == [False, True], found
