"""A cluster on one machine without starting one: its words, its files, its links, its first process, its refusals."""

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import click.testing
import msgspec
import pytest
from paths import environment
from refusals import refusal

from parbench import cli
from parbench.slurm.local.cluster import FOLDER_VARIABLE, NODES_FILE, ORDER_FILE, Order, inner_environment
from parbench.slurm.local.cluster_conf import (
    ClusterSpec,
    address,
    checked_rate,
    cluster_spec,
    config_files,
    emulated,
    parse_delay,
)
from parbench.slurm.local.links import Node, Switch, port
from parbench.slurm.local.local import break_or_mend, check_parent, check_programs, run_local, sandbox

FOLDER = Path("/tmp/parbench-x")


def test_words_make_a_cluster_whose_nodes_have_rates_of_their_own() -> None:
    spec = cluster_spec(nodes=4, cpus=3, link="200mbit", delay="500us", slow=("n3:50mbit",))
    assert spec == ClusterSpec(nodes=4, cpus=3, link="200mbit", delay="500us", slow=(("n3", "50mbit"),))
    assert spec.delay_seconds == pytest.approx(500e-6)
    assert [spec.rate(name) for name in spec.names] == ["200mbit", "200mbit", "50mbit", "200mbit"]
    alone = cluster_spec(nodes=2, cpus=2, slow=("n1:10mbit",))
    assert [alone.rate(name) for name in alone.names] == ["10mbit", ""]
    assert (alone.link, alone.delay, alone.delay_seconds) == ("", "", 0.0), "left alone"


def test_rates_delays_and_slow_nodes_are_read_and_others_refused_with_an_example() -> None:
    for text in ("100kbit", "200mbit", "1gbit", "100gbit"):
        assert checked_rate(text, "--link") == text
    for text in ("", "200", "200m", "200Mbit", "1.5gbit", "0mbit", "99kbit", "101gbit", "-1mbit", "٣mbit", "1mbit b"):
        told = refusal(cluster_spec, nodes=4, cpus=2, link=text)
        assert re.search(rf"^--link {re.escape(repr(text))} is no rate.*such as 200mbit$", told), text
    for text, seconds in {"500us": 500e-6, "2ms": 2e-3, "0.5ms": 5e-4, "1000ms": 1.0}.items():
        assert parse_delay(text) == pytest.approx(seconds)
    for text in ("", "500", "0us", "1s", "1001ms", "-1ms", "1e3us", "500 us"):
        told = refusal(cluster_spec, nodes=4, cpus=2, delay=text)
        assert re.search(rf"^--delay {re.escape(repr(text))} is no delay.*such as 500us$", told), text
    for slow, sentence in (
        ("n3", "'n3' is not understood: write NODE:RATE, such as n3:50mbit"),
        ("n5:50mbit", "'n5:50mbit': 'n5' is none of the nodes n1 to n4"),
        ("n3:fast", "'fast' is no rate"),
        ("n3:1mbit n2:1mbit n3:2mbit", "names n3 more than once; a node has one link"),
    ):
        assert refusal(cluster_spec, nodes=4, cpus=2, slow=slow.split()).startswith(f"--slow {sentence}"), slow


def test_every_host_has_an_address_and_a_port_of_its_own_and_two_leaves_share_four_nodes_and_more() -> None:
    names = ("ctl", *ClusterSpec(nodes=200).names)
    assert len({address(name) for name in names}) == len({port(name) for name in names}) == 201
    assert all(int(part) < 255 for name in names for part in address(name).split("."))
    assert max(len(port(name)) for name in names) < 16, "what Linux allows for an interface"
    told = config_files(ClusterSpec(nodes=2), FOLDER, "me")["hosts"]
    assert told == "127.0.0.1 localhost\n10.77.0.254 ctl\n10.77.0.1 n1\n10.77.0.2 n2\n"
    known = {1: ["n1"], 3: ["n[1-3]"], 4: ["n[1-2]", "n[3-4]"], 5: ["n[1-2]", "n[3-5]"]}
    for nodes, leaves in known.items():
        text = config_files(ClusterSpec(nodes=nodes), FOLDER, "me")["topology.conf"]
        assert re.findall(r"^SwitchName=leaf\d Nodes=(\S+)$", text, re.MULTILINE) == leaves
        assert ("SwitchName=spine Switches=leaf[1-2]" in text) == (len(leaves) == 2)


