"""The nodes of a job: which they are, how ranks are spread over them, and the machine that each of them is."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    NodeLayout,
    choose_layout,
    machine_of_ranks,
    main,
)
from tests.support.clusters import run_in_cluster
from tests.support.nvidia import H100, gpus, install
from tests.support.paths import environment
from tests.support.refusals import usage_error
from tests.support.trees import write_tool

FOUR = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
JOB = Allocation(job="17", nodes=4, nodelist="n[1-4]")


def spread(nodes: int | None = None, each: int = 1, placement: str | None = None) -> NodeLayout:
    return choose_layout(JOB, nodes=nodes, ntasks_per_node=each, placement=placement)


def test_an_allocation_is_found_in_slurms_variables() -> None:
    assert Allocation.find(FOUR) == JOB
    for text, tasks in {
        "2": 2,
        "2(x4)": 2,
        "2(x3),1": None,
        "2,1": None,
        "": None,
        "two": None,
    }.items():
        assert Allocation.find({**FOUR, "SLURM_NTASKS_PER_NODE": text}).ntasks_per_node == tasks, (
            text
        )


def test_outside_an_allocation_the_sentence_says_how_to_get_one() -> None:
    for missing in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        told = usage_error(
            Allocation.find, {name: value for name, value in FOUR.items() if name != missing}
        )
        assert told == (
            "--launcher srun needs an allocation, and SLURM_JOB_ID is not set: start it in an sbatch script or "
            "under salloc, or let parbench slurm submit do so"
        )


def test_all_nodes_in_blocks_unless_it_is_said_otherwise() -> None:
    assert spread(each=2) == NodeLayout(nodes=4, ntasks_per_node=2, placement="block")
    chosen = spread(nodes=2, each=2, placement="cyclic")
    assert chosen == NodeLayout(nodes=2, ntasks_per_node=2, placement="cyclic")
    assert chosen.ranks == 4
    assert spread(nodes=1, each=2).ranks == 2


def test_what_the_allocation_cannot_hold_is_refused_with_numbers() -> None:
    assert usage_error(spread, nodes=8) == "--nodes 8: job 17 has 4 (n[1-4])"
    assert usage_error(spread, nodes=0) == "--nodes 0: at least 1 is needed"
    assert "needs at least 2 ranks, and this is one node" in usage_error(spread, nodes=1)
    told = usage_error(spread, placement="cylic")
    assert (
        told == "--placement 'cylic' is not known; did you mean 'cyclic'?; allowed: block or cyclic"
    )


# --- the machine of a node ---

LOGIN = Machine(
    cores=4, physical_cores=4, memory_bytes=16 << 30, torch_version="2.13.0", torch_has_cuda=True
)
GPU = Gpu(name="H100", memory_bytes=80 << 30)
NODE = Machine(
    cores=128, memory_bytes=1 << 40, gpus=(GPU,) * 8, torch_version="2.13.0", torch_has_cuda=True
)


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_machine, "inspect_machine", lambda environ: LOGIN)


class Srun:
    """An srun that is a script of the test's, beside the answer of a node; it notes its words and its environment."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        (folder / "node.json").write_bytes(msgspec.json.encode(NODE))
        self.environ: Mapping[str, str] = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        monkeypatch.setenv("PATH", self.environ["PATH"])
        self.does(f"echo a module is loaded; echo; cat {folder}/node.json; echo")

    def does(self, script: str) -> None:
        script = script.replace("ANSWER", f"cat {self._folder}/node.json")
        write_tool(
            self._folder,
            "srun",
            f'echo "$@" >> {self._folder}/words\nenv > {self._folder}/env\n{script}',
        )
        (self._folder / "words").write_text("")

    def asked(self) -> list[list[str]]:
        return [line.split() for line in (self._folder / "words").read_text().splitlines()]

    def variables(self) -> list[str]:
        return (self._folder / "env").read_text().splitlines()


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Srun:
    return Srun(tmp_path, monkeypatch)


