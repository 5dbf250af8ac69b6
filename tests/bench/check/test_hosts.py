"""Hosts of a file or a list are asked at once, and what they answer, or do not, is one table and one exit code."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.bench.check import check as checking
from parbench.bench.check.check import check, document
from parbench.bench.check.health import Device, Health, Rate, Reason
from parbench.bench.check.hosts import Answer, ask, code_of, hosts_in, render, together
from parbench.bench.machine.machine import affinity
from parbench.bench.text import counted
from parbench.cli import main
from tests.support.refusals import usage_error
from tests.support.trees import write_tool

ASKED: dict[str, Any] = {
    "device": "cpu",
    "nproc": 1 << 20,
    "budget": "9s",
    "timeout": "9s",
    "out": Path(),
    "inject": None,
}


def health(host: str, speed: float = 1.0, *, emulated: bool = False, **more: Any) -> Health:
    told = {
        "float32": Rate(
            name="float32",
            unit="FLOP/s",
            value=speed * 1e12,
            launches=dict.fromkeys(range(3), speed * 1e12),
        )
    }
    own = tuple(
        Device(host=host, name=f"GPU {i}", uuid=f"{host}{i}", kind="H100", rank=i, rates=told)
        for i in range(2)
    )
    whole = Health(
        host=host, started="2026", seconds=41.0, device="cuda", devices=own, emulated=emulated
    )
    return msgspec.structs.replace(whole, **more)


def test_hosts_are_a_list_or_a_files_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# rack 3\nn1 slots=8\nn2:8\n\nn1\n")
    assert hosts_in(str(file)) == ("n1", "n2:8")
    assert hosts_in("a,b,,a") == ("a", "b")
    assert len(hosts_in(",".join(f"rack7-node{number}" for number in range(500)))) == 500
    for text in ("", ",", "-oProxyCommand=x,b"):
        assert "names no hosts: write a,b,c, or a file" in usage_error(hosts_in, text)


def test_every_host_is_asked_by_the_agent_and_one_that_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps(document(health("n1")))
    (tmp_path / "answer").write_text(f"warning\n{answer}\n")
    script = (
        f'echo "$1: $2" >>{tmp_path}/asked\n'
        "[ $1 = n2 ] && echo no route to n2 >&2 && exit 255\n"
        f"cat {tmp_path}/answer"
    )
    write_tool(tmp_path, "agent", script)
    found = ask(("n1", "n2"), ["--budget", "40s"], agent=str(tmp_path / "agent"), seconds=1.0)
    assert found[0].health == health("n1")
    assert found[1] == Answer(host="n2", problem="no route to n2")
    asked = sorted((tmp_path / "asked").read_text().splitlines())
    assert (
        asked[0] == f"n1: cd {Path.cwd()} && {sys.executable} -m parbench check --budget 40s --json"
    )
    [gone] = ask(("n1",), [], agent="no-such-agent -q", seconds=1.0)
    assert gone.problem == "no-such-agent cannot be started: No such file or directory"
    for agent in ("", "ssh -o 'x"):
        assert usage_error(ask, ("n1",), [], agent=agent, seconds=1.0).startswith(
            f"--ssh {agent!r} is no command: "
        )
    assert code_of(found) == 4
    assert "did not run  n2: no route to n2" in render(found)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        main,
        ["check", "--hosts", "n1,n2", "--ssh", str(tmp_path / "agent"), "--json", "-o", "all.json"],
    )
    assert done.exit_code == 4
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "all.json").read_text())
    assert [one["host"] for one in told["hosts"]] == ["n1", "n2"]
    assert told["hosts"][0]["verdict"] == "ok"


def test_a_host_that_is_slow_as_a_whole_is_named_beside_others() -> None:
    answers = [
        Answer(host=f"n{i}", health=health(f"n{i}", 0.8 if i == 3 else 1.0)) for i in range(1, 5)
    ]
    found = together(answers)
    assert code_of(answers) == 0
    assert code_of(found) == 1
    text = render(found)
    assert text.startswith("4 hosts: 1 bad, 0 did not run\n")
    assert "bad  n3 GPU 0: 20 % under its peers in float32 (" in text
    assert text.endswith("leave out: n3")
    shared = [
        Answer(host=f"n{i}", health=health(f"n{i}", 1 / i, emulated=True)) for i in range(1, 5)
    ]
    assert together(shared) == tuple(shared), "nodes that share a machine are not alike"


def test_a_check_is_not_started_by_every_rank_of_a_job() -> None:
    joined = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    told = usage_error(check, (), joined, **ASKED)
    assert told.startswith("parbench check starts its own ranks, and RANK is set: ")


def test_no_more_groups_are_checked_than_there_are_cores() -> None:
    told = usage_error(check, (), {}, **ASKED)
    assert (
        told
        == f"--nproc {1 << 20}: this process may use {counted(len(affinity()), 'core')}, one for each at most"
    )


@pytest.mark.parametrize(
    ("code", "more"),
    [
        (0, {}),
        (1, {"links": (Reason(text="GPU 0 - GPU 1: slow", remedy="see"),)}),
        (4, {"problems": ("x",)}),
    ],
)
def test_the_command_prints_a_check_and_ends_with_its_code(
    code: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "check", lambda *_, **__: health("n1", **more))
    done = CliRunner().invoke(main, ["check"])
    assert (done.exit_code, done.stdout.splitlines()[0].split()[1]) == (
        code,
        {0: "ok", 1: "bad", 4: "did"}[code],
    )
    done = CliRunner().invoke(main, ["check", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (code, code)