def test_slurm_is_set_for_rehearsals_by_nodes_that_claim_their_cpus() -> None:
    text = config_files(ClusterSpec(nodes=2, cpus=7), FOLDER, "me")["slurm.conf"]
    nodes = [dict(word.split("=") for word in line.split()) for line in text.splitlines() if line.startswith("NodeN")]
    assert [(node["NodeName"], node["NodeAddr"]) for node in nodes] == [("n1", "10.77.0.1"), ("n2", "10.77.0.2")]
    assert {(node["CPUs"], node["CoresPerSocket"], node["ThreadsPerCore"]) for node in nodes} == {("7", "7", "1")}
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "PartitionName"))]
    found = dict(line.split("=", 1) for line in lines)
    wanted = {"KillWait": "2", "SlurmdTimeout": "15", "ReturnToService": "2", "JobRequeue": "1", "SlurmUser": "me"}
    wanted |= {"SelectType": "select/cons_tres", "TopologyPlugin": "topology/tree", "JobCompType": "jobcomp/filetxt"}
    assert (wanted | {"SlurmdParameters": "config_overrides"}).items() <= found.items()
    assert "PartitionName=lab Nodes=ALL Default=YES MaxTime=60 " in text
    paths = {name: value for name, value in found.items() if "/" in value and not name.endswith(("Type", "Plugin"))}
    assert {name for name, value in paths.items() if str(FOLDER) not in value} == {"MailProg"}
    assert {"StateSaveLocation", "SlurmdSpoolDir", "SlurmctldLogFile", "JobCompLoc", "AuthInfo"} <= paths.keys()


def test_what_runs_inside_knows_its_cluster_and_no_other() -> None:
    spec = cluster_spec(nodes=4, cpus=2, link="200mbit", delay="500us")
    assert emulated(spec, 2) == "4 nodes on one machine of 2 cores, links of 200mbit, delay 500us"
    assert emulated(ClusterSpec(nodes=1), 1) == "1 node on one machine of 1 core"
    slow = cluster_spec(nodes=2, cpus=2, link="1gbit", slow=("n2:50mbit",))
    assert emulated(slow, 8) == "2 nodes on one machine of 8 cores, links of 1gbit, n2 of 50mbit"
    foreign = {"SLURM_JOB_ID": "7", "SRUN_CPUS_PER_TASK": "1", "SBATCH_PARTITION": "x"}
    foreign |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    inside = inner_environment({**foreign, "HOME": "/h", "NCCL_ALGO": "Ring"}, FOLDER, spec)
    assert inside.pop("PARBENCH_EMULATED").startswith("4 nodes on one machine of ")
    own = {"SLURM_CONF": "/tmp/parbench-x/slurm.conf", "PARBENCH_CLUSTER": "/tmp/parbench-x"}
    assert inside == {"HOME": "/h", "NCCL_ALGO": "Ring", **own}


