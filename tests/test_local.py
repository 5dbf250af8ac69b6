"""A cluster on one machine, from outside: refused in a sentence, ended in every way, and nothing left of it."""

import os
import pwd
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
from click.testing import CliRunner
from clusters import PARBENCH, cluster_words, tool

from bench.errors import UserError
from slurm.commands import slurm
from slurm.local import check_parent, check_programs, check_user, sandbox

GONE_SECONDS = 20.0
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
    end = time.monotonic() + GONE_SECONDS
    while (Path(folder).exists() or processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_of(folder) == []
    assert not Path(folder).exists()
    assert folder not in Path("/proc/mounts").read_text()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@contextmanager
def running(*command: str, nodes: int = 2) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a cluster whose command says ``up FOLDER``; yield its process and its folder."""
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


def test_what_is_missing_is_said_with_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_programs(str(tmp_path))
    assert str(caught.value) == (
        "a cluster on this machine needs slurmctld, slurmd, srun, munged, ip, tc, unshare, nsenter, mount, hostname, "
        "not found in PATH: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 "
        "util-linux mount hostname"
    )


def test_only_what_is_missing_is_said(tmp_path: Path) -> None:
    for name in ("slurmctld", "slurmd", "srun", "munged", "unshare", "nsenter", "mount", "hostname"):
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(UserError, match=r"needs ip, tc, not found.*recommends iproute2$"):
        check_programs(str(tmp_path))


@pytest.mark.parametrize("user", [0, 1000])
def test_a_kernel_that_refuses_namespaces_is_quoted(tmp_path: Path, user: int) -> None:
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho unshare: unshare failed: Operation not permitted >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(UserError, match=r"^no namespaces can be made here \(unshare: unshare failed: Operation not"):
        sandbox(user, path=str(tmp_path))


def test_only_a_user_needs_a_user_namespace(tmp_path: Path) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "unshare").chmod(0o755)
    assert "--user" in sandbox(1000, path=str(tmp_path))
    assert "--user" not in sandbox(0, path=str(tmp_path))


@pytest.mark.parametrize(
    "parent", ["/tmp/with space", "/tmp/a,b", "/tmp/é", "/dev/shm", "/dev/shm/x", f"/tmp/{'x' * 60}"]
)
def test_a_temporary_folder_that_slurm_cannot_use_is_refused(parent: str) -> None:
    with pytest.raises(UserError, match=r"^SLURM cannot work in the temporary folder '.*at most 55.*; set TMPDIR$"):
        check_parent(Path(parent))


def test_usual_temporary_folders_are_taken() -> None:
    for parent in ("/tmp", "/scratch/some.one/job_7", "/tmp/" + "x" * 50):
        check_parent(Path(parent))


def test_a_user_without_a_name_is_refused() -> None:
    check_user(os.getuid())
    nobody = next(number for number in range(54321, 55000) if number not in {user.pw_uid for user in pwd.getpwall()})
    with pytest.raises(UserError, match=f"^user {nobody} has no name in /etc/passwd"):
        check_user(nobody)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--link", "fast", "--", "true"], "parbench: --link 'fast' is no rate"),
        (["--delay", "2s", "--", "true"], "parbench: --delay '2s' is no delay"),
        (["--slow", "n9:1mbit", "--", "true"], "parbench: --slow 'n9:1mbit': 'n9' is none of the nodes n1 to n4"),
        (["--", "no-such-program"], "parbench: the command 'no-such-program' is not found"),
        (["--nodes", "0", "--", "true"], "Error: Invalid value for '--nodes'"),
        ([], "Error: Missing argument"),
    ],
)
def test_bad_words_end_with_2_and_a_sentence_before_anything_starts(words: list[str], sentence: str) -> None:
    done = subprocess.run([PARBENCH, "slurm", "local", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["local", "local-fault"])
def test_every_command_has_help_and_an_example(name: str) -> None:
    command = slurm.commands[name]
    assert command.help
    assert command.epilog
    assert f"parbench slurm {name}" in command.epilog
    assert CliRunner().invoke(slurm, [name, "--help"]).exit_code == 0


def test_a_run_leaves_nothing_and_the_command_has_stdin(short_folder: Path) -> None:
    before = interfaces()
    done = subprocess.run(
        [*cluster_words(nodes=2), "--", "sh", "-c", 'cat; echo "$PARBENCH_CLUSTER"; setsid sleep 1000 & exit 0'],
        input="from outside\n",
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(short_folder)},
        timeout=60,
        check=False,
    )
    said, folder = done.stdout.splitlines()
    assert (said, done.returncode, done.stderr) == ("from outside", 0, "")
    assert Path(folder).parent == short_folder
    assert list(short_folder.iterdir()) == []
    assert processes_of(folder) == []
    assert interfaces() == before


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield an empty folder near the root: a test's own has too long a path for SLURM's sockets."""
    with tempfile.TemporaryDirectory(prefix="pb", dir="/tmp") as folder:
        yield Path(folder)


def test_a_folder_is_kept_where_it_is_asked_for() -> None:
    words = [*cluster_words(nodes=1), "--keep", "--", "sh", "-c", 'echo "$PARBENCH_CLUSTER"']
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    folder = Path(done.stdout.strip())
    assert done.stderr == f"parbench: the cluster's folder is kept: {folder}\n"
    assert (folder / "log/slurmctld.log").exists()
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.measures
def test_nothing_is_left_when_parbench_is_killed() -> None:
    before = interfaces()
    script = f"srun --nodes 2 sleep 1000 & setsid sleep 1000 & {WAIT_FOR_EVER}"
    with running("sh", "-c", script) as (process, folder):
        assert len(processes_of(folder)) > 5
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert_nothing_is_left(folder)
    assert interfaces() == before


def test_the_folder_stays_as_long_as_anything_of_the_cluster_does() -> None:
    with running("sh", "-c", WAIT_FOR_EVER, nodes=1) as (process, folder):
        [first] = [pid for pid in processes_of(folder) if is_first_process(pid, folder)]
        os.kill(first, signal.SIGSTOP)
        process.kill()
        time.sleep(0.5)
        there = Path(folder).exists()
        os.kill(first, signal.SIGCONT)
        assert there
        assert_nothing_is_left(folder)


def is_first_process(pid: int, folder: str) -> bool:
    """Say whether a process is the first one in a cluster's namespaces."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        inner = Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()[-1]
    except OSError:  # it has ended
        return False
    return inner == "1" and folder.encode() in words


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_the_command_s_to_end_with(sign: signal.Signals) -> None:
    script = f"trap 'exit 9' {sign.name[3:]}; echo up $PARBENCH_CLUSTER; while :; do sleep 0.05; done"
    with running("sh", "-c", script, nodes=1) as (process, folder):
        process.send_signal(sign)
        assert process.wait(10) == 9
        assert_nothing_is_left(folder)


def test_a_second_signal_ends_a_command_that_does_not_listen() -> None:
    with running("sh", "-c", f"trap '' TERM; {WAIT_FOR_EVER}", nodes=1) as (process, folder):
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


def test_two_clusters_at_once_do_not_meet() -> None:
    script = 'echo up "$PARBENCH_CLUSTER"; read -r go; srun --nodes 2 hostname'
    with running("sh", "-c", script) as (one, one_folder), running("sh", "-c", script) as (other, other_folder):
        assert one_folder != other_folder
        for process in (one, other):
            said, _ = process.communicate("go\n", timeout=60)
            assert sorted(said.split()) == ["n1", "n2"]
            assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.measures
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
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parent.parent]
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
