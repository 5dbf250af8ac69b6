"""The machine of ranks is that of the job's nodes: what the host has on which parbench was started does not matter."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from clusters import in_cluster
from conftest import environment

from bench import node_machine
from bench.allocation import Allocation
from bench.errors import UserError
from bench.machine import Gpu, Machine
from bench.node_machine import machine_of_ranks, main, node_command

LOGIN = Machine(cores=4, physical_cores=4, memory_bytes=16 << 30, torch_version="2.13.0", torch_has_cuda=True)
GPU = Gpu(name="H100", memory_bytes=80 << 30)
NODE = Machine(cores=128, memory_bytes=1 << 40, gpus=(GPU,) * 8, torch_version="2.13.0", torch_has_cuda=True)
JOB = Allocation(job="17", nodes=4, nodelist="n[1-4]")


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_machine, "look", lambda environ: LOGIN)


def srun(folder: Path, script: str) -> Mapping[str, str]:
    """Return the variables under which srun is this script; it notes its words and its environment."""
    path = folder / "srun"
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/words\nenv > {folder}/env\n{script}\n')
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(NODE))
    found = srun(tmp_path, f"echo a module is loaded; echo; cat {tmp_path}/node.json; echo")
    monkeypatch.setenv("PATH", found["PATH"])
    return found


def refusal(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, allocation: Allocation = JOB) -> str:
    monkeypatch.setenv("PATH", environ["PATH"])
    with pytest.raises(UserError) as caught:
        machine_of_ranks(environ, allocation)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_login_node_asks_a_node_of_the_job(told: Mapping[str, str]) -> None:
    assert machine_of_ranks(told, JOB) == NODE


def test_a_node_of_the_job_and_a_host_without_a_job_look_for_themselves(told: Mapping[str, str]) -> None:
    assert machine_of_ranks({**told, "SLURMD_NODENAME": "n1"}, JOB) == LOGIN
    assert machine_of_ranks(told, None) == LOGIN


def test_the_whole_node_is_asked_for_and_not_the_share_of_a_task(told: Mapping[str, str], tmp_path: Path) -> None:
    shares = {"SLURM_GPUS": "32", "SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gres/gpu:1"}
    machine_of_ranks({**told, **shares, "SLURM_JOB_ID": "17"}, JOB)
    seen = (tmp_path / "env").read_text().splitlines()
    assert not [line for line in seen if line.partition("=")[0] in shares]
    assert {"SLURM_JOB_ID=17", "PYTHONSAFEPATH=1"} <= set(seen)


def test_the_words_take_the_sites_options_and_one_task_that_shares_the_node() -> None:
    words = node_command(1, {"PARBENCH_SRUN_OPTIONS": "--container-image=x y"})
    assert words[:6] == ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--relative=1", "--cpu-bind=none"]
    assert "--overlap" in words
    assert words[-4:] == ["--container-image=x y", sys.executable, "-m", "bench.node_machine"]


def test_where_the_first_node_does_not_answer_the_second_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(NODE))
    script = f'case "$*" in *relative=0*) exit 1;; esac; cat {tmp_path}/node.json'
    environ = srun(tmp_path, script)
    monkeypatch.setenv("PATH", environ["PATH"])
    assert machine_of_ranks(environ, JOB) == NODE


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'srun: error: Unable to create step' >&2; exit 1", "srun: error: Unable to create step; start"),
        ("exit 7", "it ended with 7; start"),
        ("true", "Input data was truncated; start"),
        ("echo no JSON", "malformed"),
        ('echo "{}"', "missing required field `cores`"),
        ("exec sleep 60", "no answer within 0.5 s; start"),
    ],
)
def test_a_node_that_cannot_tell_is_one_sentence_with_srun_s_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr(node_machine, "_ANSWER_SECONDS", 0.5 if "sleep" in script else 30)
    told = refusal(srun(tmp_path, script), monkeypatch)
    assert told.startswith("--launcher srun: this host is no node of job 17, and srun could not tell what its nodes")
    assert words in told
    assert len((tmp_path / "words").read_text().splitlines()) == 2


def test_a_job_of_one_node_has_no_second_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(srun(tmp_path, "exit 1"), monkeypatch, Allocation(job="17", nodes=1, nodelist="n1"))
    assert len((tmp_path / "words").read_text().splitlines()) == 1


def test_a_node_tells_its_machine_as_the_last_line_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=Machine) == LOGIN


ASKED = """
import msgspec, os, sys
from bench.allocation import Allocation
from bench.node_machine import machine_of_ranks
assert "SLURMD_NODENAME" not in os.environ
sys.stdout.write(msgspec.json.encode(machine_of_ranks(os.environ, Allocation.find(os.environ))).decode())
"""


@pytest.mark.slow
def test_a_real_slurm_answers_for_its_node_and_not_for_the_host_of_salloc(tmp_path: Path) -> None:
    """GPUs are only where a slurmd is; the node has both of its CPUs, though the step that asks has one task."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ntest "$SLURMD_NODENAME" && echo "H100, 81920" && echo "H100, 81920"\n')
    smi.chmod(0o755)
    (tmp_path / "asked.py").write_text(ASKED)
    variables = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", sys.executable, "asked.py"]
    done = in_cluster(command, nodes=2, cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Machine)
    assert [gpu.name for gpu in found.gpus] == ["H100", "H100"]
    assert found.cores == min(2, os.cpu_count() or 1)