def first_process(folder: Path, command: tuple[str, ...], start: str = "None", told: bytes = b"") -> tuple[int, str]:
    """Run a cluster's first process, whose daemons ``start`` stands for; return its code and its words.

    The outside says ``told`` as soon as the command has printed anything.
    """
    end, lifeline = os.pipe()
    order = Order(spec=ClusterSpec(nodes=1), command=command, lifeline=end)
    (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
    replaced = f"import sys, parbench.slurm.local.cluster as c; c.start_cluster = lambda *_: {start}"
    script = f"{replaced}; sys.exit(c.main(c.Path({str(folder)!r})))"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment(),
        pass_fds=(end,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(end)
        assert process.stdout is not None
        if told:
            process.stdout.readline()
            os.write(lifeline, told)
        _, words = process.communicate(timeout=30)
    os.close(lifeline)
    return process.returncode, words


def test_the_code_is_the_command_s_and_says_if_there_was_none(tmp_path: Path) -> None:
    none = tmp_path / "none"
    none.write_bytes(b"\x00\x01")
    none.chmod(0o755)
    endless = "trap 'exit 9' HUP; echo up; while :; do sleep 0.05; done"
    failed = "(_ for _ in ()).throw(c.ClusterError('it broke'))"
    for command, more, code, words in (
        (("sh", "-c", "exit 7"), {}, 7, ""),
        (("sh", "-c", "kill -KILL $$"), {}, 137, ""),
        (("sh", "-c", endless), {"told": b"\x01"}, 9, ""),
        ((str(none),), {}, 126, f"parbench: {none} cannot be started: Exec format error\n"),
        (("true",), {"start": failed}, 4, "parbench: the cluster did not come up: it broke\n"),
    ):
        assert first_process(tmp_path, command, **more) == (code, words), command


def test_what_a_machine_lacks_is_said_with_what_installs_it_or_as_its_kernel_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(check_programs, str(tmp_path)) == (
        "a cluster on this machine needs slurmctld, slurmd, srun, munged, ip, tc, unshare, nsenter, mount, hostname, "
        "not found in PATH: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 "
        "util-linux mount hostname"
    )
    for name in ("slurmctld", "slurmd", "srun", "munged", "unshare", "nsenter", "mount", "hostname"):
        (tmp_path / name).touch(mode=0o755)
    assert re.search(r"needs ip, tc, not found.*recommends iproute2$", refusal(check_programs, str(tmp_path)))
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\nexit 0\n")
    assert ["--user" in sandbox(user) for user in (0, 1000)] == [False, True]
    fake.write_text("#!/bin/sh\necho unshare: unshare failed: Operation not permitted >&2\nexit 1\n")
    for user in (0, 1000):
        told = refusal(sandbox, user)
        assert told.startswith("no namespaces can be made here (unshare: unshare failed: Operation not"), user


def test_places_and_users_that_slurm_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in ("/tmp", "/scratch/some.one/job_7", "/tmp/" + "x" * 50):
        check_parent(Path(parent))
    for parent in ("/tmp/with space", "/tmp/a,b", "/tmp/é", "/dev/shm", "/dev/shm/x", f"/tmp/{'x' * 51}"):
        told = refusal(check_parent, Path(parent))
        assert re.search("^SLURM cannot work in the temporary folder '.*at most 55.*; set TMPDIR$", told), parent
    monkeypatch.setattr("parbench.slurm.local.local.check_programs", lambda path: None)
    nobody = next(number for number in range(54321, 55000) if number not in {user.pw_uid for user in pwd.getpwall()})
    monkeypatch.setattr(os, "getuid", lambda: nobody)
    told = refusal(run_local, ClusterSpec(nodes=1), ("true",), keep=False)
    assert told.startswith(f"user {nobody} has no name in /etc/passwd")


def test_bad_words_end_with_2_and_a_sentence_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbench.slurm.local.local.check_programs", lambda path: None)
    for words, sentence in (
        (["--link", "fast", "--", "true"], "parbench: --link 'fast' is no rate"),
        (["--", "no-such-program"], "parbench: the command 'no-such-program' is not found"),
        (["--nodes", "0", "--", "true"], "Error: Invalid value for '--nodes'"),
        ([], "Error: Missing argument"),
    ):
        done = click.testing.CliRunner().invoke(cli.main, ["slurm", "local", *words])
        assert (done.exit_code, done.stdout) == (2, ""), words
        assert sentence in done.stderr


def test_only_the_inside_of_a_running_cluster_can_be_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(action: str = "cut", node: str = "n1", rate: str | None = None) -> str:
        return refusal(break_or_mend, action, node, rate)

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert re.search(r"^PARBENCH_CLUSTER is not set: .* parbench slurm local$", told())
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert told().startswith(f"PARBENCH_CLUSTER={tmp_path} holds no running cluster")
    nodes_file = tmp_path / NODES_FILE
    nodes_file.parent.mkdir()
    nodes_file.write_bytes(msgspec.json.encode([Node(name=f"n{number}", pid=number) for number in (1, 2)]))
    (tmp_path / "first").write_bytes(b"/sbin/init")
    monkeypatch.setattr("parbench.slurm.local.local.FIRST_PROCESS", tmp_path / "first")
    assert "holds no running cluster" in told(), "a kept folder is none"
    (tmp_path / "first").write_bytes(b"python\0-m\0slurm.local.cluster\0" + str(tmp_path).encode())
    assert told("cut", "n3") == "'n3' is none of the cluster's nodes n1 to n2"
    assert told("rate", "n1") == "local-fault rate n1 needs a rate, such as 50mbit"
    assert told("heal", "n1", "50mbit") == "local-fault heal n1 takes no rate"
    assert told("rate", "n1", "fast").startswith("rate 'fast' is no rate: write a whole number")
    failed = subprocess.CompletedProcess([], 1, stderr="Cannot find device\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert told("cut", "n1") == "tc: Cannot find device"


A, B, C = (bytes([2, 0, 0, 0, 0, number]) for number in (1, 2, 3))
EVERYONE, UNKNOWN = b"\xff" * 6, bytes([2, 0, 0, 0, 0, 9])


def frame(destination: bytes, source: bytes, text: bytes = b"") -> bytes:
    return bytes(10) + destination + source + text


def switch_that_knows(*addresses: bytes) -> Switch:
    """Return a switch of 0.5 s that has seen the addresses at its ports, in order, and delivered all it had."""
    switch = Switch(len(addresses), 0.5)
    for number, one in enumerate(addresses):
        switch.receive(number, frame(EVERYONE, one), -10.0)
    for number in range(len(addresses)):
        drain(switch, number, 0.0)
    return switch


def drain(switch: Switch, port: int, now: float) -> list[bytes]:
    found = []
    while (due := switch.due(port, now)) is not None:
        found.append(due)
        switch.sent(port)
    return found


def test_a_frame_goes_to_its_address_and_one_for_all_everywhere_but_back() -> None:
    for destination, source, wanted in ((C, A, [2]), (A, A, []), (EVERYONE, B, [0, 2]), (UNKNOWN, B, [0, 2])):
        switch, sent = switch_that_knows(A, B, C), frame(destination, source)
        switch.receive((A, B, C).index(source), sent, 1.0)
        assert [drain(switch, port, 2.0) for port in range(3)] == [[sent] * (port in wanted) for port in range(3)]


def test_frames_wait_for_the_delay_and_no_longer_and_keep_their_order() -> None:
    switch, times = switch_that_knows(A, B), (1.0, 1.0, 1.25, 7.0)
    assert switch.seconds_to_wait(5.0) == 1.0, "without frames there is no hurry"
    sent = [frame(B, A, str(number).encode()) for number in range(len(times))]
    for text, now in zip(sent, times, strict=True):
        switch.receive(0, text, now)
    assert (switch.due(1, 1.499), switch.due(1, 1.5)) == (None, sent[0])
    assert switch.seconds_to_wait(1.2) == pytest.approx(0.3)
    assert drain(switch, 1, 1.5) == sent[:2]
    assert drain(switch, 1, 101.0) == sent[2:], "nothing is lost at a port that is late but can send"


def test_a_blocked_port_holds_up_no_other_and_loses_what_comes_late() -> None:
    switch = switch_that_knows(A, B, C)
    switch.receive(0, frame(B, A, b"kept"), 1.0)
    switch.receive(0, frame(C, A), 1.1)
    switch.blocked.add(1)
    assert switch.seconds_to_wait(1.0) == pytest.approx(0.6)
    assert drain(switch, 2, 2.0) == [frame(C, A)]
    switch.receive(0, frame(B, A, b"just"), 1.54)
    switch.receive(0, frame(B, A, b"lost"), 1.56)
    assert drain(switch, 1, 9.0) == [frame(B, A, b"kept"), frame(B, A, b"just")]