def test_a_login_node_asks_a_node_of_the_job_and_others_look_for_themselves(srun: Srun) -> None:
    assert machine_of_ranks({**srun.environ, "SLURMD_NODENAME": "n1"}, JOB) == LOGIN
    assert machine_of_ranks(srun.environ, None) == LOGIN
    assert len(srun.asked()) == 0
    assert machine_of_ranks(srun.environ, JOB) == NODE
    assert len(srun.asked()) == 1


def test_the_whole_node_is_asked_for_and_not_the_share_of_a_task(srun: Srun) -> None:
    shares = {"SLURM_GPUS": "32", "SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gres/gpu:1"}
    machine_of_ranks({**srun.environ, **shares, "SLURM_JOB_ID": "17"}, JOB)
    seen = srun.variables()
    assert not [line for line in seen if line.partition("=")[0] in shares]
    assert {"SLURM_JOB_ID=17"} <= set(seen)


def test_the_words_take_the_sites_options_and_one_task_that_shares_the_node(srun: Srun) -> None:
    machine_of_ranks({**srun.environ, "PARBENCH_SRUN_OPTIONS": "--container-image=x\n--mem=0"}, JOB)
    [words] = srun.asked()
    assert words[:5] == [
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--relative=0",
        "--cpu-bind=none",
    ]
    assert "--overlap" in words
    assert words[-5:] == [
        "--container-image=x",
        "--mem=0",
        sys.executable,
        "-m",
        "parbench.bench.machine.slurm_allocation",
    ]


def test_where_the_first_node_does_not_answer_the_second_is_asked_if_there_is_one(
    srun: Srun,
) -> None:
    srun.does('case "$*" in *relative=0*) exit 1;; esac; ANSWER')
    assert machine_of_ranks(srun.environ, JOB) == NODE
    srun.does("exit 1")
    usage_error(machine_of_ranks, srun.environ, Allocation(job="17", nodes=1, nodelist="n1"))
    assert len(srun.asked()) == 1


def test_a_node_that_cannot_tell_is_one_sentence_with_srun_s_own_words(
    srun: Srun, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {
        "echo loading >&2; echo 'srun: error: Unable to create step' >&2; exit 1": "srun: error: Unable to create step",
        "exit 7": "it ended with 7",
        "ANSWER; exit 7": "it ended with 7",
        "true": "Input data was truncated",
        "echo no JSON": "JSON is malformed",
        'echo "{}"': "Object missing required field `cores`",
        "exec sleep 60": "no answer within 0.2 s",
    }
    for script, words in scripts.items():
        monkeypatch.setattr(node_machine, "_ANSWER_SECONDS", 0.2 if "sleep" in script else 30)
        srun.does(script)
        told = usage_error(machine_of_ranks, srun.environ, JOB)
        assert told.startswith(
            f"--launcher srun: this host is no node of job 17, and srun could not tell what its nodes have: {words}"
        )
        assert told.endswith("; start parbench in an sbatch script, or on a node")
        if "sleep" not in script:  # a busy machine may not even have begun to ask
            assert len(srun.asked()) == 2, script


def test_a_node_tells_its_machine_as_the_last_line_of_its_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main()
    assert msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=Machine) == LOGIN


ASKED = """
import msgspec, os, sys
from parbench.bench.machine.slurm_allocation import Allocation
from parbench.bench.machine.slurm_allocation import machine_of_ranks
assert "SLURMD_NODENAME" not in os.environ
sys.stdout.write(msgspec.json.encode(machine_of_ranks(os.environ, Allocation.find(os.environ))).decode())
"""


@pytest.mark.full
def test_a_real_slurm_answers_for_its_node_and_not_for_the_host_of_salloc(tmp_path: Path) -> None:
    """GPUs are only where a slurmd is; the node has both of its CPUs, though the step that asks has one task."""
    install(tmp_path, gpus(H100, 2))
    write_tool(
        tmp_path,
        "nvidia-smi",
        f'test "$SLURMD_NODENAME" && exec {sys.executable} -IS {tmp_path / "answer.py"} "$@"',
    )
    (tmp_path / "asked.py").write_text(ASKED)
    variables = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", sys.executable, "asked.py"]
    done = run_in_cluster(command, nodes=2, cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Machine)
    assert [gpu.name for gpu in found.gpus] == [H100["name"]] * 2
    assert found.cores == min(2, os.cpu_count() or 1)
