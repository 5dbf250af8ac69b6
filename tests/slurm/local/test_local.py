"""A cluster on one machine, from outside: ended in every way, and nothing left of it."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import PARBENCH, cluster_words, in_cluster, tool
from fakes import wait_until
from paths import ROOT

pytestmark = [pytest.mark.full, pytest.mark.measures]

WAIT_FOR_EVER = 'echo up "$PARBENCH_CLUSTER"; sleep 1000'


def processes_of(folder: str) -> list[int]:
    """Return the processes that have a cluster's folder among their words or variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if folder.encode() in (path / name).read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue  # it has ended
    return found


def assert_nothing_is_left(folder: str) -> None:
    wait_until(lambda: not Path(folder).exists() and not processes_of(folder), 20)
    assert folder not in Path("/proc/mounts").read_text()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@contextmanager
def running(*command: str, nodes: int = 1) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    with subprocess.Popen(
        [*cluster_words(nodes=nodes), "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            word, _, folder = process.stdout.readline().strip().partition(" ")
            assert word == "up"
            assert processes_of(folder)
            yield process, folder
        finally:
            process.kill()


def test_a_run_leaves_nothing_and_the_command_has_stdin_and_the_last_word() -> None:
    before = interfaces()
    with tempfile.TemporaryDirectory(prefix="pb", dir="/tmp") as parent:  # a test's own is too long for sockets
        done = subprocess.run(
            [*cluster_words(nodes=1), "--", "sh", "-c", 'cat; echo "$PARBENCH_CLUSTER"; setsid sleep 1000 & exit 7'],
            input="from outside\n",
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": parent},
            timeout=60,
            check=False,
        )
        said, folder = done.stdout.splitlines()
        assert (said, done.returncode, done.stderr) == ("from outside", 7, "")
        assert Path(folder).parent == Path(parent)
        assert list(Path(parent).iterdir()) == []
    assert processes_of(folder) == []
    assert interfaces() == before


def test_a_folder_is_kept_where_it_is_asked_for() -> None:
    words = [*cluster_words(nodes=1), "--keep", "--", "sh", "-c", 'echo "$PARBENCH_CLUSTER"; srun sh -c "exit 3"']
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    folder = Path(done.stdout.strip())
    assert done.returncode == 3
    assert done.stderr.endswith(f"parbench: the cluster's folder is kept: {folder}\n")
    assert (folder / "log/slurmctld.log").exists()
    subprocess.run(["rm", "-r", str(folder)], check=True)


def test_nothing_is_left_when_parbench_is_killed_and_another_cluster_goes_on() -> None:
    before = interfaces()
    script = f"srun --nodes 2 sleep 1000 & setsid sleep 1000 & {WAIT_FOR_EVER}"
    other_script = 'echo up "$PARBENCH_CLUSTER"; read -r go; srun --nodes 2 hostname'
    with running("sh", "-c", other_script, nodes=2) as (other, other_folder):
        with running("sh", "-c", script, nodes=2) as (process, folder):
            assert folder != other_folder
            assert len(processes_of(folder)) > 5
            process.send_signal(signal.SIGKILL)
            assert process.wait(10) == -signal.SIGKILL
            assert_nothing_is_left(folder)
        said, _ = other.communicate("go\n", timeout=60)
        assert sorted(said.split()) == ["n1", "n2"]
        assert other.returncode == 0
    assert interfaces() == before


def test_a_signal_is_the_command_s_to_end_with_and_a_second_one_ends_it() -> None:
    for sign in (signal.SIGINT, signal.SIGHUP):
        script = f"trap 'exit 9' {sign.name[3:]}; echo up $PARBENCH_CLUSTER; while :; do sleep 0.05; done"
        with running("sh", "-c", script) as (process, folder):
            process.send_signal(sign)
            assert process.wait(10) == 9, sign
            assert_nothing_is_left(folder)
    with running("sh", "-c", f"trap '' TERM; {WAIT_FOR_EVER}") as (process, folder):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 137
        assert_nothing_is_left(folder)


def test_each_ctrl_c_at_a_terminal_reaches_the_command_once() -> None:
    ours, theirs = os.openpty()
    words = [*cluster_words(nodes=1), "--", *tool("interrupts")]
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words], stdin=theirs, stdout=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        _, _, folder = process.stdout.readline().strip().partition(" ")
        for number in (1, 2):  # a second one does not end the cluster: what it means is the command's to say
            os.write(ours, b"\x03")
            assert process.stdout.readline() == f"interrupt {number}\n"
        assert process.stdout.read() == ""
        assert process.wait(10) == 0
    os.close(ours)
    assert_nothing_is_left(folder)


def test_a_cluster_that_does_not_come_up_says_why_and_runs_nothing(tmp_path: Path) -> None:
    for program, sentence in {
        "slurmd": "slurmd of n1 ended with 5: it broke",
        "munged": "munged ended with 5: it broke",
        "slurmctld": "slurmctld ended with 5: it broke",
        "hostname": "n1 got no namespaces of its own: it broke",
        "ip": "ip: it broke",
        "tc": "tc: it broke",
    }.items():
        path = tmp_path / program
        path.write_text("#!/bin/sh\necho it broke >&2; exit 5\n")
        path.chmod(0o755)
        variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        done = in_cluster(["echo", "ran"], nodes=1, link="1gbit", variables=variables)
        assert (done.returncode, done.stdout) == (4, ""), program
        assert done.stderr == f"parbench: the cluster did not come up: {sentence}\n"
        path.unlink()


def test_a_user_without_any_right_has_a_cluster_too(tmp_path: Path) -> None:
    script = f"id -u; srun --nodes 2 hostname; {PARBENCH} slurm local-fault cut n2; exit 3"
    words = [*cluster_words(nodes=2, link="1gbit", delay="100us"), "--", "sh", "-c", script]
    done = subprocess.run(as_user(words, tmp_path), cwd="/", capture_output=True, text=True, timeout=60, check=False)
    number, *hosts = done.stdout.split()
    assert number != "0"
    assert sorted(hosts) == ["n1", "n2"]
    assert (done.returncode, done.stderr) == (3, "")


def as_user(words: list[str], scratch: Path) -> list[str]:
    """Return what runs a command as a user without rights, who can read this Python wherever it lies."""
    if os.getuid() != 0:
        return words
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = {path: [parent for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH] for path in needed}
    closed = {path: parents for path, parents in closed.items() if parents}
    steps = ["set -e"]
    for number, path in enumerate(closed):
        steps += [f"mkdir {scratch}/{number}", f"mount --bind {path} {scratch}/{number}"]
    steps += [f"mount -t tmpfs -o mode=755 none {parent}" for parent in {parents[-1] for parents in closed.values()}]
    for number, path in enumerate(closed):
        steps += [f"mkdir -p {path}", f"mount --bind {scratch}/{number} {path}"]
    become = "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all"
    steps.append(f'cd / && exec {become} env HOME=/tmp USER=nobody TMPDIR=/tmp "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(steps), "sh", *words]
