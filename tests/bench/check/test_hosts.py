"""Several hosts are checked at once over an agent, and their devices are compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from parbench.bench.check.check import to_document
from parbench.bench.check.health import Device, Fault, Health, Rate, compare_with_peers
from parbench.bench.check.hosts import (
    check_hosts,
    compare_hosts,
    parse_hosts,
    parse_result,
)
from parbench.bench.check.show import render
from parbench.cli import main
from tests.support.refusals import usage_error
from tests.support.trees import write_tool


def build_health(host: str, speed: float = 1.0, **fields: Any) -> Health:
    """Return a host of two GPUs of a relative speed."""
    flops = speed * 1e12
    rate = Rate(unit="FLOP/s", value=flops, repetitions=dict.fromkeys(range(3), flops))
    devices = tuple(
        Device(
            host=host,
            name=f"GPU {rank}",
            kind="H100",
            rank=rank,
            rates={"float32": rate},
        )
        for rank in range(2)
    )
    health = Health(host=host, seconds=41.0, device="cuda", devices=devices)
    return replace(health, **fields)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b,,a", ("a", "b")),
        ("gpu-a,me@gpu-b,fe80::12", ("gpu-a", "me@gpu-b", "fe80::12")),
        ("n[01-03]", ("n01", "n02", "n03")),
        ("r[1-2]n[1,4],x", ("r1n1", "r1n4", "r2n1", "r2n4", "x")),
    ],
)
def test_hosts_are_read_from_a_list(text: str, hosts: tuple[str, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", [",", "-oProxyCommand=x,b", "n[3-1]", "n[1", "^n1", "gpu-a:8"])
def test_invalid_hosts_are_refused(text: str) -> None:
    assert repr(text) in usage_error(parse_hosts, text)


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """An agent that reaches every host except n2, and records its arguments."""
    (tmp_path / "answer").write_text(
        f"warning\n{json.dumps(to_document(build_health('n1')))}\n"
    )
    script = [
        f'echo "$1: $2" >>{tmp_path}/calls',
        "[ $1 = n2 ] && echo no route to n2 >&2 && exit 255",
        f"cat {tmp_path}/answer",
    ]
    return str(write_tool(tmp_path, "agent", "\n".join(script)))


def test_unreachable_host_is_reported(tmp_path: Path, agent: str) -> None:
    answers = check_hosts(("n1", "n2"), ["--budget", "40s"], agent=agent, seconds=1.0)
    assert answers[0] == build_health("n1")
    assert answers[1].problems == ("no route to n2",)
    assert answers[1].exit_code == 4
    assert "did not run  n2: no route to n2" in render(answers)
    calls = sorted((tmp_path / "calls").read_text().splitlines())
    assert calls[0].startswith(f"n1: cd {Path.cwd()} && ")
    assert calls[0].endswith(" -m parbench check --budget 40s --format=json")


def test_command_writes_answers_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["check", "--hosts", "n1,n2", "--ssh", agent, "--format=json"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 4
    answers = json.loads(result.stdout)
    assert [host["host"] for host in answers["hosts"]] == ["n1", "n2"]
    assert answers["hosts"][0]["verdict"] == "ok"


def test_absent_agent_is_reported() -> None:
    [absent] = check_hosts(("n1",), [], agent="no-such-agent -q", seconds=1.0)
    assert "no-such-agent" in absent.problems[0]


@pytest.mark.parametrize("command", ["", "ssh -o 'x"])
def test_invalid_agent_is_refused(command: str) -> None:
    assert repr(command) in usage_error(check_hosts, ("n1",), [], agent=command, seconds=1.0)


def test_slow_host_is_found_among_hosts() -> None:
    answers = [
        build_health("n1", 1.0),
        build_health("n2", 1.0),
        build_health("n3", 0.8),
        build_health("n4", 1.0),
    ]
    compared = compare_hosts(answers)
    assert [health.exit_code for health in compared] == [0, 0, 1, 0]
    text = render(compared)
    assert "4 hosts: 1 bad" in text
    assert "bad  n3: GPU 0: slower than its peers: float32 by 20 %" in text


def test_gpu_that_other_hosts_have_is_missing() -> None:
    complete = [build_health("n1", 1.0), build_health("n2", 1.0)]
    first = build_health("n3").devices[0]
    compared = compare_hosts([*complete, build_health("n3", 1.0, devices=(first,))])
    text = render(compared)
    assert "3 hosts: 1 bad" in text
    assert "bad  n3: missing GPU: has 1 H100 fewer than most hosts" in text


def test_hosts_of_equal_names_are_told_apart() -> None:
    """Both hosts call themselves n1, because a host's own name is cut at the domain."""
    wrong = Fault(text="wrong results", fix="drain the host")
    good = build_health("n1")
    first, second = good.devices
    bad = replace(good, devices=(replace(first, reasons=(wrong,)), second))
    answers = []
    for host, health in (("n1.rack1", bad), ("n1.rack2", good)):
        answers.append(parse_result(host, json.dumps(to_document(health)).encode(), b"", 0))
    compared = compare_hosts(answers)
    verdicts = [[device.verdict for device in health.devices] for health in compared]
    assert verdicts == [["bad", "ok"], ["ok", "ok"]]
    assert "n1.rack1: GPU 0: wrong results" in render(compared)


def test_emulated_host_is_not_compared() -> None:
    answers = [build_health(f"n{index}", 0.8 if index == 2 else 1.0) for index in range(4)]
    emulated = build_health("n4", 0.5, emulated=True)
    compared = compare_hosts([*answers, emulated])
    assert compared[-1] == emulated
    assert "bad  n2: GPU 1: slower than its peers: float32 by 20 %" in render(compared)


def test_hosts_that_check_cores_next_to_gpus_are_not_fine() -> None:
    """A host whose GPUs nothing has found may have lost them."""
    answers = [
        build_health("n1", 1.0),
        build_health("n2", 1.0, device="cpu"),
        build_health("n3", 1.0),
    ]
    compared = compare_hosts(answers)
    assert [health.exit_code for health in compared] == [0, 4, 0]
    assert "did not run  n2: no GPU was found on this host" in render(compared)


@pytest.mark.parametrize(
    ("speed", "kind", "is_gpu", "verdict"),
    [
        (0.92, "H100", True, "bad"),
        (0.92, "H100", False, "ok"),  # Cores differ more than GPUs.
        (0.8, "A100", True, "ok"),
    ],
)
def test_slow_device_is_bad_among_peers_of_its_kind(
    speed: float, kind: str, is_gpu: bool, verdict: str
) -> None:
    peers = [build_health("n1").devices[0]] * 3
    slow = replace(build_health("n2", speed).devices[0], kind=kind)
    devices = [replace(device, is_gpu=is_gpu) for device in (slow, *peers)]
    devices = compare_with_peers(devices)
    assert compare_with_peers(devices) == devices, "a reason is not repeated"
    assert [device.verdict for device in devices] == [verdict, "ok", "ok", "ok"]
